"""Counter-based draws: pure, pinned, uniform, and different keys never share a draw."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from iota.core import seeds


def test_draws_are_pinned() -> None:
    """The values are part of the format: a change would change routing, plans and audits of running swarms."""
    written_out = b"\x93\x00\xa5route\x92\x01\x02"  # msgpack of (0, "route", (1, 2))
    digest = hashlib.blake2b(written_out, digest_size=8).digest()
    assert seeds.draw64(0, "route", 1, 2) == int.from_bytes(digest, "little") == 839944405943144560
    assert [seeds.pick(7, "route", 10, i) for i in range(8)] == [4, 0, 1, 6, 6, 4, 7, 1]
    assert seeds.pick_two(7, "route", 5, 3) == (2, 4)
    assert seeds.shuffle(7, "x", list("abcdef")) == ["c", "f", "d", "e", "a", "b"]


def test_order_of_calls_does_not_matter() -> None:
    forward = [seeds.draw64(1, "a", i) for i in range(50)]
    assert [seeds.draw64(1, "a", i) for i in reversed(range(50))] == forward[::-1]


def test_keys_are_told_apart() -> None:
    keys = [(1, 23), (12, 3), ("1", 23), (1, 2, 3), ((1, 2), 3), (1, (2, 3)), (b"1", 23), (), ("",), (-1,), (0,)]
    draws = {seeds.draw64(seed, purpose, *key) for key in keys for seed in (0, 1) for purpose in ("a", "b")}
    assert len(draws) == 4 * len(keys)


def test_pick_is_uniform() -> None:
    counts = Counter(seeds.pick(3, "uniform", 7, i) for i in range(14_000))
    assert set(counts) == set(range(7))
    assert all(abs(count - 2000) < 200 for count in counts.values())  # 4.8 standard deviations


def test_pick_two_is_uniform_over_ordered_pairs() -> None:
    counts = Counter(seeds.pick_two(3, "two", 4, i) for i in range(12_000))
    assert set(counts) == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_permutation_and_uniform() -> None:
    order = seeds.permutation(b"key", 1000)
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert not np.array_equal(order, seeds.permutation(b"kez", 1000))
    assert seeds.permutation(b"key", 0).tolist() == []
    values = [seeds.uniform(1, "u", i) for i in range(2000)]
    assert min(values) >= 0 and max(values) < 1 and abs(sum(values) / 2000 - 0.5) < 0.03


def test_single_choice_and_refusals() -> None:
    assert seeds.pick(0, "p", 1, 5) == 0
    assert seeds.shuffle(0, "p", []) == []
    with pytest.raises(AssertionError):
        seeds.pick(0, "p", 0)
    with pytest.raises(AssertionError):
        seeds.pick_two(0, "p", 1)
    with pytest.raises(OverflowError):
        seeds.draw64(0, "p", 1 << 65)
