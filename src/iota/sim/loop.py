"""An asyncio event loop in virtual time: an hour of a swarm in a second, the same order of events every time.

When nothing is ready, time jumps to the next timer; nothing ever sleeps. `asyncio.sleep`, `timeout`, `wait_for`, locks,
events and task groups work unchanged, because only the loop's idea of time and waiting differs. What cannot be repeated
is refused: threads, sockets, subprocesses, signals. Tasks and futures hash by creation order, so that the sets asyncio
keeps of them (task groups, `asyncio.wait`) are walked in the same order in every process (design section 8).

Failures are loud: a deadlock, a task that spins without letting time pass, the end of the time limit, tasks left over
and exceptions nobody awaited all raise, and say which task waits where.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START = 1_700_000_000.0
"""Unix time at which a simulation starts unless told otherwise."""
MAX_TURNS = 100_000
"""Loop turns allowed at one instant before the simulation is declared livelocked."""
CLEANUP_SECONDS = 60.0
"""Virtual seconds that cancelled tasks have to end in."""


class SimulationError(RuntimeError):
    """The simulated program is wrong (or asked for something that cannot be simulated); the text lists its tasks."""


class Deadlock(SimulationError):
    """Nothing is ready, no timer is set, and the main task is not done: it would wait for ever."""


class Livelock(SimulationError):
    """Tasks keep running without ever letting time pass."""


class OutOfTime(SimulationError):
    """The virtual time limit passed before the main task was done."""


class LeakedTasks(SimulationError):
    """The main task returned while others it started were still running; they were cancelled."""


class UnhandledErrors(SimulationError):
    """A background task or callback failed and nobody looked at its exception (the first is the cause)."""


class _Future(asyncio.Future[Any]):
    """A future that hashes by creation order instead of by address."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    """A task that hashes by creation order instead of by address."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # before registration in asyncio's sets, which hash
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _Jump:
    """Stands where the loop's selector would: instead of waiting for I/O until `timeout`, moves the time on."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.advance(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `time()` starts at 0 (seconds); `now()` is that plus `start`, the simulation's true Unix time.

    `limit`: virtual seconds after which `OutOfTime` is raised. `inline_threads`: let `asyncio.to_thread` and
    `run_in_executor` run their function at once, on this thread, in zero virtual time; otherwise they raise.
    """

    def __init__(
        self,
        *,
        start: float = START,
        limit: float | None = None,
        inline_threads: bool = False,
        max_turns: int = MAX_TURNS,
    ) -> None:
        super().__init__()
        self.start = start
        self.limit = limit
        self.inline_threads = inline_threads
        self.turns = 0
        self.errors: list[tuple[str, BaseException | None]] = []
        self._max_turns = max_turns
        self._virtual = 0.0
        self._still = 0
        self._made = 0
        self._live: list[_Task] = []
        self._prune_at = 256
        self._selector = _Jump(self)
        # Wider than a float's spacing at any virtual time, else a timer that time was moved to would not count as due.
        self._clock_resolution = 1e-7
        self.set_exception_handler(_collect)

    # ------------------------------------------------------------------------------------------------------- time

    def time(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._virtual

    def now(self) -> float:
        """The simulation's true time, Unix seconds; nodes see it through their own clocks."""
        return self.start + self._virtual

    def advance(self, timeout: float | None) -> None:
        """One turn of the loop passed; with nothing ready, jump to the next timer.

        Raises `Deadlock`, `Livelock` or `OutOfTime`, which end `run`.
        """
        self.turns += 1
        if timeout is None:
            raise Deadlock(
                f"Deadlock at {self._virtual:.3f} s: nothing is ready and no timer is set.\n{self.waiting()}"
            )
        if timeout <= 0:
            self._still += 1
            if self._still > self._max_turns:
                raise Livelock(f"{self._still} turns at {self._virtual:.3f} s without time passing.\n{self.waiting()}")
            return
        when = self._scheduled[0].when()  # type: ignore[attr-defined]
        if self.limit is not None and when > self.limit:
            raise OutOfTime(f"The limit of {self.limit:g} virtual seconds passed.\n{self.waiting()}")
        self._virtual = max(self._virtual, when)
        self._still = 0

    # ------------------------------------------------------------------------------------------------------ tasks

    def create_future(self) -> asyncio.Future[Any]:
        self._made += 1
        return _Future(self._made, self)

    def create_task(self, coro: Any, *, name: object = None, context: Any = None, **options: Any) -> asyncio.Task[Any]:
        """Numbered per loop and held strongly: a forgotten task is reported, not collected at a random moment."""
        self._check_closed()  # type: ignore[attr-defined]
        self._made += 1
        label = f"task-{self._made}" if name is None else str(name)
        task = _Task(self._made, coro, loop=self, name=label, context=context, **options)
        self._live.append(task)
        if len(self._live) > self._prune_at:
            self._live = [t for t in self._live if not t.done() or _unseen(t)]
            self._prune_at = 2 * len(self._live) + 256
        return task

    def pending(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, in order of creation."""
        return [task for task in self._live if not task.done()]

    def waiting(self) -> str:
        """One line a pending task: its name and the chain of awaits that it stands in."""
        return "\n".join(f"  {task.get_name()}: {where(task)}" for task in self.pending()) or "  (no task is pending)"

    # ---------------------------------------------------------------------------------------------------- refused

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Refused, or run inline (`inline_threads`): threads would make the order of events depend on the machine."""
        if not self.inline_threads:
            raise SimulationError(
                f"{getattr(func, '__qualname__', func)!r} asked for a thread inside the simulation; use the injected "
                "Compute, or run with inline_threads=True"
            )
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits, exactly as an executor does
            future.set_exception(error)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        if self._thread_id not in (None, threading.get_ident()):  # type: ignore[attr-defined]
            raise SimulationError(f"{callback!r} was scheduled from another thread; the simulation has one")
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Nobody waits in a selector, so nobody need be woken."""


def _collect(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    loop.errors.append((str(context.get("message", "")), context.get("exception")))


def _unseen(task: asyncio.Task[Any]) -> bool:
    """Whether the task failed and nobody has fetched its exception."""
    return bool(task.done() and getattr(task, "_log_traceback", False))


def where(task: asyncio.Task[Any]) -> str:
    """The awaits that a pending task stands in, outermost first: `run (node.py:40) > turn (peer.py:12) > future`."""
    steps = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = _first(inner, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            break
        file = "/".join(frame.f_code.co_filename.split("/")[-2:])
        steps.append(f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})")
        inner = _first(inner, "cr_await", "gi_yieldfrom", "ag_await")
    return " > ".join(steps) or "not started"


def _first(thing: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(thing, name, None)) is not None), None)


def run(
    main: Coroutine[Any, Any, T] | Callable[[VirtualLoop], Coroutine[Any, Any, T]],
    *,
    start: float = START,
    limit: float | None = 1_000_000.0,
    inline_threads: bool = False,
    leaks_ok: bool = False,
) -> T:
    """Run `main` (a coroutine, or a function from the loop to one) on a fresh virtual loop; return its result.

    `limit`: virtual seconds. Afterwards whatever still runs is cancelled, and the run raises: `main`'s own exception
    first; else `UnhandledErrors`; else, unless `leaks_ok`, `LeakedTasks`. `Deadlock`, `Livelock` and `OutOfTime` come
    as they happen.
    """
    loop = VirtualLoop(start=start, limit=limit, inline_threads=inline_threads)
    try:
        try:
            result: T = loop.run_until_complete(loop.create_task(main(loop) if callable(main) else main, name="main"))
        except BaseException:
            # The first failure is the one to see; what the clean-up of a broken run adds would hide it.
            _end(loop)
            raise
        leaked = loop.waiting() if loop.pending() else ""
        if stuck := _end(loop):
            raise LeakedTasks(f"These tasks did not end within {CLEANUP_SECONDS:g} s of being cancelled:\n{stuck}")
        failures = loop.errors + [(f"task {t.get_name()!r}", t.exception()) for t in loop._live if _unseen(t)]
    finally:
        loop.close()
    if failures:
        text = "\n".join(f"  {message}: {error!r}" for message, error in failures)
        raise UnhandledErrors(f"{len(failures)} failures that nobody handled:\n{text}") from failures[0][1]
    if leaked and not leaks_ok:
        raise LeakedTasks(f"The main task is done, these are not (cancelled now):\n{leaked}")
    return result


def _end(loop: VirtualLoop) -> str:
    """Cancel what still runs and let it end; returns what would not, "" when all did."""
    tasks = loop.pending()
    for task in tasks:
        task.cancel()
    loop.limit = loop.time() + CLEANUP_SECONDS
    loop._still = 0
    try:
        while tasks:
            # Cancelled tasks may start others while they end.
            loop.run_until_complete(asyncio.wait(tasks))
            tasks = [task for task in loop.pending() if task not in tasks]
            for task in tasks:
                task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
    except SimulationError:
        return loop.waiting()
    return ""
