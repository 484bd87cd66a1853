"""What can go wrong while weights are on their way. Who must stop serving is for the sync's manager to say."""

from __future__ import annotations

from rlctl.errors import RlctlError


class TransferError(RlctlError):
    """Weights did not arrive as they were sent."""


class CorruptedError(TransferError):
    """Bytes, order or metadata are not what the sender says it sent."""


class WrongBaseError(TransferError):
    """A delta was made against other weights than the ones it is to be applied to."""


class MismatchError(TransferError):
    """Sender and receiver disagree on the dtype or the shape of a tensor."""


class DeadlineError(TransferError):
    """A wait ended by its deadline."""


class PeerLostError(TransferError):
    """The other side closed its connection or died."""


class MemberLostError(PeerLostError):
    """A member's own process died, or was killed because it was stuck."""


class ReplicaLostError(MemberLostError):
    """A replica's process died, or was killed because it was stuck, and its weights with it."""


class GivenUpError(TransferError):
    """A transfer was stopped, because another member's failed."""
