"""Closing an epoch's books: verdicts to credits, credits to emissions, one ledger entry (design section 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iota.core import ledger, pay
from iota.core.machine import events as ev
from iota.core.machine.state import AuditRecord

if TYPE_CHECKING:
    from iota.core.machine.machine import Machine


def policy(mc: Machine) -> pay.Policy:
    c = mc.state.config.pay
    return pay.Policy(c.pool, c.burn, c.gamma, c.half_life)


def close_epochs(mc: Machine) -> None:
    """Close, in order, every epoch whose merge is drawn and whose audits (redrawn older ones too) are closed."""
    s = mc.state
    while True:
        epoch = len(s.ledger) + 1
        record = s.epochs.get(epoch)
        drawn = record is not None and (epoch < s.epoch or s.phase in ("reduce", "sync", "finishing", "finished"))
        if not drawn or any(a.epoch <= epoch for a in mc.open_audits()):
            return
        mc.emit(ev.EpochPaid(ledger.append(s.ledger, s.run, epoch, _credits(mc, epoch), policy(mc))))


def _credits(mc: Machine, closing: int) -> list[pay.Credit]:
    """All credits up to the closing epoch, judged by the verdicts known now."""
    s = mc.state
    credits = {c.id: c for c in _known(mc)}
    for (epoch, number, session), facts in sorted(s.facts.items()):
        key = (epoch, s.members[number].key, session)
        if epoch == closing and facts.accepted and key not in credits:
            credits[key] = pay.Credit(epoch, s.members[number].key, session, facts.stage, len(facts.accepted))
    verdicts = _verdicts(mc, closing)
    for key, before in credits.items():
        if key[0] == closing and s.by_key[key[1]] in s.epochs[closing].missed:
            credits[key] = pay.judge(before, "invalid", closing, "committed, but did not upload by the deadline")
        for audit in verdicts.get(key, ()):
            credits[key] = pay.judge(credits[key], audit.verdict, closing, audit.why)
        if before.scored >= 0 and credits[key].state == before.state:
            credits[key] = before  # settled: other words change nothing
    redraws = s.config.audit.redraws
    final = s.phase in ("finishing", "finished")
    return [pay.settle(c, closing, s.members[s.by_key[c.key]].history, redraws, final=final) for c in credits.values()]


def _known(mc: Machine) -> list[pay.Credit]:
    books = ledger.Books()
    for entry in mc.state.ledger:
        books.take(entry)
    return list(books.credits.values())


def _verdicts(mc: Machine, closing: int) -> dict[tuple[int, str, int], list[AuditRecord]]:
    """Closed audits by credit; an invalid one decides, so it comes first."""
    s = mc.state
    rows: dict[tuple[int, str, int], list[AuditRecord]] = {}
    for audit in s.audits.values():
        if audit.state == "closed" and closing - s.config.audit.redraws - 1 <= audit.epoch <= closing:
            rows.setdefault((audit.epoch, s.members[audit.number].key, audit.session), []).append(audit)
    for audits in rows.values():
        audits.sort(key=lambda a: a.verdict != "invalid")
    return rows
