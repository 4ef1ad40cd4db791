"""TRAIN, its drain and membership: silent death, sessions, lost replies, B_min, quorum, windows."""

from __future__ import annotations

import pytest

from iota.core import tasks
from iota.core.machine import events as ev
from iota.core.machine import phases, training
from iota.errors import Refused
from machine_swarm import Peer, Swarm, config


def three_by_two(**sections: dict) -> Swarm:
    swarm = Swarm(config(**{"merge": {"members": 2}, **sections}), 3)
    swarm.miners(6)
    swarm.add("validator")
    return swarm


def last_verdict(peer: Peer) -> tasks.Verdict:
    return [out.verdict for _, out in peer.answers if out.verdict is not None][-1]


def holding(swarm: Swarm, kind: type, stage: int) -> Peer:
    """Run until some miner of a stage has just taken such a task."""
    found: list[Peer] = []

    def look() -> bool:
        for peer in swarm.stage(stage):
            lease = swarm.mc.soft.lease.get(peer.member.number)
            if lease is not None and isinstance(lease.item, kind) and lease.issued == swarm.now:
                found.append(peer)
        return bool(found)

    swarm.run(look)
    return found[0]


@pytest.mark.parametrize("phase", ["gather", "train", "drain", "commit", "upload", "reduce", "sync", "finishing"])
def test_silent_death_in_each_phase_ends_by_timer(phase: str) -> None:
    swarm = three_by_two()
    swarm.until_phase(phase)
    victim = swarm.stage(1)[0]
    victim.kill()
    swarm.finish()
    s = swarm.mc.state
    assert s.epoch == 3 and all(r.merged == {0: True, 1: True, 2: True} for r in s.epochs.values())
    assert phase == "finishing" or not victim.member.alive
    swarm.check_replay()


def test_forward_of_a_dead_miner_is_issued_again_to_its_neighbour() -> None:
    swarm = three_by_two()
    dead = holding(swarm, tasks.Forward, 1)
    sample = swarm.mc.state.samples[swarm.mc.soft.lease[dead.member.number].subject]
    dead.kill()
    neighbour = next(p for p in swarm.stage(1) if p is not dead)
    swarm.run(lambda: sample.path[1] != (-1, 0))
    assert sample.path[1] == (neighbour.member.number, 1)
    rerouted = next(e for e in swarm.seen(ev.Rerouted) if e.sample == sample.id)
    assert (rerouted.kind, rerouted.stage, rerouted.lost) == ("f", 1, dead.member.number)
    swarm.finish()


def test_only_the_backward_moves_when_the_output_was_consumed_already() -> None:
    swarm = three_by_two()
    dead = holding(swarm, tasks.Backward, 1)
    sample = swarm.mc.state.samples[swarm.mc.soft.lease[dead.member.number].subject]
    assert sample.path[1] == (dead.member.number, 1)
    dead.kill()
    neighbour = next(p for p in swarm.stage(1) if p is not dead)
    swarm.run(lambda: sample.id not in swarm.mc.state.samples)
    passed = [e for e in swarm.seen(ev.Passed) if e.sample == sample.id]
    assert [(e.kind, e.stage) for e in passed] == [("f", 0), ("f", 1), ("l", 2), ("b", 1), ("b", 0)]
    assert passed[3].number == neighbour.member.number
    assert sample.path[1] == (dead.member.number, 1), "the pathway names who did the forward"
    task = next(o.task for t, o in neighbour.answers if getattr(o.task, "sample", -1) == sample.id)
    assert isinstance(task, tasks.Backward) and task.with_input
    swarm.finish()


def test_slow_member_loses_its_lease_but_not_its_session() -> None:
    swarm = three_by_two()
    slow = holding(swarm, tasks.Forward, 1)
    lease = swarm.mc.soft.lease[slow.member.number]
    result = slow.result(slow.answers[-1][1])
    slow.life += 1  # its own event is cut off: it answers by hand, too late
    swarm.run(lambda: swarm.now > lease.deadline + 1)
    assert slow.member.alive
    assert slow.member not in swarm.mc.soft.stage_trainers(swarm.mc.state)[1], "no candidate while it is silent"
    slow.send(result)
    verdict = last_verdict(slow)
    assert (verdict.accepted, verdict.code) == (False, "lease_lost")
    assert slow.member in swarm.mc.soft.stage_trainers(swarm.mc.state)[1]
    swarm.finish()


