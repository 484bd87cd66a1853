"""The process of a replica: hosts what serves, and obeys the driver.

One thread reads what the driver says and never waits for the engine; one decodes; every call has a thread of its own.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from typing import Any

import msgspec
import torch

from rlctl.experience.segments import RequestKey
from rlctl.process import Channel
from rlctl.rollout.decode_thread import DecodeThread
from rlctl.rollout.remote.messages import ORDER, Alive, Answer, Command, Ended, Failed, Fence, Order, Progress, Submit
from rlctl.rollout.remote.setup import ReplicaSetup
from rlctl.rollout.served import Served
from rlctl.rollout.serving import make_served
from rlctl.sync.calls import call
from rlctl.sync.deadline import Deadline
from rlctl.sync.error_data import ErrorData
from rlctl.sync.inlet import LoadOrder

BEAT = 1.0
log = logging.getLogger("rlctl.replica")


class ReplicaHost:
    """Hosts a replica until the driver closes the channel.

    Args:
        channel: to the driver.
        served: the replica.
        setup: what it was made from.
    """

    def __init__(self, channel: Channel, served: Served, setup: ReplicaSetup) -> None:
        self._channel = channel
        self._served = served
        self._sending = threading.Lock()
        self._spoke = time.monotonic()
        self._resumed = 0
        self._decode = DecodeThread(
            served,
            ended=lambda outputs: self._say(Ended(outputs)),
            made=lambda news: self._say(Progress(news)),
            failed=self._fail,
            lockstep=setup.lockstep,
            progress_ticks=setup.progress_ticks,
        )

    def run(self) -> None:
        """Obey. Raises EOFError when the driver has closed the channel."""
        self._say(Answer(0, len(self._served.loaders)))
        self._decode.start()
        try:
            while True:
                with suppress(TimeoutError):
                    self._obey(self._channel.receive(BEAT, ORDER))
                if time.monotonic() - self._spoke >= BEAT:
                    self._say(Alive())
        finally:
            self._decode.stop()
            self._served.close()

    def _obey(self, order: Order) -> None:
        match order:
            case Submit(requests):
                self._served.submit(requests)
            case Fence(number, reason):
                if number > self._resumed:
                    self._served.fence(reason)
            case Command(number, "tick"):
                self._decode.tick().add_done_callback(lambda done: self._answer(number, done))
            case Command(number, name, arguments, seconds):
                if name == "resume":
                    self._resumed = number
                act, deadline = COMMANDS[name], Deadline(seconds)
                done = call(lambda: act(self._served, arguments, deadline), name)
                done.add_done_callback(lambda done: self._answer(number, done))

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        self._say(Answer(number, done.result()) if error is None else Answer(number, error=ErrorData.of(error)))

    def _fail(self, error: Exception) -> None:
        log.error("decoding failed", exc_info=error)
        self._say(Failed(ErrorData.of(error)))

    def _say(self, said: Answer | Ended | Progress | Alive | Failed) -> None:
        with self._sending:
            try:
                self._channel.send(said, inf)
            except OSError:
                return  # the driver is gone: the thread that reads is about to see that
            self._spoke = time.monotonic()


def _load(served: Served, arguments: Mapping[str, Any], deadline: Deadline) -> Any:
    order = msgspec.convert(arguments["order"], LoadOrder)
    return served.loaders[arguments["part"]].load(order, deadline)


def _abort(served: Served, arguments: Mapping[str, Any], deadline: Deadline) -> None:
    served.abort(msgspec.convert(arguments["keys"], list[RequestKey] | None), deadline)


COMMANDS: Mapping[str, Callable[[Served, Mapping[str, Any], Deadline], Any]] = {
    "interrupt": lambda served, given, deadline: served.interrupt(given["how"], given["version"], deadline),
    "release_kv": lambda served, _, deadline: served.release_kv(deadline),
    "restore_kv": lambda served, _, deadline: served.restore_kv(deadline),
    "resume": lambda served, given, deadline: served.resume(given["version"], deadline),
    "abort": _abort,
    "sleep": lambda served, given, deadline: served.sleep(given["level"], deadline),
    "wake": lambda served, given, deadline: served.wake(given["tags"], deadline),
    "digests": lambda served, given, deadline: served.digests(given["names"], deadline),
    "targets": lambda served, given, _: list(served.loaders[given["part"]].targets().values()),
    "load": _load,
}


def serve(channel: Channel) -> None:
    """Entry point of a replica's process."""
    faulthandler.register(signal.SIGUSR1)
    # Slurm tells every process of a job to end; the run's own ends its replicas when it has saved a checkpoint. A
    # handler, for processes that are started here should not ignore the signal.
    signal.signal(signal.SIGTERM, lambda *_: None)
    setup = channel.receive(60.0, ReplicaSetup)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s replica {setup.replica}: %(message)s")
    if setup.threads:
        torch.set_num_threads(setup.threads)
    try:
        served = make_served(setup)
    except Exception as error:
        log.exception("making the engine failed")
        channel.send(Failed(ErrorData.of(error)), 60.0)
        return
    ReplicaHost(channel, served, setup).run()
