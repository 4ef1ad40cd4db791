"""Audits: drawing segments after all commitments, evidence, replays by validators, verdicts, held-out loss.

Design section 6 "Audit". A miner is never slowed: evidence is uploaded beside its work, replays run behind TRAIN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from iota.core import seeds, tasks
from iota.core.machine import books
from iota.core.machine import events as ev
from iota.core.machine.state import AuditRecord, Facts, Member
from iota.core.values import Digest

if TYPE_CHECKING:
    from iota.core.machine.machine import Machine

NOBODY = -1


def draw(mc: Machine, now: float) -> None:
    """Draw the epoch's audits; those drawn before a restart stay, and who did not upload is not paid anyhow. The seed
    holds the plan's secret, which nobody knew before the commitments."""
    s = mc.state
    config, secret = s.config.audit, mc.secret(s.epoch)
    drawn = {(a.number, a.session) for a in s.audits.values() if a.epoch == s.epoch}
    for (epoch, number, session), facts in sorted(s.facts.items()):
        if epoch != s.epoch or not facts.accepted or number in s.record().missed or (number, session) in drawn:
            continue
        if facts.committed and seeds.uniform(s.config.seed, "audited", secret, epoch, number) < config.share:
            for segment in _segments(mc, facts, secret):
                _draw_one(mc, facts, segment, now)
    _draw_again(mc, now)


def _segments(mc: Machine, facts: Facts, secret: str) -> list[int]:
    """The segments that hold the first inner steps of a drawn order: each step is as likely as any other, so work
    cannot hide in one segment that is longer than the rest."""
    count, wanted = len(facts.cuts) - 1, mc.state.config.audit.segments
    if wanted == 0 or wanted >= count:
        return list(range(count))
    holds = [i for i in range(count) for _ in range(facts.cuts[i].step, facts.cuts[i + 1].step)]
    order = seeds.shuffle(mc.state.config.seed, "segments", holds, secret, facts.epoch, facts.number)
    return sorted(list(dict.fromkeys(order))[:wanted])


def _draw_one(mc: Machine, facts: Facts, segment: int, now: float) -> None:
    until = now + mc.state.config.audit.show_limit
    start, stop = facts.cuts[segment].step, facts.cuts[segment + 1].step
    mc.emit(
        ev.AuditDrawn(
            mc.state.next_audit, facts.epoch, facts.number, facts.session, facts.stage, segment, start, stop, until
        )
    )
    mc.soft.wake.add(facts.number)


def _draw_again(mc: Machine, now: float) -> None:
    """Work whose audit came to nothing is drawn again for up to `redraws` epochs, while its session lives."""
    s = mc.state
    for epoch in range(max(1, s.epoch - s.config.audit.redraws), s.epoch):
        by_facts: dict[tuple[int, int, int], list[AuditRecord]] = {}
        for audit in s.audits.values():
            if audit.epoch == epoch:
                by_facts.setdefault((epoch, audit.number, audit.session), []).append(audit)
        for key, audits in sorted(by_facts.items()):
            m = s.members[key[1]]
            if any(a.state != "closed" or a.verdict != "inconclusive" for a in audits):
                continue
            if m.alive and m.session == key[2] and key in s.facts:
                _draw_one(mc, s.facts[key], audits[-1].segment, now)


# ------------------------------------------------------------------------------------------------------ evidence


def objects(audit: AuditRecord) -> dict[str, str]:
    """Object names of an audit's evidence."""
    base = f"audits/{audit.epoch}/{audit.audit}"
    return {name: f"{base}/{name}.bin" for name in ("transcript", "start", "stop", "final", "inputs", "outputs")}


def shows(mc: Machine, m: Member) -> tuple[tasks.Show, ...]:
    """Evidence that this member still owes; repeated with every answer until it is shown."""
    rows = []
    for audit in mc.open_audits(m.number):
        if audit.state != "show" or audit.session != m.session:
            continue
        names, need = objects(audit), needed(mc, audit)
        rows.append(
            tasks.Show(
                audit=audit.audit,
                epoch=audit.epoch,
                session=audit.session,
                start_step=audit.start,
                stop_step=audit.stop,
                transcript_url=names["transcript"],
                start_url=names["start"] if need["start"] else "",
                stop_url=names["stop"],
                final_url=names["final"] if need["final"] else "",
                inputs_url=names["inputs"],
                outputs_url=names["outputs"],
                deadline=audit.until,
            )
        )
    return tuple(rows)


def needed(mc: Machine, audit: AuditRecord) -> dict[str, bool]:
    """Which snapshots must be shown: the start unless it is the checkpoint itself, the final one to hold the upload
    against, unless it is the segment's end."""
    s = mc.state
    facts = s.facts[(audit.epoch, audit.number, audit.session)]
    from_checkpoint = audit.start == 0 and s.config.merge.inner_state != "carry"
    return {"start": not from_checkpoint, "final": audit.stop != facts.cuts[-1].step}


def on_shown(mc: Machine, m: Member, shown: tasks.Shown, now: float) -> None:
    audit = mc.state.audits.get(shown.audit)
    if audit is None or audit.number != m.number or audit.state != "show":
        return
    if shown.problem:
        _close(mc, audit, "invalid", f"did not show its evidence: {shown.problem[:160]}")
    else:
        mc.emit(ev.EvidenceShown(audit.audit, "", now + mc.state.config.audit.audit_limit))
        mc.wake_validators()


# ------------------------------------------------------------------------------------------------- for validators


