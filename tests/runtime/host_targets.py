"""A host without Ray: a child of the test that serves it."""

from rlctl.process import Channel
from rlctl.runtime.launch.host import Host


def main(channel: Channel) -> None:
    address, token, number = channel.receive(60.0, tuple[str, str, int])
    Host(address, token, number).serve()