def test_late_result_has_the_same_verdict_when_repeated_also_after_a_restart() -> None:
    swarm = three_by_two()
    slow = holding(swarm, tasks.Forward, 1)
    lease = swarm.mc.soft.lease[slow.member.number]
    result = slow.result(slow.answers[-1][1])
    slow.life += 1
    swarm.run(lambda: swarm.now > lease.deadline)
    turn = tasks.Turn(session=1, seq=slow.seq + 1, result=result, shown=(), draining=False)
    first = swarm.call(lambda mc, now: mc.turn(slow.key, turn, "body", now))
    again = swarm.call(lambda mc, now: mc.turn(slow.key, turn, "body", now))
    assert first.verdict == again.verdict and first.verdict.code == "lease_lost"
    with pytest.raises(Refused, match="another body") as refused:
        swarm.call(lambda mc, now: mc.turn(slow.key, turn, "other", now))
    assert refused.value.code == "idempotency"
    swarm.restart()
    after = swarm.call(lambda mc, now: mc.turn(slow.key, turn, "body", now))
    assert after.verdict == first.verdict
    with pytest.raises(Refused, match="another body"):
        swarm.call(lambda mc, now: mc.turn(slow.key, turn, "other", now))


def test_accepting_reply_is_repeated_with_its_step() -> None:
    swarm = Swarm(config(train={"accumulate": 1}), 1)
    miner = swarm.add()
    swarm.run(lambda: bool(swarm.mc.state.epochs) and swarm.mc.soft.lease.get(0) is not None)
    swarm.run(lambda: swarm.mc.state.members[0].total == 1)
    turn, out = miner.answers[-1]
    assert out.verdict is not None and out.verdict.accepted and out.step
    body = swarm.mc.state.members[0].last_body
    for _ in range(2):
        again = swarm.call(lambda mc, now: mc.turn(miner.key, turn, body, now))
        assert (again.verdict, again.step, again.task) == (out.verdict, out.step, out.task)
        swarm.restart()
        out = swarm.call(lambda mc, now: mc.turn(miner.key, turn, body, now))
        assert out.verdict.accepted and out.step, "the task beside it may differ"
    assert swarm.mc.state.members[0].total == 1
    with pytest.raises(Refused) as refused:
        old = tasks.Turn(session=1, seq=turn.seq - 1, result=None, shown=(), draining=False)
        swarm.call(lambda mc, now: mc.turn(miner.key, old, "x", now))
    assert refused.value.code == "old_turn"


def test_step_told_beside_no_result_binds_its_turn_too() -> None:
    """The incomplete rest at the drain: the answer to an empty poll says step; another body is refused."""
    swarm = Swarm(config(train={"accumulate": 3}), 1)
    swarm.add()
    swarm.run(lambda: bool(swarm.seen(ev.Stepped)))
    stepped = swarm.seen(ev.Stepped)[0]
    assert stepped.passes == swarm.mc.state.epochs[1].passes[0] % 3 and stepped.body
    m = swarm.mc.state.members[0]
    if m.last_seq == stepped.seq:
        turn = tasks.Turn(session=1, seq=stepped.seq, result=tasks.Done(task=1), shown=(), draining=False)
        with pytest.raises(Refused, match="another body"):
            swarm.call(lambda mc, now: mc.turn(m.key, turn, "other", now))
    swarm.finish()


def test_restarted_member_takes_over_with_its_token() -> None:
    swarm = three_by_two()
    swarm.run(lambda: swarm.mc.state.phase == "train" and swarm.stage(1)[0].member.passes >= 2)
    miner = swarm.stage(1)[0]
    number, before = miner.member.number, miner.member.passes
    held = [x.id for x in swarm.mc.state.samples.values() if x.holder == number]
    miner.kill()
    with pytest.raises(Refused) as refused:
        miner.start(token="stolen")
    assert refused.value.code == "key_in_use"
    miner.start()
    m = miner.member
    assert (m.session, m.passes, m.booked, m.loaded, m.stage) == (2, 0, before, -1, 1)
    lease = swarm.mc.soft.lease[number]
    assert lease.kind == "load", "the old session's pass is not its any more: it loads, and trains at once"
    assert all(swarm.mc.state.samples[x].holder not in (number,) for x in held)
    swarm.run(lambda: m.loaded == 0 and m.passes > 0)
    assert swarm.mc.state.epoch == 1
    assert {key[2] for key in swarm.mc.state.facts if key[1] == number} == {1, 2}
    swarm.finish()
    first = [st.credit for e in swarm.mc.state.ledger for st in e.statements if st.credit.key == m.key]
    assert {c.session for c in first} >= {1, 2} and sum(c.passes for c in first if c.epoch == 1 and c.session == 1) > 0


