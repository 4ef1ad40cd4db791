"""What the orchestrator tells: status, history for the report, explanations, the ledger. All of it is read off the
state that the events fold into, so the page, the ledger and the report agree."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from iota.core import ledger, pay, queries
from iota.core.machine import books, phases
from iota.core.machine import events as ev
from iota.core.machine.state import EpochRecord, Member
from iota.core.values import Key, Tensor
from iota.errors import Refused
from iota.net.peer import Outgoing

if TYPE_CHECKING:
    from iota.nodes.orchestrator.node import Orchestrator

RECENT_SECONDS = 60.0
MAX_EVENTS = 5_000


class Meter:
    """Bytes that crossed boundaries, and recent speed. The totals live in the journal's marks: a restart keeps them."""

    def __init__(self, now: float) -> None:
        self.boundary = 0
        self.uncompressed = 0
        self.last_pass = now
        self._recent: deque[tuple[float, int]] = deque()

    def restore(self, marks: Mapping[str, int]) -> None:
        self.boundary = marks.get("bytes/boundary", 0)
        self.uncompressed = marks.get("bytes/uncompressed", 0)

    def marks(self) -> dict[str, int]:
        return {"bytes/boundary": self.boundary, "bytes/uncompressed": self.uncompressed}

    def crossed(self, payload: int, uncompressed: int) -> None:
        self.boundary += payload
        self.uncompressed += uncompressed

    def observe(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Passed):
            self.last_pass = now
            if event.kind == "l":
                self._recent.append((now, 1))
                while self._recent and self._recent[0][0] < now - RECENT_SECONDS:
                    self._recent.popleft()

    def samples_per_second(self, now: float) -> float:
        """Over the last minute; 0.0 when nothing was trained in it."""
        recent = [at for at, _ in self._recent if at >= now - RECENT_SECONDS]
        return len(recent) / max(now - recent[0], 1e-3) if len(recent) > 1 else 0.0


async def answer(node: Orchestrator, by: Key, body: Any, mark: dict[str, int]) -> Outgoing:
    """Answer a query. Raises `Refused`. Anyone may ask, with a key of the moment, so only an order's nonce is kept over
    a restart: to read twice does no harm, and strangers must not fill the journal."""
    if isinstance(body, queries.DataLinks):
        document: Any = _data_links(node, body)
    elif isinstance(body, queries.Status):
        document = status(node)
    elif isinstance(body, queries.History):
        document = history(node)
    elif isinstance(body, queries.Explain):
        document = explanation(node, body)
    elif isinstance(body, queries.LedgerFrom):
        entries = [entry for entry in node.machine.state.ledger if entry.epoch >= body.epoch]
        reply = _document("jsonl", ledger.encode(entries))
        await node.commit()
        return reply
    elif isinstance(body, queries.EventsFrom):
        return _document("msgpack", _events(node, by, body))
    else:
        document = {"done": node.operate(body, by)}
        await node.commit(mark)
    reply = _document("json", msgspec.json.encode(document))
    await node.commit()  # nobody is told of a credit or a payment that a restart could lose
    return reply


def _document(kind: str, data: bytes) -> Outgoing:
    return Outgoing(queries.Document(kind=kind), (Tensor("uint8", (len(data),), data),))


def _data_links(node: Orchestrator, body: queries.DataLinks) -> dict[str, str]:
    manifest = node.manifest
    known = {shard.object for shard in (*manifest.train_shards, *manifest.heldout_shards)} | {"data/tokenizer.json"}
    strange = [name for name in body.names if name not in known]
    if strange:
        raise Refused("no_object", f"{strange[0][:80]!r} is not data of this run", "Ask for names in the run manifest.")
    until = node.clock.now() + node.config.merge.phase_limit
    return {name: node.linker.get(name, until) for name in body.names}


def _events(node: Orchestrator, by: Key, body: queries.EventsFrom) -> bytes:
    if by not in node.config.admit.operators:
        raise Refused("not_operator", f"key {by[:8]} is not an operator of this run", "Use the operator's key.")
    rows = []
    for row in node.journal.replay(after=body.seq - 1):
        rows.append((row.seq, row.time, row.payload))
        if len(rows) >= min(body.limit, MAX_EVENTS):
            break
    return msgspec.msgpack.encode(rows)


