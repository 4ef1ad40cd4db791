"""TRAIN and its drain: opening samples, SWARM routing, accepting results, re-routing what a lost member held.

Design section 3.1; SWARM parallelism (arXiv 2301.11913) for the stochastic wiring, here with two random candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iota.core import seeds, tasks
from iota.core.machine import auditing
from iota.core.machine import events as ev
from iota.core.machine.soft import Lease
from iota.core.machine.state import Member, Sample

if TYPE_CHECKING:
    from iota.core.machine.machine import Machine

PASSES = ("f", "b", "l")
"""Lease kinds: a forward, a backward, the last stage's both in one."""
NOBODY = (-1, -1, -1)
REST = 1.0
"""Seconds that a member is left alone after it failed at something."""
SHORT_REST = 0.1
"""The same when it could not use what it was given, which is now somebody else's."""
MAX_ATTEMPTS = 3
"""A sample that more than so many members in turn could not use (a tensor on its way makes everything overflow) starts
anew instead of going round and keeping a whole stage busy."""


def lease_seconds(mc: Machine, stage: int, kind: str) -> float:
    """How long a member may hold a task: three times the 90th percentile of the stage's recent ones plus grace."""
    recent = mc.soft.quantile(stage, kind, 0.9)
    limits = mc.state.config.limits
    return limits.lease if recent is None else max(3.0 * recent, 2.0) + limits.grace


def max_in_flight(mc: Machine) -> int:
    return mc.state.config.train.max_in_flight or mc.state.stages + 1


# ------------------------------------------------------------------------------------------------------- routing


def route(mc: Machine, sample: int, stage: int, attempt: int, kind: str, lost: int = -1) -> tuple[int, int, int]:
    """Draw two live members of a stage, take the one that would be free sooner: (candidate, candidate, choice).

    Members below B_min come first while they are not full, so a slow machine still gets to merge. (-1, -1, -1) when the
    stage has nobody.
    """
    soft, s = mc.soft, mc.state
    live = soft.stage_trainers(s)[stage]
    if lost >= 0:
        live = [m for m in live if m.number != lost]
    if len(live) > 1:
        live = _needy(mc, live)
    if not live:
        return NOBODY
    if len(live) == 1:
        return (live[0].number, -1, live[0].number)
    i, j = seeds.pick_two(s.config.seed, "route", len(live), sample, stage, attempt, kind)
    a, b = live[i].number, live[j].number
    return (a, b, a if _free_in(mc, a) <= _free_in(mc, b) else b)


def _needy(mc: Machine, live: list[Member]) -> list[Member]:
    """Those below B_min that have room, while there are others; else all."""
    minimum, full, load = mc.state.config.merge.min_batches, max_in_flight(mc), mc.soft.load
    if not any(m.passes >= minimum for m in live):
        return live
    short = [m for m in live if m.passes < minimum and load(m.number) < full and _may_lead(mc, m)]
    return short if short and len(short) < len(live) else live


def _free_in(mc: Machine, number: int) -> float:
    return (mc.soft.load(number) + 1) * mc.soft.speed.get(number, 1.0)


def way_back(mc: Machine, sample: Sample, stage: int) -> tuple[int, int, int]:
    """The backward goes to who did the forward; if that session is gone, to a neighbour (who gets the stored input)."""
    number, session = sample.path[stage]
    if number >= 0:
        m, soft = mc.state.members[number], mc.soft
        if m.alive and m.session == session and number not in soft.draining and number not in soft.suspect:
            return (-1, -1, number)
    return route(mc, sample.id, stage, sample.attempt, "b", lost=number)


def needs_input(mc: Machine, sample: Sample, member: Member) -> bool:
    """A backward task must carry the stored input when this session did not do the forward."""
    return sample.path[sample.stage] != (member.number, member.session)


# ------------------------------------------------------------------------------------------------- handing out


def next_task(mc: Machine, m: Member, seq: int, now: float) -> tuple[tasks.Task, object] | None:
    """The member's next pass, or None when there is nothing. Leases it."""
    s = mc.state
    sample = mc.soft.pop(m.number, s)
    if sample is None and m.stage == 0 and s.phase == "train":
        sample = _open(mc, m)
    if sample is None:
        return None
    return _lease(mc, m, sample, now)


def _open(mc: Machine, m: Member) -> Sample | None:
    """Start a new sample at a first-stage member, if the pipeline has room for it."""
    s = mc.state
    if s.config.train.pipeline == "synchronous":
        if not _window_open(mc):
            return None
    elif len(mc.soft.in_flight.get(m.number, ())) >= max_in_flight(mc) or _yields(mc, m):
        return None
    again = bool(s.queue)
    number = s.queue[0] if again else s.next_sample
    mc.emit(ev.Opened(number, m.number, again))
    mc.soft.in_flight.setdefault(m.number, set()).add(number)
    return s.samples[number]


