"""The other half of `fold`: what merging, audits and pay fold into."""

from __future__ import annotations

from iota.core.machine import events as ev
from iota.core.machine.state import KEPT_EPOCHS, AuditRecord, Commitment, Member, MergeSummary, RunState, StageMerge
from iota.core.pay import ABSENT, HISTORY

# -------------------------------------------------------------------------------------------------------- merging


def committed(s: RunState, e: ev.Committed) -> None:
    m = s.members[e.number]
    m.answered(e.seq, e.body)
    facts = s.facts_of(m)
    facts.committed, facts.root = True, e.root
    facts.cuts = list(e.cuts)
    facts.heads.append(e.head)
    s.commitments[e.number] = Commitment(
        e.number, e.root, e.length, e.digest, e.manifest_length, e.manifest_digest, e.steps
    )
    s.record().steps[e.number] = e.steps


def uploaded(s: RunState, e: ev.Uploaded) -> None:
    s.members[e.number].answered(e.seq, e.body)
    s.commitments[e.number].uploaded = True


def planned(s: RunState, e: ev.Planned) -> None:
    n = len(e.members)
    if n:
        s.merges[e.stage] = StageMerge(e.stage, e.members, e.weights, e.seed, e.chunks, max(1, n * (n - 1) // 2))
    record = s.record()
    record.effective_batch[e.stage] = e.effective_batch
    record.missed.update(e.missed)


def shard_reported(s: RunState, e: ev.ShardReported) -> None:
    if e.number >= 0:
        s.members[e.number].answered(e.seq, e.body)
    merge = s.merges[e.stage]
    for shard, parts, length, digest, obj in e.shards:
        if e.third:
            merge.third[shard] = (parts, length, digest, obj, e.number)
        else:
            merge.reports.setdefault(shard, {})[e.number] = (parts, length, digest, obj)
    merge.bad.extend((shard, number, e.number, why) for shard, number, why in e.bad)


def shard_reassigned(s: RunState, e: ev.ShardReassigned) -> None:
    s.merges[e.stage].extra_owners.setdefault(e.shard, []).append(e.owner)


def shard_settled(s: RunState, e: ev.ShardSettled) -> None:
    s.merges[e.stage].settled[e.shard] = (e.how, e.winner, e.liars)


def stage_merged(s: RunState, e: ev.StageMerged) -> None:
    s.checkpoints[e.stage] = e.checkpoint
    s.t[e.stage] = e.checkpoint.t
    keep_complete(s)
    record = s.record()
    record.merged[e.stage] = e.merged
    merge = s.merges.get(e.stage)
    if merge is not None:
        merge.done = True
        record.matrix[e.stage] = merge
        record.summary[e.stage] = _summary(merge)


def keep_complete(s: RunState) -> None:
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


def audit_drawn(s: RunState, e: ev.AuditDrawn) -> None:
    s.audits[e.audit] = AuditRecord(e.audit, e.epoch, e.number, e.session, e.stage, e.segment, e.start, e.stop, e.until)
    s.next_audit = e.audit + 1


def evidence_shown(s: RunState, e: ev.EvidenceShown) -> None:
    audit = s.audits[e.audit]
    audit.state, audit.until = "ready", e.until


def verdict_given(s: RunState, e: ev.VerdictGiven) -> None:
    if e.validator >= 0:
        s.members[e.validator].answered(e.seq, e.body)
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


def heldout(s: RunState, e: ev.HeldoutMeasured) -> None:
    s.members[e.validator].answered(e.seq, e.body)
    record = s.epochs.get(max(e.epoch, 1))
    if record is not None:
        record.heldout[e.validator if e.epoch else -1 - e.validator] = e.loss


def epoch_paid(s: RunState, e: ev.EpochPaid) -> None:
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