def test_session_rules() -> None:
    swarm = three_by_two()
    swarm.until_phase("train")
    miner = swarm.stage(0)[0]
    m = miner.member
    idle = tasks.Turn(session=1, seq=miner.seq + 1, result=None, shown=(), draining=False)
    miner.kill()
    swarm.run(lambda: not m.alive)
    with pytest.raises(Refused) as refused:
        swarm.call(lambda mc, now: mc.turn(miner.key, idle, "b", now))
    assert refused.value.code == "rejoin"
    miner.start(token="")  # dead: its key alone opens a session at once
    assert m.session == 2 and m.alive
    with pytest.raises(Refused) as refused:
        swarm.call(lambda mc, now: mc.turn(miner.key, idle, "b", now))
    assert refused.value.code == "session_over"
    with pytest.raises(Refused) as refused:
        swarm.call(lambda mc, now: mc.turn("0" * 64, idle, "b", now))
    assert refused.value.code == "unknown_key"
    request = tasks.Join(role="validator", token="", software="", device="", dtype="", memory=0, disk=0, owner="")
    with pytest.raises(Refused) as refused:
        swarm.call(lambda mc, now: mc.join(miner.key, request, "t", now))
    assert refused.value.code == "wrong_role"
    swarm.finish()


def test_drain_deadline_returns_or_closes_as_partial() -> None:
    swarm = Swarm(config(merge={"members": 1}, train={"accumulate": 1}, limits={"lease": 5.0}), 3)
    swarm.miners(3)
    swarm.until_phase("drain")
    swarm.stage(1)[0].kill()  # nobody else in the stage
    swarm.until_phase("commit")
    closed = swarm.seen(ev.SampleClosed)
    assert {e.how for e in closed} <= {"partial", "returned"} and closed
    passed = [e.sample for e in swarm.seen(ev.Passed) if e.kind != "f"]
    for e in closed:
        assert (e.how == "partial") == (e.sample in passed)
    returned = sorted(e.sample for e in closed if e.how == "returned")
    assert swarm.mc.state.queue == returned
    swarm.check()
    swarm.add()  # takes the dead one's stage
    swarm.until_phase("train", 2)
    swarm.run(lambda: len(swarm.seen(ev.Opened)) and swarm.mc.state.queue == [])
    again = [e.sample for e in swarm.seen(ev.Opened) if e.again]
    assert again == returned, "the queue's head comes first"
    swarm.finish()


def test_b_min_at_the_deadline_lets_a_slow_machine_merge() -> None:
    swarm = Swarm(config(merge={"members": 2, "min_batches": 40, "epoch_limit": 50.0}, stop="epochs >= 1"), 1)
    fast, slow = swarm.add(seconds=1.5), swarm.add(seconds=2.5)
    swarm.finish()
    record = swarm.mc.state.epochs[1]
    assert record.why["drain"].startswith("deadline")
    best, other = record.passes[fast.member.number], record.passes[slow.member.number]
    assert best // 2 <= other < best < 40
    plan = swarm.seen(ev.Planned)[0]
    assert len(plan.members) == 2 and plan.effective_batch == best + other
    assert record.until["train"] == record.began["train"] + 50.0


def test_a_member_far_below_b_min_does_not_merge_but_is_paid() -> None:
    swarm = Swarm(config(merge={"members": 2, "min_batches": 40, "epoch_limit": 60.0}, stop="epochs >= 1"), 1)
    swarm.add("validator")
    fast, slow = swarm.add(seconds=1.0), swarm.add(seconds=9.0)
    swarm.finish()
    record = swarm.mc.state.epochs[1]
    plan = swarm.seen(ev.Planned)[0]
    assert plan.members == (fast.member.number,) and plan.missed == ()
    assert plan.effective_batch == record.passes[fast.member.number]
    assert slow.member.number in record.steps, "it committed, so it is audited"
    assert slow.member.paid > 0 and slow.member.loaded == 1


