"""Faults in the simulated swarm with real torch: each scenario has its right value, and ends with `survive`'s
comparison of the survivors' whole state."""

import asyncio

import pytest

from fault_case import PHASES, begins, kinds, last_epoch_whole, of_stage, on, reboot, seen, small, survive
from iota.core.machine import events as ev
from iota.sim.faults import Fault, FaultPlan
from iota.sim.swarm import ORCHESTRATOR, STORE


def plan(*faults, seed=1):
    return FaultPlan(tuple(faults), seed)


# ------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("phase", PHASES)
def test_a_miner_dies_in_a_phase_and_returns(tmp_path, phase):
    async def script(swarm):
        on(swarm, begins(phase, 2), lambda: swarm.crash("miner-4"))
        await seen(swarm, begins(phase, 2)).wait()
        await asyncio.sleep(4.0)
        await swarm.start_node("miner-4")

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=0)
    last_epoch_whole(swarm)
    assert swarm.state.member(swarm.key("miner-4")).session == 2
    assert swarm.ended["miner-4"].startswith("finished")


@pytest.mark.parametrize("phase", PHASES)
def test_the_orchestrator_dies_in_a_phase_and_returns(tmp_path, phase):
    async def script(swarm):
        await seen(swarm, begins(phase, 2)).wait()
        swarm.crash(ORCHESTRATOR)
        await reboot(swarm, 3.0)

    swarm = survive(small(), tmp_path, script, miners=6, validators=0, punctual=False)
    last_epoch_whole(swarm)
    assert {m.session for m in swarm.state.members} == {1}, "nobody has to join again"
    assert len(kinds(swarm, ev.Restarted)) == 1


@pytest.mark.parametrize("kind", [ev.Passed, ev.Committed, ev.Uploaded, ev.Planned, ev.ShardReported, ev.Loaded])
def test_the_orchestrator_dies_with_a_reply_in_flight(tmp_path, kind):
    """The event is durable, the reply never leaves: the same request gets the same verdict from the restarted one."""

    async def script(swarm):
        def fatal(e):
            return isinstance(e, kind) and swarm.state.epoch == 2

        on(swarm, fatal, lambda: swarm.crash(ORCHESTRATOR))
        await seen(swarm, fatal).wait()
        await reboot(swarm, 1.0)

    swarm = survive(small(), tmp_path, script, miners=6, validators=0, punctual=False)
    last_epoch_whole(swarm)
    assert {m.session for m in swarm.state.members} == {1}


def test_the_orchestrator_dies_ten_times(tmp_path):
    async def script(swarm):
        for number in range(10):
            await asyncio.sleep(0.7 + 0.37 * number)
            if swarm.state.phase in ("finishing", "finished"):
                return
            await reboot(swarm, 0.5)

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=1, punctual=False)
    assert swarm.state.boots >= 5


def test_all_miners_of_a_stage_are_lost_and_fresh_ones_come(tmp_path):
    async def script(swarm):
        await seen(swarm, begins("train", 2)).wait()
        await asyncio.sleep(0.3)
        for name in of_stage(swarm, 1):
            swarm.crash(name)
        await asyncio.sleep(30.0)
        swarm.names += ["miner-6", "miner-7"]
        for name in ("miner-6", "miner-7"):
            await swarm.start_node(name)

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=0)
    last_epoch_whole(swarm)
    assert {swarm.state.member(swarm.key(n)).stage for n in ("miner-6", "miner-7")} == {1}


# --------------------------------------------------------------------------------------- frozen, slow, far, skewed


@pytest.mark.parametrize("phase", ["train", "commit", "reduce", "sync"])
def test_a_frozen_miner_misses_the_merge_and_rejoins(tmp_path, phase):
    """A6: what it brings after it thawed is refused by session; it comes back and trains."""

    async def script(swarm):
        on(swarm, begins(phase, 2), lambda: swarm.injector.hosts["miner-4"].freeze())
        await seen(swarm, begins("train", 3)).wait()
        await asyncio.sleep(0.5)
        swarm.injector.hosts["miner-4"].thaw()

    swarm = survive(small("epochs >= 5"), tmp_path, script, miners=6, validators=0)
    m = swarm.state.member(swarm.key("miner-4"))
    number = m.number
    planned = {e.epoch: e.members for e in kinds(swarm, ev.Planned) if e.stage == m.stage}
    assert number in planned[1] and number in planned[5]
    assert (number in planned[2]) == (phase in ("reduce", "sync"))
    last_epoch_whole(swarm)


