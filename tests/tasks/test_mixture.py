"""Several tasks mixed by weight: exact shares, the same prompts again, each member's own scoring."""

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

from rlctl.errors import FindingsError, UsageError
from rlctl.ops.inputs import find_inputs
from rlctl.ops.load_tasks import load_tasks
from rlctl.ops.resolve import Resolution, resolve
from rlctl.tasks.base import Task
from rlctl.tasks.cycle import CycleTask
from rlctl.tasks.mixed_rewards import scorer_for
from rlctl.tasks.mixture import Member, MixtureTask, cursor_for, place, whole_weights
from rlctl.tasks.registry import load_task
from tests.trainers.sessions import Run


def questions(path: Path, count: int = 7) -> Task:
    path.write_text("".join(json.dumps({"prompt": f"{n}+1*2b", "answer": f"{n}"}) + "\n" for n in range(count)))
    return load_task(str(path), verifier="numeric", held_out=0.0)


def resolved(*overrides: str) -> Resolution:
    return resolve(env={}, overrides=overrides)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_exact_wherever_they_can_be(seed: int) -> None:
    rng = random.Random(seed)
    written = [rng.choice([1, 2, 3, 7, 0.1, 0.25, 1.5, 12.0]) for _ in range(rng.randint(1, 5))]
    weights, counts = whole_weights(written), [0] * len(written)
    assert [Fraction(w, sum(weights)) for w in weights] == [
        Fraction(str(w)) / sum(Fraction(str(v)) for v in written) for w in written
    ]
    for ordinal in range(700):
        number, before = place(ordinal, weights)
        assert before == counts[number]
        counts[number] += 1
        due = [Fraction((ordinal + 1) * weight, sum(weights)) for weight in weights]
        assert max(abs(count - share) for count, share in zip(counts, due, strict=True)) < max(2, len(weights) - 1)
        if all(share.denominator == 1 for share in due):
            assert counts == due


def test_prompts_depend_on_seed_and_position_alone(tmp_path: Path) -> None:
    def cursor(seed: int = 3):  # type: ignore[no-untyped-def]
        task = MixtureTask([Member(CycleTask(), 3), Member(questions(tmp_path / "maths.jsonl"), 1)])
        return task, cursor_for(task, seed)

    task, one = cursor()
    taken = one.take(56)
    assert [sample.task for _, sample in taken[:8]] == ["cycle"] * 3 + ["maths"] + ["cycle"] * 3 + ["maths"]
    # Each pass over the finite member has each of its prompts once, in an order of its own.
    maths = [sample.prompt for _, sample in taken if sample.task == "maths"]
    assert sorted(maths[:7]) == sorted(maths[7:14]) == sorted({*maths})
    assert maths[:7] != maths[7:14]
    assert all(task.sample(sample.index) == sample for _, sample in taken)
    again = cursor()[1]
    again.load(json.loads(json.dumps(cursor()[1].state())) | {"ordinal": 20})
    assert again.take(36) == taken[20:]
    other = cursor(4)[1]
    assert [sample.prompt for _, sample in other.take(56)] != [sample.prompt for _, sample in taken]


def test_weights_and_data_belong_to_the_saved_position(tmp_path: Path) -> None:
    def cursor(weight: float, count: int = 7):  # type: ignore[no-untyped-def]
        members = [Member(CycleTask(), 1), Member(questions(tmp_path / "maths.jsonl", count), weight)]
        return cursor_for(MixtureTask(members), 0)

    state = cursor(2).state()
    cursor(2.0).load(state)
    for changed in (cursor(3), cursor(2, count=8)):
        with pytest.raises(UsageError, match="belongs to other data"):
            changed.load(state)


