"""Trainer modes: one loop, ten stages, nine hooks; a mode is hooks and declared constraints."""

from rlctl.trainers.registry import get_trainer_cls, register_trainer

__all__ = ["get_trainer_cls", "register_trainer"]
