"""What a rollout engine keeps beside its weights: the KV cache, and the work space of a prefill or a decode tick."""

from __future__ import annotations

from rlctl.memory.kv_cache import embedded_cache_bytes, kv_bytes_per_token
from rlctl.memory.workload import Workload

UTILIZATION = 0.9
"""Share of the device that vLLM fills (``gpu_memory_utilization``, its default)."""
PREFILL_TOKENS = 8192
"""Tokens of one prefill: of the embedded engine's, and vLLM's default ``max_num_batched_tokens`` for such devices."""
_SAMPLING_COPIES = 4
"""Float32 copies of the logits of a tick while a token is drawn: logits, log-softmax, noise, sum."""


def kv_cache_bytes(work: Workload, *, room: int | None = None) -> int:
    """Return the bytes of the KV cache of one rank.

    The embedded engine sets aside every slot at full length. vLLM takes what the responses at hand can fill, or the
    ``room`` that is left under its share of the device, whichever is less: what does not fit waits in its queue.
    """
    if work.embedded:
        return embedded_cache_bytes(
            work.spec,
            work.engine_bytes,
            slots=work.config.rollout.max_slots,
            length=work.sequence,
            threads=work.threads,
            tp=work.config.placement.replica_tp,
        )
    wanted = work.replica_rows * sequence_kv_bytes(work)
    if room is None:
        return wanted
    reserve = int((1 - UTILIZATION) * work.config.cluster.device_memory)
    return max(min(wanted, room - reserve), sequence_kv_bytes(work))


def sequence_kv_bytes(work: Workload) -> int:
    """Return the bytes of the KV cache of one sequence of full length on one rank."""
    tp = work.config.placement.replica_tp
    return work.sequence * kv_bytes_per_token(work.spec, work.engine_bytes, tp=tp)


def engine_work_bytes(work: Workload) -> int:
    """Return the bytes that a prefill, or the drawing of tokens, needs for a moment, whichever are more."""
    spec, tp = work.spec, work.config.placement.replica_tp
    prompts = -(-work.replica_rows // work.config.rollout.samples_per_prompt)
    tokens = min(PREFILL_TOKENS, prompts * work.config.task.max_prompt_tokens)
    width = 2 * spec.hidden + max(spec.ffn, spec.moe_ffn * max(spec.experts_per_token, 1)) * 2 // tp
    prefill = tokens * width * work.engine_bytes
    if work.embedded:  # the caches of the prompts lie beside the slots until they are placed
        prefill += prompts * work.config.task.max_prompt_tokens * kv_bytes_per_token(spec, work.engine_bytes)
    drawing = work.replica_rows * spec.vocab * 4 * _SAMPLING_COPIES
    return max(prefill, drawing)
