"""state = fold(events). One function an event type; no decisions here, so replay needs neither clock nor randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iota.core.machine import events as ev
from iota.core.machine import fold_merging as later
from iota.core.machine.state import (
    EpochRecord,
    Member,
    RunState,
    Sample,
)


def fold(state: RunState, event: ev.Event) -> None:
    """Apply one event. Raises KeyError for an event that contradicts the state: the journal is not this run's."""
    _FOLD[type(event)](state, event)


# ------------------------------------------------------------------------------------------------ run and members


def _run_started(s: RunState, e: ev.RunStarted) -> None:
    s.run, s.started, s.phase_at = e.run, e.at, e.at
    s.checkpoints = list(e.checkpoints)
    later.keep_complete(s)
    s.t = [c.t for c in e.checkpoints]
    s.epoch = 1


def _restarted(s: RunState, e: ev.Restarted) -> None:
    s.boots += 1
    if s.paused is None:  # a pause ends with `resume`, which counts all of its time
        _stood_still(s, e.down)
    returned = []
    for sample in list(s.samples.values()):
        if sample.backwards:
            s.record().samples_partial += 1
        else:
            s.record().samples_returned += 1
            returned.append(sample.id)
        del s.samples[sample.id]
    s.queue = sorted(returned) + s.queue


def _stood_still(s: RunState, seconds: float) -> None:
    """Open deadlines move by the time that was lost, and it counts as nobody's run time."""
    s.paused_total += seconds
    record = s.epochs.get(s.epoch)
    if record is not None:
        record.held[s.phase] = record.held.get(s.phase, 0.0) + seconds
    if s.phase_until is not None:
        s.phase_until += seconds
        if record is not None:
            record.until[s.phase] = s.phase_until
    for audit in s.audits.values():
        if audit.state != "closed":
            audit.until += seconds


def _registered(s: RunState, e: ev.Registered) -> None:
    s.members.append(Member(e.number, e.key, e.role, e.owner, e.founder, e.stake, e.at))
    s.by_key[e.key] = e.number


def _session_opened(s: RunState, e: ev.SessionOpened) -> None:
    m = s.members[e.number]
    _drop_holds(s, e.number)
    m.session, m.stage, m.token, m.alive, m.why_gone = e.session, e.stage, e.token, True, ""
    m.loaded, m.starts, m.software, m.device, m.dtype = -1, e.starts, e.software, e.device, e.dtype
    m.passes = m.pending = m.last_seq = 0
    m.last_body, m.last_code, m.last_text, m.last_step, m.facts = "", None, "", False, None


def _gone(s: RunState, e: ev.Gone) -> None:
    m = s.members[e.number]
    m.alive, m.why_gone = False, f"{e.how}: {e.why}"
    m.passes = m.pending = 0
    _drop_holds(s, e.number)


def _drop_holds(s: RunState, number: int) -> None:
    """Nobody holds what a lost session held; `Rerouted` follows when there is a neighbour."""
    for sample in s.samples.values():
        if sample.holder == number:
            sample.holder = -1


def _moved(s: RunState, e: ev.Moved) -> None:
    m = s.members[e.number]
    m.stage, m.loaded = e.stage, -1


def _loaded(s: RunState, e: ev.Loaded) -> None:
    m = s.members[e.number]
    m.answered(e.seq, e.body)
    m.loaded = e.epoch
    m.passes = m.pending = 0
    m.facts = None


def _declined(s: RunState, e: ev.Declined) -> None:
    s.members[e.number].answered(e.seq, e.body, e.code, e.text)


# -------------------------------------------------------------------------------------------------------- phases


def _phase_began(s: RunState, e: ev.PhaseBegan) -> None:
    again = s.phase == e.phase and s.epoch == e.epoch  # a new deadline of the same phase
    s.phase_at = s.phase_at if again else e.at
    s.phase, s.epoch, s.phase_until, s.phase_why = e.phase, e.epoch, e.until, e.why
    s.announced = e.members or s.announced
    record = s.epochs.get(e.epoch)
    if record is not None:
        record.began[e.phase] = s.phase_at
        record.until[e.phase] = e.until
        record.why[e.phase] = e.why
        if e.phase == "finishing":
            record.closed = e.at
    s.extended = False
    if e.phase == "commit":
        s.commitments, s.merges = {}, {}


def _epoch_opened(s: RunState, e: ev.EpochOpened) -> None:
    if e.epoch - 1 in s.epochs:
        s.epochs[e.epoch - 1].closed = e.at
    s.epoch, s.phase, s.phase_at, s.phase_until = e.epoch, "train", e.at, e.until
    s.phase_why = "training"
    s.secret_digest = e.secret_digest
    record = EpochRecord(e.epoch, e.at, e.tokens, e.t, e.tokens_per_step, e.segment_steps, e.members)
    record.began["train"], record.until["train"] = e.at, e.until
    s.epochs[e.epoch] = record
    for m in s.members:
        m.passes = m.booked = m.pending = 0
        m.facts = None


# ------------------------------------------------------------------------------------------------------- training


