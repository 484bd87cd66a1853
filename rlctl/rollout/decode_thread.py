"""The thread in which a replica decodes: by itself, or in lockstep, a step whenever it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from rlctl.rollout.base import Output
from rlctl.rollout.served import Served
from rlctl.rollout.under_way import Made, News

# How long it stays in one call with nothing to do: what its end may have to wait for.
_IDLE = 0.2


class DecodeThread:
    """Calls ``step`` of what is served. What it tells, it tells from its own thread.

    Args:
        served: nobody else calls ``step``, or ``progress``, of it.
        ended: told what ended; in lockstep only what steps bring is told, before the step counts as done.
        made: told, every ``progress_ticks`` steps, what else has been made.
        failed: told why it decodes no more.
        lockstep: decode when told, by ``tick``.
        progress_ticks: see ReplicaSetup.
    """

    def __init__(
        self,
        served: Served,
        *,
        ended: Callable[[list[Output]], None],
        made: Callable[[list[Made]], None],
        failed: Callable[[Exception], None],
        lockstep: bool,
        progress_ticks: int,
    ) -> None:
        self._served = served
        self._ended, self._made, self._failed = ended, made, failed
        self._lockstep = lockstep
        self._progress_ticks = progress_ticks
        self._news = News()
        self._steps = 0
        self._over = False
        self._ticks: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"rlctl-decode-{served.replica}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tick(self) -> Future[None]:
        """In lockstep: decode one step; done when what ended has been told."""
        assert self._lockstep
        done: Future[None] = Future()
        self._ticks.put(done)
        return done

    def stop(self, timeout: float = 5.0) -> None:
        """End it, after the step under way; harmless when repeated."""
        self._over = True
        self._ticks.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._over:
                if self._lockstep:
                    self._lockstep_step()
                else:
                    self._step(_IDLE)
        except Exception as error:  # noqa: BLE001 - handed on: without decoding there is no replica
            self._failed(error)

    def _lockstep_step(self) -> None:
        done = self._ticks.get()
        if done is None:
            return
        try:
            self._step(0.0)
        except BaseException as error:
            done.set_exception(error)
            raise
        done.set_result(None)

    def _step(self, timeout: float) -> None:
        outputs = self._served.step(timeout)
        self._steps += 1
        if outputs:
            self._news.ended(outputs)
            self._ended(outputs)
        if self._steps % self._progress_ticks == 0:
            news = self._news.of(self._served.progress())
            if news:
                self._made(news)
