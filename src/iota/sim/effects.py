"""What the simulator injects into a node in place of the real clock, computation and entropy, and the machine under it.

A `Host` is one simulated machine process: its own (skewed) clock, its one worker, its entropy, and the two states a
fault can put it in: frozen (every effect waits until it thaws, as after SIGSTOP) and dead (every effect ends the
caller, nothing leaves it any more, as after kill -9: clean-up code still runs in Python, but it reaches nobody).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from iota.nodes.effects import Entropy
from iota.sim.loop import VirtualLoop

T = TypeVar("T")
Cost = Callable[[Callable[..., Any], tuple[Any, ...]], float]
"""Cost model: from the work and its arguments to the virtual seconds that it takes on an undisturbed machine."""


def draw(*key: object) -> float:
    """A number in [0, 1) that depends on `key` alone, whatever else was drawn before (numbers and strings only)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


def seeded_entropy(seed: int, name: str) -> Entropy:
    """A replacement for `os.urandom`: an endless byte stream fixed by (seed, name).

    A restarted node needs another `name`, or it draws its old nonces again; `Host` adds its incarnation.
    """
    counter = 0

    def entropy(count: int) -> bytes:
        nonlocal counter
        out = b""
        while len(out) < count:
            out += hashlib.sha256(f"iota entropy\0{seed}\0{name}\0{counter}".encode()).digest()
            counter += 1
        return out[:count]

    return entropy


class Gate:
    """Whether a machine runs, is frozen, or is dead. Everything it does passes here."""

    def __init__(self) -> None:
        self.dead = False
        self._open = asyncio.Event()
        self._open.set()

    @property
    def frozen(self) -> bool:
        return not self._open.is_set()

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def kill(self) -> None:
        self.dead = True
        self._open.set()

    async def passage(self) -> None:
        """Wait while frozen. Raises CancelledError when the machine is dead: the caller no longer exists."""
        while self.frozen:  # again: it may have been frozen anew before this task got its turn
            await self._open.wait()
        if self.dead:
            raise asyncio.CancelledError("the simulated machine was killed")


class VirtualClock:
    """A node's clock (`nodes.effects.Clock`): true time plus `offset` seconds, running `1 + drift` times as fast."""

    def __init__(self, loop: VirtualLoop, offset: float = 0.0, drift: float = 0.0, gate: Gate | None = None) -> None:
        assert drift > -1.0, "a clock cannot stand still or run backwards"
        self._loop = loop
        self._offset = offset
        self._drift = drift
        self._since = loop.time()
        self._gate = gate or Gate()

    def now(self) -> float:
        return self._loop.now() + self._offset + (self._loop.time() - self._since) * self._drift

    def skew(self, seconds: float, drift: float | None = None) -> None:
        """Jump by `seconds` (someone set the clock), and from now on drift by `drift` when it is given."""
        self._offset += seconds + (self._loop.time() - self._since) * self._drift
        self._since = self._loop.time()
        self._drift = self._drift if drift is None else drift

    async def sleep(self, seconds: float) -> None:
        """`seconds` of this clock; a sleep that ends while frozen returns when thawed, as a stopped process's does."""
        await self._gate.passage()
        await asyncio.sleep(seconds / (1.0 + self._drift))
        await self._gate.passage()


class InlineCompute:
    """A node's one worker (`nodes.effects.Compute`): work runs inline, then takes the seconds that the cost model says.

    One call at a time, in order of submission. Errors of the work are raised after its time, like its results. A caller
    that is cancelled leaves the worker busy to the end of that work, as a thread would be.
    All costs are multiplied by `slow` (this machine's own speed) and `hindrance` (set by faults); `seconds` is the busy
    time so far.
    """

    def __init__(self, clock: VirtualClock, cost: Cost | None = None) -> None:
        self.slow = 1.0
        self.hindrance = 1.0
        self.seconds = 0.0
        self._clock = clock
        self._cost = cost
        self._turn = asyncio.Lock()
        self._busy_until = 0.0
        self._closed = False

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Raises RuntimeError after `close`, CancelledError on a dead machine, else whatever `work` raises."""
        async with self._turn:
            loop, gate = self._clock._loop, self._clock._gate
            await asyncio.sleep(max(0.0, self._busy_until - loop.time()))
            await gate.passage()
            if self._closed:
                raise RuntimeError("compute was asked for work after it was closed")
            seconds = self.slow * self.hindrance * self._cost(work, args) if self._cost else 0.0
            self.seconds += seconds
            self._busy_until = loop.time() + seconds
            try:
                return work(*args)
            finally:
                if seconds > 0:
                    await asyncio.sleep(seconds)
                await gate.passage()

    def close(self) -> None:
        self._closed = True


class Host:
    """One simulated machine process of node `name`: the node is given its clock, compute, entropy and run by `spawn`.

    `incarnation` counts its starts (a restart is a new Host under the same name, with the old one's stores).
    """

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        *,
        seed: int = 0,
        incarnation: int = 0,
        offset: float = 0.0,
        drift: float = 0.0,
        cost: Cost | None = None,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.gate = Gate()
        self.clock = VirtualClock(loop, offset, drift, self.gate)
        self.compute = InlineCompute(self.clock, cost)
        self.entropy = seeded_entropy(seed, f"{name}/{incarnation}")
        self._loop = loop
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._spawned = 0

    def spawn(self, coro: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Start a task that lives on this machine: `kill` cancels it."""
        number = self._spawned = self._spawned + 1
        task = self._loop.create_task(coro, name=f"{self.name}/{name or number}")
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))
        if self.gate.dead:
            task.cancel()
        return task

    def freeze(self) -> None:
        self.gate.freeze()

    def thaw(self) -> None:
        self.gate.thaw()

    def kill(self) -> None:
        """kill -9: no effect reaches anything from now on; then its tasks are cancelled, in order of their start."""
        self.gate.kill()
        for task in list(self._tasks.values()):
            if not task.done():  # cancelling a task that failed would silence its failure
                task.cancel()
