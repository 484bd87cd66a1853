"""Tasks of several turns: what a step may return, how an observation is put to the model, the built-in one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.errors import UsageError
from rlctl.tasks.base import Sample, Task
from rlctl.tasks.chat import Chat, observation_ids
from rlctl.tasks.conversation import ConversationTask, StepError
from rlctl.tasks.cycle_tokenizer import build_tokenizer
from rlctl.tasks.mixed_rewards import scorer_for
from rlctl.tasks.mixture import Member, MixtureTask, cursor_for
from rlctl.tasks.prompts import encode_prompt
from rlctl.tasks.registry import load_task
from rlctl.tasks.rewarding import RewardScorer
from rlctl.tasks.two_turn import TwoTurnTask
from tests.trainers.sessions import Run

# As Qwen's: every message between marks, and the thoughts of earlier turns left out.
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}"
    "{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Returning(TwoTurnTask):
    """The built-in task with a step of the test's."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def step(self, sample: Sample, messages: Any) -> Any:
        if isinstance(self._step, Exception):
            raise self._step
        return self._step


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(turns)]


def test_the_second_guess_of_the_built_in_task_depends_on_what_it_is_told() -> None:
    task = load_task("two_turn")
    assert isinstance(task, ConversationTask)
    for sample in task.held_out(50):
        secret = int(sample.answer)
        for guess in range(10):
            observation, reward, done = task.step(sample, said(sample.prompt, str(guess)))
            if guess == secret:
                assert (observation, reward, done) == (None, 1.0, True)
                continue
            assert (reward, done, observation) == (0.0, False, f"a+{(secret - guess) % 10}")
            for second in (f"={secret}", f"={secret};</think>{secret}", str(secret)):
                talk = said(sample.prompt, str(guess), str(observation), second)
                assert task.step(sample, talk) == (None, 1.0, True)
            talk = said(sample.prompt, str(guess), str(observation), str((secret + 1) % 10))
            assert task.step(sample, talk) == (None, 0.0, True)
        assert task.step(sample, said(sample.prompt, "12"))[1:] == (0.0, True)
        assert task.score(sample, sample.answer) == 1.0
    held_out = {sample.prompt for sample in task.held_out(10_000)}
    assert 600 < len(held_out) < 900
    assert not held_out & {sample.prompt for _, sample in cursor_for(task, 0).take(2000)}
    # The secrets are spread evenly, so that nothing but the observation helps.
    counts = [sum(sample.answer == str(digit) for sample in task.held_out(700)) for digit in range(10)]
    assert min(counts) > 45


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "step of task 'two_turn' returned NoneType None"),
        (("obs", 1.0), "returned tuple"),
        ("abc", "returned str"),
        (("obs", 1.0, 1), "done is int"),
        (("obs", "1.0", True), "the reward is str"),
        ((None, 0.0, False), "it goes on, and the observation is None"),
        (("", 0.0, False), "it goes on, and the observation is ''"),
        ((b"obs", 0.0, False), "it goes on, and the observation is b'obs'"),
    ],
)
def test_a_step_of_the_wrong_type_ends_the_run_and_is_named(step: Any, message: str) -> None:
    sample = TwoTurnTask().sample(0)
    with RewardScorer(Returning(step), 1.0) as scorer, pytest.raises(StepError) as caught:
        scorer.step([(sample, said(sample.prompt, "1"))])
    assert message in str(caught.value)
    assert "return a tuple (observation: text, or None when done; reward: number; done: bool)" in str(caught.value)


def test_a_step_that_raises_or_gives_no_number_counts_as_zero() -> None:
    sample = TwoTurnTask().sample(0)
    for step, failed in (
        (ValueError("x"), "raised: ValueError: x"),
        ((None, float("nan"), True), "not a number: nan"),
    ):
        with RewardScorer(Returning(step), 1.0) as scorer:
            (score,) = scorer.step([(sample, said(sample.prompt, "1"))])
        assert (score.reward, score.failed, score.observation) == (0.0, failed, None)


def test_numbers_of_numpy_are_numbers() -> None:
    sample = TwoTurnTask().sample(0)
    with RewardScorer(Returning(("on", np.float32(0.5), np.bool_(False))), 1.0) as scorer:
        (score,) = scorer.step([(sample, said(sample.prompt, "1"))])
    assert (score.reward, score.failed, score.observation) == (0.5, None, "on")


def test_a_mixture_takes_each_members_steps() -> None:
    two_turn = load_task("two_turn")
    task = MixtureTask([Member(load_task("cycle"), 1), Member(two_turn, 1)])
    (_, cycle), (_, guess) = cursor_for(task, 0).take(2)
    wrong = str((int(guess.answer) + 9) % 10)
    with scorer_for(task, 1.0) as scorer:
        scores = scorer.step([(guess, said(guess.prompt, wrong)), (cycle, said(cycle.prompt, cycle.answer))])
    assert [(score.reward, score.observation) for score in scores] == [(0.0, "a+1"), (1.0, None)]


