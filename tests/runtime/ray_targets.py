"""A Ray cluster of a run's own, in a process that the tests can kill."""

import os
from contextlib import ExitStack

from rlctl.process import Channel
from rlctl.runtime.launch.ray_cluster import connect
from rlctl.runtime.launch.run_folder import RunFolder


def cluster(channel: Channel) -> None:
    """Say where it is and what one needs to connect to it; end when the channel closes."""
    with ExitStack() as stack:
        folder = RunFolder()
        stack.callback(folder.close)
        _, address = connect(None, cores=8, folder=folder, stack=stack)
        channel.receive(60.0)
        secrets = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
        channel.send([address, str(folder.path), secrets], 60.0)
        channel.receive(600.0)
