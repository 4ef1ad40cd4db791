"""The virtual-time loop: no real waiting, the same order every time, and loud about everything that goes wrong."""

import asyncio
import itertools
import random
import time

import pytest

from iota.sim import loop as sim


def test_days_pass_without_waiting(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("really slept"))

    async def main():
        loop = asyncio.get_running_loop()
        before = loop.now()
        await asyncio.sleep(86_400.0)
        return before, loop.now(), loop.time()

    assert sim.run(main()) == (sim.START, sim.START + 86_400.0, 86_400.0)


def test_timeout_wait_for_event_queue_and_condition_work():
    async def main():
        event, queue = asyncio.Event(), asyncio.Queue()
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await event.wait()
        assert loop.time() == 5.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 2.5)
        assert loop.time() == 7.5
        loop.call_later(1.0, event.set)
        loop.call_at(10.0, queue.put_nowait, "x")
        await event.wait()
        assert (loop.time(), await queue.get(), loop.time()) == (8.5, "x", 10.0)

    sim.run(main())


def _order(seed):
    """Many tasks that wait, race and cancel: the order in which they get on."""
    seen = []

    async def worker(name, draws):
        for _ in range(5):
            await asyncio.sleep(draws.choice([0, 0.1, 0.1, 0.25]))
            seen.append((name, asyncio.get_running_loop().time()))

    async def main():
        draws = random.Random(seed)
        await asyncio.gather(*(worker(i, draws) for i in range(20)))
        done, late = await asyncio.wait([asyncio.create_task(worker(i, draws)) for i in range(20)], timeout=0.5)
        seen.append([task.get_name() for task in done])
        for task in late:
            task.cancel()
        seen.append([task.get_name() for task in late])
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(20):
                    group.create_task(_tell(i))
                await asyncio.sleep(1)
                raise ValueError
        except* ValueError:
            pass

    async def _tell(i):
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(("cancelled", i))

    sim.run(main())
    return seen


def test_same_seed_same_order_also_where_asyncio_walks_sets():
    first = _order(3)
    clutter = [object() for _ in range(1000)]  # other addresses for the objects of the second run
    assert first == _order(3)
    assert first != _order(4)
    del clutter


def test_deadlock_names_who_waits_where():
    async def stuck_on_event():
        await asyncio.Event().wait()

    async def main():
        task = asyncio.create_task(stuck_on_event(), name="waiter")
        await asyncio.sleep(3)
        await task

    with pytest.raises(sim.Deadlock) as caught:
        sim.run(main())
    text = str(caught.value)
    assert "at 3.000 s" in text
    assert "waiter: " in text and "stuck_on_event (tests/test_sim_loop.py:" in text and "Event.wait" in text
    assert "main: " in text


def test_livelock_and_time_limit():
    async def spin():
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(sim.Livelock, match="spin"):
        sim.run(spin())
    with pytest.raises(sim.OutOfTime, match="limit of 10 virtual seconds"):
        sim.run(asyncio.sleep(11), limit=10)
    sim.run(asyncio.sleep(10), limit=10)


def test_leaked_tasks_are_cancelled_and_reported():
    ended = []

    async def background():
        try:
            await asyncio.sleep(1e5)
        finally:
            await asyncio.sleep(1)
            ended.append(True)

    async def main():
        asyncio.create_task(background(), name="forgotten")  # noqa: RUF006 - the leak under test
        await asyncio.sleep(1)
        return 7

    with pytest.raises(sim.LeakedTasks, match=r"forgotten: .*background"):
        sim.run(main())
    assert ended == [True]
    assert sim.run(main(), leaks_ok=True) == 7


def test_task_that_will_not_end_is_reported_even_if_leaks_are_fine():
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                continue

    async def main():
        asyncio.create_task(stubborn(), name="stubborn")  # noqa: RUF006
        await asyncio.sleep(1)

    with pytest.raises(sim.LeakedTasks, match="did not end"):
        sim.run(main(), leaks_ok=True)


def test_background_failure_is_not_lost():
    async def fails():
        raise KeyError("nobody looks")

    async def main():
        asyncio.create_task(fails(), name="sad")  # noqa: RUF006
        asyncio.get_running_loop().call_later(1, lambda: 1 / 0)
        await asyncio.sleep(2)

    with pytest.raises(sim.UnhandledErrors) as caught:
        sim.run(main())
    assert "nobody looks" in str(caught.value) and "ZeroDivisionError" in str(caught.value)


def test_main_failure_comes_first():
    async def fails():
        raise KeyError("background")

    async def main():
        asyncio.create_task(fails())  # noqa: RUF006
        await asyncio.sleep(1)
        raise ValueError("main")

    with pytest.raises(ValueError, match="main"):
        sim.run(main())


def test_threads_and_sockets_are_refused_or_inline():
    async def threaded():
        return await asyncio.to_thread(lambda a: a + 1, 1)

    with pytest.raises(sim.SimulationError, match="thread inside the simulation"):
        sim.run(threaded())
    assert sim.run(threaded(), inline_threads=True) == 2

    async def failing():
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        sim.run(failing(), inline_threads=True)

    async def connects():
        await asyncio.open_connection("127.0.0.1", 9)

    with pytest.raises((sim.SimulationError, NotImplementedError)):
        sim.run(connects())


def test_thousands_of_tasks_are_pruned():
    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(5000):
            await asyncio.create_task(asyncio.sleep(0.01))
        return len(loop._live)

    assert sim.run(main()) < 600
