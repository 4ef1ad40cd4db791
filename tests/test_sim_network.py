"""The simulated network and its faults: every fault does what it says, and the same seed gives the same story."""

import asyncio

import msgspec
import pytest

from iota.core.values import sha256
from iota.errors import IotaError, Unreachable
from iota.net.transport import Channel
from iota.sim import loop as sim
from iota.sim.effects import Host
from iota.sim.faults import HOST_KINDS, LINK_KINDS, Fault, FaultPlan, Injector, random_plan
from iota.sim.network import Link, SimNetwork, SimObjects

EVEN = Link(latency=0.1, jitter=0.0, bandwidth=1e12)


def _world(scenario, *faults, link=EVEN, seed=0):
    """Run `scenario(network, channel, handled)` with an echo server "b" and a channel from "a" to it."""

    async def main():
        loop = asyncio.get_running_loop()
        network = SimNetwork(loop, seed, FaultPlan(tuple(faults), seed), link)
        handled = []

        async def echo(body):
            handled.append(body)
            return [b"re:", body]

        network.listen("b", echo)
        channel: Channel = network.channel("a", "b")
        result = await scenario(network, channel, handled)
        await network.close()
        return result

    return sim.run(main())


def test_round_trip_takes_latency_and_bandwidth():
    async def scenario(network, channel, handled):
        loop = asyncio.get_running_loop()
        body = b"x" * 600 + b"y" * 400
        assert await channel.request([body[:600], memoryview(body[600:])], timeout=5) == b"re:" + body
        assert loop.time() == pytest.approx(0.2 + 1.0 + 1.003)
        # Two at once share each sender's uplink: the second leaves after the first.
        before = loop.time()
        await asyncio.gather(*(channel.request([b"z" * 1000], timeout=9) for _ in range(2)))
        assert loop.time() - before == pytest.approx(0.2 + 1.0 + 2 * 1.003)
        assert network.sent["a>b"] == {"messages": 3, "bytes": 3000}

    _world(scenario, link=Link(0.1, 0.0, 1000.0))


def test_cut_link_is_silence_and_heals():
    async def scenario(network, channel, handled):
        loop = asyncio.get_running_loop()
        with pytest.raises(Unreachable, match="within 2 s"):
            await channel.request([b"1"], timeout=2)
        assert loop.time() == 2.0 and handled == []
        await asyncio.sleep(1)
        assert await channel.request([b"2"], timeout=2) == b"re:2"

    _world(scenario, Fault(node="b", kind="cut", at=0.05, lasts=2.5))  # begins while the first is on its way


def test_dropped_request_is_not_handled_dropped_reply_is():
    async def scenario(network, channel, handled):
        for body in (b"1", b"2"):
            with pytest.raises(Unreachable):
                await channel.request([body], timeout=1)
        assert await channel.request([b"3"], timeout=1) == b"re:3"
        return handled

    drops = (Fault(node="b", kind="drop_request", times=1), Fault(node="a", peer="b", kind="drop_reply", times=1))
    assert _world(scenario, *drops) == [b"2", b"3"]
    assert _world(scenario, *drops, Fault(node="a", peer="c", kind="drop_request")) == [b"2", b"3"]


def test_duplicate_is_handled_twice_and_answered_once():
    async def scenario(network, channel, handled):
        assert await channel.request([b"1"], timeout=1) == b"re:1"
        await asyncio.sleep(1)
        assert await channel.request([b"2"], timeout=1) == b"re:2"
        await asyncio.sleep(1)
        return handled

    assert _world(scenario, Fault(node="b", kind="duplicate", times=1)) == [b"1", b"1", b"2"]


def test_reorder_lets_later_messages_overtake():
    async def scenario(network, channel, handled):
        for i in range(20):
            asyncio.get_running_loop().call_later(i * 0.01, tasks.append, None)
        replies = await asyncio.gather(*(channel.request([b"%d" % i], timeout=9) for i in range(20)))
        assert replies == [b"re:%d" % i for i in range(20)]  # each reply still belongs to its request
        return [int(body) for body in handled]

    tasks = []
    assert _world(scenario) == list(range(20))
    order = _world(scenario, Fault(node="b", kind="reorder", value=3.0))
    assert order != list(range(20)) and sorted(order) == list(range(20))


def test_corrupt_changes_bytes_never_length_and_slow_link_is_slow():
    async def scenario(network, channel, handled):
        reply = await channel.request([bytes(100)], timeout=60)
        assert len(handled[0]) == 100 and handled[0] != bytes(100)
        assert len(reply) == 103 and reply[3:] == handled[0]  # only one message is hit
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)

    _world(scenario, Fault(node="a", kind="corrupt", times=1), Fault(node="b", kind="slow_link", value=10.0))