def test_an_observation_continues_the_models_own_tokens_as_the_template_does() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = QWEN
    stop = [tokenizer.eos_token_id]
    chat, prompt, answer = Chat(), "6-1-9e", "<think>a-1=5;</think>5"
    ids = encode_prompt(tokenizer, Sample(0, prompt, ""), 100)
    ids += [*tokenizer.encode(answer, add_special_tokens=False), *stop]
    ids += observation_ids(tokenizer, chat, "no", stop)
    whole = tokenizer.decode(ids)
    marks = ("<|im_start|>user\n", "<|end|>\n", "<|im_start|>assistant\n")
    # The thoughts stay: the template would leave them out of an earlier turn, and the model has seen them.
    assert whole == f"{marks[0]}{prompt}{marks[1]}{marks[2]}{answer}{marks[1]}{marks[0]}no{marks[1]}{marks[2]}"
    # Without thoughts the ids are those of the whole chat, rendered at once.
    plain = [*encode_prompt(tokenizer, Sample(0, prompt, ""), 100), *tokenizer.encode("5"), *stop]
    plain += observation_ids(tokenizer, chat, "no", stop)
    rendered = tokenizer.apply_chat_template(said(prompt, "5", "no"), add_generation_prompt=True, tokenize=False)
    assert plain == tokenizer.encode(rendered, add_special_tokens=False)


def test_the_built_in_templates_chat_is_the_conversation_that_is_trained() -> None:
    tokenizer = build_tokenizer()
    ids = [*encode_prompt(tokenizer, Sample(0, "6-1-9b", ""), 9), *tokenizer.encode("5"), tokenizer.eos_token_id]
    ids += observation_ids(tokenizer, Chat(), "a+3", [tokenizer.eos_token_id])
    rendered = tokenizer.apply_chat_template(said("6-1-9b", "5", "a+3"), add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == rendered == "6-1-9b5<|end|>a+3"
    assert observation_ids(tokenizer, Chat("plain"), "a+3", []) == tokenizer.encode("a+3")


def test_a_template_that_hides_the_assistant_cannot_hold_a_conversation() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UsageError, match="leaves out what the assistant said"):
        observation_ids(tokenizer, Chat(), "no", [])


STEPS = """
import os, time

def step(messages, answer):
    said = messages[-1]["content"]
    if said == "hang":
        time.sleep(60)
    if said == "die":
        os._exit(3)
    if said == "wrong":
        return "again", 1.0
    if said == answer:
        return None, 1.0, True
    return f"not {said}, of {len(messages)}", -0.25, False

def taking_one(messages):
    return None, 0.0, True
"""


def own(folder: Path, function: str = "step") -> Task:
    (folder / "own.py").write_text(STEPS)
    data = folder / "d.jsonl"
    rows = [{"prompt": "2+2", "answer": "4"}, {"messages": said("hi", "hello", "3+3"), "answer": "6"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(str(data), step=f"{folder}/own.py:{function}", held_out=0.0)


def test_a_function_of_ones_own_answers_the_model_in_its_own_process(tmp_path: Path) -> None:
    task = own(tmp_path)
    first, second = task.sample(0), task.sample(1)
    with RewardScorer(task, 30.0) as scorer:
        scores = scorer.step(
            [
                (first, said("2+2", "5")),
                (first, said("2+2", "5", "not 5, of 2", "4")),
                (second, [*said("hi", "hello", "3+3"), {"role": "assistant", "content": "7"}]),
                (first, said("2+2", "die")),
                (first, said("2+2", "4")),
            ]
        )
        found = [(score.reward, score.observation, score.failed) for score in scores]
        assert found[:3] == [(-0.25, "not 5, of 2", None), (1.0, None, None), (-0.25, "not 7, of 4", None)]
        assert found[3][:2] == (0.0, None)
        assert str(found[3][2]).startswith("died")
        assert found[4] == (1.0, None, None)
        with pytest.raises(StepError, match=r"step .*own\.py:step returned tuple \('again', 1\.0\)"):
            scorer.step([(first, said("2+2", "wrong"))])
    with RewardScorer(task, 0.5) as scorer:
        assert [score.failed for score in scorer.step([(first, said("2+2", "hang"))])] == ["timeout"]
    assert task.score(first, "4") == 1.0


def test_a_step_that_cannot_be_used_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"taking_one cannot be called with \(messages, answer\)"):
        RewardScorer(own(tmp_path, "taking_one"), 30.0)
    with pytest.raises(UsageError, match=r"task\.step: there is no file"):
        load_task(str(tmp_path / "d.jsonl"), step=f"{tmp_path}/absent.py:step")
    with pytest.raises(UsageError, match=r"does not use task\.verifier"):
        load_task(str(tmp_path / "d.jsonl"), step=f"{tmp_path}/own.py:step", verifier="exact")
    with pytest.raises(UsageError, match=r"does not use task\.step"):
        load_task("cycle", step=f"{tmp_path}/own.py:step")


def test_a_run_over_a_file_with_steps_trains_on_conversations(tmp_path: Path) -> None:
    own(tmp_path)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "6-1-9b", "answer": "7"}) + "\n")
    words = [
        f"task.name={tmp_path}/d.jsonl",
        f"task.step={tmp_path}/own.py:step",
        "task.held_out=0",
        "task.max_turns=3",
    ]
    metrics = Run(tmp_path, *words, steps=1).metrics[0]
    assert 1 < metrics["turns_max"] <= 3
    assert metrics["truncated"] > 0
