"""Linear weights on the CPU stay what they are.

After loading, vLLM's CPU build packs each linear weight for its kernels into a closure and leaves an empty parameter
behind. Such weights cannot be read back nor written in place; vLLM's own reload packs anew but forgets a head that is
tied to the embedding, whose logits then stay those of the old weights without any sign of it. In engines that rlctl
updates, linear layers use torch's own product on their parameter instead. On models of a few hundred MiB no difference
in speed was measurable.
"""

from __future__ import annotations

import inspect
from typing import Any

from rlctl.errors import UnavailableError
from rlctl.rollout.vllm.names import updated_by_rlctl

FUNCTION = "dispatch_cpu_unquantized_gemm"
PARAMETERS = ["layer", "remove_weight"]


def keep_plain() -> None:
    """Wrap the function that packs. Raises UnavailableError when this vLLM has it not, or has it otherwise."""
    import torch
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    pack = getattr(utils, FUNCTION, None)
    if getattr(pack, "keeps_plain", False):
        return
    if pack is None or list(inspect.signature(pack).parameters) != PARAMETERS:
        raise UnavailableError(f"{utils.__name__} has no {FUNCTION}({', '.join(PARAMETERS)}), which packs weights")

    def pack_or_keep(layer: Any, remove_weight: bool) -> None:
        if updated_by_rlctl(get_current_vllm_config_or_none()) and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight)

    pack_or_keep.keeps_plain = True  # type: ignore[attr-defined]
    setattr(utils, FUNCTION, pack_or_keep)
