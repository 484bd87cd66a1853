"""A host without Ray: a child of the test that serves it."""

import os

from rlctl.process import Channel
from rlctl.runtime.launch.host import Host


def main(channel: Channel) -> None:
    address, token, number = channel.receive(60.0, tuple[str, str, int])
    Host(address, token, number, os.getpriority(os.PRIO_PROCESS, 0)).serve()
