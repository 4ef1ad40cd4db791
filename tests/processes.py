"""What runs on this machine, and signals to it."""

import contextlib
import os
from pathlib import Path


def processes():
    """(pid, command line words) of everything that runs."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            words = (place / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            state = (place / "stat").read_text().rpartition(")")[2].split()
            if state[0] != "Z":
                yield int(place.name), words


def session_of(pid):
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return -1


def send(pid, number):
    """A signal to a process, if it is still there."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