# -------------------------------------------------------------------------------------------------------- status


def status(node: Orchestrator) -> dict[str, Any]:
    """The run now."""
    s, now = node.machine.state, node.clock.now()
    speed = node.meter.samples_per_second(now)
    tokens_each = node.config.train.batch * node.config.model.sequence
    idle = now - node.meter.last_pass
    latest = max((e for e, r in s.epochs.items() if r.heldout_loss() is not None), default=None)
    return {
        "run": s.run,
        "time": now,
        "epoch": s.epoch,
        "phase": s.phase,
        "phase_since": s.phase_at,
        "phase_until": s.phase_until,
        "phase_why": s.phase_why,
        "waiting_for": waiting_for(node),
        "paused": s.paused is not None,
        "stop": s.stop,
        "tokens": s.tokens,
        "tokens_per_s": speed * tokens_each,
        "seconds_since_last_pass": idle,
        "stalled": s.phase == "train" and s.paused is None and idle > max(60.0, 4 * node.config.limits.lease),
        "train_loss": _train_loss(s.epochs.get(s.epoch)),
        "heldout_loss": s.epochs[latest].heldout_loss() if latest is not None else None,
        "heldout_epoch": latest,
        "samples_in_flight": len(s.samples),
        "wire_bytes": node.meter.boundary,
        "uncompressed_bytes": node.meter.uncompressed,
        "stages": [_stage(node, stage) for stage in range(s.stages)],
        "validators": [member(node, m) for m in s.members if m.role == "validator"],
        "last_paid_epoch": len(s.ledger),
    }


def waiting_for(node: Orchestrator) -> str:
    """In plain words what the phase waits for."""
    mc = node.machine
    s = mc.state
    if s.phase == "train":
        parts = []
        for stage in range(s.stages):
            ready, need, members = phases.quorum(mc, stage)
            parts.append(f"stage {stage}: {ready} of {need} miners at B_min ({members} members)")
        return "; ".join(parts)
    if s.phase == "drain":
        return f"{len(s.samples)} samples in flight"
    if s.phase == "sync":
        behind = [m.key[:8] for m in s.members if m.alive and m.stage >= 0 and m.loaded != s.epoch]
        return f"miners to load the merged state: {', '.join(behind) or 'none'}"
    return s.phase_why


def _stage(node: Orchestrator, stage: int) -> dict[str, Any]:
    rows = [member(node, m) for m in node.machine.state.members if m.stage == stage]
    cut = node.manifest.cuts[stage]
    return {"stage": stage, "blocks": list(cut), "parameters": node.manifest.parameters[stage], "miners": rows}


def member(node: Orchestrator, m: Member) -> dict[str, Any]:
    soft = node.machine.soft
    lease = soft.lease.get(m.number)
    return {
        "key": m.key,
        "role": m.role,
        "alive": m.alive,
        "why_gone": m.why_gone,
        "loaded_epoch": m.loaded,
        "starts": m.starts,
        "session": m.session,
        "device": m.device,
        "dtype": m.dtype,
        "passes_epoch": m.booked,
        "passes_total": m.total,
        "queued": len(soft.forwards.get(m.number, ())) + len(soft.backwards.get(m.number, ())),
        "task": lease.kind if lease else None,
        "seconds_per_pass": soft.speed.get(m.number),
        "busy_seconds": soft.busy.get(m.number, 0.0),
        "last_verdict": m.last_verdict,
        "paid": m.paid,
    }


def _train_loss(record: EpochRecord | None) -> float | None:
    return record.loss_sum / record.losses if record is not None and record.losses else None


# ------------------------------------------------------------------------------------------------------- history


