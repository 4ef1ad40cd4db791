"""The real effects, for processes: wall clock, one worker thread, the system's entropy, signals.

The one file among the nodes that may import time and threads; everything else gets these injected (`nodes.effects`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

from iota.nodes.effects import Entropy

T = TypeVar("T")

entropy: Entropy = os.urandom
"""Cryptographic randomness of the operating system."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RealClock:
    """This machine's clock: Unix seconds. May be wrong and may be set while we run; the protocol allows for both."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ThreadCompute:
    """One worker thread: torch, hashing and disk run there, one call at a time, in order of submission.

    A caller that is cancelled stops waiting; work that already began runs to its end before the next. `close` drops
    what has not begun and does not wait; the interpreter's own exit does, so a process that must leave at once uses
    `os._exit`.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="iota-compute")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Raises whatever `work` raises; RuntimeError after `close`."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *args)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)


def install_signals(
    loop: asyncio.AbstractEventLoop, drain: Callable[[], None], leave: Callable[[], None]
) -> Callable[[], None]:
    """First Ctrl-C or SIGTERM calls `drain` (finish what was begun, then stop), every later one `leave` (stop at once).

    Both run on the loop, between callbacks, so they may touch the node; `leave` must not wait for anything. Returns a
    function that puts the handlers found before back. Main thread only (ValueError or RuntimeError elsewhere).
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    heard = 0

    def stop() -> None:
        nonlocal heard
        heard += 1
        (drain if heard == 1 else leave)()

    def wake(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)

    native = True
    for number in STOP_SIGNALS:
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # Windows: no signal handlers on its loops, so wake the loop from Python's own.
            native = False
            signal.signal(number, wake)

    def restore() -> None:
        for number, handler in before.items():
            if native:
                loop.remove_signal_handler(number)
            signal.signal(number, handler)

    return restore