def _opened(s: RunState, e: ev.Opened) -> None:
    if e.again:
        s.queue.remove(e.sample)
    else:
        s.next_sample = e.sample + 1
    s.opened_total += 1
    if s.config.train.pipeline == "synchronous":
        fresh = not s.samples and not any(m.pending for m in s.members)
        s.window = 1 if fresh else s.window + 1
    s.samples[e.sample] = Sample(e.sample, e.number, holder=e.number, path=[(-1, 0)] * s.stages, inputs=[""] * s.stages)


def _passed(s: RunState, e: ev.Passed) -> None:
    m = s.members[e.number]
    m.answered(e.seq, e.body, step=e.step)
    facts = m.facts or s.facts_of(m)
    sample = s.samples[e.sample]
    x = sample.inputs[e.stage]
    facts.heads.append(e.head)
    facts.kinds.append(e.kind)
    facts.samples.append(e.sample)
    facts.given.append((sample.gradient if e.kind == "b" else x, x))
    facts.outs.append(e.out)
    facts.losses.append(e.loss)
    facts.seconds += e.seconds
    if e.cut is not None:
        facts.cuts.append(e.cut)
    if e.kind != "b":
        sample.path[e.stage] = (e.number, m.session)
    if e.kind == "f":
        sample.stage, sample.holder = e.stage + 1, e.route[2]
        sample.inputs[e.stage + 1] = e.out
        return
    sample.gradient = e.out
    _count_pass(s, m, sample, e)
    if e.step:
        facts.averaged.append(m.pending)
        facts.steps += 1
        m.pending = 0
    if e.kind == "l":
        sample.loss = e.loss
        record = s.record()
        record.losses += 1
        record.loss_sum += e.loss or 0.0
        s.tokens += s.config.train.batch * s.config.model.sequence
        sample.kind = "b"
    if e.stage == 0:
        s.record().samples_full += 1
        del s.samples[e.sample]
    else:
        sample.stage, sample.holder = e.stage - 1, e.route[2]


def _count_pass(s: RunState, m: Member, sample: Sample, e: ev.Passed) -> None:
    m.passes += 1
    m.booked += 1
    m.pending += 1
    m.total += 1
    sample.backwards += 1
    assert m.facts is not None
    m.facts.accepted.append(e.sample)
    record = s.record()
    record.passes[e.number] = record.passes.get(e.number, 0) + 1
    record.stages[e.number] = e.stage


def _stepped(s: RunState, e: ev.Stepped) -> None:
    m = s.members[e.number]
    if m.last_seq == e.seq:  # the same answer also accepts a result: that verdict stays what it is
        m.last_step = True
    else:
        m.answered(e.seq, e.body, step=True)
    facts = s.facts_of(m)
    facts.averaged.append(m.pending)
    facts.steps += 1
    m.pending = 0


def _rerouted(s: RunState, e: ev.Rerouted) -> None:
    sample = s.samples[e.sample]
    sample.holder = e.route[2]
    sample.attempt += 1


def _sample_closed(s: RunState, e: ev.SampleClosed) -> None:
    del s.samples[e.sample]
    if e.how == "returned":
        s.record().samples_returned += 1
        s.queue = sorted([*s.queue, e.sample])
    else:
        s.record().samples_partial += 1


# ----------------------------------------------------------------------------------------------------- operators


def _operated(s: RunState, e: ev.Operated) -> None:
    if e.command == "pause":
        s.paused = e.at
    elif e.command == "resume":
        s.paused = None
        _stood_still(s, e.down)
    elif e.command == "stop":
        s.stop_requested = f"stopped by operator {e.by[:8]}"
    elif e.command == "ban":
        s.banned.add(e.target)
        if e.target in s.by_key:
            s.members[s.by_key[e.target]].banned = True
    elif e.command == "allow":
        s.banned.discard(e.target)
        if s.allowed:  # an open run stays open: allowing one key must not shut out all others
            s.allowed.add(e.target)
        if e.target in s.by_key:
            s.members[s.by_key[e.target]].banned = False


def _extended(s: RunState, e: ev.Extended) -> None:
    s.stop, s.stop_requested = e.stop, ""
    s.extended = s.phase == "finished"


_FOLD: dict[type, Callable[[RunState, Any], None]] = {
    ev.RunStarted: _run_started,
    ev.Restarted: _restarted,
    ev.Registered: _registered,
    ev.SessionOpened: _session_opened,
    ev.Moved: _moved,
    ev.Gone: _gone,
    ev.Loaded: _loaded,
    ev.Declined: _declined,
    ev.PhaseBegan: _phase_began,
    ev.EpochOpened: _epoch_opened,
    ev.Opened: _opened,
    ev.Passed: _passed,
    ev.Stepped: _stepped,
    ev.Rerouted: _rerouted,
    ev.SampleClosed: _sample_closed,
    ev.Committed: later.committed,
    ev.Uploaded: later.uploaded,
    ev.Planned: later.planned,
    ev.ShardReported: later.shard_reported,
    ev.ShardReassigned: later.shard_reassigned,
    ev.ShardSettled: later.shard_settled,
    ev.StageMerged: later.stage_merged,
    ev.AuditDrawn: later.audit_drawn,
    ev.EvidenceShown: later.evidence_shown,
    ev.VerdictGiven: later.verdict_given,
    ev.HeldoutMeasured: later.heldout,
    ev.EpochPaid: later.epoch_paid,
    ev.Operated: _operated,
    ev.Extended: _extended,
}
