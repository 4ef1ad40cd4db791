"""Faults in the simulated swarm with real torch: each scenario has its right value, and ends with `survive`'s
comparison of the survivors' whole state."""

import asyncio

import msgspec
import numpy as np
import pytest

from fault_case import PHASES, begins, kinds, last_epoch_whole, of_stage, on, reboot, seen, small, some, survive
from iota.core import butterfly, queries
from iota.core.machine import events as ev
from iota.nodes.miner.retain import digest_of
from iota.nodes.miner.stage import StageWorker
from iota.sim.faults import Fault, FaultPlan
from iota.sim.swarm import ORCHESTRATOR, STORE


def plan(*faults, seed=1):
    return FaultPlan(tuple(faults), seed)


# ------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("phase", some(("train", "reduce"), PHASES))
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


@pytest.mark.parametrize("phase", some(("drain", "upload"), PHASES))
def test_the_orchestrator_dies_in_a_phase_and_returns(tmp_path, phase):
    async def script(swarm):
        await seen(swarm, begins(phase, 2)).wait()
        swarm.crash(ORCHESTRATOR)
        await reboot(swarm, 3.0)

    swarm = survive(small(), tmp_path, script, miners=6, validators=0, punctual=False)
    last_epoch_whole(swarm)
    assert {m.session for m in swarm.state.members} == {1}, "nobody has to join again"
    assert len(kinds(swarm, ev.Restarted)) == 1


REPLIES = (ev.Passed, ev.Committed, ev.Uploaded, ev.Planned, ev.ShardReported, ev.Loaded)


@pytest.mark.parametrize("kind", some((ev.Passed, ev.Committed), REPLIES))
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


@pytest.mark.slow
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


@pytest.mark.parametrize("phase", some(("commit",), ("train", "commit", "reduce", "sync")))
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_when_all_are_slow_nobody_is_dropped(tmp_path):
    swarm = survive(small(), tmp_path, miners=6, validators=0, speeds={f"miner-{i}": 8.0 for i in range(6)})
    assert not kinds(swarm, ev.Gone)
    assert all(len(e.members) == 2 for e in kinds(swarm, ev.Planned))


@pytest.mark.slow
def test_a_miner_that_becomes_slow_in_the_middle(tmp_path):
    faults = plan(Fault(node="miner-3", kind="slow", at=3.0, lasts=10.0, value=40.0))
    swarm = survive(small("epochs >= 5"), tmp_path, miners=6, validators=0, plan=faults)
    last_epoch_whole(swarm)


@pytest.mark.parametrize("seconds", some((3600.0,), (2.0, 10.0, -10.0, 3600.0, -3600.0)))
def test_a_clock_that_is_wrong(tmp_path, seconds):
    """H1: within the window nothing happens; beyond it the owner is told how far off the clock is, and it works on."""
    faults = plan(Fault(node="miner-2", kind="clock_skew", at=0.0, value=seconds))
    swarm = survive(small("epochs >= 2"), tmp_path, miners=6, validators=1, plan=faults)
    told = [text for _, name, text in swarm.reports if name == "miner-2" and "clock differs" in text]
    assert len(told) == (abs(seconds) > 60)
    assert all(f"{seconds:.1f} s" in text for text in told)
    assert all(len(e.members) == 2 for e in kinds(swarm, ev.Planned))


@pytest.mark.slow
def test_a_clock_that_jumps_in_the_middle(tmp_path):
    faults = plan(
        Fault(node="miner-2", kind="clock_skew", at=2.0, lasts=6.0, value=3600.0),
        Fault(node="miner-3", kind="clock_skew", at=3.0, lasts=4.0, value=-3600.0),
        Fault(node="validator-0", kind="clock_skew", at=2.5, lasts=5.0, value=600.0),
    )
    swarm = survive(small("epochs >= 4"), tmp_path, miners=6, validators=1, plan=faults)
    last_epoch_whole(swarm)


# ---------------------------------------------------------------------------------------------- messages and stores


