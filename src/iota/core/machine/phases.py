"""Which phase follows which, when, and why. Every phase ends by itself: early when all that can come has come, else by
its announced deadline, by timer alone (design section 3)."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from iota.core import stop
from iota.core.machine import auditing, books, membership, merging, settling, training
from iota.core.machine import events as ev
from iota.core.machine.state import EpochRecord, Member
from iota.core.values import sha256

if TYPE_CHECKING:
    from iota.core.machine.machine import Machine


def advance(mc: Machine, now: float) -> None:
    """Take every transition that is due. Idempotent: does nothing when nothing is."""
    s = mc.state
    if s.paused is not None or not s.run:
        return
    while True:
        before = (s.phase, s.epoch, s.phase_until)
        _STEP[s.phase](mc, now)
        if (s.phase, s.epoch, s.phase_until) == before:
            return


def due(mc: Machine, now: float) -> bool:
    until = mc.state.phase_until
    return until is not None and now >= until


def limit(mc: Machine, phase: str, floor: float) -> float:
    """How long a phase may last: three times the median of its last three durations plus grace, at least `floor`; the
    run file's limit while there is none."""
    s = mc.state
    order = ["train", "drain", "commit", "upload", "reduce", "sync"]
    following = order[order.index(phase) + 1] if phase != "sync" else None
    lasted = []
    for epoch in range(max(1, s.epoch - 3), s.epoch):
        record = s.epochs.get(epoch)
        if record is None or phase not in record.began:
            continue
        end = record.closed if following is None else record.began.get(following)
        if end is not None:
            lasted.append(_needed(mc, record, phase, end))
    if not lasted:
        return s.config.merge.epoch_limit if phase == "train" else s.config.merge.phase_limit
    return max(3.0 * median(lasted), floor) + s.config.limits.grace


def _needed(mc: Machine, record: EpochRecord, phase: str, end: float) -> float:
    """How long a phase needed to last. One that was waited out to its deadline, in an epoch that merged, gives the same
    limit again and not three times it: else one member who never delivers would make every epoch longer than the last,
    without end. Where nothing merged the limit may have been too short for everybody, so it grows."""
    lasted, until = end - record.began[phase] - record.held.get(phase, 0.0), record.until.get(phase)
    if until is None or end < until or not any(record.merged.values()):
        return lasted
    return max(0.0, lasted - mc.state.config.limits.grace) / 3.0


_OVER = {"commit": training.PASSES, "upload": ("commit",), "reduce": ("upload",), "sync": ("reduce", "recompute")}
"""Leases that end when a phase begins."""


def begin(mc: Machine, phase: str, now: float, until: float | None, why: str) -> None:
    mc.emit(ev.PhaseBegan(phase, mc.state.epoch, now, until, why, _announce(mc, phase)))
    mc.soft.drop_leases(*_OVER.get(phase, ()))
    mc.soft.trainers = None
    mc.wake_everyone()


def _announce(mc: Machine, phase: str) -> tuple[int, ...]:
    """Members of every stage as counted for the learning-rate schedule: fixed when a SYNC (or the gathering) begins, so
    that every miner and every replay of the epoch uses the same numbers."""
    s = mc.state
    if phase == "gather":
        return () if s.announced else (s.config.merge.members,) * s.stages
    if phase != "sync" or s.phase in ("sync", "finished"):
        return ()
    return tuple(max(1, sum(1 for m in s.members if m.stage == i and m.alive)) for i in range(s.stages))


def tokens_per_step(mc: Machine, stage: int) -> int:
    """accumulate x batch x T x members of the stage, as announced."""
    s = mc.state
    return s.config.train.accumulate * s.config.train.batch * s.config.model.sequence * s.announced[stage]


# --------------------------------------------------------------------------------------------------------- gather


def _gather(mc: Machine, now: float) -> None:
    s = mc.state
    if s.phase_until is None:
        begin(mc, "gather", now, now + s.config.merge.gather_limit, _missing(mc))
        return
    if s.stop_requested:
        begin(mc, "finished", now, None, s.stop_requested)
        return
    loaded = [len(stage) for stage in mc.soft.stage_trainers(s)]
    if all(n >= s.config.merge.members for n in loaded) or (due(mc, now) and all(loaded)):
        open_epoch(mc, 1, now)
    elif due(mc, now):
        begin(mc, "gather", now, now + s.config.merge.gather_limit, _missing(mc))