def history(node: Orchestrator) -> dict[str, Any]:
    """Everything a report needs, from real events."""
    s = node.machine.state
    first = s.epochs.get(1)
    untrained = first.heldout_loss(checkpoint_zero=True) if first else None
    return {
        "run": s.run,
        "started": s.started,
        "now": node.clock.now(),
        "phase": s.phase,
        "why": s.phase_why,
        "boots": s.boots,
        "vocabulary": node.config.model.vocabulary,
        "parameters": list(node.manifest.parameters),
        "tokens": s.tokens,
        "bytes_per_token": node.manifest.bytes_per_token,
        "trigram_loss": node.manifest.trigram_loss,
        "untrained_loss": untrained,
        "wire_bytes": node.meter.boundary,
        "uncompressed_bytes": node.meter.uncompressed,
        "members": [{"number": m.number, "stage": m.stage, **member(node, m)} for m in s.members],
        "epochs": [_epoch(node, record) for _, record in sorted(s.epochs.items())],
        "audits": [_audit(node, number) for number in sorted(s.audits)],
        "ledger_head": s.ledger[-1].head if s.ledger else None,
        "burned": [entry.burned for entry in s.ledger],
        "emissions": [dict(entry.emissions) for entry in s.ledger],
    }


def _epoch(node: Orchestrator, r: EpochRecord) -> dict[str, Any]:
    s = node.machine.state
    return {
        "epoch": r.epoch,
        "opened": r.opened,
        "closed": r.closed,
        "began": r.began,
        "until": r.until,
        "why": r.why,
        "tokens_at_start": r.tokens,
        "samples": {"full": r.samples_full, "partial": r.samples_partial, "returned": r.samples_returned},
        "train_loss": _train_loss(r),
        "heldout_loss": r.heldout_loss(),
        "passes": {s.members[n].key: passes for n, passes in r.passes.items()},
        "steps": {s.members[n].key: steps for n, steps in r.steps.items()},
        "effective_batch": r.effective_batch,
        "merged": r.merged,
        "agreement": {stage: _matrix(node, r, stage) for stage in r.matrix},
    }


def _matrix(node: Orchestrator, r: EpochRecord, stage: int) -> dict[str, Any]:
    """The agreement matrix of one merge: rows and columns by miner, and how every shard was settled."""
    merge = r.matrix[stage]
    keys = [node.machine.state.members[n].key for n in merge.members]
    index = {number: i for i, number in enumerate(merge.members)}
    agree = [[0] * len(keys) for _ in keys]
    disagree = [[0] * len(keys) for _ in keys]
    for reports in merge.reports.values():
        rows = [(index[n], report[2]) for n, report in reports.items() if n in index]
        for i, (a, digest_a) in enumerate(rows):
            for b, digest_b in rows[i + 1 :]:
                table = agree if digest_a == digest_b else disagree
                table[a][b] += 1
                table[b][a] += 1
    settled = {shard: how for shard, (how, _, _) in merge.settled.items()}
    return {"members": keys, "agree": agree, "disagree": disagree, "settled": settled}


def _audit(node: Orchestrator, number: int) -> dict[str, Any]:
    a, s = node.machine.state.audits[number], node.machine.state
    return {
        "audit": a.audit,
        "epoch": a.epoch,
        "miner": s.members[a.number].key,
        "stage": a.stage,
        "steps": [a.start, a.stop],
        "state": a.state,
        "verdict": a.verdict,
        "why": a.why,
        "worst": [list(row) for row in a.worst],
        "validator": s.members[a.validator].key if a.validator >= 0 else None,
        "seconds": a.seconds,
    }


def explanation(node: Orchestrator, body: queries.Explain) -> dict[str, Any]:
    """`iota explain`: every term of what a miner was paid, from the ledger. Raises `Refused`."""
    s = node.machine.state
    epoch = body.epoch or len(s.ledger)
    matches = [m for m in s.members if m.key.startswith(body.key)] if body.key else []
    if len(matches) != 1:
        what = "no member's key begins with" if not matches else f"{len(matches)} members' keys begin with"
        raise Refused("unknown_key", f"{what} {body.key[:64]!r}", "See the keys in: iota status URL.")
    if not 1 <= epoch <= len(s.ledger):
        closed = f"epochs 1 to {len(s.ledger)} are closed" if s.ledger else "no epoch is closed yet"
        raise Refused(
            "not_closed", f"epoch {epoch} is not in the books; {closed}", "Ask again when its audits are done."
        )
    credits = ledger.credits_at(s.ledger, epoch)
    explained = pay.explain(matches[0].key, epoch, credits, books.policy(node.machine))
    return dict(msgspec.to_builtins(explained))
