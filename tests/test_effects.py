"""Injected effects: virtual ones on the virtual loop, real ones on a real loop."""

import asyncio
import os
import signal
import threading
import time

import pytest

from iota.nodes import real
from iota.nodes.effects import Clock, Compute
from iota.sim import loop as sim
from iota.sim.effects import Host, InlineCompute, VirtualClock, draw, seeded_entropy


def test_clock_offset_drift_and_skew():
    async def main():
        loop = asyncio.get_running_loop()
        clock: Clock = VirtualClock(loop, offset=5.0, drift=0.25)
        assert clock.now() == sim.START + 5.0
        await clock.sleep(10.0)  # its own seconds: a quarter fast
        assert loop.time() == 8.0 and clock.now() == sim.START + 15.0
        clock.skew(-100.0, drift=0.0)
        assert clock.now() == sim.START - 85.0
        await asyncio.sleep(4)
        assert clock.now() == sim.START - 81.0

    sim.run(main())


def test_inline_compute_takes_its_turn_and_its_time():
    async def main():
        loop = asyncio.get_running_loop()
        compute: Compute = InlineCompute(VirtualClock(loop), lambda work, args: float(args[0]))
        order = []

        async def ask(seconds):
            result = await compute.run(lambda s: s * 2, seconds)
            order.append((seconds, result, loop.time()))

        await asyncio.gather(ask(3), ask(1), ask(2))
        assert order == [(3, 6, 3.0), (1, 2, 4.0), (2, 4, 6.0)]
        compute.slow, compute.hindrance = 2.0, 5.0
        await ask(1)
        assert order[-1] == (1, 2, 16.0) and compute.seconds == 16.0
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda s: s / 0, 1)
        assert loop.time() == 26.0
        compute.close()
        with pytest.raises(RuntimeError, match="closed"):
            await compute.run(abs, 1)

    sim.run(main())


def test_cancelled_caller_leaves_the_worker_busy():
    async def main():
        loop = asyncio.get_running_loop()
        compute = InlineCompute(VirtualClock(loop), lambda work, args: 10.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await compute.run(abs, 1)
        await compute.run(abs, 1)
        assert loop.time() == 20.0

    sim.run(main())


def test_frozen_host_stands_still_and_dead_host_ends():
    async def main():
        loop = asyncio.get_running_loop()
        host = Host(loop, "m", cost=lambda work, args: 1.0)
        seen = []

        async def node():
            try:
                while True:
                    await host.clock.sleep(1)
                    await host.compute.run(abs, 1)
                    seen.append(loop.time())
            finally:
                seen.append("cleanup")
                await host.clock.sleep(0)  # nothing works any more on a dead machine
                seen.append("unreachable")

        task = host.spawn(node(), "loop")
        await asyncio.sleep(2.5)
        host.freeze()
        await asyncio.sleep(100)
        assert seen == [2.0]
        host.thaw()
        await asyncio.sleep(1.2)
        assert seen == [2.0, 103.5]
        host.kill()
        await asyncio.wait([task])
        assert seen == [2.0, 103.5, "cleanup"] and task.cancelled()
        assert host.spawn(asyncio.sleep(9)).cancelling()
        await asyncio.sleep(0)

    sim.run(main())


def test_entropy_is_seeded_by_name_and_incarnation():
    a, b = seeded_entropy(1, "m"), seeded_entropy(1, "m")
    first = a(40)
    assert first == b(40) and len(first) == 40
    assert a(40) != first
    assert seeded_entropy(2, "m")(40) != first != seeded_entropy(1, "n")(40)

    async def main():
        loop = asyncio.get_running_loop()
        return [Host(loop, "m", seed=1, incarnation=i).entropy(8) for i in (0, 1, 0)]

    one, two, again = sim.run(main())
    assert one == again != two


def test_draw_is_uniform_and_keyed():
    values = [draw(1, "x", i) for i in range(2000)]
    assert values == [draw(1, "x", i) for i in range(2000)]
    assert min(values) >= 0 and max(values) < 1
    assert abs(sum(values) / 2000 - 0.5) < 0.03


async def test_real_clock():
    clock: Clock = real.RealClock()
    before = time.time()
    await clock.sleep(0.001)
    assert before <= clock.now() <= time.time()


async def test_thread_compute_is_one_thread_in_order():
    compute: Compute = real.ThreadCompute()
    names, order = set(), []

    def work(number):
        names.add(threading.current_thread().name)
        order.append(number)
        if number == 3:
            raise ValueError("three")
        return number * 10

    results = await asyncio.gather(*(compute.run(work, i) for i in range(6)), return_exceptions=True)
    assert order == list(range(6)) and len(names) == 1
    assert threading.current_thread().name not in names
    assert [r for r in results if not isinstance(r, Exception)] == [0, 10, 20, 40, 50]
    assert isinstance(results[3], ValueError)
    compute.close()
    with pytest.raises(RuntimeError):
        await compute.run(work, 0)


def test_entropy_is_the_systems():
    assert len(real.entropy(32)) == 32 and real.entropy(32) != real.entropy(32)


@pytest.mark.parametrize("native", [True, False], ids=["native", "fallback"])
async def test_first_signal_drains_second_leaves(native, monkeypatch):
    loop = asyncio.get_running_loop()
    if not native:

        def missing(*_):
            raise NotImplementedError

        monkeypatch.setattr(loop, "add_signal_handler", missing)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    heard, came = [], asyncio.Event()

    def hear(word):
        heard.append(word)
        came.set()

    restore = real.install_signals(loop, lambda: hear("drain"), lambda: hear("leave"))
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            came.clear()
            os.kill(os.getpid(), number)
            await asyncio.wait_for(came.wait(), 10)
    finally:
        restore()
    assert heard == ["drain", "leave", "leave"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
