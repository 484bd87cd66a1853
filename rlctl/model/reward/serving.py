"""What a process of the reward model's own pool does."""

from __future__ import annotations

import math

import msgspec

from rlctl.errors import RlctlError
from rlctl.process import Channel

REPLY_SECONDS = 60.0


class Settings(msgspec.Struct, frozen=True):
    """What a process of the pool is told first; see ``load_classifier`` and ``Classifier``."""

    source: str
    dtype: str
    output: int | None
    trust_remote_code: bool
    device: str
    threads: int
    timeout: float


class Fault(msgspec.Struct, frozen=True):
    """Why the model does not load, as its error has it; all empty when it does."""

    message: str = ""
    where: str | None = None
    fix: str | None = None


def serve(channel: Channel) -> None:
    """Load the model, answer with the fault, then score batches for ever."""
    settings = channel.receive(REPLY_SECONDS, Settings)
    import torch

    from rlctl.model.reward.loading import load_classifier
    from rlctl.model.reward.passes import Classifier

    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model = load_classifier(
            settings.source,
            dtype=settings.dtype,
            output=settings.output,
            trust_remote_code=settings.trust_remote_code,
        )
    except RlctlError as error:
        channel.send(Fault(error.message, error.where, error.fix), REPLY_SECONDS)
        return
    classifier = Classifier(model.to(settings.device), output=settings.output, device=settings.device)
    channel.send(Fault(), REPLY_SECONDS)
    while True:
        batches = channel.receive(math.inf, list[list[list[int]]])
        channel.send([classifier.scores(batch) for batch in batches], settings.timeout)
