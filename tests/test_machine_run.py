"""Whole runs of the state machine: epochs, audits, pay, the stop rule, pauses, bans, extension."""

from __future__ import annotations

import pytest

from iota.core import tasks
from iota.core.machine import events as ev
from iota.core.machine import phases
from iota.errors import ConfigError, Refused
from machine_swarm import OPERATOR, Swarm, config


def small(**sections: dict) -> Swarm:
    swarm = Swarm(config(**{"merge": {"members": 2}, "stop": "epochs >= 2", **sections}), 1)
    swarm.add("validator")
    swarm.miners(2)
    return swarm


def audits(swarm: Swarm, epoch: int) -> list[ev.AuditDrawn]:
    return [e for e in swarm.seen(ev.AuditDrawn) if e.epoch == epoch]


@pytest.mark.parametrize(("stages", "per_stage"), [(3, 2), (1, 3), (1, 1), (3, 1), (2, 4)])
def test_run_ends(stages: int, per_stage: int) -> None:
    swarm = Swarm(config(merge={"members": per_stage}), stages)
    swarm.miners(stages * per_stage)
    swarm.add("validator")
    swarm.finish()
    s = swarm.mc.state
    assert s.epoch == 3 and len(s.ledger) == 3 and s.queue == []
    for record in s.epochs.values():
        assert record.merged == dict.fromkeys(range(stages), True) and record.paid
        assert record.verdicts == {"valid": stages * per_stage}
        assert record.tokens_per_step == (16 * per_stage,) * stages
        assert record.samples_full == record.losses > 0 and record.samples_partial == 0
        assert record.effective_batch == dict.fromkeys(range(stages), record.samples_full)
        order = [record.began[p] for p in ("train", "drain", "commit", "upload", "reduce", "sync")]
        assert order == sorted(order) and record.closed is not None and record.closed >= order[-1]
    assert [r.heldout_loss() for r in s.epochs.values()] == [2.5, 5 / 3, 1.25]
    assert s.epochs[1].heldout_loss(checkpoint_zero=True) == 5.0
    assert s.tokens == 8 * sum(r.losses for r in s.epochs.values())
    assert all(entry.burned == 0 for entry in s.ledger)
    swarm.check_replay()


def test_everyone_loads_the_same_schedule() -> None:
    swarm = Swarm(config(merge={"members": 2}), 2)
    miners = swarm.miners(4)
    swarm.finish()
    for epoch in (1, 2, 3):
        loads = {
            (o.task.stage, o.task.tokens, o.task.tokens_per_step, o.task.t, o.task.segment_steps)
            for p in miners
            for _, o in p.answers
            if isinstance(o.task, tasks.Load) and o.task.epoch == epoch - 1
        }
        r = swarm.mc.state.epochs[epoch]
        assert loads == {(i, r.tokens, r.tokens_per_step[i], r.t[i], r.segment_steps[i]) for i in range(2)}


def test_run_without_validators_ends_and_burns_what_nobody_measured() -> None:
    swarm = Swarm(config(merge={"members": 1}), 2)
    swarm.miners(2)
    swarm.finish()
    assert all(entry.burned == swarm.config.pay.pool for entry in swarm.mc.state.ledger)
    assert {e.verdict for e in swarm.seen(ev.VerdictGiven)} == {"inconclusive"}


def test_time_alone_closes_every_phase() -> None:
    """Everybody vanishes in TRAIN: tick by tick the epoch ends, at announced deadlines."""
    swarm = Swarm(config(merge={"members": 2}, stop="epochs >= 1"), 2)
    swarm.miners(4)
    swarm.run(lambda: swarm.phase == "train" and swarm.mc.state.members[0].passes > 1)
    for peer in swarm.peers:
        peer.kill()
    swarm._heap.clear()
    ended: dict[str, tuple[float, float | None]] = {}
    while swarm.phase != "finished":
        before, until = swarm.phase, swarm.mc.state.phase_until
        swarm.advance()
        if swarm.phase != before:
            ended[before] = (swarm.now, until)
    assert set(ended) == {"train", "drain", "sync"}, "the others had nobody to wait for"
    assert all(until is not None and at <= until + 0.06 for at, until in ended.values())
    swarm.check()