def test_a_miner_ten_times_slower_does_not_hold_the_swarm_up(tmp_path):
    """A3: the epoch ends without it; with half of the best member's passes it merges, else it is only paid."""
    config = small(merge=dict(min_batches=8, quorum=0.5))
    swift = survive(config, tmp_path / "swift", miners=6, validators=0)
    slow = survive(config, tmp_path / "slow", miners=6, validators=0, speeds={"miner-4": 10.0})

    def train(swarm):
        return [r.began["drain"] - r.began["train"] for r in swarm.state.epochs.values()]

    assert max(train(slow)) <= 2.0 * max(train(swift))
    assert slow.state.member(slow.key("miner-4")).session == 1
    last_epoch_whole(slow)


def test_when_all_are_slow_nobody_is_dropped(tmp_path):
    swarm = survive(small(), tmp_path, miners=6, validators=0, speeds={f"miner-{i}": 8.0 for i in range(6)})
    assert not kinds(swarm, ev.Gone)
    assert all(len(e.members) == 2 for e in kinds(swarm, ev.Planned))


def test_a_miner_that_becomes_slow_in_the_middle(tmp_path):
    faults = plan(Fault(node="miner-3", kind="slow", at=3.0, lasts=10.0, value=40.0))
    swarm = survive(small("epochs >= 5"), tmp_path, miners=6, validators=0, plan=faults)
    last_epoch_whole(swarm)


@pytest.mark.parametrize("seconds", [2.0, 10.0, -10.0, 3600.0, -3600.0])
def test_a_clock_that_is_wrong(tmp_path, seconds):
    """H1: within the window nothing happens; beyond it the owner is told how far off the clock is, and it works on."""
    faults = plan(Fault(node="miner-2", kind="clock_skew", at=0.0, value=seconds))
    swarm = survive(small("epochs >= 2"), tmp_path, miners=6, validators=1, plan=faults)
    told = [text for _, name, text in swarm.reports if name == "miner-2" and "clock differs" in text]
    assert len(told) == (abs(seconds) > 60)
    assert all(f"{seconds:.1f} s" in text for text in told)
    assert all(len(e.members) == 2 for e in kinds(swarm, ev.Planned))


def test_a_clock_that_jumps_in_the_middle(tmp_path):
    faults = plan(
        Fault(node="miner-2", kind="clock_skew", at=2.0, lasts=6.0, value=3600.0),
        Fault(node="miner-3", kind="clock_skew", at=3.0, lasts=4.0, value=-3600.0),
        Fault(node="validator-0", kind="clock_skew", at=2.5, lasts=5.0, value=600.0),
    )
    swarm = survive(small("epochs >= 4"), tmp_path, miners=6, validators=1, plan=faults)
    last_epoch_whole(swarm)


# ---------------------------------------------------------------------------------------------- messages and stores


@pytest.mark.parametrize("kind", ["drop_request", "drop_reply", "duplicate", "reorder", "corrupt"])
def test_a_fifth_of_all_messages_is_hit(tmp_path, kind):
    """Not one sample is counted twice, in books or in gradients: weights equal the reference's."""
    faults = plan(*(Fault(node=f"miner-{i}", kind=kind, at=0.0, lasts=40.0, chance=0.2, value=0.3) for i in range(6)))
    swarm = survive(small(), tmp_path, miners=6, validators=0, plan=faults, limit=3000.0)
    last_epoch_whole(swarm)


@pytest.mark.parametrize("phase", PHASES)
def test_the_store_is_cut_off_for_eight_seconds(tmp_path, phase):
    async def script(swarm):
        await seen(swarm, begins(phase, 2)).wait()
        now = swarm.loop.time()
        swarm.injector.add(Fault(node=STORE, kind="cut", at=now, lasts=8.0))

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=1)
    last_epoch_whole(swarm)


def test_the_store_is_full_while_shards_are_put(tmp_path):
    async def script(swarm):
        await seen(swarm, begins("reduce", 2)).wait()
        swarm.injector.add(Fault(node=STORE, kind="full_disk", at=swarm.loop.time(), lasts=3.0))

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=0)
    last_epoch_whole(swarm)


def test_a_miner_with_a_full_disk(tmp_path):
    """It cannot keep evidence, so it gives its work back, says so once, and takes part again when there is room."""
    faults = plan(Fault(node="miner-4", kind="full_disk", at=2.0, lasts=8.0))
    swarm = survive(small("epochs >= 5"), tmp_path, miners=6, validators=1, plan=faults)
    last_epoch_whole(swarm)
    assert any("disk full" in text for _, name, text in swarm.reports if name == "miner-4")
    assert swarm.state.member(swarm.key("miner-4")).number in {
        n for e in kinds(swarm, ev.Planned)[-3:] for n in e.members
    }


def test_two_miners_of_one_stage_with_ten_times_the_latency(tmp_path):
    faults = plan(*(Fault(node=n, kind="slow_link", at=0.0, value=10.0) for n in ("miner-1", "miner-2")))
    swarm = survive(small(), tmp_path, miners=6, validators=0, plan=faults)
    last_epoch_whole(swarm)
