"""MERGE: commitments, uploads, the butterfly plan, tasks to reduce and what comes back.

Design section 5; paper section 5. How shards settle and become a checkpoint: `settling`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from iota.core import butterfly, tasks
from iota.core import manifest as chunk_manifest
from iota.core import reduce as reducing
from iota.core.machine import events as ev
from iota.core.machine.state import Member, StageMerge
from iota.core.values import CHUNK_BYTES, Digest, Key

if TYPE_CHECKING:
    from iota.core.machine.machine import Machine

ORCHESTRATOR = -1
THIRD = -2
"""As the winner of a shard: neither owner's object counts but a third party's."""


def outer(mc: Machine) -> reducing.Outer:
    merge = mc.state.config.merge
    return reducing.Outer(kind=merge.outer, lr=merge.outer_lr, momentum=merge.outer_momentum)


def moments(mc: Machine) -> bool:
    return mc.state.config.merge.inner_state == "merge"


# ------------------------------------------------------------------------------------------- commit and upload


def owes_commit(mc: Machine, m: Member) -> bool:
    """Alive with accepted passes in this session: merging or not, such an epoch is committed and audited."""
    s = mc.state
    return m.alive and m.stage >= 0 and m.loaded == s.epoch - 1 and m.passes > 0 and m.number not in s.commitments


def minimum(mc: Machine, stage: int) -> int:
    """B_min of a stage: the setting, or when the deadline ended TRAIN the smaller of it and half its best member's."""
    s = mc.state
    setting = s.config.merge.min_batches
    if s.record().why.get("drain", "").startswith("quorum"):
        return setting
    best = max((m.passes for m in s.members if m.stage == stage and m.alive), default=0)
    return max(1, min(setting, best // 2))


def qualifies(mc: Machine, m: Member) -> bool:
    return m.alive and m.passes >= minimum(mc, m.stage)


def uploads_missing(mc: Machine) -> list[Member]:
    s = mc.state
    return [s.members[n] for n, c in s.commitments.items() if not c.uploaded and qualifies(mc, s.members[n])]


def upload_keys(epoch: int, stage: int, key: Key) -> tuple[str, str]:
    """Object names of a member's upload and of its chunk manifest."""
    base = f"uploads/{epoch}/{stage}/{key}"
    return f"{base}/state.bin", f"{base}/manifest.bin"


def next_task(mc: Machine, m: Member, seq: int, now: float) -> tasks.Task | None:
    """Commit, Upload or Reduce for a member, or None."""
    s = mc.state
    until = s.phase_until or now
    if s.phase == "commit" and owes_commit(mc, m):
        if m.pending:  # the incomplete rest at the drain
            if not mc.may_step:
                return None
            mc.step(m, seq)
        return mc.lease(m, "commit", now, until, lambda i: tasks.Commit(task=i, epoch=s.epoch, deadline=until))
    committed = s.commitments.get(m.number)
    if s.phase == "upload" and committed and not committed.uploaded and qualifies(mc, m):
        url, manifest_url = upload_keys(s.epoch, m.stage, m.key)
        return mc.lease(
            m, "upload", now, until,
            lambda i: tasks.Upload(task=i, epoch=s.epoch, url=url, manifest_url=manifest_url, deadline=until),
        )  # fmt: skip
    if s.phase == "reduce":
        return _reduce_task(mc, m, now)
    return None


def on_committed(mc: Machine, m: Member, seq: int, body: Digest, r: tasks.Committed) -> None:
    if mc.soft.take(m.number, r.task, ("commit",)) is None:
        mc.decline(m, seq, body, *_too_late(mc, "commit", "commitments"))
        return
    problem = _commit_problem(mc, m, r)
    if problem:
        mc.decline(m, seq, body, "bad_input", problem)
        return
    mc.emit(
        ev.Committed(
            m.number, seq, body, r.root, r.commitment, r.length, r.digest, r.manifest_length, r.manifest_digest,
            r.cuts, r.steps, r.head,
        )
    )  # fmt: skip
    mc.check_phase = True


def _too_late(mc: Machine, phase: str, what: str) -> tuple[str, str]:
    """Why a result of a merge task that its sender does not hold is declined: the phase is over, or the lease is."""
    now = mc.state.phase
    if now == phase:
        return "lease_lost", "this task is no longer yours; it is given out again"
    return "too_late", f"{what} of epoch {mc.state.epoch} are not open; the phase is {now}"


def _commit_problem(mc: Machine, m: Member, r: tasks.Committed) -> str:
    s, facts = mc.state, m.facts
    parts = len(outer(mc).upload_parts(moments(mc)))
    expected = parts * chunk_manifest.chunk_count(mc.parameters[m.stage]) * CHUNK_BYTES
    if r.length != expected:
        return f"an upload of this stage has {expected} bytes, {r.length} committed"
    if r.commitment != chunk_manifest.commitment(r.root, m.key, s.run, s.epoch, m.stage):
        return "the commitment does not bind this root to this key, run, epoch and stage"
    if facts is None or r.steps != facts.steps:
        return f"{r.steps} inner steps committed, {facts.steps if facts else 0} were told"
    told = tuple(facts.cuts)
    if len(r.cuts) < 2 or r.cuts[1 : 1 + len(told)] != told or r.cuts[0].step != 0 or r.cuts[-1].step != r.steps:
        return "the snapshot commitments contradict those that came with the results"
    if any(a.step >= b.step for a, b in zip(r.cuts, r.cuts[1:], strict=False)):
        return "snapshot commitments are not in order of steps"
    announced = s.record().segment_steps[m.stage]
    if any(cut.step % announced for cut in r.cuts[:-1]):
        return f"snapshots are due every {announced} inner steps, not after {[cut.step for cut in r.cuts][:8]}"
    if not 0 < r.manifest_length <= chunk_manifest.encoded_limit(parts, mc.parameters[m.stage]):
        return f"a chunk manifest of {r.manifest_length} bytes cannot be"
    return ""


def on_uploaded(mc: Machine, m: Member, seq: int, body: Digest, r: tasks.Done) -> None:
    """The caller has seen both objects in the store, with the committed lengths."""
    if mc.soft.take(m.number, r.task, ("upload",)) is None:
        mc.decline(m, seq, body, *_too_late(mc, "upload", "uploads"))
        return
    mc.emit(ev.Uploaded(m.number, seq, body))
    mc.check_phase = True


# ------------------------------------------------------------------------------------------------------ plan


def draw_plans(mc: Machine) -> None:
    """Draw every stage's plan, after all commitments (design section 5 "Plan")."""
    s = mc.state
    secret = mc.secret(s.epoch)
    for stage in range(s.stages):
        members = sorted(
            (s.members[n] for n, c in s.commitments.items() if c.uploaded and qualifies(mc, s.members[n])
             and s.members[n].stage == stage),
            key=lambda m: m.key,
        )  # fmt: skip
        if stage in s.record().effective_batch:  # drawn before the orchestrator was restarted
            continue
        qualified = [m for m in s.members if m.stage == stage and qualifies(mc, m)]
        roots = [s.commitments[m.number].root for m in members]
        seed = butterfly.plan_seed(secret.encode(), {}, roots)
        chunks = chunk_manifest.chunk_count(mc.parameters[stage])
        plan = butterfly.make_plan([m.key for m in members], chunks, seed).digest() if members else ""
        mc.emit(
            ev.Planned(
                epoch=s.epoch,
                stage=stage,
                members=tuple(m.number for m in members),
                weights=tuple(m.passes for m in members),
                qualified=len(qualified),
                effective_batch=sum(m.passes for m in qualified),
                chunks=chunks,
                secret=secret,
                nonces={},
                seed=seed.hex(),
                plan=plan,
                missed=tuple(m.number for m in uploads_missing(mc) if m.stage == stage),
            )
        )


def plan_of(mc: Machine, merge: StageMerge) -> butterfly.Plan:
    """The stage's plan, derived again from the event (cached per seed)."""
    cached = mc.plans.get(merge.stage)
    if cached is None or cached.seed.hex() != merge.seed:
        keys = [mc.state.members[n].key for n in merge.members]
        cached = mc.plans[merge.stage] = butterfly.make_plan(keys, merge.chunks, bytes.fromhex(merge.seed))
    return cached


def owners_of(mc: Machine, merge: StageMerge, shard: int) -> list[int]:
    """Member numbers of a shard's owners by plan."""
    return [mc.state.by_key[key] for key in plan_of(mc, merge).owners(shard)]


def coefficients(mc: Machine, merge: StageMerge) -> dict[Key, float]:
    return reducing.coefficients(_passes(mc, merge), mc.state.config.merge.weight_cap)


def mean_steps(mc: Machine, merge: StageMerge) -> int:
    """By how many steps of Adam a merged stage is ahead of its base."""
    s = mc.state
    steps = {s.members[n].key: s.commitments[n].steps for n in merge.members}
    return reducing.mean_steps(_passes(mc, merge), s.config.merge.weight_cap, steps)


def _passes(mc: Machine, merge: StageMerge) -> dict[Key, int]:
    return {mc.state.members[n].key: w for n, w in zip(merge.members, merge.weights, strict=True)}


# ---------------------------------------------------------------------------------------------------- reduce


def shard_object(epoch: int, stage: int, shard: int, who: str) -> str:
    return f"merge/{epoch}/{stage}/{shard}/{who}.bin"


def sheet(mc: Machine, merge: StageMerge, shards: list[int], who: str, third: bool) -> tasks.ReduceSheet:
    """What an owner (or third party) needs; object names where the node will put signed URLs."""
    s = mc.state
    plan = plan_of(mc, merge)
    share = coefficients(mc, merge)
    rows = []
    for number in merge.members:
        m = s.members[number]
        url, manifest_url = upload_keys(s.epoch, merge.stage, m.key)
        rows.append(tasks.Contribution(m.key, s.commitments[number].root, share[m.key], url, manifest_url))
    work = []
    for shard in shards:
        start, stop = plan.range(shard)
        work.append(tasks.ShardWork(shard, start, stop, shard_object(s.epoch, merge.stage, shard, who)))
    base = s.checkpoints[merge.stage] if third else None
    return tasks.ReduceSheet(tuple(sorted(rows, key=lambda c: c.key)), tuple(work), base, {})


def owed(mc: Machine, merge: StageMerge, number: int) -> list[int]:
    """Shards that a member still has to reduce."""
    key = mc.state.members[number].key
    plan = plan_of(mc, merge)
    own = plan.shards_of(key) if number in merge.members else []
    extra = [shard for shard, owners in merge.extra_owners.items() if number in owners]
    return [
        shard
        for shard in sorted({*own, *extra})
        if shard not in merge.settled and number not in merge.reports.get(shard, {}) and not empty(plan, shard)
    ]


def empty(plan: butterfly.Plan, shard: int) -> bool:
    start, stop = plan.range(shard)
    return start == stop


def _reduce_task(mc: Machine, m: Member, now: float) -> tasks.Task | None:
    s = mc.state
    merge = s.merges.get(m.stage)
    if merge is None or merge.done or m.loaded != s.epoch - 1:
        return None
    shards = owed(mc, merge, m.number)
    if not shards:
        return None
    until = s.phase_until or now
    return mc.lease(
        m, "reduce", now, until,
        lambda i: tasks.Reduce(task=i, epoch=s.epoch, stage=m.stage, deadline=until),
        ("reduce", sheet(mc, merge, shards, _author(mc, m), False)),
    )  # fmt: skip


def _author(mc: Machine, m: Member) -> str:
    """Under which name a member puts the shards of the lease it is about to get: an object is written once, so every
    try has its own."""
    return f"{m.key}-{mc.soft.coming_task(mc.state.boots):x}"


def _recompute(task: int, *, epoch: int, stage: int, deadline: float) -> tasks.Task:
    return tasks.Recompute(task=task, epoch=epoch, stage=stage, deadline=deadline)


def recompute_task(mc: Machine, m: Member, now: float) -> tasks.Task | None:
    """A validator recomputes the disputed shards of one stage, if any."""
    s = mc.state
    if s.phase != "reduce":
        return None
    held = {lease.subject for lease in mc.soft.lease.values() if lease.kind == "recompute"}
    for stage, merge in s.merges.items():
        shards = [shard for (st, shard) in mc.soft.disputed_at if st == stage and shard not in merge.third]
        if not shards or stage in held:
            continue
        until = now + s.config.merge.dispute_limit
        attach = ("reduce", sheet(mc, merge, sorted(shards), _author(mc, m), True))
        make = functools.partial(_recompute, epoch=s.epoch, stage=stage, deadline=until)
        return mc.lease(m, "recompute", now, until, make, attach, subject=stage)
    return None


def on_reduced(mc: Machine, m: Member, seq: int, body: Digest, r: tasks.Reduced) -> None:
    lease = mc.soft.take(m.number, r.task, ("reduce", "recompute"))
    if lease is None:
        mc.decline(m, seq, body, *_too_late(mc, "reduce", "merges"))
        return
    third = lease.kind == "recompute"
    stage = lease.subject if third else m.stage
    asked = {work.shard: work for work in lease.attach[1].shards}  # type: ignore[index]
    if {row.shard for row in r.shards} != set(asked) or len(r.shards) != len(asked):
        mc.decline(m, seq, body, "bad_input", f"asked for shards {sorted(asked)}, got {[x.shard for x in r.shards]}")
        return
    if problem := _shape_problem(mc, stage, r.shards, asked):
        mc.decline(m, seq, body, "bad_input", problem)
        return
    record_report(mc, m.number, seq, body, stage, third, r, asked)


def _shape_problem(
    mc: Machine, stage: int, rows: tuple[tasks.ShardResult, ...], asked: dict[int, tasks.ShardWork]
) -> str:
    names = outer(mc).result_parts(moments(mc))
    for row in rows:
        work = asked[row.shard]
        low, high = chunk_manifest.element_range(work.start, work.stop, mc.parameters[stage])
        if tuple(name for name, _ in row.parts) != names:
            return f"shard {row.shard} must have the parts {names}"
        if row.length != 4 * (high - low) * len(names):
            return f"shard {row.shard} has {4 * (high - low) * len(names)} bytes, not {row.length}"
    return ""


def record_report(
    mc: Machine, number: int, seq: int, body: Digest, stage: int, third: bool, r: tasks.Reduced,
    asked: dict[int, tasks.ShardWork],
) -> None:  # fmt: skip
    """Journal reduced shards of an owner, or of a third party (number -1: the orchestrator itself)."""
    known, settled = mc.state.by_key, mc.state.merges[stage].settled
    bad = tuple((shard, known[key], why[:200]) for shard, key, why in r.bad if key in known)
    rows = tuple((row.shard, row.parts, row.length, row.digest, asked[row.shard].url) for row in r.shards)
    if third:  # what is settled may already rest on another third party's object
        rows = tuple(row for row in rows if row[0] not in settled)
    mc.emit(ev.ShardReported(number, seq, body, mc.state.epoch, stage, third, rows, bad))
    mc.check_phase = True


# ------------------------------------------------------------------------- what the orchestrator does itself


def on_kept(mc: Machine, stage: int, shard: int, row: tasks.ShardResult, url: str) -> None:
    """The orchestrator wrote a shard's old value as an object of its own: nobody could reduce it (counted, shown). Call
    `tick` afterwards."""
    s = mc.state
    why = mc.soft.keep_wanted.pop((stage, shard), None)
    if why is None or s.phase != "reduce" or stage not in s.merges or shard in s.merges[stage].settled:
        return
    rows = ((row.shard, row.parts, row.length, row.digest, url),)
    mc.emit(ev.ShardReported(ORCHESTRATOR, 0, "", s.epoch, stage, True, rows, ()))
    mc.emit(ev.ShardSettled(s.epoch, stage, shard, "kept", THIRD, (), why))
    mc.soft.disputed_at.pop((stage, shard), None)
    mc.check_phase = True


def wanted(mc: Machine, now: float) -> list[tuple[str, int, int]]:
    """Shards that the orchestrator must do itself: ("keep", stage, shard), or ("recompute", stage, shard) when no
    validator spoke in the last `dispute_limit` seconds to settle a dispute."""
    s, soft = mc.state, mc.soft
    if s.phase != "reduce":
        return []
    rows = [("keep", stage, shard) for stage, shard in soft.keep_wanted]
    if not any(_can_recompute(mc, m, now) for m in s.members):
        rows += [("recompute", st, shard) for st, shard in soft.disputed_at if shard not in s.merges[st].third]
    return rows


def _can_recompute(mc: Machine, m: Member, now: float) -> bool:
    """A validator that spoke a moment ago and is not busy with something else."""
    if not m.alive or m.role != "validator":
        return False
    lease = mc.soft.lease.get(m.number)
    if lease is not None:
        return lease.kind == "recompute"
    return now - mc.soft.seen.get(m.number, 0.0) < mc.state.config.merge.dispute_limit
