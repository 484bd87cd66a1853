"""vLLM's own layer-wise reload, with an account of what came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rlctl.errors import UsageError
from rlctl.rollout.sent_form import SentForm
from rlctl.sync.errors import MismatchError
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta


class Reload:
    """Loads streams by vLLM's loaders and has each layer processed as after the first load.

    It holds the tensors of a layer until all of them have come.

    Args:
        model: of a vLLM worker.
        vllm_config: of its engine.
        form: of what is sent; None, where that is not known, goes by the engine's parameters, as far as they tell.
    """

    def __init__(self, model: Any, vllm_config: Any, form: SentForm | None) -> None:
        self._model = model
        self._config = vllm_config
        self._form = form
        self._parameters = [name for name, _ in model.named_parameters()]

    def targets(self) -> Mapping[str, TensorMeta]:
        """Return what a whole stream brings. Raises UsageError when that is not known."""
        if self._form is None:
            raise UsageError(
                "rlctl does not know the tensors of this architecture, so it cannot check them before they are loaded",
                fix="use sync.commit=inplace, which checks what vLLM has loaded",
            )
        return self._form.metas

    def load(self, stream: Iterable[tuple[str, torch.Tensor]]) -> LoadReport:
        """Load ``stream``. Raises MismatchError when vLLM refuses a tensor; the weights may be a mix then."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        seen, came, unknown = list[str](), list[str](), list[str]()
        with set_current_vllm_config(self._config), torch.no_grad():
            initialize_layerwise_reload(self._model)
            try:
                reached = self._model.load_weights(self._counted(stream, seen, came, unknown))
            except (ValueError, KeyError, AssertionError) as error:  # what its loaders raise for names and shapes
                at = came[-1] if came else "the first tensor"
                raise MismatchError(f"vLLM does not take {at}: {type(error).__name__}: {error}") from error
            finally:
                finalize_layerwise_reload(self._model, self._config.model_config)
        return LoadReport(seen, unknown, self._untouched(came, set(reached or ())))

    def _counted(
        self, stream: Iterable[tuple[str, torch.Tensor]], seen: list[str], came: list[str], unknown: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        form = self._form
        for name, tensor in stream:
            if form is not None and name not in form.metas and name not in form.single:
                (seen if name in form.aliases else unknown).append(name)
                continue
            seen.append(name)
            for single, part in [(name, tensor)] if form is None else form.split(name, tensor):
                came.append(single)
                yield single, part.clone()  # kept by vLLM until its layer is complete

    def _untouched(self, came: list[str], reached: set[str]) -> list[str]:
        if self._form is not None:
            return self._form.untouched(set(came))
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        renamed = set(came if mapper is None else mapper.get_rename_mapper().apply_list(came))
        missing = [name for name in self._parameters if name not in reached]
        parts: Mapping[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        for name in self._parameters:
            head, _, kind = name.rpartition(".")
            prefix, _, module = head.rpartition(".")
            names = [f"{prefix}.{part}.{kind}" for part in parts.get(module, ())]
            missing += [part for part in names if part not in renamed and name in reached]
        return missing
