"""MERGE: late commits, missed uploads, dead and disagreeing owners, third parties, stages that keep their state."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from iota.core import tasks
from iota.core.machine import events as ev
from iota.core.machine import merging
from machine_swarm import PARAMETERS, Peer, Swarm, config


def one_stage(miners: int, validator: bool = True, **sections: dict) -> tuple[Swarm, list[Peer]]:
    swarm = Swarm(config(**{"merge": {"members": miners}, "stop": "epochs >= 2", **sections}), 1)
    if validator:
        swarm.add("validator")
    return swarm, swarm.miners(miners)


def settled(swarm: Swarm, epoch: int = 1) -> list[ev.ShardSettled]:
    return [e for e in swarm.seen(ev.ShardSettled) if e.epoch == epoch]


def last_verdict(peer: Peer) -> tasks.Verdict:
    return [out.verdict for _, out in peer.answers if out.verdict is not None][-1]


@pytest.mark.parametrize("miners", [1, 2, 3, 5])
def test_every_pair_has_its_shard_and_checkpoints_cover_all(miners: int) -> None:
    swarm, _ = one_stage(miners)
    swarm.finish()
    rows = settled(swarm)
    assert len(rows) == max(1, miners * (miners - 1) // 2) - sum(
        1 for x in range(miners * (miners - 1) // 2) if x * 7 // 10 == (x + 1) * 7 // 10 and miners == 5
    )
    assert {e.how for e in rows} == {"alone" if miners == 1 else "agreed"}
    for merged in swarm.seen(ev.StageMerged):
        c = merged.checkpoint
        assert merged.merged and c.epoch == merged.epoch
        for part in ("weights", "momentum", "m", "v"):
            pieces = [p for p in c.pieces if p.part == part]
            assert pieces[0].start == 0 and pieces[-1].stop == PARAMETERS
            assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    first = swarm.seen(ev.StageMerged)[0].checkpoint
    assert first.t == round(sum(swarm.mc.state.epochs[1].steps.values()) / miners)


def test_commit_after_the_deadline_is_too_late_and_not_merged() -> None:
    swarm, (a, b) = one_stage(2)
    b.lazy = {"Commit"}
    swarm.until_phase("commit")
    until = swarm.mc.state.phase_until
    swarm.run(lambda: bool(b.answers) and isinstance(b.answers[-1][1].task, tasks.Commit))
    out = b.answers[-1][1]
    swarm.until_phase("upload")
    assert until <= swarm.now <= until + 0.1, "by the announced deadline"
    b.send(b.result(out))
    assert last_verdict(b).code == "too_late"
    b.lazy = set()
    swarm.finish()
    plan = swarm.seen(ev.Planned)[0]
    assert plan.members == (a.member.number,) and plan.missed == () and plan.qualified == 2
    assert b.member.loaded == 2 and b.member.total > 0
    credits = [st.credit for e in swarm.mc.state.ledger for st in e.statements if st.credit.epoch == 1]
    assert next(c.state for c in credits if c.key == b.key) == "unmeasured"


def test_commit_without_upload_is_a_miss() -> None:
    swarm, (a, b) = one_stage(2)
    b.lazy = {"Upload"}
    swarm.until_phase("reduce")
    plan = swarm.seen(ev.Planned)[0]
    assert plan.members == (a.member.number,) and plan.missed == (b.member.number,)
    assert swarm.mc.state.epochs[1].missed == {b.member.number}
    b.lazy = set()
    b.poll()
    swarm.finish()
    credits = {st.credit.id: st.credit for e in swarm.mc.state.ledger for st in e.statements}
    missed = credits[(1, b.key, 1)]
    assert missed.state == "invalid" and "did not upload" in missed.why
    assert swarm.mc.state.ledger[0].paid(b.key) == 0 and swarm.mc.state.ledger[1].paid(b.key) > 0
    assert not [e for e in swarm.seen(ev.AuditDrawn) if e.epoch == 1 and e.number == b.member.number]


def test_nobody_of_a_stage_uploads() -> None:
    swarm, (a,) = one_stage(1)
    a.lazy = {"Upload"}
    swarm.until_phase("sync")
    assert swarm.seen(ev.Planned)[0].members == () and swarm.seen(ev.StageMerged)[0].merged is False
    a.lazy = set()
    a.poll()
    swarm.finish()
    assert swarm.mc.state.epochs[1].missed == {a.member.number}


def test_commitment_must_fit_the_books() -> None:
    swarm, (a, _b) = one_stage(2)
    a.lazy = {"Commit"}
    swarm.run(lambda: bool(a.answers) and isinstance(a.answers[-1][1].task, tasks.Commit))
    good = a.result(a.answers[-1][1])
    assert isinstance(good, tasks.Committed)
    wrong = [
        replace(good, length=good.length + 1),
        replace(good, commitment="0" * 64),
        replace(good, steps=good.steps + 1),
        replace(good, cuts=good.cuts[:1]),
        replace(good, cuts=(good.cuts[-1], *good.cuts[1:])),
        replace(good, manifest_length=10**9),
    ]
    for bad in wrong:
        task = a.answers[-1][1].task
        a.send(replace(bad, task=task.task))
        assert last_verdict(a).code == "bad_input"
    a.send(replace(good, task=a.answers[-1][1].task.task))
    assert last_verdict(a).accepted
    swarm.finish()


def test_one_owner_dead_leaves_its_partner_alone() -> None:
    swarm, miners = one_stage(3)
    swarm.until_phase("reduce")
    miners[2].kill()
    swarm.until_phase("sync")
    hows = sorted(e.how for e in settled(swarm))
    assert hows == ["agreed", "alone", "alone"]
    swarm.finish()


def test_both_owners_dead_the_shard_is_reassigned() -> None:
    swarm, miners = one_stage(3)
    swarm.until_phase("reduce")
    for peer in miners[1:]:
        peer.kill()
    swarm.until_phase("sync")
    (again,) = swarm.seen(ev.ShardReassigned)
    assert again.owner == miners[0].member.number
    assert sorted(e.how for e in settled(swarm)) == ["alone", "alone", "alone"]
    assert swarm.kept == []
    swarm.finish()


def test_the_new_owner_dies_too_and_the_shard_keeps_its_value() -> None:
    swarm, miners = one_stage(3)
    swarm.until_phase("reduce")
    for peer in miners[1:]:
        peer.kill()
    swarm.run(lambda: bool(swarm.seen(ev.ShardReassigned)))
    miners[0].kill()
    swarm.until_phase("sync")
    (again,) = swarm.seen(ev.ShardReassigned)
    (kept,) = [e for e in settled(swarm) if e.how == "kept"]
    assert kept.shard == again.shard and kept.winner == merging.THIRD
    assert swarm.kept == [("keep", 0, kept.shard)]
    for peer in miners:
        peer.start()
    swarm.finish()


@pytest.mark.parametrize("miners", [1, 2])
def test_all_owners_dead_keeps_the_old_value(miners: int) -> None:
    swarm, peers = one_stage(miners)
    swarm.until_phase("reduce")
    for peer in peers:
        peer.kill()
    swarm.until_phase("sync")
    assert [e.how for e in settled(swarm)] == ["kept"] and swarm.kept == [("keep", 0, 0)]
    checkpoint = swarm.mc.state.checkpoints[0]
    assert {p.object for p in checkpoint.pieces} == {"merge/1/0/0/orchestrator.bin"}
    for peer in peers:
        peer.start()
    swarm.finish()


def test_silent_but_living_owners_are_waited_for_until_the_deadline_only() -> None:
    swarm, (a, b) = one_stage(2)
    a.lazy = b.lazy = {"Reduce"}
    swarm.until_phase("reduce")
    until = swarm.mc.state.phase_until
    swarm.until_phase("sync")
    assert until <= swarm.now <= until + 0.1
    assert [e.how for e in settled(swarm)] == ["kept"]


def test_restarted_owner_no_longer_counts() -> None:
    swarm, (a, b) = one_stage(2)
    swarm.until_phase("reduce")
    b.kill()
    b.start()
    swarm.until_phase("sync")
    (row,) = settled(swarm)
    assert (row.how, row.winner) == ("alone", a.member.number)
    swarm.finish()


def test_disagreeing_owners_and_a_validator() -> None:
    swarm, miners = one_stage(3)
    liar = miners[1]
    liar.lies = True
    swarm.until_phase("sync")
    rows = settled(swarm)
    assert sorted(e.how for e in rows) == ["agreed", "settled", "settled"]
    for row in rows:
        if row.how == "settled":
            assert row.liars == (liar.member.number,) and row.winner != liar.member.number
    third = [e for e in swarm.seen(ev.ShardReported) if e.third]
    assert {e.number for e in third} == {swarm.peers[0].member.number} and swarm.kept == []
    summary = swarm.mc.state.epochs[1].summary[0]
    assert summary.liars == {liar.member.number: 2} and summary.settled == {"agreed": 1, "settled": 2}
    liar.lies = False
    swarm.finish()


def test_without_a_validator_the_orchestrator_recomputes() -> None:
    swarm, (a, b) = one_stage(2, validator=False)
    b.lies = True
    swarm.until_phase("sync")
    (row,) = settled(swarm)
    assert (row.how, row.winner, row.liars) == ("settled", a.member.number, (b.member.number,))
    assert swarm.kept == [("recompute", 0, 0)]
    assert [e.number for e in swarm.seen(ev.ShardReported) if e.third] == [merging.ORCHESTRATOR]
    b.lies = False
    swarm.finish()


def test_dispute_that_nobody_settles_ends_with_the_old_value() -> None:
    merge = {"members": 2, "dispute_limit": 3.0, "phase_limit": 60.0}
    swarm, (_a, b) = one_stage(2, merge=merge, limits={"poll": 1.0})  # an idle validator must have spoken lately
    b.lies = True
    swarm.peers[0].lazy = {"Recompute"}
    swarm.run(lambda: bool(swarm.seen(ev.HeldoutMeasured)))  # a busy validator would not be waited for
    swarm.until_phase("reduce")
    swarm.run(lambda: bool(swarm.mc.soft.disputed_at))
    since = swarm.now
    swarm.until_phase("sync")
    assert [e.how for e in settled(swarm)] == ["kept"] and swarm.now <= since + 3.2
    assert all(not e.liars for e in settled(swarm))


def test_dispute_survives_a_restart() -> None:
    swarm, (_a, b) = one_stage(2)
    b.lies = True
    swarm.until_phase("reduce")
    swarm.run(lambda: bool(swarm.mc.soft.disputed_at))
    swarm.restart(down=3.0)
    assert list(swarm.mc.soft.disputed_at) == [(0, 0)]
    swarm.until_phase("sync")
    assert settled(swarm)[0].liars == (b.member.number,)
    b.lies = False
    swarm.finish()


@pytest.mark.parametrize("phase", ["commit", "upload", "reduce", "sync"])
def test_orchestrator_restart_in_a_merge_phase_gives_its_tasks_again(phase: str) -> None:
    swarm = Swarm(config(merge={"members": 2}, stop="epochs >= 2"), 3)
    swarm.miners(6)
    swarm.add("validator")
    swarm.until_phase(phase)
    until = swarm.mc.state.phase_until
    swarm.restart(down=40.0)
    assert swarm.phase != phase or swarm.mc.state.phase_until == until + 40.0
    swarm.finish()
    s = swarm.mc.state
    assert all(r.merged == {0: True, 1: True, 2: True} for r in s.epochs.values())
    assert all(len(e.members) == 2 for e in swarm.seen(ev.Planned))


def test_stage_without_a_qualifying_miner_keeps_its_state() -> None:
    swarm = Swarm(config(merge={"members": 1}, stop="epochs >= 2"), 3)
    swarm.miners(3)
    swarm.until_phase("commit")
    victim = swarm.stage(1)[0]
    before = swarm.mc.state.checkpoints[1]
    victim.kill()
    swarm.until_phase("sync")
    merged = {e.stage: e for e in swarm.seen(ev.StageMerged)}
    assert [merged[i].merged for i in range(3)] == [True, False, True]
    kept = merged[1].checkpoint
    assert kept.pieces == before.pieces and kept.t == before.t and kept.epoch == 1
    swarm.run(lambda: "waiting for a miner in stage 1" in swarm.mc.state.phase_why)
    victim.start()
    swarm.finish()


def test_late_sync_is_given_up_by_the_deadline() -> None:
    swarm, (a, b) = one_stage(2)
    b.lazy = {"Prove"}
    swarm.until_phase("train", 2)
    s = swarm.mc.state
    assert s.epochs[1].closed == s.epochs[2].opened and s.epochs[2].members == ((a.member.number,),)
    swarm.run(lambda: "drain" in s.epochs[2].began)
    swarm.finish()


@pytest.mark.parametrize("cut", range(0, 40))
def test_restart_from_any_place_in_the_journal(cut: int) -> None:
    """Also between the events of one command: what was journaled stays, the rest is decided again."""
    swarm = Swarm(config(merge={"members": 2}, stop="epochs >= 2", audit={"segments": 0}), 2)
    swarm.miners(4)
    swarm.add("validator")
    swarm.finish()
    keep = len(swarm.journal) * (cut + 1) // 41
    merges = [i for i, e in enumerate(swarm.events) if isinstance(e, ev.Planned | ev.StageMerged | ev.AuditDrawn)]
    if cut % 2:
        keep = merges[(cut * 7) % len(merges)] + 1
    swarm.restart(down=2.0, keep=keep)
    for peer in swarm.peers:
        peer.kill()
        m = swarm.mc.state.member(peer.key)
        if swarm.phase != "finished":
            if m is not None:
                swarm.mc.soft.seen[m.number] = 0.0
            peer.start()
    swarm.finish()
    assert swarm.mc.state.epoch == 2
    swarm.check_replay()