@pytest.mark.parametrize(("share", "members", "need"), [(0.75, 2, 2), (0.75, 4, 3), (0.5, 3, 2), (0.1, 3, 1)])
def test_quorum_is_a_ceiling(share: float, members: int, need: int) -> None:
    swarm = Swarm(config(merge={"members": members, "quorum": share, "min_batches": 6}), 1)
    swarm.miners(members)
    swarm.until_phase("train")
    assert phases.quorum(swarm.mc, 0) == (0, need, members)
    record = swarm.mc.state.epochs[1]
    swarm.run(lambda: "drain" in record.began)
    ready = sorted(record.passes.values(), reverse=True)
    assert ready[need - 1] >= 6 and record.why["drain"].startswith("quorum")


def test_work_goes_first_to_members_below_b_min() -> None:
    swarm = Swarm(config(merge={"members": 2, "min_batches": 5}, stop="epochs >= 1"), 2)
    for seconds in (1.0, 1.0, 1.0, 4.0):
        swarm.add(seconds=seconds)
    swarm.until_phase("train")
    pair = swarm.stage(1)
    a, b = pair[0].member, pair[1].member
    a.passes, b.passes = 5, 2  # as if
    picks = {training.route(swarm.mc, sample, 1, 0, "f")[2] for sample in range(20)}
    assert picks == {b.number}
    b.passes = 5
    assert len({training.route(swarm.mc, sample, 1, 0, "f")[2] for sample in range(20)}) == 2


def test_in_flight_limit() -> None:
    swarm = Swarm(config(train={"max_in_flight": 3}, merge={"members": 2, "min_batches": 10}), 2)
    for seconds in (0.2, 5.0, 0.2, 5.0):
        swarm.add(seconds=seconds)
    swarm.until_phase("train")
    most = 0
    while swarm.phase == "train":
        swarm.advance()
        opened: dict[int, int] = {}
        for sample in swarm.mc.state.samples.values():
            opened[sample.first] = opened.get(sample.first, 0) + 1
        most = max(most, *opened.values()) if opened else most
    assert most == 3
    assert training.max_in_flight(swarm.mc) == 3


