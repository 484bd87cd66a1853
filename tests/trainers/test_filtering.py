"""Groups without signal are replaced one for one; cut responses go by the stated policy. Real runs."""

import json
from pathlib import Path

import pytest

from rlctl.errors import FindingsError, RlctlError
from rlctl.experience.events import Dispatched, Evicted, Finished, GroupEnded, Noted, Selected
from tests.trainers.sessions import Run
from tests.trainers.threaded import LAYOUT, threaded

__all__ = ["threaded"]  # the fixture

BESIDE = ("trainer.mode=separate_async", *LAYOUT, "trainer.parameter_sync_step=2", "trainer.max_staleness=2")
FILTER = "algorithm.filter_groups=true"


def rewards_of(run: Run) -> dict[int, set[float]]:
    rewards: dict[int, set[float]] = {}
    for event in run.events:
        if isinstance(event, Finished):
            rewards.setdefault(event.ordinal, set()).add(event.reward)
    return rewards


def test_a_group_that_is_evicted_is_replaced_by_exactly_one_and_the_trained_ones_all_teach(tmp_path: Path) -> None:
    run = Run(tmp_path, FILTER, steps=3)
    rewards = rewards_of(run)
    evicted = [event.ordinal for event in run.events if isinstance(event, Evicted)]
    selected = [ordinal for event in run.events if isinstance(event, Selected) for ordinal in event.ordinals]
    dispatched = [event.ordinal for event in run.events if isinstance(event, Dispatched)]
    assert evicted
    assert all(len(rewards[ordinal]) == 1 for ordinal in evicted)
    assert len(selected) == 3 * 4
    assert all(len(rewards[ordinal]) > 1 for ordinal in selected)
    assert dispatched == list(range(len(selected) + len(evicted)))
    assert sorted(selected + evicted) == dispatched
    assert all(metrics["groups_without_signal"] == 0 for metrics in run.metrics)
    assert sum(metrics["filter/evicted_groups"] for metrics in run.metrics) == len(evicted)
    every = [event.reward for event in run.events if isinstance(event, Finished)]
    generated = [(m["filter/reward_generated"], m["filter/generated_prompts"] * 4) for m in run.metrics]
    assert sum(reward * count for reward, count in generated) == pytest.approx(sum(every))
    # Nothing is generated in vain: every group that began has ended.
    assert sum(isinstance(event, GroupEnded) for event in run.events) == len(dispatched)


def test_what_is_replaced_is_bounded_and_told(tmp_path: Path) -> None:
    run = Run(tmp_path, FILTER, "algorithm.filter_max_batches=1", steps=1)
    assert not [event for event in run.events if isinstance(event, Evicted)]
    kept = run.metrics[0]["filter/kept_without_signal"]
    assert kept == run.metrics[0]["groups_without_signal"] > 0
    assert run.metrics[0]["filter/generated_prompts"] == 4
    notes = [event.message for event in run.events if isinstance(event, Noted)]
    assert any(f"{kept:.0f} groups without signal are trained" in note for note in notes)