@pytest.mark.parametrize(
    "kind", some(("drop_reply", "corrupt"), ("drop_request", "drop_reply", "duplicate", "reorder", "corrupt"))
)
def test_a_fifth_of_all_messages_is_hit(tmp_path, kind):
    """Not one sample is counted twice, in books or in gradients: weights equal the reference's."""
    faults = plan(*(Fault(node=f"miner-{i}", kind=kind, at=0.0, lasts=40.0, chance=0.2, value=0.3) for i in range(6)))
    swarm = survive(small(), tmp_path, miners=6, validators=0, plan=faults, limit=3000.0)
    last_epoch_whole(swarm)


@pytest.mark.parametrize("phase", some(("reduce",), PHASES))
def test_the_store_is_cut_off_for_eight_seconds(tmp_path, phase):
    async def script(swarm):
        await seen(swarm, begins(phase, 2)).wait()
        now = swarm.loop.time()
        swarm.injector.add(Fault(node=STORE, kind="cut", at=now, lasts=8.0))

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=1)
    last_epoch_whole(swarm)


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_miners_of_one_stage_with_ten_times_the_latency(tmp_path):
    faults = plan(*(Fault(node=n, kind="slow_link", at=0.0, value=10.0) for n in ("miner-1", "miner-2")))
    swarm = survive(small(), tmp_path, miners=6, validators=0, plan=faults)
    last_epoch_whole(swarm)


# ------------------------------------------------------------------------------------------------- coming and going


@pytest.mark.parametrize("phase", some(("reduce",), ("train", "commit", "upload", "reduce", "sync")))
def test_a_newcomer_arrives_in_a_phase(tmp_path, phase):
    """A8: it trains from the next full sync on, from the checkpoint."""

    async def script(swarm):
        swarm.names.append("miner-6")
        await seen(swarm, begins(phase, 1)).wait()
        await swarm.start_node("miner-6")

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=0)
    last_epoch_whole(swarm)
    number = swarm.state.member(swarm.key("miner-6")).number
    assert any(number in e.members for e in kinds(swarm, ev.Planned) if e.epoch == 3)


def test_every_miner_leaves_by_drain_and_returns(tmp_path):
    async def script(swarm):
        await seen(swarm, begins("train", 2)).wait()
        await asyncio.sleep(0.4)
        for miner in list(swarm.miners.values()):
            miner.drain()
        await asyncio.sleep(8.0)
        assert len(swarm.ended) == 6
        assert all(word.startswith("drained") for word in swarm.ended.values())
        for name in list(swarm.miners):
            await swarm.start_node(name)

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=0)
    last_epoch_whole(swarm)
    assert {m.session for m in swarm.state.members} == {2}
    assert {e.how for e in kinds(swarm, ev.Gone)} == {"left"}


@pytest.mark.parametrize("phase", some(("upload",), PHASES))
def test_pause_and_resume_in_a_phase(tmp_path, phase):
    """Paused time stops deadlines; nobody is lost, nothing is late."""
    key = "ab" * 32
    config = small("epochs >= 3", admit=dict(operators=(key,)))

    async def order(swarm, command):
        swarm.orchestrator.operate(queries.Operate(command=command, target=""), key)
        await swarm.orchestrator.commit()

    async def script(swarm):
        await seen(swarm, begins(phase, 2)).wait()
        await order(swarm, "pause")
        await asyncio.sleep(40.0)
        assert swarm.state.phase == phase and swarm.state.epoch == 2
        await order(swarm, "resume")

    swarm = survive(config, tmp_path, script, miners=6, validators=1)
    last_epoch_whole(swarm)
    assert not kinds(swarm, ev.Gone)
    assert all(len(e.members) == 2 and not e.missed for e in kinds(swarm, ev.Planned))


