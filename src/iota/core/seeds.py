"""Counter-based randomness (design section 7): every draw is a pure function of (seed, purpose, parts), never a stream.

So a draw does not depend on what was drawn before it, a restarted process repeats it, and two machines agree on it.
`parts` are integers of at most 64 bits, strings, bytes, or tuples of them; (1, 23) and (12, 3) are different keys, and
so are 1 and "1". A draw is BLAKE2b over the msgpack encoding of the whole key; it costs about a microsecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Part = int | str | bytes | tuple[int | str | bytes, ...]

_blake2b = hashlib.blake2b
_encode = msgspec.msgpack.encode
_MASK = (1 << 64) - 1


def draw64(seed: int, purpose: str, *parts: Part) -> int:
    """A uniform integer in [0, 2**64). Raises OverflowError for an integer of more than 64 bits."""
    return int.from_bytes(_blake2b(_encode((seed, purpose, parts)), digest_size=8).digest(), "little")


def uniform(seed: int, purpose: str, *parts: Part) -> float:
    """A uniform float in [0, 1), a multiple of 2**-53."""
    return (draw64(seed, purpose, *parts) >> 11) * 2.0**-53


def pick(seed: int, purpose: str, n: int, *parts: Part) -> int:
    """A uniform index in [0, n). n must be at least 1. (The bias of multiply-and-shift is below n / 2**64.)"""
    assert n >= 1, f"pick of {n}"
    return (int.from_bytes(_blake2b(_encode((seed, purpose, parts)), digest_size=8).digest(), "little") * n) >> 64


def pick_two(seed: int, purpose: str, n: int, *parts: Part) -> tuple[int, int]:
    """Two distinct indices in [0, n), every ordered pair equally likely. n must be at least 2."""
    assert n >= 2, f"pick_two of {n}"
    wide = int.from_bytes(_blake2b(_encode((seed, purpose, parts)), digest_size=16).digest(), "little")
    first = ((wide & _MASK) * n) >> 64
    second = ((wide >> 64) * (n - 1)) >> 64
    return first, second + (second >= first)


def permutation(key: bytes, n: int) -> npt.NDArray[np.int64]:
    """A uniform permutation of range(n) as int64 [n]: the order of n 64-bit words that SHAKE-256 draws from `key`.

    Half a million elements take about 0.1 s. Equal words (chance n**2 / 2**65) keep their order."""
    words = np.frombuffer(hashlib.shake_256(key).digest(8 * n), dtype="<u8")
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def shuffle(seed: int, purpose: str, items: Sequence[T], *parts: Part) -> list[T]:
    """The items in a uniformly drawn order, as a new list."""
    return [items[i] for i in permutation(_encode((seed, purpose, parts)), len(items)).tolist()]
