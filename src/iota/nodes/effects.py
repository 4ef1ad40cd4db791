"""The effects that nodes are given instead of taking them: time, computation, entropy.

A node never imports `time`, `random`, `threading` or calls `asyncio.sleep`; a test holds this. In a process these are
real; in the simulator the clock is virtual and computation runs inline, so the SAME node code runs thousands at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Time in seconds since the Unix epoch, on this node's own (possibly wrong) clock."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class Compute(Protocol):
    """Runs blocking work (torch, hashing, disk) off the event loop, one call at a time and in order of submission."""

    async def run(self, work: Callable[..., T], *args: Any) -> T: ...

    def close(self) -> None: ...


Entropy = Callable[[int], bytes]
"""`os.urandom` in a process, a seeded generator in the simulator."""
