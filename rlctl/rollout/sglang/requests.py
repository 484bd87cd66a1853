"""What is asked of an SGLang server, as data: paths and JSON bodies. Nothing here touches a network.

The names are those of ``sglang/srt/managers/io_struct.py``; the tests hold every body to the classes of a wheel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from rlctl.errors import UsageError
from rlctl.rollout.base import Request

# SGLang counts the tags of memory by these names; they are rlctl's, too.
Tag = Literal["weights", "kv_cache"]
# Ways to hand weights over that SGLang offers and rlctl does not use.
REFUSED_TRANSFERS: Mapping[str, str] = {
    "tensor": "its tensors are pickled (MultiprocessingSerializer)",
    "lora_tensors": "its tensors are pickled (MultiprocessingSerializer)",
    "ipc": "the handles that its workers read from a socket are pickled",
    "distributed": "SGLang's workers would have to join a process group of rlctl's, over torch's private functions",
}
# Ends an id, and is in none: SGLang aborts every request whose id begins with what it is told.
_END = ";"


class Call(NamedTuple):
    """One HTTP request; without a ``body`` it is a GET."""

    path: str
    body: dict[str, Any] | None = None


def request_id(request: Request, attempt: int) -> str:
    """Return the id of a request's ``attempt``: no id is the beginning of another."""
    ordinal, sample, turn = request.key
    return f"{ordinal}.{sample}.{turn}.{attempt}{_END}"


def generate(request: Request, made: Sequence[int], rid: str, *, adapter: str | None = None) -> Call:
    """Return the call that makes what is missing of a response.

    Args:
        request: it leaves room for at least one token.
        made: token ids of the response so far.
        rid: see ``request_id``.
        adapter: name of a loaded adapter.
    """
    params = request.params
    left = params.max_new_tokens - len(made)
    assert left > 0
    sampling: dict[str, Any] = {
        "max_new_tokens": left,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        # With ``ignore_eos`` no stop token ends a response; without it, those of the model's configuration do, too.
        "ignore_eos": not params.stop_token_ids,
        "stop_token_ids": list(params.stop_token_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": sampling_seed(request),
    }
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": [*request.prompt_ids, *made],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    return Call("/generate", body)


def sampling_seed(request: Request) -> int:
    """Return a seed of 63 bits that follows from the run's and the request's key.

    SGLang mixes a token's position into it, so that a response that goes on after an abort goes on with its own noise
    (with ``--enable-deterministic-inference``; else it draws as it likes).
    """
    text = " ".join(str(number) for number in (request.seed, *request.key))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def pause(mode: Literal["abort", "retract", "in_place"]) -> Call:
    """Compute nothing more. ``retract``: what runs waits, and its keys and values are computed again afterwards."""
    return Call("/pause_generation", {"mode": mode})


def go_on() -> Call:
    """Compute again."""
    return Call("/continue_generation", {"torch_empty_cache": False})


def abort(rid: str | None) -> Call:
    """End one request, or all: each is answered with what it has made."""
    return Call("/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})


def release(tags: Sequence[Tag]) -> Call:
    """Give memory back. The server must be idle or paused."""
    return Call("/release_memory_occupation", {"tags": list(tags)})


def restore(tags: Sequence[Tag]) -> Call:
    """Take memory again that was given back."""
    return Call("/resume_memory_occupation", {"tags": list(tags)})


def load_folder(folder: str, version: int) -> Call:
    """Load the weights in a folder of safetensors; the prefix cache is emptied, or the call fails."""
    return Call(
        "/update_weights_from_disk",
        {
            "model_path": folder,
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        },
    )


def load_adapter(name: str, folder: str) -> Call:
    """Load an adapter in PEFT's form."""
    return Call("/load_lora_adapter", {"lora_name": name, "lora_path": folder})


def unload_adapter(name: str) -> Call:
    """Let an adapter go, once no request computes with it."""
    return Call("/unload_lora_adapter", {"lora_name": name})


def name_version(version: int) -> Call:
    """Have what is made from now on carry a version; for adapters, whose loading names none."""
    return Call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})


def read_weight(name: str, rows: int) -> Call:
    """Read the first ``rows`` rows of a weight, as numbers, by the name that it is sent under."""
    return Call("/get_weights_by_name", {"name": name, "truncate_size": rows})


def model_info() -> Call:
    """What the server serves, its ``weight_version`` among it."""
    return Call("/model_info")


def ready() -> Call:
    """Answered with 200 once requests can be sent."""
    return Call("/ready")


def require_transfer(name: str) -> None:
    """Raise UsageError unless weights can be handed over in this way."""
    if name in REFUSED_TRANSFERS:
        raise UsageError(f"rlctl does not use update_weights_from_{name}: {REFUSED_TRANSFERS[name]}", fix="use disk")
    if name != "disk":
        raise UsageError(f"SGLang has no transfer {name!r}", fix="use disk")
