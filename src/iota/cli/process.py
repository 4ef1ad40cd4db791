"""What every long-running command shares: threads before torch, signals, leaving with the parent, exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
ATTACHED = "IOTA_ATTACHED"
"""Set by `iota up` for its children: their standard input is a pipe from it, and its end means that `up` is gone."""
ORPHAN_SECONDS = 5.0
STOPPED = 130


def limit_threads(threads: int) -> None:
    """Set the thread count that numerical libraries read when they are loaded. To be called before they are."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)


def limit_torch(threads: int) -> None:
    """Load torch with this many threads (after `limit_threads`)."""
    import torch

    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def watch_parent() -> None:
    """When this process was started by `iota up`: leave when that is gone, however it ended. A thread, so that it works
    also while the loop is busy: first as Ctrl-C would, after `ORPHAN_SECONDS` at once."""
    if os.environ.pop(ATTACHED, "") == "1":
        threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        continue
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(ORPHAN_SECONDS)
    os._exit(STOPPED)


def say(text: str) -> None:
    """One line of a process's log, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def run_process(work: Callable[[asyncio.Event], Awaitable[bool]]) -> int:
    """Run a node until it is done. The first Ctrl-C or SIGTERM sets the event that `work` was given (finish what was
    begun, then stop), the second leaves at once. `work` returns whether it came to its own end. Returns the exit code:
    0, or 130 when it was stopped."""
    import asyncio

    from iota.nodes.real import install_signals

    async def body() -> bool:
        stop = asyncio.Event()

        def drain() -> None:
            say("stopping; again Ctrl-C leaves at once")
            stop.set()

        restore = install_signals(asyncio.get_running_loop(), drain, _leave)
        try:
            return await work(stop)
        finally:
            restore()

    return 0 if asyncio.run(body()) else STOPPED


def _leave() -> None:
    sys.stdout.flush()
    os._exit(STOPPED)