def _yields(mc: Machine, m: Member) -> bool:
    """Once it has B_min, a first-stage member leaves new samples to those of its stage below it that have room."""
    minimum, full = mc.state.config.merge.min_batches, max_in_flight(mc)
    if m.passes < minimum:
        return False
    return any(
        o.passes < minimum and len(mc.soft.in_flight.get(o.number, ())) < full
        for o in mc.soft.stage_trainers(mc.state)[0]
        if o is not m and _may_lead(mc, o)
    )


def _may_lead(mc: Machine, m: Member) -> bool:
    """Whether others may stand back for a member below B_min: not while it fails at its tasks, nor when samples that it
    began this epoch came to nothing."""
    return m.number not in mc.soft.rest and m.number not in mc.soft.spoiled


def _window_open(mc: Machine) -> bool:
    """Synchronous pipeline: a window is accumulate x (members of the narrowest stage) samples; a new one starts when
    all of the last are accepted everywhere and everyone with a pass has been told to step."""
    s = mc.state
    if not all(mc.soft.stage_trainers(s)):
        return False
    if s.samples or any(m.pending for stage in mc.soft.stage_trainers(s) for m in stage):
        return not _window_full(mc)
    return True


def _window_full(mc: Machine) -> bool:
    s = mc.state
    return s.window >= s.config.train.accumulate * min(len(stage) for stage in mc.soft.stage_trainers(s))


def step_due(mc: Machine, m: Member) -> bool:
    """True when a member must step outside of an accepting reply: at a synchronous window's end, or at the drain's."""
    s = mc.state
    if s.config.train.pipeline != "synchronous" or m.pending == 0 or s.samples:
        return False
    return s.phase == "drain" or (s.phase == "train" and _window_full(mc))


def _lease(mc: Machine, m: Member, sample: Sample, now: float) -> tuple[tasks.Task, object]:
    task_id = mc.soft.next_task(mc.state.boots)
    deadline = now + lease_seconds(mc, sample.stage, sample.kind)
    if mc.state.phase == "drain" and mc.state.phase_until is not None:
        deadline = min(deadline, mc.state.phase_until)  # nothing done by its announced deadline is thrown away
    task: tasks.Task
    if sample.kind == "f":
        task = tasks.Forward(
            task=task_id,
            epoch=mc.state.epoch,
            sample=sample.id,
            attempt=sample.attempt,
            deadline=deadline,
            origin=b"",
        )
        attach: object = ("activation", sample.id, sample.stage) if sample.stage else None
    else:
        with_input = needs_input(mc, sample, m)
        task = tasks.Backward(
            task=task_id,
            epoch=mc.state.epoch,
            sample=sample.id,
            attempt=sample.attempt,
            deadline=deadline,
            origin=b"",
            with_input=with_input,
            input_origin=b"",
        )
        attach = ("gradient", sample.id, sample.stage, with_input)
    kind = "l" if sample.kind == "f" and sample.stage == mc.state.stages - 1 else sample.kind
    mc.soft.lease[m.number] = Lease(task_id, kind, sample.id, now, deadline, task, attach)
    return task, attach


# --------------------------------------------------------------------------------------------------- accepting


def on_passed(mc: Machine, m: Member, seq: int, body: str, r: tasks.Passed, now: float) -> None:
    """Judge a forward or backward result and route the sample on. Emits `Passed` or `Declined`."""
    s, soft = mc.state, mc.soft
    lease = soft.lease.get(m.number)
    sample = s.samples.get(r.sample)
    if (
        lease is None
        or lease.task != r.task
        or lease.kind not in PASSES
        or lease.subject != r.sample
        or sample is None
        or sample.holder != m.number
    ):
        mc.decline(
            m, seq, body, "lease_lost", f"task {r.task} of sample {r.sample} is no longer yours: it was re-issued"
        )
        return
    del soft.lease[m.number]
    kind, stage = lease.kind, sample.stage
    if (r.loss is not None) != (kind == "l") or (r.loss is not None and not 0.0 <= r.loss < 1e6):
        mc.decline(m, seq, body, "bad_input", f"loss {r.loss} cannot be for a {kind} pass of stage {stage}")
        reroute(mc, sample, "a result that cannot be", m.number)
        return
    took = max(0.0, now - lease.issued)
    seconds = r.seconds if 0.0 <= r.seconds <= took + 1.0 else took  # claimed, within what can be (NaN cannot)
    soft.note(stage, sample.kind, m.number, took, seconds)
    onward: tuple[int, ...] = ()
    if kind == "f":
        onward = route(mc, sample.id, stage + 1, sample.attempt, "f")
    elif stage > 0:
        onward = way_back(mc, sample, stage - 1)
    step = kind != "f" and s.config.train.pipeline == "asynchronous" and m.pending + 1 >= s.config.train.accumulate
    first = sample.first
    mc.emit(
        ev.Passed(
            m.number, seq, body, kind, r.sample, stage, r.head, r.inp, r.out, r.cut, r.loss, seconds, r.recomputed,
            step, onward,
        )
    )  # fmt: skip
    if onward:
        if onward[2] >= 0:
            soft.push(onward[2], sample)
    else:
        _sample_left(mc, r.sample, first)
    if kind != "f" and m.passes == s.config.merge.min_batches:
        mc.check_phase = True


