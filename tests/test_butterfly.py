"""The butterfly plan: every pair exactly one shard, any N, known to all, and the paper's formulas."""

import random
from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.core import butterfly as bf

LIMITED = settings(derandomize=True, deadline=None, max_examples=60)


def keys(n: int) -> list[str]:
    return [f"{i * 7919:064x}" for i in range(n)]


@LIMITED
@given(st.integers(1, 40), st.integers(1, 3000), st.binary(min_size=32, max_size=32))
def test_every_pair_has_exactly_one_shard_and_every_chunk_one_place(n: int, chunks: int, seed: bytes) -> None:
    plan = bf.make_plan(keys(n), chunks, seed)
    assert plan.shards == max(1, n * (n - 1) // 2)
    owners = [plan.owners(s) for s in range(plan.shards)]
    wanted = list(combinations(sorted(keys(n)), 2)) if n > 1 else [(keys(1)[0],)]
    assert sorted(owners) == sorted(wanted)
    ranges = [plan.range(s) for s in range(plan.shards)]
    assert ranges[0][0] == 0 and ranges[-1][1] == chunks
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = {stop - start for start, stop in ranges}
    assert max(sizes) - min(sizes) <= 1
    for key in plan.members:
        assert plan.shards_of(key) == [s for s, pair in enumerate(owners) if key in pair]


@LIMITED
@given(st.integers(1, 20), st.binary(min_size=32, max_size=32), st.randoms(use_true_random=False))
def test_order_of_members_does_not_matter(n: int, seed: bytes, rng: random.Random) -> None:
    mixed = keys(n)
    rng.shuffle(mixed)
    plan = bf.make_plan(mixed, 100, seed)
    assert plan.digest() == bf.make_plan(keys(n), 100, seed).digest()
    assert plan.digest() != bf.make_plan(keys(n), 101, seed).digest()
    assert plan.digest() != bf.make_plan(keys(n), 100, seed + b"x").digest()


def test_plan_is_pinned() -> None:
    """Everyone must derive the same plan: a change here is a protocol change."""
    plan = bf.make_plan(keys(4), 12, bytes(32))
    assert [(int(a), int(b)) for a, b in zip(plan.first, plan.second, strict=True)] == PINNED


PINNED = [(0, 3), (2, 3), (0, 1), (1, 2), (1, 3), (0, 2)]


def test_the_draw_is_uniform_over_pairs() -> None:
    counts = Counter(bf.make_plan(keys(4), 6, i.to_bytes(32, "big")).owners(0) for i in range(3000))
    assert len(counts) == 6 and all(abs(count - 500) < 100 for count in counts.values())


def test_a_thousand_members() -> None:
    plan = bf.make_plan(keys(1000), 100_000, bytes(32))
    assert plan.shards == 499_500
    assert plan.first.nbytes + plan.second.nbytes + plan.held.nbytes < 20_000_000
    pairs = plan.first.astype(int) * 1000 + plan.second
    assert len(set(pairs.tolist())) == 499_500 and bool((plan.first < plan.second).all())
    assert plan.range(499_499)[1] == 100_000
    member = plan.members[500]
    assert len(plan.shards_of(member)) == 999 and all(member in plan.owners(s) for s in plan.shards_of(member))


def test_one_and_two_members_and_empty_shards() -> None:
    one = bf.make_plan(["a"], 5, b"")
    assert (one.shards, one.owners(0), one.range(0), one.shards_of("a")) == (1, ("a",), (0, 5), [0])
    two = bf.make_plan(["b", "a"], 5, b"")
    assert (two.shards, two.owners(0), two.range(0), two.shards_of("b")) == (1, ("a", "b"), (0, 5), [0])
    thin = bf.make_plan(keys(10), 3, b"")
    assert sorted(stop - start for start, stop in map(thin.range, range(45))) == [0] * 42 + [1] * 3


def test_impossible_plans_are_refused() -> None:
    for members, chunks in (([], 5), (["a", "a"], 5), (["a"], 0)):
        with pytest.raises(ValueError, match="distinct members"):
            bf.make_plan(members, chunks, b"")
    with pytest.raises(ValueError):
        bf.make_plan(["a"], 1, b"").shards_of("stranger")


def test_plan_seed_depends_on_everything_but_the_order() -> None:
    base = bf.plan_seed(b"s", {"v1": b"x", "v2": b"y"}, ["r1", "r2"])
    assert base == bf.plan_seed(b"s", {"v2": b"y", "v1": b"x"}, ["r2", "r1"]) and len(base) == 32
    others = [
        bf.plan_seed(b"t", {"v1": b"x", "v2": b"y"}, ["r1", "r2"]),
        bf.plan_seed(b"s", {"v1": b"x"}, ["r1", "r2"]),
        bf.plan_seed(b"s", {"v1": b"y", "v2": b"x"}, ["r1", "r2"]),
        bf.plan_seed(b"s", {"v1": b"x", "v2": b"y"}, ["r1"]),
        bf.plan_seed(b"s", {"v1": b"x", "v2": b"y"}, ["r1r2"]),
    ]
    assert len({base, *others}) == 6


@LIMITED
@given(st.integers(3, 25), st.integers(1, 25), st.binary(min_size=4, max_size=4))
def test_orphans_are_spread_evenly_over_the_living(n: int, gone: int, seed: bytes) -> None:
    plan = bf.make_plan(keys(n), 500, seed)
    dead = set(plan.members[: min(gone, n - 1)])
    live = set(plan.members) - dead
    orphans = [s for s in range(plan.shards) if set(plan.owners(s)) <= dead]
    given_to = bf.reassign_all(orphans, dead, plan.members, seed)
    assert set(given_to) == set(orphans) and set(given_to.values()) <= live
    counts = [Counter(given_to.values())[key] for key in live]
    assert max(counts) - min(counts) <= 1
    assert all(bf.reassign(s, dead, live, seed) in live for s in orphans)
    assert bf.reassign(0, plan.members, plan.members, seed) is None


def test_p_valid_is_the_share_of_shards_with_an_owner() -> None:
    for n in range(1, 12):
        plan = bf.make_plan(keys(n), 1000, b"p")
        for k in range(n + 1):
            dead = set(plan.members[:k])
            alive = sum(not set(plan.owners(s)) <= dead for s in range(plan.shards))
            assert bf.p_valid(n, k) == pytest.approx(alive / plan.shards)
    assert bf.p_valid(100, 10) > 0.95  # the paper's 10% failures


def test_traffic_is_the_papers() -> None:
    w = 1_000_000
    for n in (2, 3, 10, 1000):
        assert bf.traffic(w, n).total == pytest.approx(4 * w + 2 * w / n)
        assert bf.traffic(w, n, skip_own=True).total == pytest.approx(4 * w - 2 * w / n)
    assert bf.traffic(w, 1).total == 4 * w and bf.traffic(w, 1, skip_own=True).total == 2 * w
    extra = bf.traffic(w, 4, momentum_bytes=1000).total - bf.traffic(w, 4).total
    assert extra == pytest.approx(1000 * (1 + 2 / 4))


def test_traffic_counts_what_a_plan_moves() -> None:
    n, chunks = 6, 1500
    plan = bf.make_plan(keys(n), chunks, b"t")
    for key in plan.members:
        mine = sum(b - a for a, b in map(plan.range, plan.shards_of(key)))
        expected = bf.traffic(chunks, n)
        assert mine * n == pytest.approx(expected.down_reduce) and mine == pytest.approx(expected.up_shards)
