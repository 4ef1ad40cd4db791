"""Miners against the real orchestrator, in virtual time: whole epochs, all miners at the same bytes, evidence shown."""

import asyncio
import dataclasses
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch

from iota.config.load import load_run
from iota.core import tasks
from iota.core.machine import events as ev
from iota.errors import IotaError, Unreachable
from iota.net.memory import MemoryNetwork
from iota.net.peer import Caller
from iota.nodes.link import Session
from iota.nodes.miner.node import Miner, MinerSettings
from iota.nodes.miner.stage import StageWorker
from iota.nodes.orchestrator import sheets
from iota.nodes.orchestrator.create import create_run
from iota.nodes.orchestrator.node import Orchestrator
from iota.nodes.validator.audit import Auditor
from iota.nodes.validator.engine import Engine
from iota.nodes.validator.inline import InlineReplayer
from iota.sim.effects import Host
from iota.sim.loop import run as simulate
from iota.store.blobs import MemoryBlobs
from iota.store.journal import MemoryJournal
from iota.store.manifest import OBJECT
from iota.store.remote import DirectObjects
from iota.store.tokens import TokenReader
from iota.wire.keys import Identity

torch.set_num_threads(1)
TINY = load_run(Path(__file__).parent.parent / "recipes" / "tiny.toml")
HUB = Identity.new(b"h" * 32)


def two_by_two(**merge):
    return msgspec.structs.replace(
        TINY,
        stop="epochs >= 2",
        model=msgspec.structs.replace(TINY.model, blocks=2),
        stages=msgspec.structs.replace(TINY.stages, count=2),
        merge=msgspec.structs.replace(TINY.merge, members=2, min_batches=4, **merge),
        audit=msgspec.structs.replace(TINY.audit, segment_steps=2, segments=0),
        train=msgspec.structs.replace(TINY.train, accumulate=2),
        data=msgspec.structs.replace(TINY.data, max_bytes=100_000),
    )


class Flaky:
    """A channel that loses every third reply after the orchestrator has handled the request."""

    def __init__(self, channel):
        self.channel, self.count = channel, 0

    async def request(self, parts, *, timeout):
        reply = await self.channel.request(parts, timeout=timeout)
        self.count += 1
        if self.count % 3 == 2:
            raise Unreachable("the reply was lost")
        return reply

    async def close(self):
        await self.channel.close()


class Swarm:
    """An orchestrator and `count` miners on simulated hosts."""

    def __init__(self, loop, folder, config, seconds=0.05, flaky=False, making=0.05):
        self.loop, self.folder, self.config = loop, folder, config
        self.network, self.blobs, self.lines = MemoryNetwork(), MemoryBlobs(), {}
        self.seconds, self.flaky, self.making = seconds, flaky, making
        self.hub = Host(loop, "hub")
        self.miners, self.hosts, self.verdicts = [], [], {}

    async def start(self, count, worker=None):
        now = self.hub.clock.now()
        self.manifest = await create_run(self.config, self.blobs, HUB.key, now, HUB.sign)
        self.node = Orchestrator(
            self.manifest, await self.blobs.get(OBJECT), HUB, "ab" * 32, journal=MemoryJournal(self.manifest.run),
            blobs=self.blobs, blob_url="http://store", clock=self.hub.clock, entropy=self.hub.entropy,
        )  # fmt: skip
        await self.node.open()
        self.network.listen("hub", self.node.handler)
        self.ticking = self.hub.spawn(self.node.run())
        return [self.miner(number, worker) for number in range(count)]

    def channel(self):
        channel = self.network.channel("hub")
        return Flaky(channel) if self.flaky else channel

    def miner(self, number, worker=None):
        maker = worker or StageWorker

        def cost(work, args):
            return self.making if work is maker else self.seconds

        host = Host(self.loop, f"miner-{number}", cost=cost)
        lines = self.lines[number] = []
        kwargs = {} if worker is None else {"worker_class": worker}
        miner = Miner(
            MinerSettings(folder=self.folder / f"miner-{number}"),
            Caller(Identity.new(bytes([number + 1]) * 32), self.channel(), HUB.key, "", host.clock.now),
            DirectObjects(self.blobs, HUB.key, host.clock.now),
            clock=host.clock,
            compute=host.compute,
            entropy=host.entropy,
            report=lines.append,
            **kwargs,
        )
        self.miners.append(miner)
        self.hosts.append(host)
        return host.spawn(miner.run())

    async def audit(self):
        """Replay every segment whose evidence is there, with the validator's own code."""
        config, cuts = self.manifest.config, self.manifest.cuts
        objects = DirectObjects(self.blobs, HUB.key, self.hub.clock.now)
        reader = TokenReader.train(self.manifest, self.blobs.get)
        replayer = InlineReplayer(Engine(config, cuts, "cpu", "float32"), self.hub.compute)
        auditor = Auditor(self.manifest, objects, reader, replayer, self.hub.compute, self.hub.clock)
        while not self.node.finished:
            for audit in self.node.machine.open_audits():
                if audit.state == "ready" and audit.audit not in self.verdicts:
                    now = self.hub.clock.now()
                    sheet = sheets.audit_sheet(self.node.linker, self.node.machine, self.node.archive, audit.audit, now)
                    task = tasks.Audit(
                        task=0, audit=audit.audit, epoch=audit.epoch, stage=audit.stage, start_step=audit.start,
                        stop_step=audit.stop, deadline=now + 60,
                    )  # fmt: skip
                    data = bytes(sheet.data)
                    found = await auditor.audit(task, msgspec.msgpack.decode(data, type=tasks.AuditSheet))
                    self.verdicts[audit.audit] = (found.verdict, found.why)
            await self.hub.clock.sleep(0.5)

    async def stop(self):
        await self.node.close()
        await self.ticking


