"""Starting the trainer's ranks, talking to them, and saying which one is at fault when something goes wrong."""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rlctl.errors import RlctlError
from rlctl.process import Child, Start, start
from rlctl.runtime.ranks.meeting import FileMeeting, Meeting, TcpMeeting
from rlctl.runtime.ranks.messages import Order, RankSetup, Report
from rlctl.runtime.ranks.trouble import Trouble

TARGET = "rlctl.runtime.ranks.rank:main"
# Until a process runs; until it has loaded the model.
START_SECONDS, LOAD_SECONDS = 60.0, 1800.0
# A rank that waits for another ends its wait by itself; what has said nothing this long after is the one at fault.
_GRACE = 0.25
_LISTEN = 0.3
_DUMP = 0.15
_LINES = 5


class RankError(RlctlError):
    """A trainer rank died, stalled or failed; the run cannot go on without it."""


class TrainerRanks:
    """The ranks of one model, each a child process. They end with this object, and with this process.

    Args:
        setups: of each rank; ``store`` is filled in.
        logs: folder of their logs, ``trainer_rank_N.log``.
        target: entry point of their processes; default: the class's own.
        starter: gives what starts the process of each rank.
        meet_at: address of this machine at which ranks on several machines find each other; None where all are here.

    Raises:
        RankError: a rank did not come up.
        RlctlError: what a rank found wrong with the model.
    """

    target, grace = TARGET, _GRACE

    def __init__(
        self,
        setups: Sequence[RankSetup],
        *,
        logs: Path,
        target: str | None = None,
        starter: Callable[[int], Start] = lambda _: start,
        meet_at: str | None = None,
    ) -> None:
        self.size = len(setups)
        self._timeout = setups[0].timeout
        self._logs = logs
        self._starter = starter
        self._children: list[Child] = []
        self._talking = [threading.Lock() for _ in setups]
        self._meeting: Meeting | None = FileMeeting() if meet_at is None else TcpMeeting(meet_at)
        self.ended: set[int] = set()  # ranks whose channel a sync found closed
        try:
            with ThreadPoolExecutor(self.size) as pool:
                starts = [pool.submit(self._start, rank, target or self.target) for rank in range(self.size)]
            self._children = [done.result() for done in starts if done.exception() is None]
            for done in starts:
                done.result()
            for setup, child in zip(setups, self._children, strict=True):
                setup.store = self._meeting.store
                child.channel.send(setup, START_SECONDS)
            self._finish("load", LOAD_SECONDS)
            self.call("join")
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for child in self._children]

    def call(self, operation: str, **arguments: Any) -> Any:
        """Have all ranks do something and return what rank 0 says.

        Raises:
            RankError: a rank died or stalled; it is named, and all have been ended.
            RlctlError: what went wrong in the ranks.
        """
        with self._to_its_end():
            self._order(operation, arguments)
            return self._finish(operation)

    def stream(self, operation: str, **arguments: Any) -> Iterator[Report]:
        """Have all ranks do something in which rank 0 hands out tensors; yield their heads, then the result.

        The pieces of a tensor are taken by ``piece`` before the next report.
        """
        with self._to_its_end():
            self._order(operation, arguments)
            for rank, report in self._reports(operation, self._timeout + _GRACE):
                if rank == 0:
                    yield report

    def feed(self, operation: str, pieces: Iterator[memoryview], **arguments: Any) -> Any:
        """Have all ranks do something for which rank 0 is sent ``pieces``, and return what it says."""
        with self._to_its_end():
            self._order(operation, arguments)
            for piece in pieces:
                self._send(operation, 0, piece)
            return self._finish(operation)

    def piece(self, operation: str) -> bytes:
        """Return the next piece of the tensor that rank 0 has announced."""
        try:
            return self._children[0].channel.receive(self._timeout, bytes)
        except TimeoutError:
            self._fail(operation, Trouble(silent=set(range(self.size))))
        except (EOFError, OSError):
            self._fail(operation, Trouble(gone={0}, silent=set(range(1, self.size))))

    def child(self, rank: int) -> Child:
        """Return the process of a rank; its channel is used while ``talking`` holds."""
        return self._children[rank]

    def talking(self, rank: int) -> threading.Lock:
        """Return what is held while somebody speaks to a rank: a sync does from threads of its own."""
        return self._talking[rank]

    def require_alive(self, what: str) -> None:
        """Raise RankError when a rank has ended, by name; all have been ended then."""
        gone = self.ended | {rank for rank, child in enumerate(self._children) if not child.alive()}
        if gone:
            with self._to_its_end():
                self._fail(what, Trouble(gone=gone))

    def close(self) -> None:
        """End the ranks. Harmless when repeated."""
        for child in self._children:  # all at once, and only then wait for each
            child.signal(signal.SIGKILL, group=True)
        for child in self._children:
            child.kill()
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """End the ranks when what they were told is left halfway, by Ctrl-C say: what they still send would be taken
        for the answer to something else. Syncs wait meanwhile."""
        with ExitStack() as talking:
            for lock in self._talking:
                talking.enter_context(lock)
            try:
                yield
            except BaseException:
                self.close()
                raise

    def _start(self, rank: int, target: str) -> Child:
        return self._starter(rank)(target, name=f"trainer-{rank}", timeout=START_SECONDS, output=self._log(rank))

    def _log(self, rank: int) -> Path:
        return self._logs / f"trainer_rank_{rank}.log"

    def _order(self, operation: str, arguments: Mapping[str, Any]) -> None:
        if self._meeting is None:
            raise RankError(f"{operation}: the trainer's ranks have ended")
        for rank in range(self.size):
            self._send(operation, rank, Order(operation, dict(arguments)))

    def _send(self, operation: str, rank: int, message: object) -> None:
        try:
            self._children[rank].channel.send(message, self._timeout)
        except TimeoutError:
            self._fail(operation, Trouble(silent=set(range(self.size))))
        except OSError:
            self._fail(operation, Trouble(gone={rank}))

    def _finish(self, operation: str, timeout: float | None = None) -> Any:
        reports = self._reports(operation, timeout or self._timeout + _GRACE)
        results = {rank: report.result for rank, report in reports if report.kind == "done"}
        return results[0]

    def _reports(self, operation: str, timeout: float) -> Iterator[tuple[int, Report]]:
        """Yield what ranks say, signs of life left out, until all are done."""
        working = set(range(self.size))
        while working:
            ready = self._ready(timeout)
            if not ready:
                self._fail(operation, Trouble(silent=working))
            for rank in ready:
                report = self._receive(rank)
                if report is None:
                    self._fail(operation, Trouble(gone={rank}, silent=working - {rank}))
                if report.kind == "failed":
                    self._fail(operation, Trouble(failed={rank: report}, silent=working - {rank}))
                if report.kind == "done":
                    working.discard(rank)
                if report.kind not in ("pass", "answer"):
                    yield rank, report

    def _ready(self, seconds: float) -> list[int]:
        """Return the ranks that have something to read, or have ended, once there are some; none after ``seconds``."""
        pending = [rank for rank, child in enumerate(self._children) if child.channel.pending]
        if pending:
            return pending
        poll = select.poll()
        ranks = {}
        for rank, child in enumerate(self._children):
            ranks[child.channel.fileno()] = rank
            poll.register(child.channel.fileno(), select.POLLIN)
        return sorted(ranks[fd] for fd, _ in poll.poll(seconds * 1000))

    def _receive(self, rank: int) -> Report | None:
        """Return what a rank says; None when it is gone."""
        with suppress(EOFError, OSError):
            return self._children[rank].channel.receive(self._timeout, Report)
        return None

    def _fail(self, operation: str, trouble: Trouble) -> NoReturn:
        """End all ranks and raise the error of the one at fault: one that died, one that says what is wrong, one that
        keeps the others waiting."""
        self._listen(trouble)
        error = self._verdict(operation, trouble)
        self.close()
        raise error

    def _listen(self, trouble: Trouble) -> None:
        """Hear for a moment what else is said: the first to complain need not be the one at fault. Once one has said
        who is, only what has been said already is heard."""
        end = time.monotonic() + _LISTEN
        while trouble.silent and not trouble.gone:
            left = 0.0 if trouble.told else end - time.monotonic()
            ready = self._ready(left) if left >= 0 else []
            if not ready:
                break
            for rank in ready:
                report = self._receive(rank)
                if report is None:
                    trouble.gone.add(rank)
                elif report.kind == "failed":
                    trouble.failed[rank] = report
                if report is None or report.kind in ("failed", "done"):
                    trouble.silent.discard(rank)

    def _verdict(self, operation: str, trouble: Trouble) -> RlctlError:
        if trouble.gone:
            rank = min(trouble.gone)
            return self._blame(
                rank, f"died in {operation}: {self._children[rank].ending()}", self._children[rank].tail(_LINES)
            )
        for rank, report in sorted(trouble.failed.items()):
            assert report.error is not None
            if not report.waiting and report.error.kind:
                return report.error.error()
            if not report.waiting:
                return self._blame(rank, f"failed in {operation}: {report.error.message}", [])
        if trouble.silent:
            rank, lines = self._stuck(trouble.silent)
            return self._blame(rank, f"stalled in {operation}: no answer for {self._timeout:g} s", lines)
        rank, report = min(trouble.failed.items())
        message = "" if report.error is None else report.error.message
        return self._blame(rank, f"lost the others in {operation}: {message}", [])

    def _stuck(self, silent: set[int]) -> tuple[int, list[str]]:
        """Return which of the silent ranks keeps the others waiting, with the last lines of its log and where it is."""
        before = {rank: (self._children[rank].tail(_LINES), self._log(rank).stat().st_size) for rank in silent}
        for rank in silent:
            self._children[rank].signal(signal.SIGUSR1)
        time.sleep(_DUMP)
        stacks = {rank: self._since(rank, size) for rank, (_, size) in before.items()}
        elsewhere = [rank for rank in sorted(silent) if not any("torch/distributed/" in line for line in stacks[rank])]
        rank = (elsewhere or sorted(silent))[0]
        frames = [line.strip() for line in stacks[rank] if line.strip().startswith("File")][:3]
        return rank, [*before[rank][0], *(frames or ["(it does not say where it is)"])]

    def _since(self, rank: int, size: int) -> list[str]:
        with self._log(rank).open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace").splitlines()

    def _blame(self, rank: int, what: str, lines: Sequence[str]) -> RankError:
        said = "".join(f"\n    {line}" for line in lines)
        return RankError(
            f"trainer rank {rank} of {self.size} {what}{said}",
            where=str(self._log(rank)),
            fix="the ranks have been ended; go on from the last checkpoint with --resume auto",
        )
