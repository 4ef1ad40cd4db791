"""state = fold(events). One function an event type; no decisions here, so replay needs neither clock nor randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iota.core.machine import events as ev
from iota.core.machine.state import (
    KEPT_EPOCHS,
    AuditRecord,
    Commitment,
    EpochRecord,
    Facts,
    Member,
    MergeSummary,
    RunState,
    Sample,
    StageMerge,
)
from iota.core.pay import ABSENT, HISTORY


def fold(state: RunState, event: ev.Event) -> None:
    """Apply one event. Raises KeyError for an event that contradicts the state: the journal is not this run's."""
    _FOLD[type(event)](state, event)


# ------------------------------------------------------------------------------------------------ run and members


def _run_started(s: RunState, e: ev.RunStarted) -> None:
    s.run, s.started, s.phase_at = e.run, e.at, e.at
    s.checkpoints = list(e.checkpoints)
    _keep_complete(s)
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


def _answered(m: Member, seq: int, body: str, code: str | None = None, text: str = "", step: bool = False) -> None:
    m.last_seq, m.last_body, m.last_code, m.last_text, m.last_step = seq, body, code, text, step


def _loaded(s: RunState, e: ev.Loaded) -> None:
    m = s.members[e.number]
    _answered(m, e.seq, e.body)
    m.loaded = e.epoch
    m.passes = m.pending = 0
    m.facts = None


def _declined(s: RunState, e: ev.Declined) -> None:
    _answered(s.members[e.number], e.seq, e.body, e.code, e.text)


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
    s.samples[e.sample] = Sample(
        e.sample, e.number, holder=e.number, path=[(-1, 0)] * s.stages, inputs=[""] * s.stages
    )


def _facts(s: RunState, m: Member) -> Facts:
    if m.facts is None:
        m.facts = Facts(m.number, m.session, m.stage, s.epoch)
        s.facts[(s.epoch, m.number, m.session)] = m.facts
    return m.facts


def _passed(s: RunState, e: ev.Passed) -> None:
    m = s.members[e.number]
    _answered(m, e.seq, e.body, step=e.step)
    facts = m.facts or _facts(s, m)
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
        _answered(m, e.seq, e.body, step=True)
    facts = _facts(s, m)
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


# -------------------------------------------------------------------------------------------------------- merging


def _committed(s: RunState, e: ev.Committed) -> None:
    m = s.members[e.number]
    _answered(m, e.seq, e.body)
    facts = _facts(s, m)
    facts.committed, facts.root = True, e.root
    facts.cuts = list(e.cuts)
    facts.heads.append(e.head)
    s.commitments[e.number] = Commitment(
        e.number, e.root, e.length, e.digest, e.manifest_length, e.manifest_digest, e.steps
    )
    s.record().steps[e.number] = e.steps


def _uploaded(s: RunState, e: ev.Uploaded) -> None:
    _answered(s.members[e.number], e.seq, e.body)
    s.commitments[e.number].uploaded = True