def test_nobody_there_port_in_use_too_large_and_closed_channel():
    async def scenario(network, channel, handled):
        loop = asyncio.get_running_loop()
        with pytest.raises(Unreachable, match="Nothing listens at c"):
            await network.channel("a", "c").request([b"1"], timeout=60)
        assert loop.time() == pytest.approx(0.1)
        with pytest.raises(IotaError, match="already listens"):
            network.listen("b", None)

        async def slow(body):
            await asyncio.sleep(50)
            return [b"late"]

        listener = network.listen("d", slow, limit=10)
        to_d = network.channel("a", "d")
        with pytest.raises(IotaError) as caught:
            await to_d.request([bytes(11)], timeout=60)
        assert caught.value.code == "too_large"
        pending = asyncio.create_task(to_d.request([b"1"], timeout=60))
        await asyncio.sleep(1)
        await to_d.close()
        with pytest.raises(Unreachable, match="closed"):
            await pending
        pending = asyncio.create_task(network.channel("a", "d").request([b"1"], timeout=60))
        await asyncio.sleep(1)
        listener.close()
        with pytest.raises(Unreachable, match="went away"):
            await pending

    _world(scenario)


def test_failing_handler_is_unreachable_to_the_client_and_fails_the_simulation():
    async def scenario(network, channel, handled):
        async def broken(body):
            raise KeyError("bug in the handler")

        network.listen("c", broken)
        with pytest.raises(Unreachable, match="failed"):
            await network.channel("a", "c").request([b"1"], timeout=60)

    with pytest.raises(sim.UnhandledErrors, match="bug in the handler"):
        _world(scenario)


def _machines(plan, scenario):
    """Hosts "a" and "b"; b counts up by its clock and compute and answers its count; a crashed b is started again."""

    async def main():
        loop = asyncio.get_running_loop()
        count = [0]
        starts = []

        def start(name):
            host = Host(loop, "b", incarnation=len(starts), cost=lambda work, args: 1.0)
            starts.append(loop.time())
            network.attach(host)

            async def run():
                while True:
                    await host.clock.sleep(1.0)
                    count[0] += await host.compute.run(abs, 1)

            async def answer(body):
                return [b"%d" % count[0]]

            network.listen("b", answer)
            host.spawn(run())
            return host

        injector = Injector(loop, plan, on_restart=start)
        network = SimNetwork(loop, 0, injector, EVEN)
        start("b")
        await scenario(network, injector, starts)
        await network.close()
        injector.hosts["b"].kill()
        await asyncio.sleep(0)
        return count[0]

    return sim.run(main(), leaks_ok=True)


def test_crash_freeze_slow_skew_and_disk():
    plan = FaultPlan(
        (
            Fault(node="b", kind="crash", at=10.0, lasts=5.0),
            Fault(node="b", kind="freeze", at=20.0, lasts=10.0),
            Fault(node="b", kind="slow", at=("tick", 2), lasts=10.0, value=4.0),
            Fault(node="b", kind="clock_skew", at=32.0, lasts=100.0, value=-3600.0),
            Fault(node="b", kind="full_disk", at=50.0, lasts=1.0),
            Fault(node="b", kind="freeze", at=60.0),
            Fault(node="b", kind="thaw", at=65.0),
        )
    )

    async def scenario(network, injector, starts):
        loop, to_b = asyncio.get_running_loop(), network.channel("a", "b")

        async def until(when):
            await asyncio.sleep(when - loop.time())

        await until(9.5)
        assert await to_b.request([b"?"], timeout=1) == b"4"
        await until(11.0)
        with pytest.raises(Unreachable, match="Nothing listens"):
            await to_b.request([b"?"], timeout=1)
        await until(19.9)  # started again at 15
        assert starts == [0.0, 15.0]
        with pytest.raises(Unreachable, match="within 3 s"):
            await to_b.request([b"?"], timeout=3)  # arrives while frozen
        assert await to_b.request([b"?"], timeout=30) == b"6" and loop.time() == pytest.approx(30.1)
        injector.step("b", "tick")
        injector.step("a", "tick")
        assert not injector.active("b", "slow")
        injector.step("b", "tick")
        assert injector.hosts["b"].compute.hindrance == 4.0
        await until(45.0)
        assert injector.hosts["b"].compute.hindrance == 1.0
        assert injector.hosts["b"].clock.now() == sim.START + 45.0 - 3600.0
        injector.check_disk("b")
        await until(50.5)
        with pytest.raises(OSError, match="No space left"):
            injector.check_disk("b")
        injector.check_disk("a")
        await until(62.0)
        assert injector.hosts["b"].gate.frozen
        await until(66.0)
        assert not injector.hosts["b"].gate.frozen
        assert [(t, what, f.kind) for t, what, f in injector.log][:3] == [
            (10.0, "begin", "crash"),
            (15.0, "end", "crash"),
            (20.0, "begin", "freeze"),
        ]

    assert _machines(plan, scenario) > 8


