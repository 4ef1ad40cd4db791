"""What the orchestrator remembers beside the compared state: leases, queues, recent durations, who spoke when.

All of it may be lost in a restart and is rebuilt from what peers do next (design section 7).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from iota.core import tasks
from iota.core.machine.state import Member, RunState, Sample

RECENT = 32


@dataclass(slots=True)
class Lease:
    """A task that a member runs. `subject`: sample id, audit id, or -1. Re-issued as it is when the reply was lost."""

    task: int
    kind: str
    subject: int
    issued: float
    deadline: float
    item: tasks.Task
    attach: object = None


@dataclass(slots=True)
class Soft:
    """`suspect`: let a pass's lease run out and said nothing since; it gets nothing until it speaks. `rest`: failed at
    something and is left alone until then. `spoiled`: opened a sample of this epoch that nobody could use. `asked`: the
    last turn (seq, body) of each member. `in_flight`: samples that a first-stage member opened and that are not closed
    yet. `wake`: whose held poll should ask again."""

    stages: int
    counter: int = 0
    lease: dict[int, Lease] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    draining: set[int] = field(default_factory=set)
    suspect: set[int] = field(default_factory=set)
    rest: dict[int, float] = field(default_factory=dict)
    spoiled: set[int] = field(default_factory=set)
    asked: dict[int, tuple[int, str]] = field(default_factory=dict)
    forwards: dict[int, list[int]] = field(default_factory=dict)
    backwards: dict[int, list[int]] = field(default_factory=dict)
    in_flight: dict[int, set[int]] = field(default_factory=dict)
    durations: dict[tuple[int, str], deque[float]] = field(default_factory=dict)
    quantiles: dict[tuple[int, str, float], float | None] = field(default_factory=dict)
    noted: int = 0
    speed: dict[int, float] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    waiting_since: dict[int, tuple[str, float]] = field(default_factory=dict)
    wake: set[int] = field(default_factory=set)
    released: list[int] = field(default_factory=list)
    trainers: list[list[Member]] | None = None
    keep_wanted: dict[tuple[int, int], str] = field(default_factory=dict)
    disputed_at: dict[tuple[int, int], float] = field(default_factory=dict)

    def next_task(self, boots: int) -> int:
        """Task ids grow over restarts too, so a result for an old lease never matches a new one."""
        self.counter += 1
        return (boots << 40) + self.counter

    def coming_task(self, boots: int) -> int:
        """The id that `next_task` gives next."""
        return (boots << 40) + self.counter + 1

    def stage_trainers(self, state: RunState) -> list[list[Member]]:
        """Per stage, who may take work; cached, since routing asks at every accepted result."""
        if self.trainers is None:
            away = self.draining | self.suspect
            self.trainers = [[m for m in state.trainers(stage) if m.number not in away] for stage in range(self.stages)]
        return self.trainers

    def push(self, number: int, sample: Sample) -> None:
        """Queue a sample's next task at a member; wakes its poll."""
        queues = self.forwards if sample.kind == "f" else self.backwards
        heapq.heappush(queues.setdefault(number, []), sample.id)
        self.wake.add(number)

    def load(self, number: int) -> int:
        """Queued and running tasks of a member."""
        count = 1 if number in self.lease else 0
        if number in self.forwards:
            count += len(self.forwards[number])
        if number in self.backwards:
            count += len(self.backwards[number])
        return count

    def pop(self, number: int, state: RunState) -> Sample | None:
        """The next task of a member: backward before forward, then in order of sample id. Entries whose sample went
        elsewhere in the meantime are skipped."""
        for kind, queues in (("b", self.backwards), ("f", self.forwards)):
            queue = queues.get(number)
            while queue:
                sample = state.samples.get(heapq.heappop(queue))
                if sample is not None and sample.holder == number and sample.kind == kind:
                    return sample
        return None

    def note(self, stage: int, kind: str, number: int, took: float, seconds: float) -> None:
        """Record a task: `took` from lease to result as seen here, for deadlines and for routing by speed (who claims
        to be fast could draw all work to itself and shorten everybody's deadlines); `seconds` of compute as told."""
        key = (stage, kind)
        recent = self.durations.get(key)
        if recent is None:
            recent = self.durations[key] = deque(maxlen=RECENT)
        recent.append(took)
        self.noted += 1
        if len(recent) <= 4 or self.noted % 8 == 0:  # an order statistic of 32 need not be sorted out at every task
            self.quantiles.clear()
        before = self.speed.get(number)
        self.speed[number] = took if before is None else 0.8 * before + 0.2 * took
        self.busy[number] = self.busy.get(number, 0.0) + seconds

    def quantile(self, stage: int, kind: str, q: float) -> float | None:
        """Quantile of recent durations (up to eight results old), None before there are four."""
        key = (stage, kind, q)
        if key not in self.quantiles:
            ordered = sorted(self.durations.get((stage, kind), ()))
            self.quantiles[key] = ordered[min(len(ordered) - 1, int(q * len(ordered)))] if len(ordered) >= 4 else None
        return self.quantiles[key]

    def take(self, number: int, task: int, kinds: str | tuple[str, ...]) -> Lease | None:
        """End the lease that a result answers; None when the member does not hold this task (any more)."""
        lease = self.lease.get(number)
        if lease is None or lease.task != task or lease.kind not in kinds:
            return None
        del self.lease[number]
        return lease

    def drop_leases(self, *kinds: str) -> None:
        """A phase is over: its tasks are nobody's any more."""
        for number in [n for n, lease in self.lease.items() if lease.kind in kinds]:
            del self.lease[number]

    def forget(self, number: int) -> None:
        """A session ended: nothing of it is owed any more."""
        self.lease.pop(number, None)
        self.forwards.pop(number, None)
        self.backwards.pop(number, None)
        self.in_flight.pop(number, None)
        self.draining.discard(number)
        self.suspect.discard(number)
        self.rest.pop(number, None)
        self.asked.pop(number, None)
        self.seen.pop(number, None)
        self.waiting_since.pop(number, None)
        self.trainers = None
