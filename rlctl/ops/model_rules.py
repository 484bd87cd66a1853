"""Rules on how a model goes with a layout: heads against tensor parallelism, tensors against buckets."""

from __future__ import annotations

from rlctl.hardware.rules.outcome import Outcome, fail, ok, skipped, warn
from rlctl.hybrid.sizes import padding
from rlctl.keys.model_spec import ModelSpec
from rlctl.ops.planned_model import PlannedModel
from rlctl.schema import Config
from rlctl.units import format_bytes

_LARGEST_TP = 64


def valid_sizes(spec: ModelSpec, most: int = _LARGEST_TP) -> list[int]:
    """Return the tensor-parallel sizes that cut a model evenly: heads and feed-forward widths are multiples of it, and
    key-value heads are, or it is a multiple of them (then each is kept several times).
    """
    widths = [width for width in (spec.ffn, spec.moe_ffn if spec.experts else 0, spec.shared_ffn) if width]
    return [
        tp
        for tp in range(1, min(spec.heads, most) + 1)
        if spec.heads % tp == 0
        and (spec.mla is not None or spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
        and all(width % tp == 0 for width in widths)
    ]


def tensor_parallel_heads(config: Config, model: PlannedModel | None) -> list[Outcome]:
    """Check the tensor-parallel sizes of trainer and replicas against the model's heads."""
    rule = "tensor-parallel-heads"
    if model is None or model.spec is None:
        return [skipped(rule, "the model's heads are not known")]
    spec, found = model.spec, []
    sizes = valid_sizes(spec)
    heads = f"{spec.heads} heads, {'latent attention' if spec.mla is not None else f'{spec.kv_heads} key-value heads'}"
    for key, tp in (
        ("placement.trainer_tp", config.placement.trainer_tp),
        ("placement.replica_tp", config.placement.replica_tp),
    ):
        if tp not in sizes and config.placement.pad and key == "placement.replica_tp":
            message = f"{key} {tp} does not cut {model.name} evenly ({heads}, feed-forward {spec.ffn})"
            found.append(warn(rule, message, f"it is padded with {padding(spec, tp, config.placement.trainer_ranks)}"))
        elif tp not in sizes:
            message = f"{key} {tp} does not cut {model.name} evenly ({heads}, feed-forward {spec.ffn})"
            found.append(fail(rule, message, f"valid sizes: {', '.join(map(str, sizes))}"))
        elif spec.mla is None and tp > spec.kv_heads:
            copies = tp // spec.kv_heads
            kept = f"each is kept {copies} times, its cache too"
            message = f"{key} {tp} is more than the {spec.kv_heads} key-value heads: {kept}"
            found.append(warn(rule, message, f"up to {spec.kv_heads} the cache of keys and values is not repeated"))
    return found or [
        ok(rule, f"{heads}: trainer {config.placement.trainer_tp}, replica {config.placement.replica_tp} divide them")
    ]


def bucket_size(config: Config, model: PlannedModel | None) -> Outcome:
    """Check the largest tensor against the bucket. Tensors above it are cut and merged again by every backend."""
    rule = "bucket-size"
    if model is None or not model.weights:
        return skipped(rule, "the model's tensors are not known")
    largest = max(model.weights, key=lambda weight: weight.nbytes)
    bucket = config.sync.bucket_size
    size = f"{largest.name} is the largest tensor: {_mib(largest.nbytes)}"
    if largest.nbytes <= bucket:
        return ok(rule, f"{size}, and a bucket holds {_mib(bucket)}")
    pieces = -(-largest.nbytes // bucket)
    message = f"{size}, and a bucket holds {_mib(bucket)}: it travels in {pieces} pieces"
    return warn(rule, message, f"sync.bucket_size of at least {_mib(largest.nbytes)} carries it whole")


def _mib(nbytes: int) -> str:
    # Rounded up, so that the figure may be used as a bucket size.
    return f"{-(-nbytes // (1 << 20))} MiB" if nbytes >= 1 << 20 else format_bytes(nbytes)
