"""What every rollout engine takes and gives: requests, outputs, weight loads, and the life of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.errors import UsageError
from rlctl.experience.segments import FinishReason, RequestKey, Segment
from rlctl.sync.protocols import LoadReport

if TYPE_CHECKING:
    import torch

    from rlctl.sync.tensor_meta import TensorMeta

__all__ = ["WAKE_TAGS", "LoadReport", "Output", "Request", "RolloutEngine", "SamplingParams"]

WAKE_TAGS = ("weights", "kv_cache")


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. Raises UsageError for values that mean nothing.

    Attributes:
        max_new_tokens: most tokens of the response, those of a continued request's prefix included.
        temperature: divides the logits; 0 takes the most likely token (the lowest id among equals).
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.
        stop_token_ids: tokens that end a response; the stop token is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}", fix="give at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}", fix="give 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}", fix="give a number above 0 and up to 1 (1 keeps every token)")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}", fix="give 0 (keeps every token) or a positive number")


@dataclass(frozen=True)
class Request:
    """One response to make.

    Attributes:
        key: identity; unique among the requests in flight.
        prompt_ids: token ids of the prompt, at least one.
        params: sampling parameters.
        seed: the run's seed; with ``key`` and the token's position it fixes the noise of every token.
        prefix: segments made before an abort. The request goes on after them: their tokens count against
            ``max_new_tokens``, and token positions (and so the noise) go on too.
    """

    key: RequestKey
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    prefix: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Output:
    """One response as it ended.

    Attributes:
        key: the request's key.
        segments: the whole response, the request's prefix included. Neighbours of the same version and replica are
            merged into one segment; a segment is never empty, the list is when no token was made.
        finish_reason: ``stop`` (the last token is a stop token), ``length`` or ``abort``.
    """

    key: RequestKey
    segments: list[Segment]
    finish_reason: FinishReason

    @property
    def token_ids(self) -> list[int]:
        """Token ids of all segments, in order."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of all segments, aligned with ``token_ids``."""
        return [logprob for segment in self.segments for logprob in segment.logprobs]


class RolloutEngine(ABC):
    """One copy of the model that turns requests into outputs.

    An engine is made without weights and refuses to generate until every weight has been loaded. Nothing in it
    depends on wall-clock time: one ``step`` is one decode tick, and the tokens of a request depend on its key, seed,
    prompt and the weights alone.

    Args:
        model: a transformers configuration, or the folder that holds one. Weights are not read from the folder.
        dtype: of weights, activations and KV cache; ``torch.float32`` or ``torch.bfloat16``.
        max_slots: most requests that are decoded at once.
        max_length: most tokens of prompt and response together.
        replica: the name written into segments.
        device: where the engine lives, as torch names it.
        trust_remote_code: let a model folder run its own code.
    """

    replica: str

    @abstractmethod
    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        max_slots: int = 64,
        max_length: int = 2048,
        replica: str = "0",
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None: ...

    @property
    @abstractmethod
    def version(self) -> int | None:
        """The version of the weights, None while they are not complete."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests submitted whose output has not been returned, those that wait for a slot included."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order. Raises UsageError (and queues none) when one cannot be served."""

    @abstractmethod
    def step(self) -> list[Output]:
        """Refill free slots, decode one token for every running request, return those that finished.

        Raises RlctlError while the engine is asleep or its weights are not complete.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Submit ``requests``, step until all of them finished, and return their outputs in their order.

        Outputs of other requests that finish meanwhile are returned by the next ``step``.
        """

    @abstractmethod
    def abort(self, keys: Iterable[RequestKey] | None = None) -> list[Output]:
        """End the named requests (None: all), keeping the tokens made so far; unknown keys are ignored.

        An output may be continued later by a request with its segments as ``prefix``.
        """

    def progress(self) -> dict[RequestKey, list[Segment]]:
        """Return what has been made so far of each request that is being decoded, its prefix included: what is not
        lost with the engine. An engine that cannot tell returns nothing."""
        return {}

    @abstractmethod
    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]], version: int) -> LoadReport:
        """Write named tensors (names as in the transformers model's ``state_dict``) into the live weights.

        Requests in flight are kept: their KV cache is dropped and recomputed under the new weights, and their next
        token begins a segment of the new version. Call ``abort`` first to end them instead. The weights must be
        awake. Tensors are cast to the engine's dtype; a wrong shape raises RlctlError. When the stream raises, the
        weights may be a mix, and the engine refuses to generate until a load brings every name again.
        """

    @abstractmethod
    def weights(self) -> Mapping[str, TensorMeta]:
        """Return what ``load_weights`` takes: names, shapes, dtypes. Raises RlctlError while the weights are asleep."""

    @abstractmethod
    def digests(self, names: Iterable[str] | None = None) -> dict[str, list[Any]]:
        """Read back: name -> [dtype, shape, digest] (``sync.member.described``) of what the engine computes with.

        Args:
            names: of which tensors; None: of all. Raises RlctlError for one that there is not.
        """

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Free memory: level 1 the KV cache, level 2 the weights too (they must be loaded again after waking).

        Requests in flight are kept and recomputed after waking.
        """

    @abstractmethod
    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        """Allocate again what ``tags`` names: ``weights``, ``kv_cache``; in stages when weights arrive in between."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; the engine cannot be used after. Requests in flight are dropped."""
