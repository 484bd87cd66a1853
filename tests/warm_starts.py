"""Child processes that have torch and transformers from the start.

A new interpreter that imports both takes seconds of a core, which is more than what most tests have their processes
do. So a server, itself a new interpreter, imports them once and forks the processes that ``rlctl.process`` starts, and
commands: the same programs, channels, pipes and ends, only without the import. It has one thread and has computed
nothing yet when it forks, so a child finds torch as a new interpreter has it right after its import.

Tests that are about the start of a process, or that should see one from its very beginning, are marked
``new_interpreters``.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import json
import os
import random
import runpy
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from rlctl.process import run_child, spawning
from rlctl.process.spawning import Program

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.warm_starts import serve; serve()"
# What counts while modules are imported.
_READ_AT_IMPORT = (
    "OMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHONHASHSEED", "PYTHONUTF8", "TORCH", "HF_HUB_OFFLINE", "HF_HOME", "CUDA_",
    "GLOO_",
)  # fmt: skip
_MODULES = (
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3", "rlctl.sync.member",
    "rlctl.runtime.ranks.rank", "rlctl.rollout.remote.process", "rlctl.ops.session", "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)  # fmt: skip
_LARGEST = 1 << 20


class WarmPopen(subprocess.Popen[Any]):
    """A process that the server forks; what it is given besides is what ``subprocess.Popen`` takes.

    Args:
        server: that forks it.
        question: to the server; the environment, the folder and the open files are added.
    """

    def __init__(self, server: WarmServer, question: dict[str, Any], **more: Any) -> None:
        self._server, self._question = server, question
        self._asking = threading.Lock()
        super().__init__(["fork"], stdin=subprocess.DEVNULL, **more)

    def _execute_child(self, *given: Any) -> None:
        of = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        ends = [end if end != -1 else own for own, end in ((1, of["c2pwrite"]), (2, of["errwrite"]))]
        question = {**self._question, "env": {**of["env"]}, "folder": str(of["cwd"] or Path.cwd())}
        self.pid = self._server.ask(question, *ends, *of["pass_fds"])
        self._watched = os.pidfd_open(self.pid)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(of[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._asking:
            if self.returncode is None:
                self.returncode = self._server.ask({"ended": self.pid})
            return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            # Readable once it has ended; the server still has its exit status then.
            select.select([self._watched], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def __del__(self) -> None:
        super().__del__()  # type: ignore[misc]
        os.close(self._watched)


class WarmServer:
    """The server, as who asks it sees it; any thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._env = dict(os.environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether that environment is the server's in what counts while modules are imported."""
        return all(env.get(key) == self._env.get(key) for key in {*env, *self._env} if key.startswith(_READ_AT_IMPORT))

    def ask(self, question: dict[str, Any], *descriptors: int) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(_LARGEST)
        assert answer, f"the server of warm starts ended: {self._process.wait(10)}"
        return json.loads(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


class WarmStarts:
    """Starts processes by a server, from the first on that suits it; a context manager in which ``rlctl.process`` does
    so too.

    Attributes:
        enabled: whether it does at the moment; otherwise they are new interpreters.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._server: WarmServer | None = None
        self._cold = spawning._spawn

    def __enter__(self) -> Self:
        spawning._spawn = self._spawn
        return self

    def __exit__(self, *_: object) -> None:
        spawning._spawn = self._cold
        if self._server is not None:
            self._server.close()

    def server_for(self, env: Mapping[str, str]) -> WarmServer | None:
        """Return the server, if it may start a process of that environment."""
        if not self.enabled:
            return None
        if self._server is None:
            self._server = WarmServer()
        return self._server if self._server.suits(env) else None

    def _spawn(self, program: Program, sock: socket.socket, output: int) -> subprocess.Popen[bytes]:
        server = self.server_for(program.env)
        if server is None:
            return self._cold(program, sock, output)
        return WarmPopen(
            server,
            {"path": list(program.path), "target": program.target, "name": f"rlctl:{program.name}"},
            stdout=output,
            stderr=output,
            pass_fds=[sock.fileno()],
            env={**program.env, spawning.TOKEN_VARIABLE: spawning.run_token()},
            cwd=program.folder,
        )


WARM = WarmStarts()


def start_module(
    module: str, words: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.Popen[Any]:
    """Start ``python -m MODULE`` with those words; what is given besides is what ``subprocess.Popen`` takes."""
    env = {**os.environ} if env is None else env
    server = WARM.server_for(env)
    if server is None:
        return subprocess.Popen([sys.executable, "-m", module, *words], env=env, stdin=subprocess.DEVNULL, **more)
    path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    return WarmPopen(server, {"path": path, "module": module, "words": list(words)}, env=env, **more)


def run_module(
    module: str, words: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE`` with those words to its end and return what it said, as text."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_module(module, words, env=env, **streams) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess([module, *words], process.returncode, out, err)


def serve() -> None:
    """Fork processes until the other side closes, and be each of them to its end."""
    descriptor, parent = sys.argv[2:4]
    spawning.die_with_parent(int(parent))
    asked = socket.socket(fileno=int(descriptor))
    for name in _MODULES:
        import_module(name)
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    assert threads == 1, f"{threads} threads: a fork would lose them"
    gc.collect()
    gc.freeze()  # what is here already need not be copied when a child's collector goes over it
    server = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, _LARGEST, 3)
        if not data:
            os._exit(0)
        question = json.loads(data)
        if "ended" in question:
            pid, status = os.waitpid(question["ended"], os.WNOHANG)
            asked.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            asked.close()
            return _become(question, descriptors, server)
        for each in descriptors:
            os.close(each)
        asked.send(json.dumps(pid).encode())


def _become(question: dict[str, Any], descriptors: list[int], server: int) -> None:
    """Be the process that ``question`` describes, from its session and arguments to its end."""
    out, err, *passed = descriptors
    os.setsid()
    os.chdir(question["folder"])
    for number, descriptor in ((1, out), (2, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(question["env"])
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.path[:] = question["path"]
    if "words" in question:
        sys.argv[:] = [question["module"], *question["words"]]
        try:
            runpy.run_module(question["module"], run_name="__main__", alter_sys=True)
        except SystemExit as ending:
            assert isinstance(ending.code, int)
            _leave(ending.code)
    else:
        program = [json.dumps(question["path"]), str(passed[0]), str(server), question["target"], question["name"]]
        sys.argv[1:] = program
        run_child()
    _leave(0)


def _leave(code: int) -> None:
    """End with what an interpreter does at its end, except taking its modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