def events_of(swarm, *kinds):
    rows = [ev.decode(row.payload) for row in swarm.node.journal.replay()]
    return [event for event in rows if isinstance(event, kinds)]


def run_swarm(tmp_path, config, count=4, meanwhile=None, worker=None, **options):
    box = {}

    async def main():
        swarm = box["swarm"] = Swarm(asyncio.get_running_loop(), tmp_path, config, **options)
        tasks = await swarm.start(count, worker)
        auditing = swarm.hub.spawn(swarm.audit())
        if meanwhile is not None:
            await meanwhile(swarm)
        box["ends"] = await asyncio.gather(*tasks, return_exceptions=True)
        await auditing
        await swarm.stop()

    simulate(main(), limit=3600.0)
    return box["swarm"], box["ends"]


def honest(swarm):
    """Every segment drawn was shown, and the validator found each valid."""
    drawn, shown = events_of(swarm, ev.AuditDrawn), events_of(swarm, ev.EvidenceShown)
    assert len(drawn) >= len(shown) > 3 and not any(e.problem for e in shown)
    assert swarm.verdicts and all(verdict == "valid" for verdict, _ in swarm.verdicts.values()), swarm.verdicts
    return all("equal to the bit" in why for _, why in swarm.verdicts.values())


@pytest.mark.parametrize(
    "merge",
    [dict(outer="nesterov"), dict(outer="assign", inner_state="carry"), dict(outer="nesterov", inner_state="reset")],
)
def test_two_epochs_of_two_stages_with_two_miners_each(tmp_path, merge):
    swarm, ends = run_swarm(tmp_path, two_by_two(**merge))
    assert all(end.startswith("finished") for end in ends), ends
    merged = events_of(swarm, ev.StageMerged)
    assert [(e.epoch, e.stage, e.merged) for e in merged] == [(1, 0, True), (1, 1, True), (2, 0, True), (2, 1, True)]
    assert {e.how for e in events_of(swarm, ev.ShardSettled)} == {"agreed"}
    assert not [(e.code, e.text) for e in events_of(swarm, ev.Declined)]
    assert len(events_of(swarm, ev.AuditDrawn)) == len(events_of(swarm, ev.EvidenceShown)) > 4
    assert honest(swarm)
    assert not list((tmp_path / "miner-0" / "retained").rglob("*.bin"))


def test_a_stage_that_takes_long_to_make_does_not_cost_the_session(tmp_path):
    making = TINY.limits.silence + 5.0
    swarm, ends = run_swarm(tmp_path, two_by_two(gather_limit=60.0), making=making)
    assert all(end.startswith("finished") for end in ends), ends
    assert [e.session for e in events_of(swarm, ev.SessionOpened)] == [1, 1, 1, 1]
    assert not [e for e in events_of(swarm, ev.Gone) if e.how == "dead"]


