"""Errors as data, so that they cross process boundaries without pickle."""

from __future__ import annotations

import msgspec

from rlctl import errors as general
from rlctl.errors import FindingsError, RlctlError
from rlctl.sync import errors
from rlctl.sync.errors import TransferError

_CLASSES: dict[str, type[RlctlError]] = {
    cls.__name__: cls
    for cls in (
        errors.TransferError,
        errors.CorruptedError,
        errors.WrongBaseError,
        errors.MismatchError,
        errors.DeadlineError,
        errors.PeerLostError,
        errors.MemberLostError,
        errors.ReplicaLostError,
        errors.GivenUpError,
        general.UsageError,
        general.UnavailableError,
    )
}


class ErrorData(msgspec.Struct, array_like=True):
    """An error without its traceback."""

    kind: str
    message: str
    where: str | None = None
    fix: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorData:
        """Return the data of any error; one that is not rlctl's own keeps its type's name in the message, and one of
        several findings is a UsageError that lists them."""
        if isinstance(error, FindingsError):
            return cls(general.UsageError.__name__, str(error), error.where, error.fix)
        if isinstance(error, RlctlError):
            return cls(type(error).__name__, error.message, error.where, error.fix)
        return cls("", f"{type(error).__name__}: {error}")

    @property
    def sentence(self) -> str:
        """What is wrong and where, on one line."""
        return f"{self.where}: {self.message}" if self.where else self.message

    def error(self) -> RlctlError:
        """Return the error again; of a type that is not known here, a TransferError."""
        return _CLASSES.get(self.kind, TransferError)(self.message, where=self.where, fix=self.fix)