@pytest.mark.slow
def test_the_orchestrator_dies_while_paused(tmp_path):
    """L4: the pause survives the restart; the run goes on where it was."""
    key = "ab" * 32

    async def script(swarm):
        await seen(swarm, begins("upload", 2)).wait()
        swarm.orchestrator.operate(queries.Operate(command="pause", target=""), key)
        await swarm.orchestrator.commit()
        await reboot(swarm, 5.0)
        await asyncio.sleep(20.0)
        assert (swarm.state.phase, swarm.state.epoch) == ("upload", 2)
        swarm.orchestrator.operate(queries.Operate(command="resume", target=""), key)
        await swarm.orchestrator.commit()

    config = small("epochs >= 3", admit=dict(operators=(key,)))
    swarm = survive(config, tmp_path, script, miners=6, validators=0, punctual=False)
    last_epoch_whole(swarm)
    assert all(len(e.members) == 2 for e in kinds(swarm, ev.Planned))


@pytest.mark.parametrize("down", some((2.0,), (2.0, 15.0)))
def test_a_validator_dies_in_an_audit(tmp_path, down):
    async def script(swarm):
        def begun(e):
            return isinstance(e, ev.EvidenceShown) and e.audit > 2

        await seen(swarm, begun).wait()
        swarm.crash("validator-0")
        await asyncio.sleep(down)
        await swarm.start_node("validator-0")

    swarm = survive(small("epochs >= 4"), tmp_path, script, miners=6, validators=1)
    assert {a.verdict for a in swarm.state.audits.values()} <= {"valid", "inconclusive"}
    late = [a for a in swarm.state.audits.values() if a.epoch >= 3]
    assert late and any(a.verdict == "valid" for a in late)


# --------------------------------------------------------------------------------------------------- who breaks it


class Broken(StageWorker):
    """Commits to one thing, uploads another: the manifest is of the good bytes, NaN is what arrives."""

    def commit(self, task):
        result = super().commit(task)
        piece = np.frombuffer(b"".join(self.upload.pieces), "<f4").copy()
        piece[7] = np.nan
        self.upload.pieces[:] = [piece.tobytes()]
        return msgspec.structs.replace(result, digest=digest_of(self.upload.pieces))


class NotFinite(StageWorker):
    def upload_arrays(self, state):
        arrays = super().upload_arrays(state)
        name = next(iter(arrays))
        arrays[name] = np.full_like(arrays[name], np.inf)
        return arrays


class Giant(StageWorker):
    def upload_arrays(self, state):
        arrays = super().upload_arrays(state)
        name = next(iter(arrays))
        arrays[name] = arrays[name] * np.float32(1000)
        return arrays


class WrongLength(StageWorker):
    def commit(self, task):
        result = super().commit(task)
        return msgspec.structs.replace(result, length=result.length + 65536)


class NeverUploads(StageWorker):
    def commit(self, task):
        result = super().commit(task)
        self.upload = None
        return result


class Liar(StageWorker):
    """Lies about the shards it owns."""

    def old_parts(self, start, stop):
        parts = super().old_parts(start, stop)
        return {**parts, "weights": parts["weights"] + np.float32(1e-3)}


def test_bytes_that_contradict_their_manifest_are_left_out(tmp_path):
    swarm = survive(small(), tmp_path, miners=6, validators=1, workers={"miner-0": Broken}, honest=False)
    number = swarm.state.member(swarm.key("miner-0")).number
    bad = {who for e in kinds(swarm, ev.ShardReported) for _, who, _ in e.bad}
    assert bad == {number}


@pytest.mark.parametrize("worker", some((NeverUploads,), (NotFinite, WrongLength, NeverUploads)))
def test_an_upload_that_cannot_be_is_no_part_of_the_merge(tmp_path, worker):
    swarm = survive(small(), tmp_path, miners=6, validators=1, workers={"miner-0": worker}, honest=False)
    m = swarm.state.member(swarm.key("miner-0"))
    assert all(m.number not in e.members for e in kinds(swarm, ev.Planned))
    missed = [e for e in kinds(swarm, ev.Planned) if m.number in e.missed]
    assert len(missed) == (3 if worker is NeverUploads else 0)
    assert m.paid == 0
    assert all(len(e.members) == (1 if e.stage == m.stage else 2) for e in kinds(swarm, ev.Planned))


