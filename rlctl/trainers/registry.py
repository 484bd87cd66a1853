"""Trainer modes by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rlctl.registry import Registry

if TYPE_CHECKING:
    from rlctl.trainers.base import Trainer

TRAINERS: Registry[type[Trainer]] = Registry(
    "trainer mode",
    {
        "sync": "rlctl.trainers.modes.sync:SyncTrainer",
        "colocate_async": "rlctl.trainers.modes.colocate_async:ColocateAsyncTrainer",
        "separate_async": "rlctl.trainers.modes.separate_async:SeparateAsyncTrainer",
        "one_step_off": "rlctl.trainers.modes.one_step_off:OneStepOffTrainer",
    },
    group="rlctl.trainers",
    base="rlctl.trainers.base:Trainer",
)

C = TypeVar("C", bound="type[Trainer]")


def register_trainer(name: str) -> Callable[[C], C]:
    """Return a decorator that makes a Trainer subclass known as mode ``name``.

    Raises:
        UsageError: the name belongs to another class, or the class is not a Trainer.
    """

    def register(cls: C) -> C:
        TRAINERS.register(name, cls)
        return cls

    return register


def get_trainer_cls(name: str) -> type[Trainer]:
    """Return the class of mode ``name``. Raises UsageError with a suggestion for an unknown one."""
    return TRAINERS.load(name, where="trainer.mode")
