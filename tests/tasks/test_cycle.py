"""The cycle task: answers, traces, rewards, the mix of lengths, and a held-out set that training never sees."""

import random
from collections import Counter

import pytest

from rlctl.tasks import cycle
from rlctl.tasks.base import Sample, TaskOptions, is_held_out
from rlctl.tasks.cursor import PromptCursor
from rlctl.tasks.cycle import CycleTask

TASK = CycleTask.create("cycle", TaskOptions())


def test_the_documented_example() -> None:
    assert cycle.trace("6-1-9e") == "<think>e-1=5;d-9=6;c-1=5;b-9=6;a-1=5;</think>5"
    assert cycle.answer("6-1-9e") == "5"


def test_a_trace_follows_from_the_prompt_by_plain_arithmetic() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        k = rng.randint(2, 26)
        prompt = cycle.prompt_text(rng.randrange(cycle.PROBLEMS_PER_K), k)
        body = cycle.trace(prompt).removeprefix("<think>")
        steps, _, final = body.partition("</think>")
        value = prompt[0]
        for i, step in enumerate(steps.split(";")[:-1]):
            assert step[0] == chr(ord("a") + k - 1 - i)
            assert step[1:3] == (prompt[1:3], prompt[3:5])[i % 2]
            assert step[3:] == f"={eval(value + step[1:3]) % 10}"  # noqa: S307
            value = step[4]
        assert i == k - 1
        assert final == value == cycle.answer(prompt)
        assert len(body) - len("</think>") == 6 * k + 1


def test_the_problems_of_one_length_are_all_different() -> None:
    prompts = {cycle.prompt_text(n, 5) for n in range(cycle.PROBLEMS_PER_K)}
    assert len(prompts) == cycle.PROBLEMS_PER_K == 7290


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("5", 1),
        ("6", 0),
        ("<think>e-1=5;</think>5", 1),
        ("<think>nonsense</think>5", 1),
        ("<think>e-1=5;</think>6", 0),
        ("<think>e-1=5;5", 0),
        ("55", 0),
        ("5 ", 0),
        ("5\n", 0),
        (" 5", 0),
        ("\u0665", 0),
        ("", 0),
        ("</think>5", 1),
        ("<think>5</think>", 0),
    ],
)
def test_rewards(response: str, reward: float) -> None:
    assert TASK.score(Sample(0, "6-1-9e", "5"), response) == reward


def test_the_metrics_tell_thinking_from_guessing() -> None:
    sample = Sample(0, "6-1-9e", "5")
    assert TASK.metrics(sample, "<think>e") == {"think": 1.0}
    assert TASK.metrics(sample, "5") == {"think": 0.0}


def test_lengths_are_long_tailed_with_half_at_two() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    ks = sorted(cycle.operations_of(s.prompt) for _, s in PromptCursor(TASK, seed).take(6000))
    assert ks[0] == 2 and ks[-1] <= 26
    assert 0.47 < Counter(ks)[2] / len(ks) < 0.54
    tokens = [4 + 6 * k for k in ks]
    assert tokens[len(ks) // 2] in (16, 22)
    assert 94 <= tokens[int(len(ks) * 0.99)] <= 130


def test_training_never_draws_a_held_out_prompt_and_held_out_ones_all_are() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    trained = {s.prompt for _, s in PromptCursor(TASK, seed).take(5000)}
    assert not any(is_held_out(prompt, cycle.HELD_OUT) for prompt in trained)
    held_out = TASK.held_out(500)
    assert all(is_held_out(s.prompt, cycle.HELD_OUT) for s in held_out)
    assert len({s.prompt for s in held_out}) == 500
    assert not trained & {s.prompt for s in held_out}


def test_a_tenth_of_all_prompts_is_held_out() -> None:
    share = sum(is_held_out(cycle.prompt_text(n, 7), cycle.HELD_OUT) for n in range(7290)) / 7290
    assert 0.08 < share < 0.12


@pytest.mark.parametrize("n", [0, 1, 24, 25, 256])
def test_held_out_is_balanced_over_the_lengths_and_always_the_same(n: int) -> None:
    samples = TASK.held_out(n)
    assert samples == TASK.held_out(n)
    assert [s.index for s in samples] == list(range(n))
    counts = Counter(s.group for s in samples)
    assert all(s.group == f"k={cycle.operations_of(s.prompt)}" for s in samples)
    assert len(counts) == min(n, 25)
    assert not counts or max(counts.values()) - min(counts.values()) <= 1


def test_a_sample_can_be_asked_for_again_by_its_index() -> None:
    for _, sample in PromptCursor(TASK, 3).take(50):
        assert 0 <= sample.index < 2**53  # exact in every JSON reader
        assert TASK.sample(sample.index) == sample
