"""Nonces: a message is accepted once. Each sender's nonces only grow; their unit is nanoseconds of Unix time.

Together with the time window this stays true with bounded memory: a sender's last nonce must be kept only while a copy
of its last message could still be inside the window, and for members always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from iota.core.values import Key
from iota.errors import Refused
from iota.wire.codes import refused

MAX_NONCE = 2**63 - 1
MAX_AHEAD = 86_400.0
"""Seconds that a nonce may lie ahead of our clock: a sender whose clock was set back goes on from its last nonce."""

_NANOSECONDS = 1_000_000_000


class Replayed(Refused):
    """Refusal of an old nonce; `last` is the greatest one accepted, which an honest sender needs to go on."""

    last: int = 0


class NonceBook:
    """The receiving side: last accepted nonce and when it came, by sender. `window` is the clock window in seconds."""

    def __init__(self, window: float = 60.0, capacity: int = 100_000) -> None:
        self._window = window
        self._capacity = capacity
        self._last: dict[Key, tuple[int, float]] = {}
        self._pruned = float("-inf")

    def __len__(self) -> int:
        return len(self._last)

    def last(self, sender: Key) -> int:
        """Greatest nonce accepted from `sender`; -1 when none is known."""
        return self._last.get(sender, (-1, 0.0))[0]

    def check(self, sender: Key, nonce: int, now: float) -> None:
        """Raise `Refused` (`replayed`, `nonce_ahead`) unless the nonce is new. Records nothing."""
        last = self.last(sender)
        if nonce <= last:
            error = refused(
                "replayed", f"nonce {nonce} is not greater than {last}, the last one accepted from this sender"
            )
            raised = Replayed(error.code, error.cause, error.remedy)
            raised.last = last
            raise raised
        if last < 0 and len(self._last) >= self._capacity:
            self._make_room(now)
        if nonce > (now + MAX_AHEAD) * _NANOSECONDS:
            raise refused("nonce_ahead", f"nonce {nonce} lies {nonce / _NANOSECONDS - now:.0f} s ahead of {now:.3f}")

    def accept(self, sender: Key, nonce: int, now: float) -> None:
        """Record a nonce that `check` let pass."""
        self._last[sender] = (nonce, now)

    def _make_room(self, now: float) -> None:
        """At capacity: forget the silent, members too (the time window protects those), at most once a window."""
        if now - self._pruned > self._window:
            self._pruned = now
            self.prune(now, ())
        if len(self._last) >= self._capacity:
            raise refused("busy", f"more than {self._capacity} senders wrote within {2 * self._window:g} s")

    def prune(self, now: float, members: Collection[Key]) -> int:
        """Forget senders that are no members and whose last message cannot be inside the window any more (its own time
        may have been a whole window ahead of ours, hence twice the window). Returns how many were forgotten."""
        old = [k for k, (_, seen) in self._last.items() if k not in members and now - seen > 2 * self._window]
        for key in old:
            del self._last[key]
        return len(old)

    def export(self) -> dict[Key, tuple[int, float]]:
        """Plain data for the journal: sender -> (nonce, time accepted)."""
        return dict(self._last)

    def restore(self, saved: Mapping[Key, tuple[int, float]]) -> None:
        """Take over exported nonces; a greater nonce already known stays."""
        for key, (nonce, seen) in saved.items():
            if nonce > self.last(key):
                self._last[key] = (nonce, seen)


class NonceSource:
    """The sending side: max(previous + 1, now in ns). Needs no file unless the clock is set back between two starts;
    then the refusal tells the last accepted nonce and `advance` goes past it."""

    def __init__(self, now: Callable[[], float], last: int = 0) -> None:
        self._now = now
        self.last = last

    def next(self) -> int:
        """A nonce greater than all before."""
        self.last = max(self.last + 1, int(self._now() * _NANOSECONDS))
        return self.last

    def advance(self, last: int) -> bool:
        """Go on after `last`, as told by the other side. False, and nothing changed, when that is no plausible nonce
        (more than a day ahead of our clock): nobody can use up a sender's nonces for it."""
        if last > (self._now() + MAX_AHEAD) * _NANOSECONDS:
            return False
        self.last = max(self.last, last)
        return True
