"""Child processes that have torch and transformers from the start.

A new interpreter that imports both takes seconds of a core, which is more than what most tests have their processes
do. So a server, itself a new interpreter, imports them once and forks the processes that ``rlctl.process`` starts: the
same programs, sessions, channels and ends, only without the import. It has one thread and has computed nothing yet
when it forks, so a child finds torch as a new interpreter has it right after its import.

Tests that are about the start of a process, or that should see one from its very beginning, are marked
``new_interpreters``.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from rlctl.process import spawning
from rlctl.process.spawning import Program

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.warm_starts import serve; serve(); "
    "from rlctl.process import run_child; run_child(); from tests.warm_starts import leave; leave()"
)
_READ_AT_IMPORT = ("OMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON", "TORCH", "HF_", "TRANSFORMERS_", "CUDA_", "GLOO_")
_MODULES = (
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3", "rlctl.sync.member",
    "rlctl.runtime.ranks.rank", "rlctl.rollout.remote.process",
)  # fmt: skip
_LARGEST = 1 << 20


class WarmProcess:
    """A process that the server forked, as ``subprocess.Popen`` shows one."""

    def __init__(self, pid: int, server: WarmServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()
        self._watched = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._server.ask({"ended": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            # Readable once it has ended; the server still has its exit status then.
            select.select([self._watched], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(["fork"], timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def __del__(self) -> None:
        os.close(self._watched)


class WarmStarts:
    """Has ``rlctl.process`` start processes by a server, from the first on that suits it; a context manager.

    Attributes:
        enabled: whether it does at the moment.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._server: WarmServer | None = None
        self._cold = spawning._spawn

    def __enter__(self) -> Self:
        spawning._spawn = self._spawn  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        spawning._spawn = self._cold
        if self._server is not None:
            self._server.close()

    def _spawn(self, program: Program, sock: socket.socket, output: int) -> subprocess.Popen[bytes] | WarmProcess:
        if self.enabled and self._server is None:
            self._server = WarmServer()
        if self.enabled and self._server is not None and self._server.suits(program):
            return self._server.spawn(program, sock, output)
        return self._cold(program, sock, output)


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
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def suits(self, program: Program) -> bool:
        """Whether its environment is the server's in what counts while modules are imported."""
        return all(
            program.env.get(key) == self._env.get(key)
            for key in {*program.env, *self._env}
            if key.startswith(_READ_AT_IMPORT)
        )

    def ask(self, question: dict[str, Any], *descriptors: int) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(_LARGEST)
        assert answer, f"the server of warm starts ended: {self._process.wait(10)}"
        return json.loads(answer)

    def spawn(self, program: Program, sock: socket.socket, output: int) -> WarmProcess:
        """Do what ``rlctl.process.spawning`` does with a new interpreter."""
        question = {
            "target": program.target, "name": program.name, "path": list(program.path), "folder": program.folder,
            "env": {**program.env, spawning.TOKEN_VARIABLE: spawning.run_token()},
            "here": str(Path.cwd()),
        }  # fmt: skip
        return WarmProcess(self.ask(question, sock.fileno(), output), self)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


def serve() -> None:
    """Fork processes until the other side closes; returns in each of them, ready for ``run_child``."""
    descriptor, parent = sys.argv[2:4]
    spawning.die_with_parent(int(parent))
    asked = socket.socket(fileno=int(descriptor))
    for name in _MODULES:
        import_module(name)
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    assert threads == 1, f"{threads} threads: a fork would lose them"
    gc.collect()
    gc.freeze()  # what is here already need not be copied when a child's collector goes over it
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, _LARGEST, 2)
        if not data:
            os._exit(0)
        question = json.loads(data)
        if "ended" in question:
            pid, status = os.waitpid(question["ended"], os.WNOHANG)
            asked.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            asked.close()
            _become(question, descriptors, server)
            return
        for each in descriptors:
            os.close(each)
        asked.send(json.dumps(pid).encode())


def _become(question: dict[str, Any], descriptors: list[int], server: int) -> None:
    """Be what ``question`` says, from the session to the arguments."""
    sock, output = descriptors
    os.setsid()
    os.chdir(question["folder"] or question["here"])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(question["env"])
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.path[:] = question["path"]
    sys.argv[1:] = [json.dumps(question["path"]), str(sock), str(server), question["target"],
                   f"rlctl:{question['name']}"]  # fmt: skip


def leave() -> None:
    """End with what an interpreter does at its end, except taking its modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
