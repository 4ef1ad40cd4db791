"""The one door to the state machine: commands in, events and tasks out. Design section 7.

A command folds its events as it emits them and leaves them in `take_events()`; the caller journals them and lets no
reply leave before they are durable. Everything here is a pure function of (state, soft state, command, now, secret).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from iota.config.schema import RunConfig
from iota.core import butterfly, stop, tasks
from iota.core.machine import auditing, books, membership, merging, phases, training
from iota.core.machine import events as ev
from iota.core.machine.fold import fold
from iota.core.machine.soft import Lease, Soft
from iota.core.machine.state import MERGING, TRAINING, AuditRecord, Member, RunState
from iota.core.values import Checkpoint, Digest, Key
from iota.errors import Refused

NEVER = (0, "")
MAX_SEQ = 2**53


@dataclass(slots=True)
class Outcome:
    """What a turn comes to. `attach` names what the node adds to the task: tensors by (sample, stage), or a sheet."""

    verdict: tasks.Verdict | None
    step: bool
    task: tasks.Task
    attach: object
    shows: tuple[tasks.Show, ...]


class Machine:
    """A run's decisions. `secret` (hex, the orchestrator's own) keys what nobody may know before it is revealed."""

    def __init__(self, config: RunConfig, stages: int, parameters: tuple[int, ...], secret: str) -> None:
        self.state = RunState(config, stages, stop=config.stop, allowed=set(config.admit.allow))
        self.soft = Soft(stages)
        self.parameters = parameters
        self.plans: dict[int, butterfly.Plan] = {}
        self.check_phase = False
        self.may_step = False
        self._secret = secret
        self._events: list[ev.Event] = []
        self._open_audits: dict[int, AuditRecord] = {}
        self._rule: tuple[str, stop.Rule] | None = None

    # ------------------------------------------------------------------------------------------------- plumbing

    def emit(self, event: ev.Event) -> None:
        """Fold an event now and keep it for the journal."""
        self._events.append(event)
        self._fold(event)

    def _fold(self, event: ev.Event) -> None:
        fold(self.state, event)
        kind = type(event)
        if kind is ev.AuditDrawn:
            self._open_audits[event.audit] = self.state.audits[event.audit]  # type: ignore[union-attr]
        elif kind is ev.VerdictGiven and event.final:  # type: ignore[union-attr]
            self._open_audits.pop(event.audit, None)  # type: ignore[union-attr]

    def take_events(self) -> list[ev.Event]:
        """Events since the last call, in order; journal them before any reply leaves."""
        events, self._events = self._events, []
        return events

    def replay(self, events: Iterable[ev.Event]) -> None:
        """Rebuild the state from a journal. Leases, queues and durations start empty: call `restarted` next."""
        for event in events:
            self._fold(event)

    def secret(self, epoch: int) -> str:
        """The orchestrator's share of an epoch's draw: committed to at its opening, revealed with the plan."""
        return hashlib.blake2b(f"{self.state.run}/{epoch}".encode(), key=bytes.fromhex(self._secret)[:64]).hexdigest()

    def rule(self) -> stop.Rule:
        if self._rule is None or self._rule[0] != self.state.stop:
            self._rule = (self.state.stop, stop.parse(self.state.stop))
        return self._rule[1]

    def open_audits(self, number: int | None = None) -> list[AuditRecord]:
        """Audits not closed, oldest first, of one member or of all."""
        return [a for a in self._open_audits.values() if number is None or a.number == number]

    def wake_everyone(self) -> None:
        self.soft.wake.update(m.number for m in self.state.members if m.alive)

    def wake_validators(self) -> None:
        self.soft.wake.update(m.number for m in self.state.members if m.alive and m.role == "validator")

    def decline(self, m: Member, seq: int, body: Digest, code: str, text: str) -> None:
        self.emit(ev.Declined(m.number, seq, body, code, text[:300]))

    def lease(
        self, m: Member, kind: str, now: float, until: float, make: Callable[[int], tasks.Task],
        attach: object = None, subject: int = -1,
    ) -> tasks.Task:  # fmt: skip
        """Hand a member a task it holds until it answers or `until` passes."""
        task_id = self.soft.next_task(self.state.boots)
        task = make(task_id)
        self.soft.lease[m.number] = Lease(task_id, kind, subject, now, until, task, attach)
        return task

    # ------------------------------------------------------------------------------------------------- commands

    def start(self, run: str, at: float, checkpoints: tuple[Checkpoint, ...]) -> None:
        """The first command of a run."""
        self.emit(ev.RunStarted(run, at, checkpoints))
        self.tick(at)

    def restarted(self, now: float, down: float) -> None:
        """After `replay`: leases and relayed tensors are gone; open deadlines move by the time that was lost. Goes on
        from wherever the journal ends, also in the middle of a command's events."""
        self.emit(ev.Restarted(now, max(0.0, down)))
        for m in self.state.members:
            if m.alive:
                self.soft.seen[m.number] = now
        books.close_epochs(self)
        self.tick(now)

    def join(self, key: Key, request: tasks.Join, token: Digest, now: float, block: str = "") -> Member:
        """Open a session. Raises `Refused`. `token` is the digest of the token that the node will hand out."""
        m = membership.join(self, key, request, token, now, block)
        self._settle(now)
        return m

    def turn(
        self, key: Key, turn: tasks.Turn, body: Digest, now: float, problem: tuple[str, str] = ("", "")
    ) -> Outcome:
        """One exchange: judge the result, then find the next task. Raises `Refused` (nothing changed then).

        `problem`: (code, text) of what the node found wrong with the attached tensors or objects; the result is then
        declined and its work goes to somebody else."""
        m = membership.check_session(self, key, turn.session)
        _check_order(m, turn, body)
        soft = self.soft
        soft.seen[m.number] = now
        if m.number in soft.suspect:
            soft.suspect.discard(m.number)
            soft.trainers, self.check_phase = None, True
        if turn.draining and m.number not in soft.draining:
            self._drain(m)
        self.may_step = turn.seq > m.last_seq and turn.seq > soft.asked.get(m.number, NEVER)[0]
        verdict, step = self._judge(m, turn, body, problem, now)
        for shown in turn.shown:
            auditing.on_shown(self, m, shown, now)
        if self.check_phase:
            self._settle(now)
        soft.asked[m.number] = (turn.seq, body)
        task, attach = self._task(m, turn.seq, now)
        step = step or (m.last_seq == turn.seq and m.last_step)
        return Outcome(verdict, step, task, attach, auditing.shows(self, m) if self._open_audits else ())

    def again(self, key: Key, turn: tasks.Turn, now: float) -> Outcome:
        """A held poll asks once more, for the turn it came with. No sign of life: whoever asked may be gone."""
        m = membership.check_session(self, key, turn.session)
        self.may_step = turn.seq == self.soft.asked.get(m.number, NEVER)[0]
        task, attach = self._task(m, turn.seq, now)
        step = m.last_seq == turn.seq and m.last_step
        return Outcome(None, step, task, attach, auditing.shows(self, m) if self._open_audits else ())

    def tick(self, now: float) -> None:
        """Whatever is due by time alone."""
        if self.state.phase == "finished" and not self.state.extended:
            return
        if self.state.paused is None:
            self._end_rests(now)
            training.expire_leases(self, now)
            membership.find_dead(self, now)
            auditing.close_overdue(self, now)
        self._settle(now)

    def next_due(self, now: float) -> float:
        """When `tick` should next be called, at the latest; always after `now`."""
        s = self.state
        due = now + 1.0
        if s.paused is None:
            times = [x.deadline for x in self.soft.lease.values()]
            times += [a.until for a in self._open_audits.values()]
            times += self.soft.rest.values()
            if s.phase_until is not None:
                times.append(s.phase_until)
            due = min(times, default=due)
        return min(due, now + 1.0) if due > now else now + 0.05

    def operate(self, command: str, target: Key, by: Key, now: float) -> str:
        """pause | resume | stop | ban | allow, by an operator's key. Returns what it did. Raises `Refused`."""
        s = self.state
        if by not in s.config.admit.operators:
            raise Refused("not_operator", f"key {by[:8]} is not an operator of this run", "Use the operator's key.")
        if command not in ("pause", "resume", "stop", "ban", "allow"):
            raise Refused("bad_command", f"unknown command {command[:32]!r}", "Use pause, resume, stop, ban or allow.")
        if command in ("pause", "resume") and (s.paused is not None) == (command == "pause"):
            raise Refused("no_effect", f"the run is {'already' if s.paused else 'not'} paused", "See: iota status URL.")
        down = now - s.paused if command == "resume" and s.paused is not None else 0.0
        self.emit(ev.Operated(command, target, by, now, down))
        if command == "resume":
            for lease in self.soft.lease.values():
                lease.issued, lease.deadline = lease.issued + down, lease.deadline + down
            for shard in self.soft.disputed_at:
                self.soft.disputed_at[shard] += down
            for number in self.soft.seen:
                self.soft.seen[number] = now
        m = s.member(target) if command == "ban" else None
        if m is not None and m.alive:
            membership.gone(self, m, "banned", f"by operator {by[:8]}", now)
        self.wake_everyone()
        self._settle(now)
        return f"{command} {target}".strip()

    def extend(self, rule: str, now: float) -> None:
        """Set a new stop rule; a finished run that it does not end goes on at the next `tick`. Raises ConfigError."""
        stop.parse(rule)
        self.emit(ev.Extended(now, rule))

    # ------------------------------------------------------------------------------------------------ inside a turn

    def step(self, m: Member, seq: int) -> None:
        """Tell a member to step outside of an accepting reply: in the answer to its turn `seq`. Only while `may_step`:
        the answer to a turn that came again may be dropped as a double, and the step with it."""
        asked, body = self.soft.asked.get(m.number, NEVER)
        self.emit(ev.Stepped(m.number, seq, m.pending, body if asked == seq else ""))

    def _end_rests(self, now: float) -> None:
        rest = self.soft.rest
        for number in [n for n, until in rest.items() if now >= until]:
            del rest[number]
            self.soft.wake.add(number)

    def _settle(self, now: float) -> None:
        self.check_phase = False
        training.adopt(self)
        phases.advance(self, now)

    def _drain(self, m: Member) -> None:
        """Nothing new for this member; what it had not begun goes to others."""
        self.soft.draining.add(m.number)
        self.soft.trainers, self.check_phase = None, True
        lease = self.soft.lease.get(m.number)
        for sample in list(self.state.samples.values()):
            if sample.holder == m.number and (lease is None or lease.subject != sample.id):
                training.reroute(self, sample, f"{m.key[:8]} drains", m.number)

    def _judge(
        self, m: Member, turn: tasks.Turn, body: Digest, problem: tuple[str, str], now: float
    ) -> tuple[tasks.Verdict | None, bool]:
        if turn.seq == m.last_seq:
            return (_verdict(m) if turn.result is not None else None), m.last_step
        if turn.result is None:
            return None, False
        self._result(m, turn.seq, body, turn.result, problem, now)
        assert m.last_seq == turn.seq
        return _verdict(m), m.last_step

    def _result(self, m: Member, seq: int, body: Digest, r: tasks.Result, problem: tuple[str, str], now: float) -> None:
        if problem[0]:
            training.on_failed(self, m, seq, body, tasks.Failed(task=r.task, code=problem[0], text=problem[1]), now)
        elif isinstance(r, tasks.Passed):
            training.on_passed(self, m, seq, body, r, now)
        elif isinstance(r, tasks.Loaded):
            self._loaded(m, seq, body, r)
        elif isinstance(r, tasks.Committed):
            merging.on_committed(self, m, seq, body, r)
        elif isinstance(r, tasks.Done):
            merging.on_uploaded(self, m, seq, body, r)
        elif isinstance(r, tasks.Reduced):
            merging.on_reduced(self, m, seq, body, r)
        elif isinstance(r, tasks.Audited):
            auditing.on_audited(self, m, seq, body, r)
        elif isinstance(r, tasks.Measured):
            auditing.on_measured(self, m, seq, body, r)
        else:
            training.on_failed(self, m, seq, body, r, now)

    def _loaded(self, m: Member, seq: int, body: Digest, r: tasks.Loaded) -> None:
        lease = self.soft.take(m.number, r.task, ("load",))
        checkpoint = self.state.checkpoints[m.stage]
        if lease is None:
            self.decline(m, seq, body, "lease_lost", "this task is no longer yours; it is given out again")
        elif lease.subject != checkpoint.epoch:
            self.decline(m, seq, body, "stale", "the state to load has changed meanwhile; load again")
        elif r.root != checkpoint.root():
            self.decline(m, seq, body, "wrong_digest", f"that is not the state of epoch {checkpoint.epoch}; load again")
        else:
            self.emit(ev.Loaded(m.number, seq, body, checkpoint.epoch, auditing.finite(r.seconds)))
            self.soft.trainers = None
            self.check_phase = True

    # ---------------------------------------------------------------------------------------------- the next task

    def _task(self, m: Member, seq: int, now: float) -> tuple[tasks.Task, object]:
        farewell = membership.farewell(self, m, now)
        if farewell is not None:
            return farewell, None
        lease = self.soft.lease.get(m.number)
        if lease is not None:
            return lease.item, lease.attach
        if self.state.paused is not None:
            return self._wait(m, "paused", "the run is paused by its operator", now), None
        task = self._find(m, seq, now)
        if task is not None:
            self.soft.waiting_since.pop(m.number, None)
            if isinstance(task, tuple):
                return task
            lease = self.soft.lease[m.number]
            return task, lease.attach
        return self._wait(m, *self._why_wait(m), now), None

    def _find(self, m: Member, seq: int, now: float) -> tasks.Task | tuple[tasks.Task, object] | None:
        s = self.state
        if m.role == "validator":
            return merging.recompute_task(self, m, now) or auditing.next_task(self, m, now)
        if m.number in self.soft.draining or m.number in self.soft.rest:
            return None
        if m.loaded != s.epoch - 1 and s.phase != "sync":
            may = m.starts <= s.epoch and s.phase in ("gather", "train")
            return self._load(m, tasks.Load, now, "to start training") if may else None
        if s.phase == "sync":
            return self._load(m, tasks.Prove, now, "the merged state") if m.loaded != s.epoch else None
        if s.phase in TRAINING:
            if training.step_due(self, m):
                if not self.may_step:
                    return None
                self.step(m, seq)
                self._settle(now)
                self.wake_everyone()
                return self._find(m, seq, now)
            return training.next_task(self, m, seq, now)
        if s.phase in MERGING:
            return merging.next_task(self, m, seq, now)
        return None

    def _load(self, m: Member, kind: type[tasks.Load], now: float, why: str) -> tasks.Task:
        s = self.state
        checkpoint = s.checkpoints[m.stage]
        epoch = checkpoint.epoch + 1
        record = s.epochs.get(epoch)
        until = max(s.phase_until or 0.0, now + s.config.merge.phase_limit)
        return self.lease(
            m, "load", now, until,
            lambda i: kind(
                task=i,
                epoch=checkpoint.epoch,
                stage=m.stage,
                tokens=record.tokens if record else s.tokens,
                tokens_per_step=record.tokens_per_step[m.stage] if record else phases.tokens_per_step(self, m.stage),
                t=checkpoint.t,
                segment_steps=phases.segment_steps(self, epoch, m.stage),
                deadline=until,
                why=why,
            ),
            ("checkpoint", checkpoint), subject=checkpoint.epoch,
        )  # fmt: skip

    def _why_wait(self, m: Member) -> tuple[str, str]:
        s = self.state
        if m.role == "validator":
            return "no_audit", "no segment to replay and no checkpoint to measure"
        if m.number in self.soft.draining:
            return "draining", "your last task is with the orchestrator"
        if m.number in self.soft.rest:
            return "rest", "a task failed a moment ago; you are asked again shortly"
        if s.phase == "gather":
            return "gather", s.phase_why
        if m.starts > s.epoch or (m.loaded != s.epoch - 1 and s.phase in MERGING):
            return "next_sync", f"you start at the next full sync, after epoch {s.epoch} ({s.phase})"
        if s.phase == "train":
            return "no_work", f"no sample has reached stage {m.stage} for you yet"
        return s.phase, f"{s.phase} of epoch {s.epoch}: {s.phase_why}"

    def standing(self, m: Member) -> tasks.Standing:
        """What a peer may want to show its owner."""
        s = self.state
        return tasks.Standing(
            epoch=s.epoch,
            phase=s.phase if s.paused is None else "paused",
            phase_since=s.phase_at if s.paused is None else s.paused,
            phase_until=s.phase_until if s.paused is None else None,
            passes_epoch=m.booked,
            passes_total=m.total,
            last_verdict=m.last_verdict,
            paid_total=m.paid,
        )

    def _wait(self, m: Member, code: str, text: str, now: float) -> tasks.Wait:
        before = self.soft.waiting_since.get(m.number)
        if before is None or before[0] != code:
            before = self.soft.waiting_since[m.number] = (code, now)
        until = self.state.phase_until if self.state.paused is None else None
        return tasks.Wait(code=code, text=text, since=before[1], until=until)


def _check_order(m: Member, turn: tasks.Turn, body: Digest) -> None:
    """Refuse what must not change anything: a turn from the past, another body under a judged turn's number. (Turns
    count from 1: number 0 would be taken for the repetition of a turn that nobody judged.)"""
    if turn.seq < 1 or turn.seq > MAX_SEQ:
        raise Refused("malformed", f"turn {turn.seq}: turns are numbered from 1", "Join again.")
    if turn.seq < m.last_seq:
        raise Refused(
            "old_turn", f"turn {turn.seq} is older than {m.last_seq}, the last one judged", "Go on from there."
        )
    if turn.seq == m.last_seq and m.last_body and body != m.last_body:
        raise Refused("idempotency", f"turn {turn.seq} was judged with another body", "Repeat a request unchanged.")


def _verdict(m: Member) -> tasks.Verdict:
    return tasks.Verdict(m.last_code is None, m.last_code or "", m.last_text)