def test_a_miner_that_does_not_fit_takes_no_task(tmp_path):
    async def main():
        swarm = Swarm(asyncio.get_running_loop(), tmp_path, two_by_two())
        (task,) = await swarm.start(1)
        miner = swarm.miners[0]
        miner.settings = dataclasses.replace(miner.settings, max_memory=1)
        with pytest.raises(IotaError, match="--max-memory allows 1"):
            await task
        leases = dict(swarm.node.machine.soft.lease)
        await swarm.hub.clock.sleep(TINY.limits.silence + 2.0)
        alive = swarm.node.machine.state.members[0].alive
        await swarm.stop()
        return leases, alive

    assert simulate(main(), limit=600.0) == ({}, False)


def test_a_miner_that_returns_to_another_stage_reads_tokens_only_there(tmp_path):
    config = msgspec.structs.replace(
        two_by_two(),
        model=msgspec.structs.replace(TINY.model, blocks=3),
        stages=msgspec.structs.replace(TINY.stages, count=3, codec="bottleneck"),
    )

    async def main():
        swarm = Swarm(asyncio.get_running_loop(), tmp_path, config)
        (task,) = await swarm.start(1)
        task.cancel()
        miner, reads = swarm.miners[0], []
        for number, stage in enumerate((0, 1, 2), 1):
            session = Session(number, stage, swarm.manifest)
            await miner._begin(session, miner._fit(session))
            reads.append(miner._tokens is not None)
            miner._end()
        await swarm.stop()
        return reads

    assert simulate(main(), limit=600.0) == [True, False, True]


class Watched(StageWorker):
    """Counts the backwards whose input came with the task."""

    taken: ClassVar[list] = []

    def run_backward(self, sample, gradient, x, ids):
        if x is not None:
            self.taken.append((self.stage, sample))
        return super().run_backward(sample, gradient, x, ids)


def test_a_miner_dies_and_a_neighbour_takes_its_backwards(tmp_path):
    config = msgspec.structs.replace(
        two_by_two(outer="nesterov", quorum=0.5),
        model=TINY.model,
        stages=TINY.stages,
    )

    async def kill_one(swarm):
        state = swarm.node.machine.state
        while True:  # until a middle-stage member has done a forward whose backward is still to come
            paths = [s.path[1][0] for s in state.samples.values() if s.stage == 2 and s.path[1][0] >= 0]
            if paths:
                break
            await swarm.hub.clock.sleep(0.01)
        key = state.members[paths[0]].key
        next(h for h, m in zip(swarm.hosts, swarm.miners, strict=True) if m.status.key == key).kill()

    Watched.taken.clear()
    swarm, ends = run_swarm(tmp_path, config, 6, kill_one, Watched)
    assert sum(isinstance(end, str) and end.startswith("finished") for end in ends) == 5, ends
    assert Watched.taken and {stage for stage, _ in Watched.taken} == {1}
    assert honest(swarm)


def test_a_miner_that_drains_leaves_when_its_work_is_booked(tmp_path):
    async def drain_one(swarm):
        while not any(m.passes for m in swarm.node.machine.state.members):
            await swarm.hub.clock.sleep(0.1)
        swarm.miners[0].drain()
        box.append(swarm.hub.clock.now())
        while swarm.miners[0].worker is not None:
            await swarm.hub.clock.sleep(0.05)
        box.append(swarm.hub.clock.now())

    box = []
    swarm, ends = run_swarm(tmp_path, two_by_two(outer="assign", quorum=0.5), meanwhile=drain_one)
    assert ends[0].startswith("drained") and all(end.startswith("finished") for end in ends[1:]), ends
    assert box[1] - box[0] < 5.0
    assert honest(swarm)


def test_lost_replies_change_nothing(tmp_path):
    """Every third reply is lost after it took effect: joins, passes, steps, commits, everything is said again."""
    swarm, ends = run_swarm(tmp_path, two_by_two(outer="nesterov"), flaky=True)
    assert all(end.startswith("finished") for end in ends), ends
    assert not [(e.code, e.text) for e in events_of(swarm, ev.Declined)]
    passes = [(e.kind, e.sample, e.stage) for e in events_of(swarm, ev.Passed)]
    assert len(passes) == len(set(passes)) > 20
    assert {e.how for e in events_of(swarm, ev.ShardSettled)} == {"agreed"}
    assert honest(swarm)
    assert sum("does not answer" in line for line in swarm.lines[0]) > 10
