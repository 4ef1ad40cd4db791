"""Shared by fault tests of the whole swarm: a small configuration, invariants watched at every event, and the last line
of each test: the survivors' whole state against the journal, the stores, the books and plain PyTorch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from iota.core import butterfly, ledger
from iota.core.machine import books
from iota.core.machine import events as ev
from iota.core.machine.machine import Machine
from iota.core.manifest import element_range
from iota.core.reduce import coefficients, renormalise
from iota.sim import loop as virtual
from iota.sim.swarm import ORCHESTRATOR, Swarm
from machine_swarm import Books
from reference_replay import Run
from swarm_case import initial, tiny, train_tokens, weights

PHASES = ("train", "drain", "commit", "upload", "reduce", "sync")
QUICK = dict(lease=2.0, grace=0.5, poll=1.0, silence=6.0)


def small(stop="epochs >= 3", **sections):
    """Three stages, float32 boundaries (so that plain PyTorch is the reference), short limits; see `tiny`."""
    base = dict(
        stages=dict(codec="identity", wire_dtype="float32"),
        model=dict(sequence=16),
        data=dict(max_bytes=60_000, heldout_tokens=512, heldout_share=0.05),
        train=dict(accumulate=2, batch=1, lr=2e-3, clip=0.5),
        merge=dict(outer="nesterov", outer_lr=0.7, outer_momentum=0.5, min_batches=4, members=2, phase_limit=8.0,
                   epoch_limit=20.0),
        limits=QUICK,
        audit=dict(segment_steps=2, segments_per_epoch=2, show_limit=20.0, audit_limit=20.0, final_wait=20.0),
    )  # fmt: skip
    for name, value in sections.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and name in base else value
    return tiny(stop=stop, **base)


class Reference(Run):
    """`reference_replay.Run` that also knows what faults do to a merge: shards that kept their old value, and shards
    without somebody's contribution."""

    def fold(self, events):
        self.keys, self.settled, self.bad, self.steps = {}, {}, {}, {}
        for e in events:
            if isinstance(e, ev.Registered):
                self.keys[e.number] = e.key
            elif isinstance(e, ev.ShardSettled):
                self.settled[e.epoch, e.stage, e.shard] = e
            elif isinstance(e, ev.ShardReported):
                for shard, number, _ in e.bad:
                    self.bad.setdefault((e.epoch, e.stage, shard, -2 if e.third else e.number), set()).add(number)
        return super().fold(events)

    def merge(self, e):
        base, plan = self.base[e.stage], self.plans.get(e.stage)
        old = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in base.items()}
        super().merge(e)
        self.steps[e.epoch, e.stage] = base["t"]
        if plan is None or not e.merged:
            return
        layout = butterfly.make_plan([self.keys[n] for n in plan.members], plan.chunks, bytes.fromhex(plan.seed))
        for shard in range(max(1, len(plan.members) * (len(plan.members) - 1) // 2)):
            settled = self.settled.get((e.epoch, e.stage, shard))
            if settled is None:
                continue
            low, high = element_range(*layout.range(shard), len(base["weights"]))
            without = self.bad.get((e.epoch, e.stage, shard, settled.winner), set())
            if settled.how == "kept" or without >= set(plan.members):
                for part in ("weights", "m", "v", "u"):
                    base[part][low:high] = old[part][low:high]
            elif without:
                self.shard_without(e, plan, without, old, low, high)
        self.merged[e.epoch, e.stage] = base["weights"].clone()

    def shard_without(self, e, plan, without, old, low, high):
        """One shard again, with the contributions that its owners could use."""
        c, base = self.config.merge, self.base[e.stage]
        share = coefficients({self.keys[n]: w for n, w in zip(plan.members, plan.weights, strict=True)}, c.weight_cap)
        share = renormalise(share, {self.keys[n] for n in plan.members if n not in without})
        rows = [(share[self.keys[n]], self.miners[n]) for n in plan.members if n not in without]

        def mean(part):
            return sum(s * r.flat(getattr(r, part)) for s, r in rows)[low:high]

        if c.outer == "nesterov":
            delta = old["weights"][low:high] - mean("p")
            base["u"][low:high] = c.outer_momentum * old["u"][low:high] + delta
            step = delta + c.outer_momentum * base["u"][low:high]
            base["weights"][low:high] = old["weights"][low:high] - c.outer_lr * step
        else:
            base["weights"][low:high] = mean("p")
        base["m"][low:high], base["v"][low:high] = mean("m"), mean("v")


class Watch:
    """What must hold at every event."""

    def __init__(self, swarm: Swarm, punctual: bool = True) -> None:
        self.swarm, self.books, self.punctual = swarm, Books(), punctual
        self.synced = 0
        self.merged = {}
        swarm.watchers.append(self.take)

    def take(self, event: ev.Event) -> None:
        self.books.take(event)
        swarm = self.swarm
        if swarm.orchestrator is None:
            return
        s = swarm.state
        for sample in s.samples.values():
            if sample.holder >= 0:
                m = s.members[sample.holder]
                assert m.alive and m.stage == sample.stage, (sample, m)
        if self.punctual and s.paused is None and s.phase_until is not None and isinstance(event, ev.PhaseBegan):
            assert swarm.loop.now() <= s.phase_until + 2.0, (s.phase, s.epoch)
        if isinstance(event, ev.StageMerged):  # now: old checkpoints are cleared away
            self.merged[event.epoch, event.stage] = weights(swarm, event.checkpoint)
        if isinstance(event, ev.EpochOpened) or (isinstance(event, ev.PhaseBegan) and event.phase == "finishing"):
            self.compare_loaded()

    def compare_loaded(self) -> None:
        """Every live miner that proved the checkpoint holds its bytes."""
        swarm, s = self.swarm, self.swarm.state
        for name, miner in swarm.miners.items():
            m, worker = s.member(swarm.key(name)), miner.worker
            if m is None or not m.alive or worker is None or worker.session != m.session or not swarm.up(name):
                continue
            checkpoint = s.checkpoints[m.stage]
            if m.loaded != checkpoint.epoch:
                continue
            wanted = weights(swarm, checkpoint)
            assert np.array_equal(worker.base["weights"], wanted), (name, checkpoint.epoch)
            assert np.array_equal(worker.trainer.state().weights, wanted), (name, checkpoint.epoch)
            assert worker.trainer.state().t == checkpoint.t
            self.synced += 1


def reference(swarm) -> Reference:
    torch.manual_seed(0)
    tokens = torch.from_numpy(train_tokens(swarm).astype(np.int64))
    start = [torch.from_numpy(array.copy()) for array in initial(swarm)]
    return Reference(swarm.manifest.config, swarm.manifest.cuts, start, tokens).fold(swarm.events())


def survive(config, folder: Path, script=None, *, limit=600.0, exact=True, punctual=True, honest=True, **options):
    """Run a swarm with its faults to the end and check what survived. `exact`: merged weights against plain PyTorch
    (not with miners that lie about their state); `honest`: no verdict is invalid."""
    torch.set_num_threads(1)

    async def main(loop):
        swarm = Swarm(loop, config, folder, **options)
        swarm.watch = Watch(swarm, punctual)
        await swarm.start()
        beside = loop.create_task(script(swarm), name="script") if script else None
        await swarm.finish()
        if beside is not None:
            await beside
        return swarm

    swarm = virtual.run(main, limit=limit, leaks_ok=True)
    check(swarm, exact=exact, honest=honest)
    return swarm


def check(swarm, *, exact=True, honest=True) -> None:
    """The last line of every fault test."""
    state, events = swarm.state, swarm.events()
    machine = Machine(swarm.manifest.config, len(swarm.manifest.cuts), swarm.manifest.parameters, "00")
    machine.replay(events)
    assert machine.state == state, "the journal's replay is another state"
    check_books(swarm, state)
    check_ledger(swarm, state)
    assert swarm.watch.synced > 0
    if honest:
        invalid = [(a.epoch, a.number, a.why) for a in state.audits.values() if a.verdict == "invalid"]
        assert invalid == []
    if exact:
        run = reference(swarm)
        for e in events:
            if isinstance(e, ev.StageMerged):
                ours, theirs = swarm.watch.merged[e.epoch, e.stage], run.merged[e.epoch, e.stage].numpy()
                gap = float(np.abs(ours - theirs).max())
                # Rounding adds up over epochs, and Adam magnifies it where a gradient is all but zero. A pass more
                # or less moves weights by the learning rate, 2e-3.
                late = e.epoch > 3
                assert gap <= (1e-4 if late else 1e-6), (e.epoch, e.stage, gap)
                assert float(np.abs(ours - theirs).mean()) <= (1e-6 if late else 1e-7), (e.epoch, e.stage)
                assert e.checkpoint.t == run.steps[e.epoch, e.stage]
        assert all(abs(a - b) < 1e-5 for a, b in run.losses.values())


def check_books(swarm, state) -> None:
    """Every sample is open, waiting to be opened again, or closed exactly once; every pass has one owner."""
    b = swarm.watch.books
    groups = (set(b.open), b.queued, b.full, b.partial)
    assert sum(map(len, groups)) == state.next_sample == b.next
    assert set().union(*groups) == set(range(state.next_sample))
    assert set(state.samples) == set(b.open) and state.queue == sorted(b.queued)
    assert sum(r.samples_full for r in state.epochs.values()) == len(b.full)
    assert sum(r.samples_partial for r in state.epochs.values()) == len(b.partial)
    for m in state.members:
        assert m.total == b.passes.get(m.number, 0)


def check_ledger(swarm, state) -> None:
    policy = books.policy(swarm.orchestrator.machine)
    assert ledger.verify_chain(state.ledger, run=state.run, policy=policy) == []
    pool = state.config.pay.pool
    assert all(sum(units for _, units in e.emissions) + e.burned == pool for e in state.ledger)
    assert sum(m.paid for m in state.members) == sum(units for e in state.ledger for _, units in e.emissions)
    assert state.phase == "finished"
    if state.epoch in state.epochs:
        assert [e.epoch for e in state.ledger] == list(range(1, state.epoch + 1))


# ------------------------------------------------------------------------------------------------------- scripts


def seen(swarm, wanted) -> asyncio.Event:
    """Set inside the very commit that journals the first event for which `wanted(event)` holds."""
    event = asyncio.Event()

    def watch(e):
        if wanted(e):
            event.set()

    swarm.watchers.append(watch)
    return event


def on(swarm, wanted, act) -> None:
    """Call `act` at the first such event, before any reply that rests on it leaves."""
    done = []

    def watch(e):
        if not done and wanted(e):
            done.append(e)
            act()

    swarm.watchers.append(watch)


def some(quick, every):
    """Parameters of which only the quick ones run in `make test`, the others in `make test-all`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in every]


def begins(phase, epoch=1):
    """An event predicate: a phase of an epoch begins."""
    if phase == "train":
        return lambda e: isinstance(e, ev.EpochOpened) and e.epoch == epoch
    return lambda e: isinstance(e, ev.PhaseBegan) and e.phase == phase and e.epoch == epoch


def kinds(swarm, kind):
    return [e for e in swarm.events() if isinstance(e, kind)]


def of_stage(swarm, stage) -> list[str]:
    """Names of a stage's miners: the order of arrival is the network's."""
    return [name for name in swarm.miners if (m := swarm.state.member(swarm.key(name))) and m.stage == stage]


async def reboot(swarm, down: float) -> None:
    """kill -9 of the orchestrator, started again after `down` seconds."""
    swarm.crash(ORCHESTRATOR)
    await asyncio.sleep(down)
    await swarm.start_node(ORCHESTRATOR)


def last_epoch_whole(swarm) -> None:
    """The faults are over: the last epoch merged in every stage, and nothing was kept or disputed in it."""
    s = swarm.state
    assert all(s.record().merged.get(stage) for stage in range(s.stages)), s.record().merged
    for merge in s.record().matrix.values():
        assert {how for how, _, _ in merge.settled.values()} <= {"agreed", "alone"}
