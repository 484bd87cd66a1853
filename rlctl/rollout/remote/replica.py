"""A replica in a process of its own, as the driver has it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlctl.experience.segments import RequestKey
from rlctl.process import Child, ChildDied, Start
from rlctl.rollout.base import Output, Request
from rlctl.rollout.client import OnLost, OnOutputs
from rlctl.rollout.remote.connection import Connection, last_lines
from rlctl.rollout.remote.messages import SAID, Answer, Ended, Failed, Progress, Said, Submit
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.under_way import UnderWay
from rlctl.sync.deadline import Deadline
from rlctl.sync.errors import ReplicaLostError
from rlctl.sync.inlet import LoadOrder
from rlctl.sync.protocols import Interruption, LoadReport
from rlctl.sync.tensor_meta import TensorMeta

TARGET = "rlctl.rollout.remote.process:serve"
_TARGETS_SECONDS = 60.0


class RemoteReplica:
    """A ``ReplicaClient``; ``begin`` starts its process.

    Args:
        setup: how the process makes it.
        start: starts the process.
        output: file for what the process prints.
        silence: seconds until a process that has work, and gives no sign of life, is killed and counts as lost; what it
            is when a process begins.
    """

    def __init__(self, setup: ReplicaSetup, start: Start, *, output: Path | None = None, silence: float = 30.0) -> None:
        self.setup = setup
        self.serving: int | None = None
        self.lost = ""
        self.loaders: Sequence[RemoteLoader] = [RemoteLoader(self, part) for part in range(setup.tensor_parallel)]
        self._start = start
        self._output = output
        self.silence = silence
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._under_way = UnderWay()
        self._listener: tuple[OnOutputs, OnLost] | None = None
        self._ended: list[Output] = []  # nobody has been given them
        self._closed = False

    @property
    def replica(self) -> str:
        """Its name."""
        return self.setup.replica

    @property
    def pid(self) -> int:
        """Its process, or the last one that it had."""
        return self._living().child.pid

    # --- life ---

    def begin(self, deadline: Deadline) -> None:
        """Start the process and wait until its engine is there, without weights.

        Raises:
            ReplicaLostError: the process ended before.
            DeadlineError: it was not ready in time; it has been killed.
            RlctlError: what was wrong with the setup.
        """
        assert self._connection is None, "it has begun"
        child = self._new_process(deadline)
        with self._lock:  # should it die at once, its death is told after this
            if self._closed:
                child.kill()
                raise ReplicaLostError(f"replica {self.replica} was closed while it started")
            self.lost = ""
            self._connection = Connection(
                self.replica,
                child,
                silence=self.silence,
                has_work=lambda: len(self._under_way) > 0,
                on_said=self._on_said,
                on_lost=self._on_lost,
            )

    def restart(self, deadline: Deadline) -> None:
        """After a death: begin anew, with a process that has no weights, and nothing under way; see ``begin``."""
        with self._lock:
            assert self.lost, "it lives"
            self._connection = None
            self._under_way.clear()
            self._ended = []
        self.begin(deadline)

    def kill(self, reason: str) -> None:
        """End the process at once: it is lost for this reason."""
        self._living().end(reason)

    def close(self) -> None:
        """See ReplicaClient."""
        with self._lock:
            self._closed, self.serving, self.lost = True, None, self.lost or "it was closed"
        if self._connection is not None:
            self._connection.close()

    # --- requests ---

    def listen(self, outputs: OnOutputs, lost: OnLost) -> None:
        """See ReplicaClient."""
        with self._lock:
            self._listener = outputs, lost
            ended: list[Output] = []
            if not self.setup.lockstep:
                ended, self._ended = self._ended, []
            reason = self.lost
        if ended:
            outputs(self.replica, ended)
        if reason:
            lost(self.replica, reason)

    def submit(self, requests: Sequence[Request]) -> None:
        """See ReplicaClient."""
        with self._lock:
            connection = self._living()
            if self.lost:
                raise connection.lost_error()
            self._under_way.add(requests, max_length=self.setup.max_length, vocab_size=self.setup.vocab_size)
        connection.post(Submit(list(requests)))

    def unfinished(self) -> list[Request]:
        """See ReplicaClient."""
        with self._lock:
            return self._under_way.requests()

    def abort(self, keys: Iterable[RequestKey] | None = None, *, deadline: Deadline) -> None:
        """See ReplicaClient."""
        self._call("abort", deadline, keys=None if keys is None else list(keys))

    def tick(self, deadline: Deadline) -> list[Output]:
        """See ReplicaClient."""
        assert self.setup.lockstep
        self._call("tick", deadline)
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def digests(self, names: Iterable[str] | None, deadline: Deadline) -> dict[str, list[Any]]:
        """See ReplicaClient."""
        found: dict[str, list[Any]] = self._call("digests", deadline, names=None if names is None else list(names))
        return found

    def sleep(self, level: int, deadline: Deadline) -> None:
        """See ReplicaClient."""
        self.serving = None
        self._call("sleep", deadline, level=level)

    def wake(self, tags: Sequence[str], deadline: Deadline) -> None:
        """See ReplicaClient."""
        self._call("wake", deadline, tags=list(tags))

    # --- ServedReplica ---

    def interrupt(self, how: Interruption, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        self.serving = None
        self._call("interrupt", deadline, how=how, version=version)

    def release_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._call("release_kv", deadline)

    def restore_kv(self, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._call("restore_kv", deadline)

    def resume(self, version: int, deadline: Deadline) -> None:
        """See ServedReplica."""
        self._call("resume", deadline, version=version)
        with self._lock:
            if not self.lost:
                self.serving = version

    def fence(self, reason: str) -> None:
        """See ServedReplica."""
        self.serving = None
        if self._connection is not None:
            self._connection.fence(reason)

    # --- for its loaders ---

    def targets(self, part: int) -> list[TensorMeta]:
        """Return the weights of one of its inference processes."""
        return msgspec.convert(self._call("targets", Deadline(_TARGETS_SECONDS), part=part), list[TensorMeta])

    def load(self, part: int, order: LoadOrder, deadline: Deadline) -> LoadReport:
        """Have one of its inference processes take weights."""
        return msgspec.convert(self._call("load", deadline, part=part, order=order), LoadReport)

    def _call(self, command: str, deadline: Deadline, **arguments: Any) -> Any:
        return self._living().call(command, deadline, **arguments)

    def _living(self) -> Connection:
        if self._connection is None:
            raise ReplicaLostError(f"replica {self.replica} has not been started")
        return self._connection

    def _new_process(self, deadline: Deadline) -> Child:
        threads = {"OMP_NUM_THREADS": str(self.setup.threads)} if self.setup.threads else {}
        what = f"starting replica {self.replica}"
        try:
            child = self._start(
                TARGET,
                name=f"replica-{self.replica}",
                timeout=deadline.remaining,
                output=self._output,
                env={"OMP_WAIT_POLICY": "PASSIVE", **threads},
            )
        except TimeoutError as error:
            raise deadline.error(what) from error
        except ChildDied as error:
            raise ReplicaLostError(f"replica {self.replica} did not start: {error.reason}") from error
        try:
            child.channel.send(self.setup, deadline.remaining)
            said: Said = child.channel.receive(deadline.remaining, SAID)
            if isinstance(said, Failed):
                raise said.error.error()
            assert isinstance(said, Answer)
            assert said.result == len(self.loaders), f"{said.result} inference processes"
        except TimeoutError as error:
            child.kill()
            raise deadline.error(what) from error
        except (EOFError, OSError) as error:
            ending = child.ending()
            child.kill()
            raise ReplicaLostError(f"replica {self.replica} did not start: {ending}{last_lines(child)}") from error
        except BaseException:
            child.kill()
            raise
        return child

    def _on_said(self, said: Said) -> None:
        if isinstance(said, Progress):
            with self._lock:
                self._under_way.made(said.news)
        if isinstance(said, Ended):
            with self._lock:
                self._under_way.ended(said.outputs)
                listener = None if self.setup.lockstep else self._listener
                if listener is None:
                    self._ended += said.outputs
            if listener is not None:
                listener[0](self.replica, said.outputs)

    def _on_lost(self, reason: str) -> None:
        with self._lock:
            self.lost, self.serving, listener = reason, None, self._listener
        if listener is not None:
            listener[1](self.replica, reason)


class RemoteLoader:
    """One of a replica's inference processes as a ``Loader``.

    Args:
        owner: the replica.
        part: its place among them.
    """

    def __init__(self, owner: RemoteReplica, part: int) -> None:
        self._owner = owner
        self._part = part
        self._targets: dict[str, TensorMeta] = {}

    def targets(self) -> Mapping[str, TensorMeta]:
        """See Loader. Asked of the process once: a restart does not change them."""
        if not self._targets:
            self._targets = {meta.name: meta for meta in self._owner.targets(self._part)}
        return self._targets

    def load(self, order: LoadOrder, deadline: Deadline) -> LoadReport:
        """See Loader."""
        return self._owner.load(self._part, order, deadline)