def test_each_member_scores_its_own_and_gives_held_out_prompts(tmp_path: Path) -> None:
    maths = questions(tmp_path / "maths.jsonl")
    (tmp_path / "own.py").write_text("def score(prompt, response, answer):\n    return len(response)\n")
    own = load_task(str(tmp_path / "maths.jsonl"), verifier=f"{tmp_path}/own.py:score", held_out=0.4)
    task = MixtureTask([Member(CycleTask(), 2), Member(own, 1)])
    held_out = task.held_out(12)
    assert {sample.task for sample in held_out} == {"cycle", "maths"}
    assert [s.prompt for s in held_out if s.task == "cycle"] == [s.prompt for s in CycleTask().held_out(8)]
    assert not {s.prompt for s in held_out} & {s.prompt for _, s in cursor_for(task, 0).take(300)}
    cycle, mine = next(s for s in held_out if s.task == "cycle"), next(s for s in held_out if s.task == "maths")
    with scorer_for(task, 30.0) as scorer:
        scores = scorer.score([(mine, "four"), (cycle, cycle.answer), (mine, ""), (cycle, "x")])
    assert [score.reward for score in scores] == [4.0, 1.0, 0.0, 0.0]
    assert task.members["maths"].task.size == maths.size - len(own.held_out(99))


def test_files_are_called_by_their_stems_where_that_tells_them_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one, other = questions(tmp_path / "maths.jsonl"), questions(tmp_path / "a" / "maths.jsonl")
    assert list(MixtureTask([Member(CycleTask(), 1), Member(one, 1)]).members) == ["cycle", "maths"]
    assert list(MixtureTask([Member(one, 1), Member(other, 1)]).members) == [one.name, other.name]


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ("[{name: cycle, weight: 0}]", "item 1: weight: 0.0 is too small; it must be above 0"),
        ("[{name: cycle}, {name: b, weight: -1}]", "item 2: weight: -1.0 is too small"),
        ("[{name: cycle, wieght: 2}]", "did you mean 'weight'"),
        ("[{weight: 2}]", "item 1 has no name"),
        ("[cycle]", "item 1: expected {name, weight"),
        ("cycle", r"write it as \[a, b\]"),
    ],
)
def test_a_mixture_that_cannot_be_read_is_refused(mixture: str, message: str) -> None:
    with pytest.raises(FindingsError) as caught:
        resolved(f"task.mixture={mixture}")
    assert message.replace("\\", "") in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.mixture=[{name: cycle}]", "task.verifier=exact"], "task.verifier is set beside task.mixture"),
        (["task.mixture=[{name: cycle}]", "task.epochs=2"], "a mixture has no end"),
        (["task.mixture=[{name: cycle}, {name: cycle, weight: 2}]"], "cycle is in the mixture more than once"),
    ],
)
def test_a_mixture_that_contradicts_itself_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(FindingsError, match=message):
        resolved(*words).require_valid()


def test_a_member_that_does_not_exist_is_named(tmp_path: Path) -> None:
    for member, message in (
        ("{name: cylce}", "task.mixture, item 2: name: unknown task 'cylce'\n  did you mean 'cycle'"),
        (f"{{name: {tmp_path}/absent.jsonl, verifier: exact}}", "task.mixture, item 2: name: cannot read"),
        (f"{{name: {tmp_path}/absent.jsonl}}", "task.mixture, item 2: "),
    ):
        config = resolved(f"task.mixture=[{{name: cycle}}, {member}]").config
        with pytest.raises(UsageError) as caught:
            find_inputs(config)
        assert message in str(caught.value)


def test_keys_of_a_member_may_refer_to_others() -> None:
    config = resolved("task.mixture=[{name: cycle, weight: '${run.steps}'}]", "run.steps=7").config
    assert [(member.name, member.weight) for member in config.task.mixture] == [("cycle", 7.0)]
    assert isinstance(load_tasks(config), MixtureTask)


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_equal_runs_give_equal_bits_and_figures_by_task(tmp_path: Path, steps: int) -> None:
    questions(tmp_path / "maths.jsonl")
    mixture = f"[{{name: cycle, weight: 3}}, {{name: {tmp_path}/maths.jsonl, verifier: numeric, held_out: 0}}]"
    words = [f"task.mixture={mixture}", "task.overlong_prompts=drop"]
    runs = [Run(tmp_path / part, *words, steps=steps) for part in "ab"]
    print("digest", runs[0].digests)
    assert runs[0].digests == runs[1].digests
    for metrics in runs[0].metrics:
        assert [metrics[f"tasks/{name}/prompts"] for name in ("cycle", "maths")] == [3, 1]
        shares = [metrics[f"tasks/{name}/samples"] * metrics[f"tasks/{name}/reward"] for name in ("cycle", "maths")]
        assert sum(shares) / metrics["samples"] == pytest.approx(metrics["reward"])
