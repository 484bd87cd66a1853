"""What a run would read, looked at without torch: data and models are there, and are what the run takes them for. (Of
adapters: ``rlctl.ops.adapter_checks``.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rlctl.errors import FindingsError, RlctlError, UnavailableError
from rlctl.ops.inputs import find_reward_model, find_task
from rlctl.ops.resolve import Resolution
from rlctl.runtime.model_sources import find_actor, find_critic, find_reference
from rlctl.schema import Config
from rlctl.trainers.contracts import CheckResult

Check = Callable[[Config], object]


def with_input_checks(resolution: Resolution) -> Resolution:
    """Return the resolution with the outcome of a check of each input added, in the run's order."""
    found = [result for check in _CHECKS for result in _outcomes(*check, resolution.config)]
    return replace(resolution, checks=(*resolution.checks, *found))


def _outcomes(rule: str, title: str, check: Check, config: Config) -> Iterator[CheckResult]:
    try:
        check(config)
    except FindingsError as error:
        for finding in error.findings:
            yield CheckResult(rule, "violated", finding.message, finding.where, finding.fix)
    except UnavailableError as error:
        # Another machine may have it: as with hardware, a plan is not refused for that.
        yield CheckResult(rule, "note", error.message, error.where, error.fix)
    except RlctlError as error:
        yield CheckResult(rule, "violated", error.message, error.where, error.fix)
    else:
        yield CheckResult(rule, "ok", title)


def _task(config: Config) -> None:
    names = [member.name for member in config.task.mixture] or [config.task.name]
    for name in names:
        family, _, rest = name.partition(":")
        if family == "hub" and not Path(rest.partition(":")[0]).exists():
            raise UnavailableError(f"{name} is read when the run starts: a dry run does not ask the hub")
    find_task(config)


def _actor(config: Config) -> None:
    folder = Path(config.model.path).expanduser()
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        raise UnavailableError(f"{folder} is planned with by its config.json: it holds no weights to train")
    find_actor(config, ask_hub=False)


def _reference(config: Config) -> None:
    find_reference(config, ask_hub=False)


def _critic(config: Config) -> None:
    find_critic(config, ask_hub=False)


def _reward_model(config: Config) -> None:
    find_reward_model(config, ask_hub=False)


_CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("task_can_be_read", "the task has prompts and answers to train on", _task),
    ("model_is_there", "the model is there", _actor),
    ("reference_is_there", "a reference model that is named is there", _reference),
    ("critic_is_there", "a critic that is named is there", _critic),
    ("reward_model_is_there", "a reward model that is named is there, and scores", _reward_model),
)
