"""A swarm in memory that plays miners and validators against `Machine`: fake digests, virtual time, no torch.

Peers behave as real ones do (one request brings a result and takes the next task, idle polls are held and woken), and
every event goes through `events.encode` into a journal, so a restart is a replay of bytes. `Books` follows the events
on its own and is held against the state by `Swarm.check`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from iota.config.schema import AdmitConfig, AuditConfig, LimitsConfig, MergeConfig, ModelConfig, RunConfig, TrainConfig
from iota.core import ledger, tasks
from iota.core import manifest as chunk_manifest
from iota.core.machine import books, merging
from iota.core.machine import events as ev
from iota.core.machine.machine import Machine, Outcome
from iota.core.machine.state import Member
from iota.core.values import CHUNK_BYTES, Checkpoint, Cut, Piece, sha256
from iota.errors import Refused

OPERATOR = "f" * 64
PARAMETERS = 100_000  # seven chunks a part
SECRET = "5e" * 32


def text_digest(*parts: object) -> str:
    return sha256(repr(parts).encode())


def config(**sections: dict[str, Any]) -> RunConfig:
    """A run with short limits; `train=dict(accumulate=2)` changes a section, plain values change the top level."""
    base: dict[str, Any] = {
        "name": "swarm",
        "seed": 7,
        "stop": "epochs >= 3",
        "model": ModelConfig(sequence=8),
        "train": TrainConfig(batch=1, accumulate=2),
        "merge": MergeConfig(
            min_batches=4, quorum=1.0, members=1, epoch_limit=200.0, phase_limit=30.0, gather_limit=30.0
        ),
        "audit": AuditConfig(segment_steps=2, show_limit=20.0, audit_limit=30.0, final_wait=20.0),
        "admit": AdmitConfig(operators=(OPERATOR,)),
        "limits": LimitsConfig(lease=20.0, grace=2.0),
    }
    for name, value in sections.items():
        base[name] = msgspec.structs.replace(base[name], **value) if isinstance(value, dict) else value
    return RunConfig(**base)


class Books:
    """What must be true of samples and passes, from the events alone."""

    def __init__(self) -> None:
        self.open: dict[int, set[int]] = {}
        self.queued: set[int] = set()
        self.full: set[int] = set()
        self.partial: set[int] = set()
        self.next = 0
        self.passes: dict[int, int] = {}
        self.plans: set[tuple[int, int]] = set()
        self.counts: dict[str, int] = {}

    def take(self, e: ev.Event) -> None:
        name = type(e).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if isinstance(e, ev.Opened):
            assert e.sample not in self.open and e.sample not in self.full and e.sample not in self.partial
            assert e.again == (e.sample in self.queued)
            assert e.again or e.sample == self.next
            self.queued.discard(e.sample)
            self.next = max(self.next, e.sample + 1)
            self.open[e.sample] = set()
        elif isinstance(e, ev.Passed) and e.kind != "f":
            assert e.stage not in self.open[e.sample], f"two accepted backward passes of {e.sample} at {e.stage}"
            self.open[e.sample].add(e.stage)
            self.passes[e.number] = self.passes.get(e.number, 0) + 1
            if e.stage == 0:
                del self.open[e.sample]
                self.full.add(e.sample)
        elif isinstance(e, ev.SampleClosed):
            assert (e.how == "partial") == bool(self.open[e.sample])
            self._close(e.sample)
        elif isinstance(e, ev.Restarted):
            for sample in list(self.open):
                self._close(sample)
        elif isinstance(e, ev.Planned):
            assert (e.epoch, e.stage) not in self.plans, "two plans of one stage and epoch"
            self.plans.add((e.epoch, e.stage))

    def _close(self, sample: int) -> None:
        (self.partial if self.open.pop(sample) else self.queued).add(sample)


class Peer:
    """A process: its session, its local training state, the task it runs."""

    def __init__(self, swarm: Swarm, name: str, role: str, seconds: float) -> None:
        self.swarm, self.name, self.role, self.seconds = swarm, name, role, seconds
        self.key = sha256(name.encode())
        self.token = ""
        self.starts = 0
        self.running = False
        self.lies = False
        self.draining = False
        self.lazy: set[str] = set()  # class names of tasks that it takes and never answers
        self.log: list[str] = []
        self.answers: list[tuple[tasks.Turn, Outcome]] = []
        self._fresh()

    def _fresh(self) -> None:
        self.life = 0 if not hasattr(self, "life") else self.life + 1
        self.session = self.seq = 0
        self.turn: tasks.Turn | None = None
        self.held = False
        self.shown: list[tasks.Shown] = []
        self.steps = self.stepped_at = 0
        self.segment = 1
        self.cuts: list[Cut] = []
        self.unsent: Cut | None = None
        self.verdict = "valid"

    @property
    def member(self) -> Member:
        found = self.swarm.mc.state.member(self.key)
        assert found is not None
        return found

    # -------------------------------------------------------------------------------------------- process life

    def start(self, token: str | None = None) -> None:
        """Join (with its own last token unless another is given) and begin to work."""
        self.starts += 1
        new = f"{self.name} token {self.starts}"
        known = self.token if token is None else token
        request = tasks.Join(
            role=self.role, token=known, software="t", device="cpu", dtype="float32", memory=1, disk=1, owner=""
        )
        m = self.swarm.call(lambda mc, now: mc.join(self.key, request, sha256(new.encode()), now))
        self._fresh()
        self.token, self.session, self.running = new, m.session, True
        self.poll()

    def kill(self) -> None:
        """Silent death."""
        self.running, self.held = False, False
        self.life += 1

    def poll(self) -> None:
        self.send(None)

    # ---------------------------------------------------------------------------------------------- the exchange

    def send(self, result: tasks.Result | None, lose_reply: bool = False) -> None:
        self.seq += 1
        shown, self.shown = tuple(self.shown), []
        self.turn = tasks.Turn(session=self.session, seq=self.seq, result=result, shown=shown, draining=self.draining)
        self.repeat(lose_reply)

    def repeat(self, lose_reply: bool = False) -> Outcome | None:
        """Send the last turn (again), unchanged."""
        turn = self.turn
        assert turn is not None
        body = sha256(msgspec.msgpack.encode(turn))
        life = self.life
        try:
            out = self.swarm.call(lambda mc, now: mc.turn(self.key, turn, body, now))
        except Refused as refused:
            self.log.append(refused.code)
            if refused.code == "rejoin":
                self.running = False
                self.start()
            else:
                self.kill()
            return None
        if lose_reply:
            self.swarm.at(2.0, lambda: self.repeat() if life == self.life else None)
        elif life == self.life:
            self._answer(turn, out)
        return out

    def woken(self) -> None:
        turn = self.turn
        assert turn is not None
        try:
            out = self.swarm.call(lambda mc, now: mc.again(self.key, turn, now))
        except Refused:
            self.held = False
            self.repeat()
            return
        if not isinstance(out.task, tasks.Wait) or out.step or out.shows:
            self._answer(turn, out)

    def _answer(self, turn: tasks.Turn, out: Outcome) -> None:
        self.held = False
        self.answers.append((turn, out))
        self.swarm.check_held(self, out)
        if out.step and self.stepped_at < turn.seq:
            self.stepped_at = turn.seq
            self._step()
        for show in out.shows:
            if "Show" not in self.lazy and show.audit not in [s.audit for s in self.shown]:
                self.shown.append(tasks.Shown(show.audit, ""))
        life = self.life
        if isinstance(out.task, tasks.Leave):
            self.log.append(f"leave {out.task.code}")
            self.kill()
        elif isinstance(out.task, tasks.Wait):
            if turn.result is not None or self.shown or out.step:
                self.poll()
            else:
                self.held = True
                self.swarm.at(self.swarm.config.limits.poll, lambda: self._poll_over(life, turn))
        elif type(out.task).__name__ not in self.lazy:
            self.swarm.at(self._takes(out.task), lambda: self._done(life, out))

    def _poll_over(self, life: int, turn: tasks.Turn) -> None:
        if life == self.life and self.held and self.turn is turn:
            self.held = False
            self.poll()

    def _takes(self, task: tasks.Task) -> float:
        return self.seconds if isinstance(task, tasks.Forward | tasks.Backward) else 0.5

    def _done(self, life: int, out: Outcome) -> None:
        if life == self.life:
            self.send(self.result(out), self.swarm.loses())

    def _step(self) -> None:
        self.steps += 1
        if self.steps % self.segment == 0:
            self.unsent = Cut(self.steps, text_digest(self.name, self.session, self.steps))
            self.cuts.append(self.unsent)

    # ------------------------------------------------------------------------------------------------- results

    def result(self, out: Outcome) -> tasks.Result:
        task: Any = out.task
        return getattr(self, "_" + type(task).__name__.lower())(task, out.attach)

    def _load(self, task: tasks.Load, attach: Any) -> tasks.Result:
        self.steps, self.segment, self.unsent = 0, task.segment_steps, None
        self.cuts = [Cut(0, text_digest(task.epoch, task.stage))]
        return tasks.Loaded(task=task.task, root=attach[1].root(), seconds=0.5)

    _prove = _load

    def _pass(self, task: tasks.Forward | tasks.Backward, loss: float | None) -> tasks.Result:
        cut, self.unsent = self.unsent, None
        name = (self.name, task.task)
        return tasks.Passed(
            task=task.task, sample=task.sample, head=text_digest("head", name), inp="", out=text_digest("out", name),
            cut=cut, loss=loss, seconds=self.seconds, recomputed=False,
        )  # fmt: skip

    def _forward(self, task: tasks.Forward, attach: Any) -> tasks.Result:
        stage = self.member.stage
        assert (attach is None) == (stage == 0)
        return self._pass(task, 2.0 if stage == self.swarm.stages - 1 else None)

    def _backward(self, task: tasks.Backward, attach: Any) -> tasks.Result:
        return self._pass(task, None)

    def _commit(self, task: tasks.Commit, attach: Any) -> tasks.Result:
        mc, m = self.swarm.mc, self.member
        parts = len(merging.outer(mc).upload_parts(merging.moments(mc)))
        root = text_digest("root", self.name, task.epoch)
        final = Cut(self.steps, text_digest(self.name, self.session, self.steps))
        cuts = [c for c in self.cuts if c.step < self.steps]
        return tasks.Committed(
            task=task.task, root=root,
            commitment=chunk_manifest.commitment(root, self.key, mc.state.run, task.epoch, m.stage),
            length=parts * chunk_manifest.chunk_count(PARAMETERS) * CHUNK_BYTES, digest=text_digest("u", root),
            manifest_length=100, manifest_digest=text_digest("m", root), cuts=(*cuts, final), steps=self.steps,
            head=text_digest("committed", self.name, task.epoch),
        )  # fmt: skip

    def _upload(self, task: tasks.Upload, attach: Any) -> tasks.Result:
        return tasks.Done(task=task.task)

    def _reduce(self, task: Any, attach: Any) -> tasks.Result:
        who = self.name if self.lies else ""
        rows = tuple(self.swarm.reduced(attach[1], work, task.stage, who) for work in attach[1].shards)
        return tasks.Reduced(task=task.task, shards=rows, bad=())

    _recompute = _reduce

    def _audit(self, task: tasks.Audit, attach: Any) -> tasks.Result:
        worst = (tasks.Comparison("forward", 0, float("nan"), 1.0, False),)
        audited = self.swarm.mc.state.members[self.swarm.mc.state.audits[task.audit].number]
        verdict = self.swarm.peer_of(audited.key).verdict
        return tasks.Audited(
            task=task.task, audit=task.audit, verdict=verdict, why="numbers", operations=3, worst=worst, seconds=0.5
        )

    def _heldout(self, task: tasks.Heldout, attach: Any) -> tasks.Result:
        loss = self.swarm.loss(task.epoch)
        return tasks.Measured(task=task.task, epoch=task.epoch, loss=loss, tokens=100, seconds=0.5)


class Swarm:
    """The orchestrator's side: machine, journal, clock, what a node does for the machine."""

    def __init__(self, run_config: RunConfig, stages: int = 3, begin: bool = True) -> None:
        self.config, self.stages = run_config, stages
        self.now = 1000.0
        self.journal: list[bytes] = []
        self.events: list[ev.Event] = []
        self.books = Books()
        self.peers: list[Peer] = []
        self.loss: Callable[[int], float] = lambda epoch: 5.0 / (1 + epoch)
        self.loses: Callable[[], bool] = lambda: False
        self.kept: list[tuple[str, int, int]] = []
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.mc = self._machine()
        if begin:
            zero = tuple(
                Checkpoint("run", 0, s, PARAMETERS, 0, (Piece("weights", 0, PARAMETERS, f"zero/{s}", 0, f"{s}"),))
                for s in range(stages)
            )
            self.call(lambda mc, now: mc.start("run", now, zero))

    def _machine(self) -> Machine:
        return Machine(self.config, self.stages, (PARAMETERS,) * self.stages, SECRET)

    # ------------------------------------------------------------------------------------------------- building

    def add(self, role: str = "miner", seconds: float = 1.0, start: bool = True) -> Peer:
        peer = Peer(self, f"{role}{len(self.peers)}", role, seconds)
        self.peers.append(peer)
        if start:
            peer.start()
        return peer

    def miners(self, count: int, seconds: float = 1.0) -> list[Peer]:
        return [self.add("miner", seconds) for _ in range(count)]

    def peer_of(self, key: str) -> Peer:
        return next(p for p in self.peers if p.key == key)

    def stage(self, stage: int) -> list[Peer]:
        return [p for p in self.peers if p.role == "miner" and p.member.stage == stage]

    # ------------------------------------------------------------------------------------------------------ time

    def at(self, delay: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), action))

    def call(self, command: Callable[[Machine, float], Any]) -> Any:
        """One command, then what a node does after it: journal, wake held polls."""
        try:
            return command(self.mc, self.now)
        finally:
            self._after()

    def _after(self) -> None:
        for event in self.mc.take_events():
            data = ev.encode(event)
            self.journal.append(data)
            self.books.take(event)
            self.events.append(event)
        wake, self.mc.soft.wake = self.mc.soft.wake, set()
        self.mc.soft.released.clear()
        for peer in self.peers:
            m = self.mc.state.member(peer.key)
            if peer.held and m is not None and m.number in wake:
                life, turn = peer.life, peer.turn
                self.at(0.0, lambda p=peer, n=life, t=turn: p.woken() if p.life == n and p.held and p.turn is t else 0)

    def tick(self) -> None:
        self.call(lambda mc, now: mc.tick(now))
        for kind, stage, shard in merging.wanted(self.mc, self.now):
            merge = self.mc.state.merges[stage]
            if shard in merge.settled:
                continue
            self.kept.append((kind, stage, shard))
            sheet = merging.sheet(self.mc, merge, [shard], "orchestrator", True)
            work = sheet.shards[0]
            row = self.reduced(sheet, work, stage, "old value" if kind == "keep" else "")
            if kind == "keep":
                self.call(lambda mc, now, st=stage, sh=shard, r=row, u=work.url: merging.on_kept(mc, st, sh, r, u))
            else:
                r = tasks.Reduced(task=0, shards=(row,), bad=())
                self.call(
                    lambda mc, now, st=stage, r=r, w=work: merging.record_report(
                        mc, -1, 0, "", st, True, r, {w.shard: w}
                    )
                )
            self.call(lambda mc, now: mc.tick(now))

    def reduced(self, sheet: tasks.ReduceSheet, work: tasks.ShardWork, stage: int, who: str) -> tasks.ShardResult:
        """An honest (who "") or a wrong result for one shard."""
        low, high = chunk_manifest.element_range(work.start, work.stop, PARAMETERS)
        names = merging.outer(self.mc).result_parts(merging.moments(self.mc))
        roots = [(c.key, c.root, c.coefficient) for c in sheet.contributions]
        parts = tuple((name, text_digest(name, stage, work.shard, roots, who)) for name in names)
        return tasks.ShardResult(work.shard, parts, 4 * (high - low) * len(names), text_digest(parts))

    def advance(self) -> None:
        """To the next thing that happens."""
        due = self.mc.next_due(self.now)
        assert due > self.now
        if self._heap and self._heap[0][0] <= due:
            at, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            action()
        else:
            self.now = due
        self.tick()

    def run(self, until: Callable[[], bool], limit: float = 3000.0) -> None:
        """Advance until the condition holds; fails after `limit` virtual seconds."""
        end = self.now + limit
        while not until():
            assert self.now < end, f"still {self.phase} of epoch {self.mc.state.epoch}: {self.mc.state.phase_why}"
            self.advance()

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        self.at(seconds, lambda: None)
        while self.now < end:
            self.advance()

    def until_phase(self, phase: str, epoch: int | None = None, limit: float = 3000.0) -> None:
        self.run(lambda: self.phase == phase and epoch in (None, self.mc.state.epoch), limit)

    def finish(self, limit: float = 5000.0) -> None:
        self.until_phase("finished", limit=limit)
        self.check()

    @property
    def phase(self) -> str:
        return self.mc.state.phase

    def seen(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    # --------------------------------------------------------------------------------------------------- restart

    def restart(self, down: float = 0.0, keep: int | None = None) -> None:
        """Kill the orchestrator, come back from the journal (its first `keep` rows). With the whole journal the state
        must be the same."""
        old = self.mc
        if keep is not None and keep < len(self.journal):
            del self.journal[keep:], self.events[keep:]
            self.books = Books()
            for event in self.events:
                self.books.take(event)
        self.mc = self._machine()
        self.mc.replay(ev.decode(row) for row in self.journal)
        if keep is None:
            assert self.mc.state == old.state
        self.now += down
        self.call(lambda mc, now: mc.restarted(now, down))
        for peer in self.peers:
            if peer.running and peer.held:
                peer.held = False
                life = peer.life
                self.at(0.1, lambda p=peer, n=life: p.repeat() if p.life == n else None)

    def operate(self, command: str, target: str = "") -> str:
        return self.call(lambda mc, now: mc.operate(command, target, OPERATOR, now))

    # ------------------------------------------------------------------------------------------------ invariants

    def check_held(self, peer: Peer, out: Outcome) -> None:
        """Task sanity at hand-out: the right stage, the holder it says, input beside a broken pathway's backward."""
        task = out.task
        if isinstance(task, tasks.Forward | tasks.Backward):
            sample = self.mc.state.samples[task.sample]
            m = peer.member
            assert sample.holder == m.number and sample.stage == m.stage and m.alive
            if isinstance(task, tasks.Backward):
                assert task.with_input == (sample.path[sample.stage] != (m.number, m.session))

    def check(self) -> None:
        """Everything that must hold at any moment."""
        s, b = self.mc.state, self.books
        groups = (set(b.open), b.queued, b.full, b.partial)
        assert sum(map(len, groups)) == s.next_sample == b.next
        assert set().union(*groups) == set(range(s.next_sample))
        assert set(s.samples) == set(b.open) and s.queue == sorted(b.queued)
        assert sum(r.samples_full for r in s.epochs.values()) == len(b.full)
        assert sum(r.samples_partial for r in s.epochs.values()) == len(b.partial)
        for m in s.members:
            assert m.total == b.passes.get(m.number, 0)
            assert m.total == sum(r.passes.get(m.number, 0) for r in s.epochs.values())
        for sample in s.samples.values():
            if sample.holder >= 0:
                m = s.members[sample.holder]
                assert m.alive and m.stage == sample.stage
        for number, lease in self.mc.soft.lease.items():
            assert s.members[number].alive or lease.kind == "load"
        if s.paused is None and s.phase_until is not None and s.phase != "reduce":
            assert self.now <= s.phase_until + 0.1, f"{s.phase} lasts beyond its deadline"
        problems = ledger.verify_chain(s.ledger, run=s.run, policy=books.policy(self.mc))
        assert problems == [], problems
        assert [e.epoch for e in s.ledger] == list(range(1, len(s.ledger) + 1))
        pool = self.config.pay.pool
        assert all(sum(units for _, units in e.emissions) + e.burned == pool for e in s.ledger)
        assert sum(m.paid for m in s.members) == sum(units for e in s.ledger for _, units in e.emissions)
        if s.phase == "finished" and s.epoch in s.epochs:
            assert len(s.ledger) == s.epoch and not self.mc.open_audits()

    def check_replay(self) -> None:
        mc = self._machine()
        mc.replay(ev.decode(row) for row in self.journal)
        assert mc.state == self.mc.state