class _Memory:
    """A whole object store in a dict; inner side of the `SimObjects` tests."""

    def __init__(self):
        self.held = {}

    async def get(self, url, start=0, stop=None, *, expect_sha256=None):
        return self.held[url][start:stop]

    async def put(self, url, parts):
        self.held[url] = b"".join(parts)

    async def close(self):
        return None


def test_objects_over_the_network():
    async def main():
        loop = asyncio.get_running_loop()
        faults = (
            Fault(node="store", kind="drop_reply", at=10.0, lasts=1.0),
            Fault(node="store", kind="drop_request", at=50.0, lasts=1.0),
            Fault(node="store", kind="corrupt", at=100.0, lasts=1.0),
            Fault(node="store", kind="full_disk", at=110.0, lasts=1.0),
        )
        network = SimNetwork(loop, 1, FaultPlan(faults), Link(0.1, 0.0, 1e6))
        inner = _Memory()
        objects = SimObjects(inner, network, "m")
        await objects.put("u", [b"a" * 1_000_000, b"b"])
        assert loop.time() == pytest.approx(1.2, abs=0.01)
        assert await objects.get("u", 999_999, 1_000_001) == b"ab"
        await asyncio.sleep(10 - loop.time())
        with pytest.raises(Unreachable):
            await objects.put("v", [b"stored all the same"])
        assert inner.held["v"] == b"stored all the same" and loop.time() > 40
        await asyncio.sleep(50 - loop.time())
        with pytest.raises(Unreachable):
            await objects.put("w", [b"lost"])
        assert "w" not in inner.held
        await asyncio.sleep(100 - loop.time())
        with pytest.raises(IotaError, match="not those with SHA-256"):
            await objects.get("v", expect_sha256=sha256(inner.held["v"]))
        await asyncio.sleep(110 - loop.time())
        with pytest.raises(IotaError) as caught:
            await objects.put("w", [b"no room"])
        assert caught.value.code == "disk_full" and "w" not in inner.held
        await objects.close()

    sim.run(main())


def _story(seed, plan):
    async def main():
        loop = asyncio.get_running_loop()
        injector = Injector(loop, plan)
        network = SimNetwork(loop, seed, injector)
        for name in plan_nodes:
            host = Host(loop, name, seed=seed)
            network.attach(host)
            network.listen(name, _echo)
            host.spawn(_chat(network, host))
        await asyncio.sleep(100)
        for host in injector.hosts.values():
            host.kill()
        await network.close()
        return network.digest()

    async def _echo(body):
        await asyncio.sleep(0.01)
        return [body]

    async def _chat(network, host):
        number = 0
        while True:
            number += 1
            peer = plan_nodes[number % len(plan_nodes)]
            try:
                await network.channel(host.name, peer).request([host.entropy(number % 50)], timeout=0.5)
            except Unreachable:
                await host.clock.sleep(0.2)

    plan_nodes = ["a", "b", "c", "d"]
    return sim.run(main(), leaks_ok=True)


def test_same_seed_same_story():
    plan = random_plan(5, ["a", "b", "c", "d"], 100.0, count=12)
    assert _story(1, plan) == _story(1, plan)
    assert _story(2, plan) != _story(1, plan) != _story(1, random_plan(6, ["a", "b", "c", "d"], 100.0, count=12))


def test_random_plan_is_seeded_bounded_and_survives_json():
    kinds = (*HOST_KINDS, *LINK_KINDS)
    for seed in range(20):
        plan = random_plan(seed, ["a", "b"], 50.0, count=30, kinds=kinds)
        assert plan == random_plan(seed, ["a", "b"], 50.0, count=30, kinds=kinds)
        assert len(plan.faults) == 30
        assert all(0 <= f.at <= 40.0 and f.lasts and f.at + f.lasts <= 45.01 for f in plan.faults)
        assert msgspec.json.decode(msgspec.json.encode(plan), type=FaultPlan) == plan
    assert {f.kind for f in random_plan(0, ["a"], 9.0, count=500, kinds=kinds).faults} == set(kinds)


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "explode"},
        {"kind": "slow"},
        {"kind": "cut", "chance": 0.5},
        {"kind": "freeze", "lasts": 0.0},
        {"kind": "drop_reply", "chance": 2.0},
        {"kind": "crash", "at": ("merge", 0)},
        {"kind": "crash", "at": -1.0},
    ],
)
def test_impossible_faults_are_refused(bad):
    with pytest.raises(ValueError):
        Fault(node="a", **bad)
