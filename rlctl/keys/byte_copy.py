"""Copying byte ranges between files inside the kernel, at the speed of ``cp``."""

from __future__ import annotations

import errno
import os

from rlctl.keys.tensor_file import TensorFileError

_CALL_BYTES = 1 << 30
_BUFFER_BYTES = 8 << 20
# The two files lie on file systems that cannot do it between them, or the kernel or a container forbids the call.
_CANNOT = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})


def copy_range(source: int, source_offset: int, target: int, target_offset: int, count: int, *, where: str) -> None:
    """Copy ``count`` bytes between two open files, by ``copy_file_range`` or else through a buffer.

    Raises TensorFileError when the source ends early, OSError when the target cannot take the bytes.
    """
    done = _copy_in_kernel(source, source_offset, target, target_offset, count)
    if done < count:
        _copy_by_buffer(source, source_offset + done, target, target_offset + done, count - done, where)


def _copy_in_kernel(source: int, source_offset: int, target: int, target_offset: int, count: int) -> int:
    """Return how many bytes the kernel copied; fewer than ``count`` means: try the other way."""
    done = 0
    if not hasattr(os, "copy_file_range"):
        return done
    while done < count:
        try:
            step = os.copy_file_range(
                source, target, min(count - done, _CALL_BYTES), source_offset + done, target_offset + done
            )
        except OSError as error:
            if error.errno in _CANNOT:
                return done
            raise
        if step == 0:  # also what some virtual file systems answer instead of an error
            return done
        done += step
    return done


def _copy_by_buffer(source: int, source_offset: int, target: int, target_offset: int, count: int, where: str) -> None:
    buffer = memoryview(bytearray(min(count, _BUFFER_BYTES)))
    done = 0
    while done < count:
        step = os.preadv(source, [buffer[: count - done]], source_offset + done)
        if step == 0:
            raise TensorFileError(f"the file ends at byte {source_offset + done}", where=where)
        pwrite_all(target, buffer[:step], target_offset + done)
        done += step


def pwrite_all(target: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises OSError."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(target, view[done:], offset + done)