@pytest.mark.slow
def test_an_update_a_thousand_times_too_large_is_flagged_in_its_epoch(tmp_path):
    """D12: it is finite and merges (robust reducers are a later policy), its verdict is invalid, it earns nothing."""
    swarm = survive(
        small(), tmp_path, miners=6, validators=1, workers={"miner-0": Giant}, exact=False, honest=False
    )  # fmt: skip
    number = swarm.state.member(swarm.key("miner-0")).number
    verdicts = {(a.epoch, a.verdict) for a in swarm.state.audits.values() if a.number == number}
    assert (1, "invalid") in verdicts and swarm.state.members[number].paid == 0
    assert all(np.isfinite(array).all() for array in swarm.watch.merged.values())


@pytest.mark.parametrize("validators", some((1,), (0, 1)))
def test_an_owner_that_lies_about_a_shard_is_named(tmp_path, validators):
    """A third party recomputes at once; the right value stands, bit for bit, and the liar is a row of the matrix."""
    swarm = survive(small(), tmp_path, miners=6, validators=validators, workers={"miner-0": Liar})
    m = swarm.state.member(swarm.key("miner-0"))
    settled = [e for e in kinds(swarm, ev.ShardSettled) if e.stage == m.stage]
    assert settled and {e.how for e in settled} == {"settled"}
    assert {n for e in settled for n in e.liars} == {m.number}
    assert all(e.how == "agreed" for e in kinds(swarm, ev.ShardSettled) if e.stage != m.stage)


def test_a_shard_that_lies_damaged_in_the_store_is_reduced_again(tmp_path):
    """What its owner reported is not what the store holds: refused, done again; nobody is stopped at SYNC."""

    async def script(swarm):
        put, hit = swarm.blobs.put, []

        async def damaged(key, parts):
            if key.startswith("merge/2/") and not hit:
                hit.append(key)
                parts = [bytes(len(b"".join(parts)))]
            return await put(key, parts)

        swarm.blobs.put = damaged

    swarm = survive(small(), tmp_path, script, miners=6, validators=0)
    assert [e.code for e in kinds(swarm, ev.Declined)] == ["wrong_digest"]
    assert {e.how for e in kinds(swarm, ev.ShardSettled)} == {"agreed"}
    last_epoch_whole(swarm)


@pytest.mark.slow
def test_twelve_miners_in_one_stage_lose_both_owners_of_a_shard(tmp_path):
    config = small(
        "epochs >= 3",
        stages=dict(codec="identity", wire_dtype="float32", count=1),
        model=dict(width=64, sequence=16),
        merge=dict(members=12, quorum=1.0),
    )

    async def script(swarm):
        await seen(swarm, begins("reduce", 2)).wait()
        merge = swarm.state.merges[0]
        keys = [swarm.state.members[n].key for n in merge.members]
        layout = butterfly.make_plan(keys, merge.chunks, bytes.fromhex(merge.seed))
        shard = next(x for x in range(merge.shards) if len(set(layout.range(x))) == 2 and x not in merge.settled)
        for name in swarm.miners:
            if swarm.key(name) in layout.owners(shard):
                swarm.crash(name)

    swarm = survive(config, tmp_path, script, miners=12, validators=0)
    assert [len(e.members) for e in kinds(swarm, ev.Planned)] == [12, 12, 10]
    assert kinds(swarm, ev.ShardReassigned)
    assert all(e.how in ("agreed", "alone") for e in kinds(swarm, ev.ShardSettled))
    last_epoch_whole(swarm)


@pytest.mark.parametrize("count", some((1,), (1, 2)))
def test_one_stage_with_one_or_two_miners_loses_one_in_reduce(tmp_path, count):
    config = small(
        "epochs >= 3", stages=dict(codec="identity", wire_dtype="float32", count=1), merge=dict(members=count)
    )

    async def script(swarm):
        await seen(swarm, begins("reduce", 2)).wait()
        swarm.crash("miner-0")
        await asyncio.sleep(3.0)
        await swarm.start_node("miner-0")

    swarm = survive(config, tmp_path, script, miners=count, validators=0)
    how = {e.how for e in kinds(swarm, ev.ShardSettled) if e.epoch == 2}
    assert how == ({"kept"} if count == 1 else {"alone"})
    last_epoch_whole(swarm)
