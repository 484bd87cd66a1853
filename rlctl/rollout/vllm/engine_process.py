"""The beginning and the end of an AsyncLLM, whose engine core is a process of its own."""

from __future__ import annotations

import asyncio
import glob
import signal
import time
from collections.abc import Iterable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rlctl.process import describe_exit


async def start_engine(arguments: Mapping[str, Any]) -> Any:
    """Return an ``AsyncLLM`` that runs on this event loop, in a thread that lasts: the engine core ends with it.

    Args:
        arguments: of ``AsyncEngineArgs``.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # Slurm tells every process of a job to end. The engine would abort its requests and take no more; a replica serves
    # on until the run, which saves a checkpoint first, ends it. Processes that this thread starts have its mask; the
    # tracker comes first, because starting it undoes the mask.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def wait_for_end(engine: Any) -> str:
    """Return, once the engine core has ended, how, in words."""
    manager = engine.engine_core.resources.engine_manager
    wait(manager.sentinels())
    codes: Mapping[str, int] = {}
    limit = time.monotonic() + 2.0
    while not codes and time.monotonic() < limit:  # another thread of vLLM's collects the exit status
        codes = manager.finished_procs()
        time.sleep(0.01)
    return ", ".join(f"{name}: {describe_exit(code)}" for name, code in codes.items()) or "its exit status is not known"


def remove_shared_memory(prefixes: Iterable[str]) -> None:
    """Remove the names of the files through which the workers of a started engine talk. They have opened them, and vLLM
    would leave them behind when its processes are killed.

    Args:
        prefixes: what their names begin with; empty ones are passed over.
    """
    for prefix in filter(None, prefixes):
        for path in Path("/dev/shm").glob(f"{glob.escape(prefix)}-*"):  # noqa: S108 - where vLLM makes them
            path.unlink(missing_ok=True)


async def end_tasks() -> None:
    """End what else runs on this event loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=2.0)