def _sample_left(mc: Machine, sample: int, first: int) -> None:
    """A sample closed: its first-stage member has room again, its tensors may go."""
    soft = mc.soft
    if first in soft.in_flight:
        soft.in_flight[first].discard(sample)
    soft.released.append(sample)
    soft.wake.add(first)
    if not mc.state.samples:
        mc.check_phase = True
        soft.wake.update(m.number for stage in soft.stage_trainers(mc.state) for m in stage)


def on_failed(mc: Machine, m: Member, seq: int, body: str, r: tasks.Failed, now: float) -> None:
    """A peer could not do its task: somebody else gets it, and it is left alone for a moment. An audit that a validator
    could not do is inconclusive."""
    lease = mc.soft.lease.get(m.number)
    mc.decline(m, seq, body, r.code[:32] or "failed", r.text)
    if lease is None or lease.task != r.task:
        return
    del mc.soft.lease[m.number]
    if lease.kind == "audit":
        auditing.on_failed(mc, lease.subject, r)
    sample = mc.state.samples.get(lease.subject) if lease.kind in PASSES else None
    given = r.code in ("not_finite", "bad_input")
    if sample is not None and sample.holder == m.number:
        if given and sample.attempt >= MAX_ATTEMPTS:
            mc.soft.spoiled.add(sample.first)
            _close(mc, sample, f"{sample.attempt + 1} times what was given for it could not be used")
        else:
            reroute(mc, sample, f"{m.key[:8]} failed: {r.code}", m.number)
    elsewhere = given and sample is not None and sample.holder != m.number  # it may well do other samples
    mc.soft.rest[m.number] = now + (SHORT_REST if elsewhere else REST)


# -------------------------------------------------------------------------------------------------- re-routing


def reroute(mc: Machine, sample: Sample, why: str, lost: int) -> None:
    """Give a sample's next task to a neighbour of who lost it; to the same member when the stage has no other.

    A sample for which the stage has nobody at all stays without holder until somebody loads (`adopt`)."""
    attempt = sample.attempt + 1
    onward = route(mc, sample.id, sample.stage, attempt, sample.kind, lost)
    if onward[2] < 0 and lost >= 0:
        onward = route(mc, sample.id, sample.stage, attempt, sample.kind)
    if onward[2] < 0 and sample.holder < 0:
        return
    mc.emit(ev.Rerouted(sample.id, sample.stage, sample.kind, lost, onward, why))
    if onward[2] >= 0:
        mc.soft.push(onward[2], sample)


def held_by(mc: Machine, number: int) -> list[Sample]:
    return [sample for sample in mc.state.samples.values() if sample.holder == number]


def release_holds(mc: Machine, held: list[Sample], why: str, lost: int) -> None:
    """Re-route what a member held (`held_by`, asked before it lost its session)."""
    for sample in held:
        reroute(mc, sample, why, lost)


def adopt(mc: Machine) -> None:
    """Samples that nobody holds go to whoever is there now."""
    for sample in list(mc.state.samples.values()):
        if sample.holder < 0 and mc.soft.stage_trainers(mc.state)[sample.stage]:
            reroute(mc, sample, "a member of the stage is there again", -1)


def expire_leases(mc: Machine, now: float) -> None:
    """Tasks held beyond their deadline are lost: passes, with all that waits behind them, go to neighbours, and a late
    result is answered `lease_lost`. The member is no candidate until it speaks, and dead after `silence` more."""
    soft = mc.soft
    for number, lease in list(soft.lease.items()):
        if now < lease.deadline:
            continue
        del soft.lease[number]
        soft.seen[number] = max(soft.seen.get(number, now), lease.deadline)
        if lease.kind in PASSES:
            soft.suspect.add(number)
            soft.trainers = None
            why = f"not done by its deadline after {lease.deadline - lease.issued:.1f} s"
            release_holds(mc, held_by(mc, number), why, number)


def outstanding(mc: Machine, now: float) -> float:
    """The latest announced deadline of a pass that somebody runs now."""
    return max((x.deadline for x in mc.soft.lease.values() if x.kind in PASSES), default=now)


def close_open_samples(mc: Machine) -> None:
    """The drain's deadline: a sample without any accepted backward returns to the queue, others close as partial."""
    for sample in list(mc.state.samples.values()):
        _close(mc, sample, "the drain ended")


def _close(mc: Machine, sample: Sample, why: str) -> None:
    mc.emit(ev.SampleClosed(sample.id, "partial" if sample.backwards else "returned", why))
    _sample_left(mc, sample.id, sample.first)