# ---------------------------------------------------------------------------------------------------------- audits


@pytest.mark.parametrize("segments", [1, 2, 0])
def test_segments_drawn(segments: int) -> None:
    swarm = small(audit={"segments": segments, "segment_steps": 1}, merge={"members": 2, "min_batches": 8})
    swarm.finish()
    for number in (1, 2):
        drawn = [e for e in audits(swarm, 1) if e.number == number]
        facts_steps = swarm.mc.state.epochs[1].steps[number]
        assert len(drawn) == (segments or facts_steps)
        assert all(e.stop == e.start + 1 for e in drawn) and len({e.segment for e in drawn}) == len(drawn)


def test_share_of_miners_audited() -> None:
    swarm = Swarm(config(merge={"members": 12}, audit={"share": 0.5}, stop="epochs >= 3"), 1)
    swarm.add("validator")
    swarm.miners(12)
    swarm.finish()
    assert 0 < len(swarm.seen(ev.AuditDrawn)) < 36
    nobody = small(audit={"share": 0.0})
    nobody.finish()
    assert nobody.seen(ev.AuditDrawn) == [] and len(nobody.mc.state.ledger) == 2


def test_evidence_not_shown_by_the_deadline_is_invalid() -> None:
    swarm = small()
    a, b = swarm.peers[1:]
    b.lazy = {"Show"}
    swarm.finish()
    assert {e.verdict for e in swarm.seen(ev.VerdictGiven) if e.validator < 0} <= {"invalid", "inconclusive"}
    first = audits(swarm, 1)
    mine = next(e for e in first if e.number == b.member.number)
    verdict = next(e for e in swarm.seen(ev.VerdictGiven) if e.audit == mine.audit)
    assert (verdict.verdict, verdict.validator) == ("invalid", -1) and "did not show" in verdict.why
    assert swarm.mc.state.ledger[0].paid(b.key) == 0 < swarm.mc.state.ledger[0].paid(a.key)


def test_evidence_that_cannot_be_shown_is_invalid_at_once() -> None:
    swarm = small()
    b = swarm.peers[2]
    b.lazy = {"Show"}
    swarm.run(lambda: bool(audits(swarm, 1)))
    mine = next(e for e in audits(swarm, 1) if e.number == b.member.number)
    b.shown.append(tasks.Shown(mine.audit, "the disk is full"))
    b.shown.append(tasks.Shown(999, "no such audit"))
    swarm.run(lambda: bool([e for e in swarm.seen(ev.VerdictGiven) if e.audit == mine.audit]))
    verdict = next(e for e in swarm.seen(ev.VerdictGiven) if e.audit == mine.audit)
    assert verdict.verdict == "invalid" and "disk is full" in verdict.why


def test_session_that_ended_is_inconclusive() -> None:
    swarm = small()
    b = swarm.peers[2]
    b.lazy = {"Show"}
    swarm.run(lambda: bool(audits(swarm, 1)))
    mine = next(e for e in audits(swarm, 1) if e.number == b.member.number)
    b.kill()
    b.start()
    swarm.run(lambda: bool([e for e in swarm.seen(ev.VerdictGiven) if e.audit == mine.audit]))
    verdict = next(e for e in swarm.seen(ev.VerdictGiven) if e.audit == mine.audit)
    assert verdict.verdict == "inconclusive" and "session ended" in verdict.why
    swarm.finish()


@pytest.mark.parametrize("redraws", [0, 1, 2])
def test_inconclusive_work_is_drawn_again_for_some_epochs(redraws: int) -> None:
    swarm = small(audit={"redraws": redraws}, stop="epochs >= 5")
    validator = swarm.peers[0]
    for peer in swarm.peers[1:]:
        peer.verdict = "inconclusive"
    swarm.finish()
    for number in (1, 2):
        assert len([e for e in audits(swarm, 1) if e.number == number]) == 1 + redraws
    assert len(swarm.mc.state.ledger) == 5 and validator.member.alive
    assert all(sum(u for _, u in e.emissions) == 0 for e in swarm.mc.state.ledger)