def _planned(s: RunState, e: ev.Planned) -> None:
    n = len(e.members)
    if n:
        s.merges[e.stage] = StageMerge(e.stage, e.members, e.weights, e.seed, e.chunks, max(1, n * (n - 1) // 2))
    record = s.record()
    record.effective_batch[e.stage] = e.effective_batch
    record.missed.update(e.missed)


def _shard_reported(s: RunState, e: ev.ShardReported) -> None:
    if e.number >= 0:
        _answered(s.members[e.number], e.seq, e.body)
    merge = s.merges[e.stage]
    for shard, parts, length, digest, obj in e.shards:
        if e.third:
            merge.third[shard] = (parts, length, digest, obj, e.number)
        else:
            merge.reports.setdefault(shard, {})[e.number] = (parts, length, digest, obj)
    merge.bad.extend((shard, number, e.number, why) for shard, number, why in e.bad)


def _shard_reassigned(s: RunState, e: ev.ShardReassigned) -> None:
    s.merges[e.stage].extra_owners.setdefault(e.shard, []).append(e.owner)


def _shard_settled(s: RunState, e: ev.ShardSettled) -> None:
    s.merges[e.stage].settled[e.shard] = (e.how, e.winner, e.liars)


def _stage_merged(s: RunState, e: ev.StageMerged) -> None:
    s.checkpoints[e.stage] = e.checkpoint
    s.t[e.stage] = e.checkpoint.t
    _keep_complete(s)
    record = s.record()
    record.merged[e.stage] = e.merged
    merge = s.merges.get(e.stage)
    if merge is not None:
        merge.done = True
        record.matrix[e.stage] = merge
        record.summary[e.stage] = _summary(merge)


def _keep_complete(s: RunState) -> None:
    """The last few checkpoints that every stage has: what validators measure."""
    epoch = s.checkpoints[0].epoch
    if all(checkpoint.epoch == epoch for checkpoint in s.checkpoints):
        s.complete[epoch] = tuple(s.checkpoints)
        for old in sorted(s.complete)[: -s.config.limits.keep_checkpoints]:
            del s.complete[old]


def _summary(merge: StageMerge) -> MergeSummary:
    summary = MergeSummary(merge.members, merge.weights, bad=len(merge.bad))
    for how, _, liars in merge.settled.values():
        summary.settled[how] = summary.settled.get(how, 0) + 1
        for number in liars:
            summary.liars[number] = summary.liars.get(number, 0) + 1
    return summary


# ------------------------------------------------------------------------------------------- audits, pay, operators


def _audit_drawn(s: RunState, e: ev.AuditDrawn) -> None:
    s.audits[e.audit] = AuditRecord(e.audit, e.epoch, e.number, e.session, e.stage, e.segment, e.start, e.stop, e.until)
    s.next_audit = e.audit + 1


def _evidence_shown(s: RunState, e: ev.EvidenceShown) -> None:
    audit = s.audits[e.audit]
    audit.state, audit.until = "ready", e.until


def _verdict_given(s: RunState, e: ev.VerdictGiven) -> None:
    if e.validator >= 0:
        _answered(s.members[e.validator], e.seq, e.body)
    audit = s.audits[e.audit]
    audit.verdict, audit.why, audit.worst, audit.validator = e.verdict, e.why, e.worst, e.validator
    audit.seconds = e.seconds
    if e.final:
        m = s.members[audit.number]
        if e.verdict == "inconclusive" and audit.state == "show" and (not m.alive or m.session != audit.session):
            _note(m, ABSENT)
        audit.state = "closed"
        m.last_verdict = f"epoch {audit.epoch}: {e.verdict} ({e.why})"
        if e.verdict != "inconclusive":
            _note(m, e.verdict)
        counts = s.epochs[audit.epoch].verdicts
        counts[e.verdict] = counts.get(e.verdict, 0) + 1
    else:
        audit.until = e.until


def _note(m: Member, verdict: str) -> None:
    m.history = [*m.history, verdict][-HISTORY:]


def _heldout(s: RunState, e: ev.HeldoutMeasured) -> None:
    _answered(s.members[e.validator], e.seq, e.body)
    record = s.epochs.get(max(e.epoch, 1))
    if record is not None:
        record.heldout[e.validator if e.epoch else -1 - e.validator] = e.loss


def _epoch_paid(s: RunState, e: ev.EpochPaid) -> None:
    s.ledger.append(e.ledger)
    s.epochs[e.ledger.epoch].paid = True
    for key, amount in e.ledger.emissions:
        s.members[s.by_key[key]].paid += amount
    for (epoch, number, _), facts in s.facts.items():
        if epoch == e.ledger.epoch and facts.accepted and not facts.committed:
            _note(s.members[number], ABSENT)
    _drop_old(s, e.ledger.epoch)


def _drop_old(s: RunState, paid: int) -> None:
    """What no draw, redraw or verdict can ask for any more goes: an epoch's facts (a head for every pass) once its
    redraws are over, single audits and shard reports much later. Records, summaries and the ledger stay."""
    redraws = s.config.audit.redraws
    needed = {(a.epoch, a.number, a.session) for a in s.audits.values() if a.state != "closed"}
    s.facts = {k: f for k, f in s.facts.items() if k[0] >= paid - redraws or k in needed}
    oldest = paid - max(redraws, KEPT_EPOCHS)
    if oldest > 0:
        s.epochs[oldest].matrix = {}
        s.audits = {k: a for k, a in s.audits.items() if a.epoch > oldest or a.state != "closed"}


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
    ev.Committed: _committed,
    ev.Uploaded: _uploaded,
    ev.Planned: _planned,
    ev.ShardReported: _shard_reported,
    ev.ShardReassigned: _shard_reassigned,
    ev.ShardSettled: _shard_settled,
    ev.StageMerged: _stage_merged,
    ev.AuditDrawn: _audit_drawn,
    ev.EvidenceShown: _evidence_shown,
    ev.VerdictGiven: _verdict_given,
    ev.HeldoutMeasured: _heldout,
    ev.EpochPaid: _epoch_paid,
    ev.Operated: _operated,
    ev.Extended: _extended,
}