def next_task(mc: Machine, m: Member, now: float) -> tasks.Task | None:
    """The held-out loss of the oldest kept checkpoint that this validator owes (one an epoch, so it comes first), then
    audits whose evidence is there, oldest first."""
    if mc.soft.rest.get(m.number, now) > now:
        return None
    if (heldout := _heldout_task(mc, m, now)) is not None:
        return heldout
    leased = {lease.subject for lease in mc.soft.lease.values() if lease.kind == "audit"}
    for audit in mc.open_audits():
        if audit.state == "ready" and audit.audit not in leased:
            return _audit_task(mc, m, audit, now)
    return None


def _audit_task(mc: Machine, m: Member, audit: AuditRecord, now: float) -> tasks.Task:
    until = audit.until

    def make(task: int) -> tasks.Task:
        return tasks.Audit(
            task=task,
            audit=audit.audit,
            epoch=audit.epoch,
            stage=audit.stage,
            start_step=audit.start,
            stop_step=audit.stop,
            deadline=until,
        )

    return mc.lease(m, "audit", now, until, make, ("audit", audit.audit), subject=audit.audit)


def _heldout_task(mc: Machine, m: Member, now: float) -> tasks.Task | None:
    s = mc.state
    owed = [epoch for epoch in s.complete if not measured(mc, m.number, epoch)] if s.phase != "gather" else []
    if not owed:
        return None
    epoch = min(owed)
    until = now + s.config.audit.audit_limit
    attach = ("heldout", s.complete[epoch])
    return mc.lease(
        m, "heldout", now, until,
        lambda i: tasks.Heldout(task=i, epoch=epoch, deadline=until), attach, subject=epoch,
    )  # fmt: skip


def measured(mc: Machine, number: int, epoch: int) -> bool:
    record = mc.state.epochs.get(max(epoch, 1))
    return record is not None and (number if epoch else -1 - number) in record.heldout


def on_audited(mc: Machine, m: Member, seq: int, body: Digest, r: tasks.Audited) -> None:
    s = mc.state
    lease = mc.soft.take(m.number, r.task, ("audit",))
    audit = s.audits.get(r.audit)
    if lease is None or lease.subject != r.audit or audit is None or audit.state != "ready":
        mc.decline(m, seq, body, "lease_lost", f"audit {r.audit} is no longer yours or is closed")
        return
    if r.verdict not in ("valid", "invalid", "inconclusive"):
        mc.decline(m, seq, body, "bad_input", f"verdict {r.verdict[:32]!r}: use valid, invalid or inconclusive")
        return
    worst = tuple((c.kind[:16], c.sample, finite(c.cosine), finite(c.norm_ratio)) for c in r.worst[:8])
    mc.emit(
        ev.VerdictGiven(
            r.audit, m.number, seq, body, r.verdict, r.why[:300], r.operations, worst, finite(r.seconds), True
        )
    )  # fmt: skip
    after_close(mc)


def finite(value: float) -> float:
    """The books hold no NaN (it equals nothing, not even after a replay) and no infinity."""
    return value if math.isfinite(value) else 0.0


def on_failed(mc: Machine, audit_id: int, r: tasks.Failed) -> None:
    """A failure on the validator's side measures nothing."""
    audit = mc.state.audits.get(audit_id)
    if audit is not None and audit.state == "ready":
        _close(mc, audit, "inconclusive", f"the validator failed: {r.code[:32]} {r.text[:160]}")


def on_measured(mc: Machine, m: Member, seq: int, body: Digest, r: tasks.Measured) -> None:
    lease = mc.soft.take(m.number, r.task, ("heldout",))
    if lease is None or lease.subject != r.epoch:
        mc.decline(m, seq, body, "lease_lost", f"the held-out measurement of epoch {r.epoch} is no longer yours")
        return
    if not 0.0 <= r.loss < 1e6:
        mc.decline(m, seq, body, "not_finite", f"held-out loss {r.loss} cannot be")
        return
    mc.emit(ev.HeldoutMeasured(r.epoch, m.number, seq, body, r.loss, r.tokens, finite(r.seconds)))
    mc.check_phase = True


# ------------------------------------------------------------------------------------------------------- closing


def close_overdue(mc: Machine, now: float, everything: bool = False) -> None:
    """Time is up by timer alone: evidence not shown loses; a session that ended, or no validator in time, measures
    nothing. `everything`: the run is ending, close what is open."""
    for audit in mc.open_audits():
        m = mc.state.members[audit.number]
        ended = not m.alive or m.session != audit.session
        if audit.state == "show" and ended:
            _close(mc, audit, "inconclusive", "its session ended before it could show its evidence")
        elif now >= audit.until and audit.state == "show" and _nobody_could(mc, audit):
            _close(mc, audit, "inconclusive", "nobody showed any evidence of this epoch: the store must have been down")
        elif now >= audit.until and audit.state == "show":
            _close(mc, audit, "invalid", "did not show its evidence by the deadline")
        elif now >= audit.until or everything:
            what = "no validator replayed it in time" if audit.state == "ready" else "the run ended before it was shown"
            _close(mc, audit, "inconclusive", what)


def _nobody_could(mc: Machine, audit: AuditRecord) -> bool:
    """Of at least three miners asked in this epoch, not one has shown anything: that is no single miner's doing."""
    asked = [a for a in mc.state.audits.values() if a.epoch == audit.epoch]
    shown = any(a.state == "ready" or a.validator >= 0 for a in asked)
    return not shown and len({a.number for a in asked}) >= 3


def _close(mc: Machine, audit: AuditRecord, verdict: str, why: str) -> None:
    mc.emit(ev.VerdictGiven(audit.audit, NOBODY, 0, "", verdict, why, 0, (), 0.0, True))
    after_close(mc)


def after_close(mc: Machine) -> None:
    books.close_epochs(mc)
    mc.check_phase = True
