"""An adapter that one vLLM worker is sent in memory, put into the slot of the one before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlctl.errors import UnavailableError, UsageError
from rlctl.rollout.vllm.names import ADAPTER_ID
from rlctl.sync.protocols import LoadReport


class WorkerAdapter:
    """See above.

    Args:
        worker: vLLM's.

    Attributes:
        version: of the adapter that the worker computes with; None before the first, or when an update broke off.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.version: int | None = None

    def load(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], version: int) -> LoadReport:
        """Compute with this adapter from now on, and no longer with the one before.

        Nothing changes before the adapter is known to fit; an adapter with unknown names changes nothing either.

        Args:
            config: as in ``adapter_config.json``.
            tensors: name in a PEFT file -> tensor, this call's own: vLLM multiplies B by the scale in place.
            version: of the weights with it.

        Raises:
            UnavailableError: the engine takes no adapters.
            UsageError: the adapter is of a rank or a form that the engine does not take.
        """
        workers_manager = getattr(self._worker.model_runner, "lora_manager", None)
        if workers_manager is None:
            raise UnavailableError(
                "this vLLM engine takes no adapters",
                fix=f"make it with enable_lora=True, max_lora_rank={config['r']} (8, 16, 32, ...), max_loras=1",
            )
        manager = workers_manager._adapter_manager  # noqa: SLF001 - vLLM has no public way to give it tensors
        adapter = self._adapter(workers_manager, manager.model, config, tensors)
        unknown = _unknown(manager, adapter.loras, tensors)
        if unknown:
            return LoadReport([name for name in tensors if name not in unknown], unknown, [])
        self.version = None
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        self.version = version
        return LoadReport(list(tensors), [], [])

    def _adapter(
        self, workers_manager: Any, model: Any, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> Any:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        lora_config = workers_manager.lora_config
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        try:
            helper = PEFTHelper.from_dict(dict(config))
            helper.validate_legal(lora_config)
            return LoRAModel.from_lora_tensors(
                ADAPTER_ID,
                dict(tensors),
                helper,
                device="cpu",
                dtype=lora_config.lora_dtype,
                model_vocab_size=workers_manager.vocab_size,
                # Only its renames: with the whole mapper q, k and v would be one module.
                weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            )
        except (ValueError, RuntimeError) as error:  # what vLLM raises for ranks, forms, names and sizes
            raise UsageError(
                f"vLLM does not take this adapter: {error}",
                fix="sync merged weights, or make the engine with a max_lora_rank that is high enough",
            ) from error


def _unknown(manager: Any, modules: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the tensors of modules that the engine does not adapt, which vLLM passes over in silence."""
    known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    odd = [name for name in modules if name not in known]
    return [raw for raw in tensors if any(f"{name}.lora_" in raw for name in odd)]
