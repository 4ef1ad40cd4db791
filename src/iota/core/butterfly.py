"""The Butterfly All-Reduce plan (paper section 5, design section 5 "Plan"): which two members own which shard.

N members give N(N-1)/2 pairs and as many shards; shard s is the chunk range [floor(s*C/S), floor((s+1)*C/S)) of every
part (it may be empty). A seeded uniform permutation gives every pair exactly one shard. N = 1: one shard, one owner.
N = 2: one shard, both own it. Above `group_max` a stage merges in groups; this plan is the plan of one group.

The seed comes after the commitments (`plan_seed`), so nobody can choose what it will own, and anyone can derive it
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from iota.core import seeds
from iota.core.values import Digest, Key

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Plan:
    """`first[s]` < `second[s]` index `members` and own shard s (equal only when N = 1). Compact: 12 bytes a shard."""

    members: tuple[Key, ...]
    chunks: int
    seed: bytes
    first: Ints  # [shards]
    second: Ints  # [shards]
    held: Ints  # [members, shards a member], ascending in each row

    @property
    def shards(self) -> int:
        return len(self.first)

    def owners(self, shard: int) -> tuple[Key, ...]:
        """The one or two owners of a shard, in order of key."""
        a, b = int(self.first[shard]), int(self.second[shard])
        return (self.members[a],) if a == b else (self.members[a], self.members[b])

    def shards_of(self, key: Key) -> list[int]:
        """Shards that a member owns, ascending (N-1 of them; one when N = 1). Raises ValueError for a stranger."""
        row: list[int] = self.held[self.members.index(key)].tolist()
        return row

    def range(self, shard: int) -> tuple[int, int]:
        """Chunk range [start, stop) of a shard in every part; start == stop for an empty one."""
        assert 0 <= shard < self.shards, shard
        return shard * self.chunks // self.shards, (shard + 1) * self.chunks // self.shards

    def digest(self) -> Digest:
        """Over all that the plan says: equal digests are equal plans."""
        whole = hashlib.sha256(msgspec.msgpack.encode(("iota plan", self.members, self.chunks, self.seed)))
        whole.update(self.first.astype("<i4", copy=False).tobytes())
        whole.update(self.second.astype("<i4", copy=False).tobytes())
        return whole.hexdigest()


def make_plan(members: Iterable[Key], chunks: int, seed: bytes) -> Plan:
    """The plan of these members (any order; sorted here) over `chunks` chunks a part. Half a million shards take well
    under a second. Raises ValueError for no members, a member named twice, or no chunks."""
    keys = tuple(sorted(members))
    n = len(keys)
    if n == 0 or len(set(keys)) != n or chunks < 1:
        raise ValueError(f"a plan needs distinct members and at least one chunk, not {n} members and {chunks} chunks")
    if n == 1:
        zero = np.zeros(1, dtype=np.int32)
        return Plan(keys, chunks, seed, zero, zero, zero.reshape(1, 1))
    counts = np.arange(n - 1, 0, -1)  # pairs (i, j > i) in order: n-1 of them begin with 0, n-2 with 1, ...
    low = np.repeat(np.arange(n - 1, dtype=np.int32), counts)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    high = (np.arange(len(low)) - begins + low + 1).astype(np.int32)
    order = seeds.permutation(b"iota butterfly" + seed, len(low))
    first, second = low[order], high[order]
    both = np.concatenate([first, second])
    held = np.argsort(both, kind="stable") % len(first)
    return Plan(keys, chunks, seed, first, second, np.sort(held.reshape(n, n - 1), axis=1).astype(np.int32))


def plan_seed(secret: bytes, nonces: Mapping[Key, bytes], roots: Iterable[Digest]) -> bytes:
    """H(orchestrator secret, validator nonces by key, sorted upload roots), 32 bytes (design section 5 "Plan").

    Secret and nonces were committed to before training ended, the roots after it, so no single party chose the result.
    A nonce that was not revealed is simply absent; the caller names it in the event."""
    parts = ("iota plan seed", secret, sorted(nonces.items()), sorted(roots))
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def reassign(shard: int, dead: Collection[Key], live: Iterable[Key], seed: bytes) -> Key | None:
    """Who takes over one orphaned shard: a live member not among the dead, None when there is none. Deterministic;
    shards are random to their owners, so turn by turn over a seeded order is even."""
    return reassign_all([shard], dead, live, seed, turn=shard).get(shard)


def reassign_all(
    shards: Sequence[int], dead: Collection[Key], live: Iterable[Key], seed: bytes, *, turn: int = 0
) -> dict[int, Key]:
    """New owners of several orphaned shards; no member gets more than one shard more than another. Empty when nobody
    lives."""
    able = sorted(set(live) - set(dead))
    if not able:
        return {}
    order = seeds.permutation(b"iota reassign" + seed, len(able)).tolist()
    return {shard: able[order[(turn + i) % len(able)]] for i, shard in enumerate(sorted(shards))}


def p_valid(n: int, k: int) -> float:
    """Expected share of shards that keep an owner when k of n members are gone: 1 - k(k-1) / (n(n-1)).

    (The paper's printed formula has the wrong sign.) With n = 1 the one shard is lost with its one owner."""
    assert 0 <= k <= n and n >= 1, (n, k)
    return float(k == 0) if n == 1 else 1.0 - k * (k - 1) / (n * (n - 1))


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of one miner in one merge (paper section 5.3), averages over shards of unequal size."""

    up_upload: float
    down_reduce: float
    up_shards: float
    down_result: float

    @property
    def total(self) -> float:
        return self.up_upload + self.down_reduce + self.up_shards + self.down_result


def traffic(upload_bytes: int, n: int, *, momentum_bytes: int = 0, skip_own: bool = False) -> Traffic:
    """W up, 2W down to reduce, 2W/N up, W down: 4W + 2W/N, whatever N is; outer momentum adds to the last two.

    `skip_own`: what a miner has itself is not downloaded (its own copy of each shard it owns, the results it made):
    4W - 2W/N. N = 1 has one owner a shard instead of two: W + W + W + W, or 2W with own copies skipped.
    """
    owned = 1.0 if n == 1 else 2.0 / n  # share of all shards that one member owns
    result = upload_bytes + momentum_bytes
    readers = n - 1 if skip_own else n
    return Traffic(
        up_upload=float(upload_bytes),
        down_reduce=owned * readers * upload_bytes,
        up_shards=owned * result,
        down_result=float(result) * (1.0 - owned if skip_own else 1.0),
    )