def _missing(mc: Machine) -> str:
    loaded = [len(stage) for stage in mc.soft.stage_trainers(mc.state)]
    want = mc.state.config.merge.members
    short = [f"stage {i} has {n} of {want}" for i, n in enumerate(loaded) if n < want]
    return "waiting for miners: " + ", ".join(short)


def open_epoch(mc: Machine, epoch: int, now: float) -> None:
    """Announce TRAIN: deadline, schedule position, segments, and the commitment to the plan's secret."""
    s = mc.state
    members = [[m for m in s.members if m.stage == i and m.alive and m.loaded == epoch - 1] for i in range(s.stages)]
    mc.emit(
        ev.EpochOpened(
            epoch=epoch,
            at=now,
            until=now + limit(mc, "train", 5.0),
            tokens=s.tokens,
            t=tuple(s.t),
            tokens_per_step=tuple(tokens_per_step(mc, i) for i in range(s.stages)),
            segment_steps=tuple(segment_steps(mc, epoch, i) for i in range(s.stages)),
            members=tuple(tuple(m.number for m in stage) for stage in members),
            secret_digest=sha256(mc.secret(epoch).encode()),
        )
    )
    mc.soft.trainers = None
    mc.soft.forwards.clear()
    mc.soft.backwards.clear()
    mc.soft.in_flight.clear()
    mc.soft.spoiled.clear()
    mc.wake_everyone()
    books.close_epochs(mc)


def segment_steps(mc: Machine, epoch: int, stage: int) -> int:
    """The last epoch's median of inner steps in the stage over S, rounded up; the run file's in epoch 1."""
    audit = mc.state.config.audit
    last = mc.state.epochs.get(epoch - 1)
    steps = [n for number, n in last.steps.items() if mc.state.members[number].stage == stage and n] if last else []
    return math.ceil(median(steps) / audit.segments_per_epoch) if steps else audit.segment_steps


# ---------------------------------------------------------------------------------------------------------- TRAIN


def quorum(mc: Machine, stage: int) -> tuple[int, int, int]:
    """(members at B_min, needed, members counted) of a stage: those loaded before TRAIN and still alive."""
    s = mc.state
    counted = [s.members[n] for n in s.record().members[stage] if s.members[n].alive]
    ready = sum(1 for m in counted if m.passes >= s.config.merge.min_batches)
    return ready, max(1, math.ceil(s.config.merge.quorum * len(counted))), len(counted)


def _train(mc: Machine, now: float) -> None:
    s = mc.state
    counts = [quorum(mc, stage) for stage in range(s.stages)]
    if all(ready >= need for ready, need, _ in counts):
        why = "quorum: every stage has enough miners at B_min"
    elif due(mc, now):
        why = "deadline: the announced end of TRAIN came"
    elif s.stop_requested:
        why = s.stop_requested
    else:
        return
    begin(mc, "drain", now, max(now + limit(mc, "drain", 1.0), training.outstanding(mc, now)), why)


def _drain(mc: Machine, now: float) -> None:
    s = mc.state
    if s.samples and not due(mc, now):
        return
    if (
        not s.samples
        and any(training.step_due(mc, m) for m in s.members if m.alive and m.stage >= 0)
        and not due(mc, now)
    ):
        return
    why = "all samples in flight came home" if not s.samples else f"deadline with {len(s.samples)} samples in flight"
    training.close_open_samples(mc)
    begin(mc, "commit", now, now + limit(mc, "commit", 1.0), why)


# ---------------------------------------------------------------------------------------------------------- MERGE


def _commit(mc: Machine, now: float) -> None:
    missing = [m for m in mc.state.members if merging.owes_commit(mc, m)]
    if missing and not due(mc, now):
        return
    why = f"{len(mc.state.commitments)} committed" + (f", {len(missing)} did not" if missing else "")
    begin(mc, "upload", now, now + limit(mc, "upload", 1.0), why)


