"""Any order of joins, deaths, restarts, lost and doubled requests, wrong results, pauses: the invariants hold.

The swarm checks, after every rule: no sample is counted twice or lost, passes in the books are the accepted ones, one
plan a stage and epoch, holders are alive and of the right stage, no phase outlasts its announced deadline, emissions
sum to the pool, the ledger verifies; an orchestrator restart replays encoded events to an equal state. At the end
whatever came to pass is healed and the run must finish.
"""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from iota.core import tasks
from iota.core.values import sha256
from iota.errors import Refused
from machine_swarm import Peer, Swarm, config

LAZY = ("Forward", "Backward", "Commit", "Upload", "Reduce", "Prove", "Load", "Show", "Audit", "Heldout", "Recompute")


class Runs(RuleBasedStateMachine):
    swarm: Swarm

    @initialize(
        stages=st.integers(1, 3),
        pipeline=st.sampled_from(("asynchronous", "synchronous")),
        accumulate=st.integers(1, 3),
        per_stage=st.integers(1, 2),
        segments=st.integers(0, 1),
        quorum=st.sampled_from((0.5, 1.0)),
    )
    def begin(self, stages: int, pipeline: str, accumulate: int, per_stage: int, segments: int, quorum: float) -> None:
        self.swarm = Swarm(
            config(
                train={"pipeline": pipeline, "accumulate": accumulate},
                merge={"members": per_stage, "min_batches": 3, "quorum": quorum, "epoch_limit": 60.0},
                audit={"segments": segments},
                limits={"lease": 8.0, "silence": 12.0},
                stop="epochs >= 30",
            ),
            stages,
        )
        for _ in range(stages * per_stage):
            self.swarm.add()
        self.swarm.add("validator")

    def pick(self, index: int) -> Peer:
        return self.swarm.peers[index % len(self.swarm.peers)]

    @rule(steps=st.integers(1, 60))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.swarm.advance()

    @rule(seconds=st.integers(1, 40))
    def much_time_passes(self, seconds: int) -> None:
        self.swarm.wait(seconds)

    @precondition(lambda self: len(self.swarm.peers) < 9)
    @rule(role=st.sampled_from(("miner", "miner", "validator")), seconds=st.sampled_from((0.3, 1.0, 4.0, 11.0)))
    def somebody_joins(self, role: str, seconds: float) -> None:
        self.swarm.add(role, seconds)

    @rule(who=st.integers(0, 8))
    def dies(self, who: int) -> None:
        self.pick(who).kill()

    @rule(who=st.integers(0, 8), token=st.sampled_from((None, None, "")))
    def comes_back(self, who: int, token: str | None) -> None:
        peer = self.pick(who)
        was_alive = peer.running
        try:
            peer.start(token)
        except Refused as refused:
            assert refused.code == "key_in_use" and token == ""
            assert was_alive or peer.member.alive

    @rule(who=st.integers(0, 8), what=st.sampled_from(LAZY))
    def stops_answering(self, who: int, what: str) -> None:
        self.pick(who).lazy ^= {what}

    @rule(who=st.integers(0, 8))
    def lies(self, who: int) -> None:
        self.pick(who).lies ^= True

    @rule(who=st.integers(0, 8), verdict=st.sampled_from(("valid", "invalid", "inconclusive")))
    def is_judged(self, who: int, verdict: str) -> None:
        self.pick(who).verdict = verdict

    @rule(every=st.sampled_from((0, 3, 7)))
    def replies_are_lost(self, every: int) -> None:
        count = iter(range(10**9))
        self.swarm.loses = lambda: every > 0 and next(count) % every == every - 1

    @rule(who=st.integers(0, 8))
    def repeats_its_request(self, who: int) -> None:
        peer = self.pick(who)
        if not peer.running or peer.turn is None:
            return
        m, turn = peer.member, peer.turn
        if not (m.alive and m.session == peer.session and m.last_seq == turn.seq and turn.result is not None):
            return
        before = (m.last_code, m.last_step, m.total)
        out = peer.repeat()
        assert out is not None and out.verdict is not None
        assert (out.verdict.code or None, out.step, m.total) == before
        other = msgspec.structs.replace(turn, draining=not turn.draining)
        try:
            self.swarm.call(lambda mc, now: mc.turn(peer.key, other, "another body", now))
            raise AssertionError("another body under the same number was taken")
        except Refused as refused:
            assert refused.code == ("idempotency" if m.alive else "rejoin")

    @rule(
        who=st.integers(0, 8),
        kind=st.sampled_from(("passed", "loaded", "done", "reduced", "failed", "measured", "audited")),
    )
    def sends_nonsense(self, who: int, kind: str) -> None:
        peer = self.pick(who)
        if not peer.running or not peer.member.alive or peer.member.session != peer.session:
            return
        lease = self.swarm.mc.soft.lease.get(peer.member.number)
        task, subject = (lease.task, lease.subject) if lease else (1, 0)
        results: dict[str, tasks.Result] = {
            "passed": tasks.Passed(
                task=task, sample=subject, head="", inp="", out="", cut=None, loss=float("nan"), seconds=float("nan"),
                recomputed=False,
            ),
            "loaded": tasks.Loaded(task=task, root=sha256(b"x"), seconds=-1.0),
            "done": tasks.Done(task=task + 1),
            "reduced": tasks.Reduced(task=task, shards=(), bad=()),
            "failed": tasks.Failed(task=task, code="no_memory", text="x"),
            "measured": tasks.Measured(task=task, epoch=subject, loss=-1.0, tokens=1, seconds=1.0),
            "audited": tasks.Audited(
                task=task, audit=subject, verdict="fine", why="", operations=0, worst=(), seconds=0.0
            ),
        }  # fmt: skip
        peer.life += 1  # what it was doing is forgotten
        peer.held = False
        peer.send(results[kind])

    @rule(who=st.integers(0, 8))
    def drains(self, who: int) -> None:
        self.pick(who).draining = True

    @rule(down=st.sampled_from((0.0, 1.0, 30.0)))
    def orchestrator_restarts(self, down: float) -> None:
        self.swarm.restart(down)

    @rule()
    def pause_or_resume(self) -> None:
        self.swarm.operate("resume" if self.swarm.mc.state.paused is not None else "pause")

    @rule(who=st.integers(0, 8), command=st.sampled_from(("ban", "allow")))
    def bans_or_allows(self, who: int, command: str) -> None:
        peer = self.pick(who)
        self.swarm.operate(command, peer.key)
        if command == "ban":
            peer.kill()
            self.swarm.operate("allow", peer.key)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "swarm"):
            self.swarm.check()

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        swarm = self.swarm
        if swarm.mc.state.paused is not None:
            swarm.operate("resume")
        swarm.loses = lambda: False
        swarm.wait(30)
        for peer in swarm.peers:
            peer.lazy, peer.lies, peer.draining = set(), False, False
            if swarm.phase != "finished":
                peer.kill()
                peer.start()
        epoch = swarm.mc.state.epoch
        swarm.run(lambda: swarm.mc.state.epoch > epoch or swarm.phase == "finished", limit=1000)
        if swarm.phase != "finished":
            swarm.operate("stop")
            swarm.finish(limit=1000)
        swarm.check_replay()


Runs.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestRuns = Runs.TestCase
