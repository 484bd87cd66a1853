"""An adapter that one vLLM worker is sent in memory, put into the slot of the one before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlctl.errors import RlctlError, UnavailableError, UsageError
from rlctl.rollout.vllm.names import ADAPTER_ID
from rlctl.sync.protocols import LoadReport


class WorkerAdapter:
    """See above.

    Args:
        worker: vLLM's.

    Attributes:
        version: of the adapter that the worker computes with; None before the first, or when an update broke off.
        expected: configuration of the adapters that weight syncs bring; None where they bring whole weights.
        tensors: of the adapter, as they came: name in a PEFT file -> tensor.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.version: int | None = None
        self.expected: Mapping[str, Any] | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._config: Mapping[str, Any] = {}

    def expect(self, config: Mapping[str, Any]) -> None:
        """Weight syncs bring adapters of this configuration, as in ``adapter_config.json``."""
        self.expected = config

    def load(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], version: int) -> LoadReport:
        """Compute with this adapter from now on, and no longer with the one before.

        Nothing changes before the adapter is known to fit; an adapter with unknown names changes nothing either.

        Args:
            config: as in ``adapter_config.json``.
            tensors: name in a PEFT file -> tensor, in host memory; kept, so nobody may write to them afterwards.
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
        self.tensors, self._config = dict(tensors), config
        _use(manager, adapter)
        self.version = version
        return LoadReport(list(tensors), [], [])

    def require_in_use(self) -> None:
        """Raise RlctlError unless what vLLM's layers compute with is what the adapter comes to, put in once: it is put
        in anew and compared with what was there."""
        workers_manager = self._worker.model_runner.lora_manager
        manager = workers_manager._adapter_manager  # noqa: SLF001
        held = {place: tensor.clone() for place, tensor in _slots(manager).items()}
        _use(manager, self._adapter(workers_manager, manager.model, self._config, self.tensors))
        wrong = sorted({place[0] for place, due in _slots(manager).items() if not torch.equal(held[place], due)})
        if wrong:
            raise RlctlError(
                f"vLLM computed otherwise than with the adapter that came, in {len(wrong)} modules ({wrong[0]})"
            )

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
                {name: tensor.clone() for name, tensor in tensors.items()},  # vLLM scales B in place
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


def _use(manager: Any, adapter: Any) -> None:
    """Have vLLM's layers compute with an adapter, in the place of the one before it."""
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)


def _slots(manager: Any) -> dict[tuple[str, str, int], torch.Tensor]:
    """Return what the layers compute with: (module, A or B, part of a fused layer) -> tensor."""
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    return {
        (name, kind, part): tensor[slot]
        for name, module in manager.modules.items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for part, tensor in enumerate(_parts(getattr(module, kind, ())))
    }


def _parts(stacked: Any) -> list[torch.Tensor]:
    return [stacked] if isinstance(stacked, torch.Tensor) else list(stacked)


def _unknown(manager: Any, modules: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the tensors of modules that the engine does not adapt, which vLLM passes over in silence."""
    known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    odd = [name for name in modules if name not in known]
    return [raw for raw in tensors if any(f"{name}.lora_" in raw for name in odd)]
