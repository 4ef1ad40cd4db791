"""Data order as a pure function of seed and sample id (design section 2). Standard library and numpy only.

The training corpus is one row of tokens, cut into windows of T + 1 tokens that overlap in one: window w is tokens
[w*T, w*T + T] inclusive, so ids are its first T tokens and labels its last T. Sequence j of sample i is the window
pi(i * batch + j): pi is a Feistel permutation of all windows, keyed by (seed, pass number), so a pass over the corpus
repeats no window, the next pass has another order, and nobody keeps a list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np

ROUNDS = 6


def count_windows(tokens: int, sequence: int) -> int:
    """How many whole windows of `sequence` + 1 tokens a corpus of `tokens` tokens holds."""
    return max(0, (tokens - 1) // sequence)


def window_range(window: int, sequence: int) -> tuple[int, int]:
    """The token range [start, stop) of a window: `sequence` + 1 tokens."""
    return window * sequence, window * sequence + sequence + 1


@lru_cache(maxsize=16)
def _permutation(seed: int, number: int, n_windows: int) -> Callable[[int], int]:
    """The permutation of range(n_windows) for pass `number`.

    A balanced Feistel network over the smallest even number of bits that holds n_windows; values outside are walked on
    (cycle walking), which keeps it a permutation and takes fewer than four walks on average.
    """
    half = max(1, ((n_windows - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    width = (half + 7) // 8
    key = hashlib.sha256(f"iota windows {seed} {number}".encode()).digest()
    rounds = [hashlib.blake2b(key=key, salt=bytes([turn]), digest_size=width) for turn in range(ROUNDS)]

    def permute(index: int) -> int:
        while True:
            left, right = index >> half, index & mask
            for keyed in rounds:
                turn = keyed.copy()
                turn.update(right.to_bytes(width, "little"))
                left, right = right, left ^ (int.from_bytes(turn.digest(), "little") & mask)
            index = (left << half) | right
            if index < n_windows:
                return index

    return permute


def window_index(seed: int, n_windows: int, position: int) -> int:
    """The window at `position` of the endless order: pass position // n_windows, place position % n_windows in it.

    Raises ValueError when there is no window or the position is negative.
    """
    if n_windows < 1 or position < 0:
        raise ValueError(f"no window at position {position} of a corpus of {n_windows} windows")
    number, place = divmod(position, n_windows)
    return _permutation(seed, number, n_windows)(place)


def sample_windows(seed: int, batch: int, n_windows: int, sample: int) -> list[int]:
    """The windows of a sample's `batch` sequences, in order."""
    return [window_index(seed, n_windows, sample * batch + j) for j in range(batch)]


def ids_and_labels(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split windows of tokens [batch, T + 1] into ids and labels, both int64 [batch, T]."""
    wide = np.ascontiguousarray(tokens, dtype=np.int64)
    return np.ascontiguousarray(wide[:, :-1]), np.ascontiguousarray(wide[:, 1:])