@pytest.mark.parametrize(("stages", "per_stage", "accumulate"), [(1, 1, 3), (3, 1, 1), (3, 1, 3), (2, 2, 2), (1, 3, 2)])
def test_synchronous_windows(stages: int, per_stage: int, accumulate: int) -> None:
    """Nothing new before all of a window are accepted everywhere and everyone with a pass was told to step."""
    swarm = Swarm(
        config(
            train={"pipeline": "synchronous", "accumulate": accumulate},
            merge={"members": per_stage, "min_batches": 6},
            stop="epochs >= 2",
        ),
        stages,
    )
    swarm.miners(stages * per_stage)
    swarm.finish()
    window = accumulate * per_stage
    opened = [e.sample for e in swarm.seen(ev.Opened)]
    assert opened == list(range(len(opened))), "in order of sample ids"
    count, pending = 0, dict.fromkeys(range(stages * per_stage), 0)
    for e in swarm.events:
        if isinstance(e, ev.Opened):
            if count == window:
                assert not any(pending.values()), "a new window began before everyone had stepped"
                count = 0
            count += 1
        elif isinstance(e, ev.Passed):
            assert not e.step
            pending[e.number] += e.kind != "f"
        elif isinstance(e, ev.Stepped):
            assert e.passes == pending[e.number] > 0
            if per_stage == 1 and count == window:
                assert e.passes == accumulate
            pending[e.number] = 0
    if per_stage == 1:
        full = [e for e in swarm.seen(ev.Stepped) if e.passes == accumulate]
        assert len(full) >= 2 * stages * (6 // accumulate) - stages


def test_newcomer_waits_for_the_next_sync_unless_its_stage_is_short() -> None:
    swarm = three_by_two()
    swarm.run(lambda: swarm.phase == "train" and swarm.mc.state.members[0].passes > 0)
    late = swarm.add()
    assert late.member.starts == 2 and late.held
    out = late.answers[-1][1]
    assert isinstance(out.task, tasks.Wait) and out.task.code == "next_sync"
    swarm.until_phase("train", 2)
    swarm.run(lambda: late.member.passes > 0)
    assert swarm.mc.state.epoch == 2
    victim = swarm.stage(2)[0]
    victim.kill()
    swarm.run(lambda: not victim.member.alive)
    if swarm.phase == "train":
        helper = swarm.add()
        assert helper.member.stage == 2 and helper.member.starts == swarm.mc.state.epoch
    swarm.finish()


def test_one_that_returns_before_it_did_anything_goes_where_members_are_fewest() -> None:
    swarm = Swarm(config(merge={"members": 2, "gather_limit": 300.0}), 3)
    miners = swarm.miners(5)
    assert [m.member.stage for m in miners] == [0, 1, 2, 0, 1]
    victim = miners[1]
    swarm.run(lambda: victim.held)
    victim.kill()
    swarm.run(lambda: not victim.member.alive)
    assert swarm.phase == "gather"
    taker = swarm.add()
    assert taker.member.stage == 1
    victim.start()
    assert victim.member.stage == 2, "its old stage is full now, this one has a single member"
    swarm.add("validator")
    swarm.run(lambda: victim.member.total > 0)
    victim.kill()
    swarm.run(lambda: not victim.member.alive)
    swarm.add()
    victim.start()
    assert victim.member.stage == 2, "it has worked there"
    swarm.finish()


def test_one_that_returns_before_it_did_anything_stays_where_it_was_among_equals() -> None:
    swarm = Swarm(config(merge={"members": 3, "gather_limit": 300.0}), 3)
    victim = swarm.miners(6)[-1]
    swarm.run(lambda: victim.held)
    victim.kill()
    swarm.run(lambda: not victim.member.alive)
    assert swarm.add().member.stage == 2, "two in every stage again"
    victim.start()
    assert victim.member.stage == 2


def test_draining_member_hands_on_and_leaves() -> None:
    swarm = three_by_two()
    leaver = holding(swarm, tasks.Forward, 1)
    leaver.draining = True
    swarm.run(lambda: not leaver.running)
    assert leaver.log == ["leave drained"] and leaver.member.why_gone.startswith("left")
    swarm.finish()


def test_failed_pass_goes_to_a_neighbour_and_the_member_rests() -> None:
    swarm = three_by_two()
    bad = holding(swarm, tasks.Forward, 1)
    lease = swarm.mc.soft.lease[bad.member.number]
    bad.life += 1
    bad.send(tasks.Failed(task=lease.task, code="not_finite", text="NaN"))
    assert last_verdict(bad).code == "not_finite"
    rerouted = swarm.seen(ev.Rerouted)[-1]
    assert rerouted.sample == lease.subject and rerouted.route[2] != bad.member.number
    assert bad.answers[-1][1].task.code == "rest"
    swarm.finish()


def test_result_of_another_kind_does_not_end_a_lease() -> None:
    swarm = three_by_two()
    miner = holding(swarm, tasks.Forward, 0)
    number = miner.member.number
    lease = swarm.mc.soft.lease[number]
    root = swarm.mc.state.checkpoints[0].root()
    seq = miner.seq
    for result in (
        tasks.Loaded(task=lease.task, root=root, seconds=1.0),
        tasks.Done(task=lease.task),
        tasks.Measured(task=lease.task, epoch=lease.subject, loss=1.0, tokens=1, seconds=1.0),
        tasks.Reduced(task=lease.task, shards=(), bad=()),
    ):
        seq += 1
        turn = tasks.Turn(session=1, seq=seq, result=result, shown=(), draining=False)
        out = swarm.call(lambda mc, now, t=turn: mc.turn(miner.key, t, f"b{t.seq}", now))
        assert not out.verdict.accepted and swarm.mc.soft.lease[number] is lease and out.task is lease.item
    miner.seq = seq
    swarm.finish()


def test_orchestrator_restart_returns_or_closes_what_was_in_flight() -> None:
    swarm = three_by_two()
    swarm.run(lambda: swarm.phase == "train" and len(swarm.mc.state.samples) >= 4 and swarm.now > 1010)
    s = swarm.mc.state
    partial = sorted(x.id for x in s.samples.values() if x.backwards)
    returned = sorted(x.id for x in s.samples.values() if not x.backwards)
    until, credited = s.phase_until, [m.total for m in s.members]
    swarm.restart(down=50.0)
    s = swarm.mc.state
    assert s.samples == {} and s.queue[: len(returned)] == returned
    assert s.epochs[1].samples_partial == len(partial)
    assert s.phase_until == until + 50.0 and [m.total for m in s.members] == credited
    swarm.finish()
    lost = [e for e in swarm.seen(ev.Declined) if e.code == "lease_lost"]
    assert lost
    swarm.check_replay()