def test_data_that_ends_shortens_the_run_and_every_prompt_is_used_once(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{n % 10}+1+1b", "answer": str(n % 10)}) for n in range(14)]
    file.write_text("\n".join(lines) + "\n")
    run = Run(
        tmp_path, FILTER, f"task.name={file}", "task.verifier=contains", "task.held_out=0", "task.epochs=1", steps=50
    )
    dispatched = sorted(event.ordinal for event in run.events if isinstance(event, Dispatched))
    selected = [ordinal for event in run.events if isinstance(event, Selected) for ordinal in event.ordinals]
    evicted = [event.ordinal for event in run.events if isinstance(event, Evicted)]
    assert dispatched == list(range(14))
    assert sorted(selected + evicted) == dispatched
    assert 1 <= len(run.metrics) <= 4


@pytest.mark.parametrize("deterministic", ["true", "false"])
@pytest.mark.parametrize("mode", [("trainer.mode=colocate_async",), BESIDE])
def test_groups_are_replaced_one_for_one_where_generation_is_ahead(request, mode, deterministic, tmp_path) -> None:
    if mode is BESIDE:
        request.getfixturevalue("threaded")
    settings = (FILTER, *mode, "trainer.warmup_batches=1", f"run.deterministic={deterministic}")
    run = Run(tmp_path / "a", *settings, steps=3)
    rewards = rewards_of(run)
    evicted = [event.ordinal for event in run.events if isinstance(event, Evicted)]
    selected = [ordinal for event in run.events if isinstance(event, Selected) for ordinal in event.ordinals]
    dispatched = [event.ordinal for event in run.events if isinstance(event, Dispatched)]
    assert evicted and all(len(rewards[ordinal]) == 1 for ordinal in evicted)
    assert len(selected) == 3 * 4
    assert all(len(rewards[ordinal]) > 1 for ordinal in selected)
    assert sorted(selected + evicted) == dispatched == list(range(len(dispatched)))
    assert sum(m["filter/evicted_groups"] for m in run.metrics) == len(evicted)
    if deterministic == "true":
        assert Run(tmp_path / "b", *settings, steps=3).digests == run.digests


@pytest.mark.parametrize("policy", ["truncate", "mask", "drop"])
def test_cut_responses_go_by_the_policy(policy: str, tmp_path: Path) -> None:
    # At 8 tokens some responses are cut: a trace needs 16 or more.
    run = Run(tmp_path, f"algorithm.overlong_responses={policy}", "rollout.max_new_tokens=8", steps=2)
    cut = [event for event in run.events if isinstance(event, Finished) and event.reason == "length"]
    counts = [(m["overlong_masked"], m["overlong_dropped"], m["samples"]) for m in run.metrics]
    assert cut
    totals = tuple(sum(column) for column in zip(*counts, strict=True))
    expected = {"truncate": (0, 0, 32), "mask": (len(cut), 0, 32), "drop": (0, len(cut), 32 - len(cut))}
    assert totals == expected[policy]


def test_a_step_whose_responses_are_all_cut_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(RlctlError, match="all 16 responses of the step were cut") as caught:
        Run(tmp_path, "algorithm.overlong_responses=drop", "rollout.max_new_tokens=1", steps=1)
    assert "max_new_tokens" in str(caught.value.fix)


LONG = {3: "1-1+1-1+1-1b", 8: "22222222+1+1c"}


def prompts_with_long_ones(folder: Path) -> str:
    file = folder / "prompts.jsonl"
    texts = [LONG.get(n, f"{n}+1+1b") for n in range(10)]
    file.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return f"task.name={file}"


@pytest.mark.parametrize(("policy", "trained", "told"), [("drop", 8, "left out"), ("truncate", 10, "cut to their end")])
def test_long_prompts_go_by_the_policy_and_are_counted(policy, trained, told, tmp_path: Path) -> None:
    run = Run(
        tmp_path, prompts_with_long_ones(tmp_path), "task.verifier=contains", "task.held_out=0", "task.epochs=1",
        "task.max_prompt_tokens=9", f"task.overlong_prompts={policy}", steps=9,
    )  # fmt: skip
    dispatched = [event for event in run.events if isinstance(event, Dispatched)]
    assert len(dispatched) == trained
    assert len(run.metrics) == -(-trained // 4)
    notes = [event.message for event in run.events if isinstance(event, Noted)]
    assert [note for note in notes if "longer than 9 tokens" in note and told in note] == notes[:1]
    assert notes[0].startswith("2 prompts")


def test_long_prompts_are_refused_before_the_first_step_with_every_way_out(tmp_path: Path) -> None:
    with pytest.raises(FindingsError) as caught:
        Run(
            tmp_path, prompts_with_long_ones(tmp_path), "task.verifier=contains", "task.held_out=0",
            "task.max_prompt_tokens=9",
        )  # fmt: skip
    assert len(caught.value.findings) == 2
    assert "task.overlong_prompts" in str(caught.value.findings[0].fix)
