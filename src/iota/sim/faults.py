"""Faults as data: what happens to whom, when, for how long. A plan is a value, so a failing seed is a file to keep.

Faults of a machine: `crash` (kill -9; started again after `lasts`), `freeze` (SIGSTOP; `thaw` or `lasts` ends it),
`thaw`, `slow` (computation takes `value` times as long), `clock_skew` (the clock jumps by `value` seconds, and back
after `lasts`), `full_disk` (writes fail). Faults of its links, in both directions: `cut` (nothing passes),
`drop_request`, `drop_reply` (handled, but the answer is lost), `duplicate` (handled twice), `reorder` (held back up to
`value` seconds, 1 when 0, so that later messages overtake), `corrupt` (a few bytes flipped), `slow_link` (latency and
transfer take `value` times as long).
Lies (dishonest nodes) are no faults of the machine and live with the tests.
"""

from __future__ import annotations

import errno
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from iota.sim.effects import Host, draw
from iota.sim.loop import VirtualLoop

HOST_KINDS = ("crash", "freeze", "thaw", "slow", "clock_skew", "full_disk")
LINK_KINDS = ("cut", "drop_request", "drop_reply", "duplicate", "reorder", "corrupt", "slow_link")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault.

    node: whom it befalls. at: virtual seconds since the start, or (step name, n): the n-th time, from 1, that this node
    reaches the named step (`Injector.step`). lasts: seconds from its beginning (None: to the end of the simulation).
    value: see the module. peer: only on the links between `node` and this one ("": all links of `node`).
    chance: of each message being hit. times: at most so many messages are hit (0: no limit).
    """

    node: str
    kind: str
    at: float | tuple[str, int] = 0.0
    lasts: float | None = None
    value: float = 0.0
    peer: str = ""
    chance: float = 1.0
    times: int = 0

    def __post_init__(self) -> None:
        if self.kind not in HOST_KINDS + LINK_KINDS:
            raise ValueError(f"unknown fault kind {self.kind!r}; known: {', '.join(HOST_KINDS + LINK_KINDS)}")
        if self.kind in ("slow", "slow_link") and not self.value > 0:
            raise ValueError(f"{self.kind} needs a factor above 0 as value, not {self.value}")
        if self.lasts is not None and not self.lasts > 0:
            raise ValueError(f"a fault lasts a positive time or None, not {self.lasts}")
        if not 0 <= self.chance <= 1 or self.times < 0:
            raise ValueError(f"chance {self.chance} must be within 0..1 and times {self.times} not negative")
        if self.kind == "cut" and (self.chance, self.times) != (1.0, 0):
            raise ValueError("a cut swallows everything: no chance, no times; drop_request and drop_reply take both")
        if (self.at[1] < 1) if isinstance(self.at, tuple) else (self.at < 0):
            raise ValueError(f"a fault cannot begin at {self.at}")


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All faults of one simulation. `seed` fixes which messages a `chance` hits."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0


DEFAULT_KINDS = ("crash", "freeze", "slow", "clock_skew", "cut", "drop_request", "drop_reply", "duplicate", "reorder")


def random_plan(
    seed: int, nodes: Sequence[str], duration: float, *, count: int = 8, kinds: Sequence[str] = DEFAULT_KINDS
) -> FaultPlan:
    """`count` faults within the first 80% of `duration` seconds, every one over by 90% of it, so that the rest of the
    run shows whether the survivors recover. Same arguments, same plan."""
    assert nodes and kinds and duration > 0
    faults = []
    for number in range(count):

        def pick(what: str, number: int = number) -> float:
            return draw(seed, "plan", number, what)

        kind = kinds[int(pick("kind") * len(kinds))]
        at = pick("at") * 0.8 * duration
        lasts = min(0.9 * duration - at, (0.01 + 0.19 * pick("lasts")) * duration)
        value = {
            "slow": 2.0 + 8.0 * pick("value"),
            "slow_link": 2.0 + 48.0 * pick("value"),
            "clock_skew": 60.0 * pick("value") - 30.0,
            "reorder": 5.0 * pick("value"),
        }.get(kind, 0.0)
        chance = 1.0 if kind in HOST_KINDS or kind == "cut" else 0.1 + 0.9 * pick("chance")
        node = nodes[int(pick("node") * len(nodes))]
        faults.append(
            Fault(node=node, kind=kind, at=round(at, 3), lasts=round(lasts, 3) or 0.001, value=value, chance=chance)
        )
    return FaultPlan(tuple(sorted(faults, key=lambda f: (f.at, f.node, f.kind))), seed)


class Injector:
    """Carries a plan out on one loop; the harness attaches hosts, nodes' hooks report steps, the network asks.

    Timed faults begin and end by the loop's timers. Of machine faults it does freeze, thaw, slow and clock_skew itself;
    for a crash it kills the host, then calls `on_crash(node)`, and after `lasts` calls `on_restart(node)`, where the
    harness builds a new host and attaches it (running slow and clock_skew faults are put on it again).
    `log` holds (virtual time, "begin" | "end", fault) as they came. Overlapping faults of one kind add up; a
    machine is frozen until its last freeze has ended.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        plan: FaultPlan,
        *,
        on_crash: Callable[[str], None] | None = None,
        on_restart: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan
        self.hosts: dict[str, Host] = {}
        self.log: list[tuple[float, str, Fault]] = []
        self._loop = loop
        self._on_crash = on_crash
        self._on_restart = on_restart
        self._active: dict[int, Fault] = {}
        self._hits: Counter[int] = Counter()
        self._asked: Counter[tuple[int, str]] = Counter()
        self._steps: Counter[tuple[str, str]] = Counter()
        for number, fault in enumerate(plan.faults):
            if isinstance(fault.at, tuple):
                continue
            if fault.at <= loop.time() and fault.kind in LINK_KINDS:
                self._begin(number)  # a timer would let the first messages slip through
            else:
                loop.call_at(fault.at, self._begin, number)

    def add(self, fault: Fault) -> None:
        """One more fault, that begins now (a script decides when; `at` is not looked at)."""
        self.plan = FaultPlan((*self.plan.faults, fault), self.plan.seed)
        self._begin(len(self.plan.faults) - 1)

    def attach(self, host: Host) -> None:
        """Make `host` the machine that faults of its name befall from now on."""
        self.hosts[host.name] = host
        for fault in list(self._active.values()):
            if fault.node == host.name and fault.kind in ("slow", "clock_skew"):
                self._befall(host, fault, begin=True)

    def step(self, node: str, name: str) -> None:
        """`node` reached step `name`: faults waiting for this occurrence begin before this call returns."""
        self._steps[node, name] += 1
        now = self._steps[node, name]
        for number, fault in enumerate(self.plan.faults):
            if fault.node == node and fault.at == (name, now):
                self._begin(number)

    def active(self, node: str, kind: str) -> list[Fault]:
        """The faults of one kind that `node` suffers at this moment."""
        return [fault for fault in self._active.values() if fault.node == node and fault.kind == kind]

    def check_disk(self, node: str) -> None:
        """Raises OSError(ENOSPC) while the node's disk is full; stores of the harness call it before they write."""
        if self.active(node, "full_disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"disk of {node} (simulated)")

    def hit(self, source: str, target: str, kind: str) -> Fault | None:
        """The link fault of this kind that befalls one message between the two (either direction), or None.

        Asking counts: `chance` and `times` are per message, so ask once for each.
        """
        for number, fault in self._active.items():
            if fault.kind != kind or fault.node not in (source, target):
                continue
            if fault.peer and fault.peer not in (source, target):
                continue
            if fault.times and self._hits[number] >= fault.times:
                continue
            link = f"{source}>{target}"
            self._asked[number, link] += 1
            # Keyed by link and message, not a stream: what happens on other links does not change the outcome here.
            if draw(self.plan.seed, "hit", number, link, self._asked[number, link]) < fault.chance:
                self._hits[number] += 1
                return fault
        return None

    def _begin(self, number: int) -> None:
        fault = self.plan.faults[number]
        self.log.append((self._loop.time(), "begin", fault))
        if fault.kind != "thaw":  # happens, and is over
            self._active[number] = fault
        if fault.kind == "thaw":
            for other in [n for n, f in self._active.items() if f.node == fault.node and f.kind == "freeze"]:
                self._end(other)
        elif fault.node in self.hosts:
            self._befall(self.hosts[fault.node], fault, begin=True)
        if fault.kind == "crash" and self._on_crash:
            self._on_crash(fault.node)
        if fault.lasts is not None:
            self._loop.call_later(fault.lasts, self._end, number)

    def _end(self, number: int) -> None:
        fault = self._active.pop(number, None)
        if fault is None:  # a thaw ended this freeze before its own time
            return
        self.log.append((self._loop.time(), "end", fault))
        if fault.kind == "crash":
            if self._on_restart and not self.active(fault.node, "crash"):
                self._on_restart(fault.node)
        elif fault.node in self.hosts:
            self._befall(self.hosts[fault.node], fault, begin=False)

    def _befall(self, host: Host, fault: Fault, *, begin: bool) -> None:
        if fault.kind == "crash":
            host.kill()
        elif fault.kind == "freeze":
            if self.active(host.name, "freeze"):
                host.freeze()
            else:
                host.thaw()
        elif fault.kind == "slow":
            host.compute.hindrance = math.prod(f.value for f in self.active(host.name, "slow"))
        elif fault.kind == "clock_skew":
            host.clock.skew(fault.value if begin else -fault.value)
