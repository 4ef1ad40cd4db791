"""How shards settle and become the checkpoint: agreement of the owners, disputes, orphans, what is kept.

Design section 5 "Agree" and "Survive". Decisions about one shard are `core.agreement.decide`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iota.core import agreement, butterfly
from iota.core import manifest as chunk_manifest
from iota.core.machine import events as ev
from iota.core.machine import merging
from iota.core.machine.state import Member, StageMerge
from iota.core.values import Checkpoint, Key, Piece

if TYPE_CHECKING:
    from iota.core.machine.machine import Machine


def reassigned(mc: Machine) -> int:
    """How many shards of this epoch were given to new owners."""
    return sum(len(owners) for merge in mc.state.merges.values() for owners in merge.extra_owners.values())


def settle(mc: Machine, now: float, late: bool) -> bool:
    """Settle what can be settled; True when every shard of every stage is."""
    return all([_settle_stage(mc, merge, now, late) for merge in list(mc.state.merges.values())])


def _settle_stage(mc: Machine, merge: StageMerge, now: float, late: bool) -> bool:
    plan = merging.plan_of(mc, merge)
    open_shards = [x for x in range(merge.shards) if x not in merge.settled and not merging.empty(plan, x)]
    for shard in open_shards:
        _settle_shard(mc, merge, plan, shard, now, late)
    return all(x in merge.settled for x in open_shards)


def _settle_shard(mc: Machine, merge: StageMerge, plan: butterfly.Plan, shard: int, now: float, late: bool) -> None:
    s = mc.state
    reports = merge.reports.get(shard, {})
    by_key = {s.members[n].key: report[2] for n, report in reports.items()}
    extra = merge.extra_owners.get(shard, [])
    keys = plan.owners(shard)
    asked = [*keys, *(s.members[n].key for n in extra)]
    gone = [key for key in asked if late or not _can_reduce(mc, s.members[s.by_key[key]])]
    third = merge.third.get(shard)
    since = mc.soft.disputed_at.get((merge.stage, shard))
    expired = since is not None and now >= since + s.config.merge.dispute_limit
    outcome = agreement.decide(
        keys,
        by_key,
        gone=gone,
        third=third[2] if third else None,
        late=expired or (late and bool(by_key or extra)),
        replacement=s.members[extra[-1]].key if extra else None,
    )
    if outcome.kind == "dispute" and since is None:
        mc.soft.disputed_at[(merge.stage, shard)] = now
        mc.wake_everyone()
    elif outcome.kind == "orphaned":
        _reassign(mc, merge, plan, shard, keys, late)
    elif outcome.kind in ("kept", "zero") and third is None:
        mc.soft.keep_wanted[(merge.stage, shard)] = outcome.why
    elif outcome.final:
        liars = tuple(s.by_key[key] for key in outcome.liars)
        winner = s.by_key[outcome.winners[0]] if outcome.winners else merging.THIRD
        mc.emit(ev.ShardSettled(s.epoch, merge.stage, shard, outcome.kind, winner, liars, outcome.why))
        mc.soft.disputed_at.pop((merge.stage, shard), None)
        mc.soft.keep_wanted.pop((merge.stage, shard), None)


def _can_reduce(mc: Machine, m: Member) -> bool:
    """Whether an owner may still deliver: a session that began after TRAIN does not hold the stage's base."""
    return m.alive and m.loaded == mc.state.epoch - 1 and m.number not in mc.soft.draining


def _reassign(
    mc: Machine, merge: StageMerge, plan: butterfly.Plan, shard: int, dead: tuple[Key, ...], late: bool
) -> None:
    """Give an orphan to a member that can still reduce (and, when the phase is at its end, has done its own part)."""
    s = mc.state
    live = [
        s.members[n].key
        for n in merge.members
        if _can_reduce(mc, s.members[n]) and not (late and merging.owed(mc, merge, n))
    ]
    new = butterfly.reassign(shard, dead, live, plan.seed)
    if new is None:
        mc.soft.keep_wanted[(merge.stage, shard)] = "both owners are gone and nobody of the merge is left"
        return
    mc.emit(ev.ShardReassigned(s.epoch, merge.stage, shard, s.by_key[new], "its owners are gone"))
    mc.soft.wake.add(s.by_key[new])


# ------------------------------------------------------------------------------------------------ checkpoint


def finish_stages(mc: Machine) -> None:
    """The merged shards ARE the checkpoint: name every piece, advance t, for every stage."""
    s = mc.state
    for stage in range(s.stages):
        old = s.checkpoints[stage]
        if old.epoch == s.epoch:  # finished before the orchestrator was restarted
            continue
        merge = s.merges.get(stage)
        if merge is None:
            kept = Checkpoint(s.run, s.epoch, stage, old.parameters, old.t, old.pieces)
            mc.emit(ev.StageMerged(s.epoch, stage, False, kept))
            continue
        pieces = _pieces(mc, merge, old.parameters)
        t = old.t + merging.mean_steps(mc, merge)
        merged = Checkpoint(s.run, s.epoch, stage, old.parameters, t, pieces)
        mc.emit(ev.StageMerged(s.epoch, stage, True, merged))


def _pieces(mc: Machine, merge: StageMerge, parameters: int) -> tuple[Piece, ...]:
    plan = merging.plan_of(mc, merge)
    pieces: list[Piece] = []
    for shard in range(merge.shards):
        low, high = chunk_manifest.element_range(*plan.range(shard), parameters)
        if low == high:
            continue
        winner = merge.settled[shard][1]
        if winner == merging.THIRD:
            parts, _length, _digest, obj, _who = merge.third[shard]
        else:
            parts, _length, _digest, obj = merge.reports[shard][winner]
        for i, (name, digest) in enumerate(parts):
            pieces.append(Piece(name, low, high, obj, 4 * (high - low) * i, digest))
    return tuple(sorted(pieces, key=lambda p: (p.part, p.start)))
