"""What the children in test_process.py run."""

import os
import signal
import subprocess
import sys
import time

from rlctl.process import Channel, run_token


def echo(channel: Channel) -> None:
    while True:
        message = channel.receive(60.0)
        match message:
            case "sleep":
                time.sleep(60)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "leave":
                os._exit(3)
            case "print":
                print("on stdout", flush=True)
                print("on stderr", file=sys.stderr, flush=True)
            case "ignore sigterm":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "token":
                message = run_token()
            case str() if message.startswith("env "):
                message = os.environ.get(message.removeprefix("env "))
            case "grandchild":
                message = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
            case "ids":
                message = [os.getpid(), os.getsid(0)]
        channel.send(message, 10.0)


def slow_start(channel: Channel) -> None:
    """Its parent waits less for it than an interpreter takes to come up."""
