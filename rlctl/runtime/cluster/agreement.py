"""Whether a replica computes with the weights that the trainer has: by log-probs in float32, else by digests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlctl.errors import RlctlError
from rlctl.experience.rows import Floats, Row
from rlctl.experience.segments import RequestKey
from rlctl.rollout.base import Output, Request, SamplingParams
from rlctl.runtime.cluster.probed_replica import PROBES, Probed
from rlctl.sync.deadline import Deadline

# Largest difference of log-probs between two correct float32 forward passes of one model, as the mean over a response
# of likely tokens. Rounding shows the more, the less likely a token is: passes over the built-in model, as it learnt,
# differed by 2e-6 at most so, and by 4e-5 at single tokens that were drawn.
BOUND = 1e-5
# Longer than a block of any prefix cache, so that one that outlived an update is read from; and a short one.
LENGTHS = (150, 6)
TOKENS = 4
_STEP = 7919  # a prime: probes walk through the vocabulary


class AgreementError(RlctlError):
    """A replica that took an update does not compute with the trainer's weights."""


class LogProbAgreement:
    """Has a replica take the likeliest tokens after fixed prompts, the same at every sync, and asks the trainer for the
    log-probs of the same tokens.

    Args:
        log_probs: of rows, at temperature 1, under the weights that were sent.
        vocabulary: number of tokens.
        max_length: of prompt and response together.
        seed: of the sampling.
    """

    def __init__(
        self, log_probs: Callable[[Sequence[Row]], list[Floats]], *, vocabulary: int, max_length: int, seed: int
    ) -> None:
        self._log_probs = log_probs
        self._lock = threading.Lock()
        self.requests = probe_requests(vocabulary, max_length, seed)

    def check(self, replica: Probed, version: int, deadline: Deadline) -> None:
        """See Agreement."""
        outputs = replica.probe(self.requests, deadline)
        rows = [_row(request, output) for request, output in zip(self.requests, outputs, strict=True)]
        with self._lock:  # one replica after the other: the trainer is one
            trainer = self._log_probs(rows)
        gap = max(float(np.mean(np.abs(mine - row.rollout_logprobs))) for mine, row in zip(trainer, rows, strict=True))
        if not gap <= BOUND:
            raise AgreementError(
                f"replica {replica.replica} took version {version} and computes otherwise than the trainer: log-probs "
                f"of the same tokens differ by {gap:.3g}, more than {BOUND:g}",
                fix="the next sync fills it in full; if that differs too, the engine does not use what it is given "
                "(its prefix cache, an adapter, or a layer that it has packed)",
            )


class DigestAgreement:
    """Compares what a replica holds, byte by byte, with what the trainer sent.

    Args:
        sent: returns what the last sync sent: name -> [dtype, shape, digest].
    """

    def __init__(self, sent: Callable[[], Mapping[str, list[Any]]]) -> None:
        self._sent = sent

    def check(self, replica: Probed, version: int, deadline: Deadline) -> None:
        """See Agreement."""
        sent = self._sent()
        held = replica.digests(list(sent), deadline)
        wrong = [name for name, due in sent.items() if list(held.get(name, ())) != list(due)]
        if wrong or not sent:
            raise AgreementError(
                f"replica {replica.replica} took version {version} and holds {len(wrong)} of {len(sent)} tensors "
                f"otherwise than they were sent ({', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''})",
                fix="the next sync fills it in full; if it fails alike, the engine changes what it is given",
            )


def probe_requests(vocabulary: int, max_length: int, seed: int) -> list[Request]:
    """Return the probes: requests that depend on nothing but these."""
    params = SamplingParams(max_new_tokens=min(TOKENS, max_length - 1), temperature=0.0)
    requests = []
    for number, length in enumerate(LENGTHS):
        ids = tuple((number + 1 + place * _STEP) % vocabulary for place in range(min(length, max_length - TOKENS)))
        requests.append(Request(RequestKey(PROBES - number, 0), ids or (number % vocabulary,), params, seed))
    return requests


def _row(request: Request, output: Output) -> Row:
    if not output.token_ids:
        raise AgreementError(f"probe {request.key.ordinal} ended without a token ({output.finish_reason})")
    return Row(
        key=request.key,
        group=request.key.ordinal,
        prompt_ids=list(request.prompt_ids),
        response_ids=output.token_ids,
        reward=0.0,
        rollout_logprobs=np.asarray(output.logprobs, np.float32),
        versions=np.zeros(len(output.token_ids), np.int64),
    )