def test_redrawn_work_is_paid_when_it_turns_out_valid() -> None:
    swarm = small(stop="epochs >= 4")
    b = swarm.peers[2]
    b.verdict = "inconclusive"
    swarm.until_phase("train", 2)
    swarm.run(lambda: b.member.last_verdict.startswith("epoch 1"))
    b.verdict = "valid"
    swarm.finish()
    credits = {st.credit.id: st.credit for e in swarm.mc.state.ledger for st in e.statements}
    assert credits[(1, b.key, 1)].state == "valid" and credits[(1, b.key, 1)].scored == 2
    ledger = swarm.mc.state.ledger
    assert ledger[0].paid(b.key) == 0 and ledger[0].burned > 0 and ledger[1].paid(b.key) > 0 == ledger[1].burned


def test_invalid_verdict_pays_nothing_for_its_epoch() -> None:
    swarm = small(stop="epochs >= 3")
    a, b = swarm.peers[1:]
    b.verdict = "invalid"
    swarm.finish()
    assert b.member.paid == 0 and a.member.paid == 3 * swarm.config.pay.pool
    assert b.member.history == ["invalid"] * 3 and b.member.last_verdict.startswith("epoch 3: invalid")


def test_failing_validator_measures_nothing() -> None:
    swarm = small()
    validator = swarm.peers[0]
    original = validator.result

    def fails(out):  # type: ignore[no-untyped-def]
        if isinstance(out.task, tasks.Audit):
            return tasks.Failed(task=out.task.task, code="no_memory", text="out of memory")
        return original(out)

    validator.result = fails  # type: ignore[method-assign]
    swarm.finish()
    assert {(e.verdict, e.validator) for e in swarm.seen(ev.VerdictGiven)} == {("inconclusive", -1)}


def test_old_facts_and_reports_go() -> None:
    swarm = small(stop="epochs >= 8", audit={"redraws": 1})
    swarm.finish()
    s = swarm.mc.state
    assert {key[0] for key in s.facts} == {7, 8}
    assert all(r.summary[0].settled == {"agreed": 1} for r in s.epochs.values())
    swarm.check_replay()


# -------------------------------------------------------------------------------------------- stop rule, operators


@pytest.mark.parametrize(
    ("rule", "epochs"), [("epochs >= 4", 4), ("tokens >= 120", 2), ("loss <= 1.7", 2), ("minutes >= 1", 4)]
)
def test_stop_rule(rule: str, epochs: int) -> None:
    swarm = small(stop=rule)
    swarm.finish()
    s = swarm.mc.state
    if rule.startswith("epochs"):
        assert s.epoch == epochs
    elif rule.startswith("tokens"):
        assert s.tokens >= 120 and s.epochs[s.epoch].tokens < 120
    elif rule.startswith("loss"):
        assert s.epoch == epochs, "the validator measures a checkpoint while miners still load it"
    else:
        assert s.epochs[s.epoch].closed is not None and s.epochs[s.epoch].closed - s.started >= 60
        assert s.epoch > 1 and s.epochs[s.epoch - 1].closed - s.started < 60
    assert s.phase_why.split()[0] == rule.split()[0]


def test_extended_run_goes_on() -> None:
    swarm = small(stop="epochs >= 1")
    swarm.finish()
    first = swarm.mc.state.ledger[0]
    with pytest.raises(ConfigError):
        swarm.mc.extend("epochs <= 3", swarm.now)
    swarm.restart(down=100_000.0)
    swarm.wait(5)
    assert swarm.phase == "finished", "a restart alone does not reopen it"
    with pytest.raises(Refused) as refused:
        swarm.add("miner")
    assert refused.value.code == "finished"
    swarm.peers.pop()
    swarm.call(lambda mc, now: mc.extend("epochs >= 3 or minutes >= 60", now))
    swarm.restart(down=100_000.0)
    assert swarm.phase == "sync" and swarm.mc.state.phase_until == swarm.now + swarm.config.merge.gather_limit
    for peer in swarm.peers:
        peer.kill()
        swarm.mc.soft.seen.clear()
        peer.start()
    swarm.finish()
    s = swarm.mc.state
    assert s.epoch == 3 and s.ledger[0] == first and all(r.merged == {0: True} for r in s.epochs.values())
    swarm.check_replay()


