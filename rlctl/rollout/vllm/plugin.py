"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``).

It makes rlctl's checkpoint engines backends of vLLM's weight transfer, ``rlctl-gloo`` for ``gloo``, and mends what
would make updates of a running engine fail or go stale. Nothing changes for engines that rlctl does not update, and a
vLLM in which something is not where it was goes on working: what could not be done is logged, and said again by the
first update that needs it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from rlctl.process import die_with_parent
from rlctl.rollout.vllm import cpu_experts, cpu_packing, engine_core
from rlctl.rollout.vllm.environment import PARENT_VARIABLE
from rlctl.rollout.vllm.names import PACKAGE, PREFIX
from rlctl.sync.registry import CHECKPOINT_ENGINES
from rlctl.sync.traits import BACKEND_TRAITS

log = logging.getLogger(__name__)

LINEAR, EXPERTS, CORE = "linear weights on the CPU", "experts on the CPU", "engine core"
# What is done to vLLM -> why it could not be; filled by ``register``.
problems: dict[str, str] = {}


def register() -> None:
    """Register and mend; called again it does nothing. Never raises."""
    steps: dict[str, Callable[[], None]] = {
        "weight-transfer engines": _register_engines,
        LINEAR: cpu_packing.keep_plain,
        EXPERTS: cpu_experts.pack_again,
        CORE: engine_core.guard_updates,
    }
    if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):  # the engine core of a replica, which may be killed
        die_with_parent(os.getppid())
    for what, step in steps.items():
        try:
            step()
            problems.pop(what, None)
        except Exception as error:  # noqa: BLE001 - any fault of ours must leave vLLM as it was
            problems[what] = f"{type(error).__name__}: {error}"
            log.warning("rlctl's vLLM plugin: %s: %s", what, problems[what])


def _register_engines() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    sides = (
        (WeightTransferEngineFactory, "transfer_engine", "RlctlWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer_engine", "RlctlTrainerEngine"),
    )
    for factory, module, name in sides:
        for backend in CHECKPOINT_ENGINES.names():
            if backend in BACKEND_TRAITS and BACKEND_TRAITS[backend].in_place:
                continue  # it has no rollout side
            if PREFIX + backend not in factory._registry:  # noqa: SLF001 - it has no other way to ask
                factory.register_engine(PREFIX + backend, f"{PACKAGE}.{module}", name)
