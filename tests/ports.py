"""Free ports for tests with real processes."""

import contextlib
import socket


def free_ports(count):
    """So many different ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]