@pytest.mark.parametrize("phase", ["train", "commit", "reduce", "sync"])
def test_pause_moves_deadlines_also_across_a_restart(phase: str) -> None:
    swarm = small()
    swarm.until_phase(phase)
    until, at = swarm.mc.state.phase_until, swarm.now
    swarm.operate("pause")
    with pytest.raises(Refused) as refused:
        swarm.operate("pause")
    assert refused.value.code == "no_effect"
    swarm.wait(100)
    assert swarm.phase == phase and swarm.mc.state.phase_until == until
    assert isinstance(swarm.peers[1].answers[-1][1].task, tasks.Wait) and swarm.peers[1].member.alive
    swarm.restart(down=40.0)
    assert swarm.mc.state.phase_until == until, "a pause counts once"
    swarm.wait(60)
    paused = swarm.now - at
    swarm.operate("resume")
    s = swarm.mc.state
    assert s.paused_total == pytest.approx(paused) and paused >= 200
    assert swarm.phase != phase or s.phase_until == pytest.approx(until + paused)
    swarm.finish()
    assert s.epochs[1].held[phase] == pytest.approx(paused)
    assert phases.limit(swarm.mc, "train", 5.0) < 100
    swarm.check_replay()


def test_operators_only() -> None:
    swarm = small()
    rows = (("pause", "0" * 64, "not_operator"), ("dance", OPERATOR, "bad_command"), ("resume", OPERATOR, "no_effect"))
    for command, by, code in rows:
        with pytest.raises(Refused) as refused:
            swarm.call(lambda mc, now, c=command, b=by: mc.operate(c, "", b, now))
        assert refused.value.code == code


def test_ban_and_allow() -> None:
    swarm = small()
    swarm.run(lambda: swarm.phase == "train" and swarm.mc.state.members[1].passes > 0)
    b = swarm.peers[2]
    assert swarm.operate("ban", b.key) == f"ban {b.key}"
    assert not b.member.alive and all(x.holder != 2 for x in swarm.mc.state.samples.values())
    b.kill()
    with pytest.raises(Refused) as refused:
        b.start()
    assert refused.value.code == "banned"
    swarm.operate("allow", b.key)
    assert swarm.mc.state.allowed == set(), "an open run stays open"
    b.start()
    swarm.finish()
    assert b.member.session == 2 and b.member.total > 0


def test_allow_list() -> None:
    swarm = Swarm(config(admit={"allow": ("a" * 64,)}, merge={"members": 1}), 1)
    with pytest.raises(Refused) as refused:
        swarm.add()
    assert refused.value.code == "not_allowed"
    swarm.operate("allow", swarm.peers[0].key)
    swarm.peers[0].start()
    swarm.finish()


@pytest.mark.parametrize("phase", ["gather", "train", "commit", "sync"])
def test_stop_by_the_operator(phase: str) -> None:
    swarm = Swarm(config(merge={"members": 2 if phase != "gather" else 3}), 1)
    swarm.miners(2)
    swarm.until_phase(phase)
    swarm.operate("stop")
    swarm.finish(limit=60)
    assert swarm.mc.state.epoch == 1 and "stopped by operator" in swarm.mc.state.phase_why
    if phase != "gather":
        assert swarm.mc.state.epochs[1].merged == {0: True}


def test_standing_says_what_a_miner_earned() -> None:
    swarm = small()
    swarm.finish()
    m = swarm.peers[1].member
    standing = swarm.mc.standing(m)
    assert (standing.phase, standing.epoch, standing.phase_until) == ("finished", 2, None)
    assert standing.passes_total == m.total and standing.paid_total == m.paid > 0
    assert standing.passes_epoch == swarm.mc.state.epochs[2].passes[m.number]
    assert standing.last_verdict == "epoch 2: valid (numbers)"
