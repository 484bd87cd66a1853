"""Expert weights on the CPU are packed after every load, not only after the first.

vLLM's CPU kernels read experts in an order of their own. It is made after the first load; on a reload vLLM takes its
kernel for set up already and leaves the weights as they came: every log-prob is wrong from then on, without any sign
of it. In engines that rlctl updates, a reload packs again.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from rlctl.errors import UnavailableError
from rlctl.rollout.vllm.names import updated_by_rlctl

METHOD = "_setup_kernel"
PARAMETERS = ["self", "layer", "w13", "w2"]


def pack_again() -> None:
    """Wrap the method that sets a kernel up. Raises UnavailableError when this vLLM has it not, or otherwise."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = getattr(UnquantizedFusedMoEMethod, METHOD, None)
    if getattr(set_up, "packs_again", False):
        return
    if set_up is None or list(inspect.signature(set_up).parameters) != PARAMETERS:
        raise UnavailableError(f"UnquantizedFusedMoEMethod has no {METHOD}({', '.join(PARAMETERS)})")

    @functools.wraps(set_up)
    def set_up_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        again = self.moe_kernel is not None
        set_up(self, layer=layer, w13=w13, w2=w2)
        if again and updated_by_rlctl(get_current_vllm_config_or_none()):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    set_up_and_pack.packs_again = True  # type: ignore[attr-defined]
    setattr(UnquantizedFusedMoEMethod, METHOD, set_up_and_pack)
