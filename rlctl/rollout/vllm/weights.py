"""How the weights of one vLLM worker are written: straight into its parameters, or by vLLM's own reload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from rlctl.errors import RlctlError, UnavailableError, UsageError
from rlctl.keys.dtypes import dtype_code
from rlctl.keys.model_spec import ModelSpec
from rlctl.rollout.sent_form import SentForm, sent_form
from rlctl.rollout.vllm.held_weights import HeldWeights, held_weights
from rlctl.rollout.vllm.reload import Reload
from rlctl.sync.protocols import LoadReport
from rlctl.sync.tensor_meta import TensorMeta


class VllmWeights(Protocol):
    """The weights of one worker.

    Attributes:
        way: ``in place`` or ``reload``.
    """

    way: str

    @property
    def views(self) -> Mapping[str, torch.Tensor] | None:
        """Name -> tensor, when every tensor of a stream lies whole in this worker's memory."""

    def targets(self) -> Mapping[str, TensorMeta]:
        """Return the weights by name."""

    def load(self, stream: Iterable[tuple[str, torch.Tensor]], *, cast: bool) -> LoadReport:
        """Write a stream, whose tensors are valid until the next is asked for."""

    def held(self) -> HeldWeights:
        """Return what can be read back. Raises RlctlError when nothing can."""


class InPlace:
    """Straight into the parameters."""

    way = "in place"

    def __init__(self, held: HeldWeights) -> None:
        self._held = held
        self.views = held.views

    def targets(self) -> Mapping[str, TensorMeta]:
        """See VllmWeights."""
        return self._held.metas

    def load(self, stream: Iterable[tuple[str, torch.Tensor]], *, cast: bool) -> LoadReport:
        """See VllmWeights."""
        return self._held.load(stream, cast=cast)

    def held(self) -> HeldWeights:
        """See VllmWeights."""
        return self._held


class ByReload:
    """Through vLLM's loaders, for weights that it keeps in another form than they are sent in."""

    way = "reload"
    views = None

    def __init__(self, reload: Reload, why: str) -> None:
        self._reload = reload
        self._why = why

    def targets(self) -> Mapping[str, TensorMeta]:
        """See VllmWeights."""
        return self._reload.targets()

    def load(self, stream: Iterable[tuple[str, torch.Tensor]], *, cast: bool) -> LoadReport:
        """See VllmWeights. vLLM casts as it likes."""
        return self._reload.load(stream)

    def held(self) -> HeldWeights:
        """See VllmWeights."""
        raise RlctlError(f"weights of this engine cannot be read back: {self._why}")


def weights_of(model: Any, vllm_config: Any) -> VllmWeights:
    """Return how to write the weights of a worker's ``model``. Raises UnavailableError when that would go wrong."""
    from vllm.distributed import get_tensor_model_parallel_rank

    from rlctl.rollout.vllm.plugin import EXPERTS, problems

    packed = [name for name, layer in model.named_modules() if _is_packed(layer)]
    if packed:
        reason = "; ".join(f"{what}: {why}" for what, why in problems.items()) or "the plugin was not active"
        raise UnavailableError(
            f"vLLM packed {len(packed)} linear weights ({packed[0]}), so they cannot be updated: {reason}",
            fix="install rlctl in vLLM's environment, and leave it in VLLM_PLUGINS if that is set",
        )
    if EXPERTS in problems and any(hasattr(layer, "w13_weight") for layer in model.modules()):
        raise UnavailableError(f"an update would leave experts that vLLM's kernels cannot read: {problems[EXPERTS]}")
    parallel, config = vllm_config.parallel_config, vllm_config.model_config.hf_config.to_dict()
    try:
        spec = ModelSpec.from_config(config)
        if spec.experts or vllm_config.quant_config is not None:
            raise UnavailableError("vLLM may keep experts and quantised weights in another order than they are sent in")
        if parallel.world_size != parallel.tensor_parallel_size:
            raise UnavailableError("each stage of a pipeline has its own parameters")
        world = parallel.tensor_parallel_size
        return InPlace(held_weights(model, config, rank=get_tensor_model_parallel_rank(), world=world))
    except (UnavailableError, UsageError) as error:
        return ByReload(Reload(model, vllm_config, _form(config, vllm_config)), error.message)


def _is_packed(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    return hasattr(layer, "cpu_linear") and (
        layer.cpu_linear is not torch.nn.functional.linear or (weight is not None and not weight.numel())
    )


def _form(config: Mapping[str, Any], vllm_config: Any) -> SentForm | None:
    """Return what a whole stream has to bring, None for an architecture that is not known."""
    try:
        spec = ModelSpec.from_config(config)
    except UsageError:
        return None
    return sent_form(spec, dtype_code(vllm_config.model_config.dtype))