def _upload(mc: Machine, now: float) -> None:
    s = mc.state
    missing = merging.uploads_missing(mc)
    if missing and not due(mc, now):
        return
    merging.draw_plans(mc)
    auditing.draw(mc, now)
    why = "all uploads arrived" if not missing else f"deadline, {len(missing)} uploads missing"
    begin(mc, "reduce", now, now + limit(mc, "reduce", s.config.merge.dispute_limit), why)


def _reduce(mc: Machine, now: float) -> None:
    late, before = due(mc, now), settling.reassigned(mc)
    if not settling.settle(mc, now, late):
        if late and settling.reassigned(mc) > before:  # once for each orphan: its new owner has a limit too
            until = now + limit(mc, "reduce", mc.state.config.merge.dispute_limit)
            begin(mc, "reduce", now, until, "shards whose owners are gone were given to others")
        return
    settling.finish_stages(mc)
    begin(mc, "sync", now, now + limit(mc, "sync", 1.0), "every shard is settled")
    books.close_epochs(mc)


# ----------------------------------------------------------------------------------------------------------- SYNC


def _to_sync(mc: Machine) -> list[Member]:
    """Who is to prove the merged state: everyone alive with a stage (newcomers too: they start here)."""
    return [m for m in mc.state.members if m.alive and m.stage >= 0 and m.number not in mc.soft.draining]


def _sync(mc: Machine, now: float) -> None:
    s = mc.state
    synced = [m for m in _to_sync(mc) if m.loaded == s.epoch]
    all_in = bool(synced) and len(synced) == len(_to_sync(mc))
    staffed = all(any(m.stage == i for m in synced) for i in range(s.stages))
    ended, why = over(mc, now)
    if ended and (all_in or due(mc, now)):
        begin(mc, "finishing", now, now + s.config.audit.final_wait, why)
    elif staffed and (all_in or due(mc, now)):
        open_epoch(mc, s.epoch + 1, now)
    elif due(mc, now):
        empty = [str(i) for i in range(s.stages) if not any(m.stage == i for m in synced)]
        begin(mc, "sync", now, now + limit(mc, "sync", 5.0), f"waiting for a miner in stage {', '.join(empty)}")


def over(mc: Machine, now: float) -> tuple[bool, str]:
    """The stop rule and the operator's wish, asked at SYNC."""
    s = mc.state
    if s.stop_requested:
        return True, s.stop_requested
    losses = [loss for r in s.epochs.values() if (loss := r.heldout_loss()) is not None]
    progress = stop.Progress(
        epochs=s.epoch,
        tokens=s.tokens,
        loss=losses[-1] if losses else None,
        minutes=(now - s.started - s.paused_total) / 60,
    )
    return stop.evaluate(mc.rule(), progress)


def _finishing(mc: Machine, now: float) -> None:
    """Wait a little for the last audits and the last held-out loss, then close the books and end."""
    s = mc.state
    measured = s.record().heldout_loss() is not None or not any(m.alive and m.role == "validator" for m in s.members)
    if not due(mc, now) and not (measured and not mc.open_audits()):
        return
    auditing.close_overdue(mc, now, everything=True)
    books.close_epochs(mc)
    begin(mc, "finished", now, None, s.phase_why)


def _finished(mc: Machine, now: float) -> None:
    """A run that was extended goes on at SYNC, where whoever comes loads the last checkpoint (or, when it was stopped
    before it began, with gathering)."""
    s = mc.state
    if not s.extended or over(mc, now)[0]:
        return
    for m in s.members:
        if m.alive:  # told to leave when the run ended; whoever is still there joins again
            membership.gone(mc, m, "left", "the run had ended", now)
    if s.epoch in s.epochs:
        begin(mc, "sync", now, now + s.config.merge.gather_limit, "the run was extended")
    else:
        begin(mc, "gather", now, now + s.config.merge.gather_limit, "the run was extended")


_STEP = {
    "gather": _gather,
    "train": _train,
    "drain": _drain,
    "commit": _commit,
    "upload": _upload,
    "reduce": _reduce,
    "sync": _sync,
    "finishing": _finishing,
    "finished": _finished,
}
