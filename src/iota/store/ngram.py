"""The demo's yardstick: a byte-trigram model fitted on the training bytes, as strong as a trigram model gets.

Interpolated Kneser-Ney smoothing: p(c|ab) = max(n(abc) - D3, 0) / n(ab) + D3 T(ab) / n(ab) p(c|b), with T(ab) how many
distinct bytes were seen after ab; the bigram and unigram below count distinct contexts instead of occurrences, and the
unigram is interpolated with the uniform distribution, so nothing has probability zero. Each order's discount is
D = n1 / (n1 + 2 n2) from its own counts of counts; nothing is tuned on held-out text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 4 * 1024 * 1024


class Trigram:
    """Counts of byte trigrams, fed block by block (128 MiB in all)."""

    def __init__(self) -> None:
        self.counts = np.zeros(256**3, dtype=np.int64)
        self._tail = np.zeros(0, dtype=np.int64)

    def add(self, tokens: npt.NDArray[np.uint8]) -> None:
        """Count the next stretch of training bytes; trigrams across two stretches count too."""
        for start in range(0, tokens.size, BLOCK):
            data = np.concatenate([self._tail, tokens[start : start + BLOCK].astype(np.int64)])
            self._tail = data[-2:]
            if data.size > 2:
                index = (data[:-2] << 16) | (data[1:-1] << 8) | data[2:]
                if index.size > 2**20:
                    self.counts += np.bincount(index, minlength=256**3)
                else:
                    np.add.at(self.counts, index, 1)

    def loss(self, tokens: npt.NDArray[np.uint8]) -> float:
        """Mean nats per byte over `tokens` [n >= 3], each predicted from the two before it (the first two given)."""
        assert tokens.size >= 3, "a trigram needs three bytes"
        counts = self.counts.reshape(256, 256, 256)
        data = tokens.astype(np.int64)
        a, b, c = data[:-2], data[1:-1], data[2:]
        seen = counts > 0
        pairs = seen.sum(axis=0, dtype=np.int64)
        singles = (pairs > 0).sum(axis=0, dtype=np.int64)
        unigram = _smooth(singles[None, :], np.full((1, 256), 1 / 256))[0]
        bigram = _smooth(pairs, np.broadcast_to(unigram, (256, 256)))
        total = counts.sum(axis=2)
        kinds = seen.sum(axis=2, dtype=np.int64)
        discount = _discount(self.counts)
        norm = np.maximum(total[a, b], 1)
        top = np.maximum(counts[a, b, c] - discount, 0.0) / norm
        rest = np.where(total[a, b] > 0, discount * kinds[a, b] / norm, 1.0)
        return float(-np.log(top + rest * bigram[b, c]).mean())


def _discount(counts: npt.NDArray[np.int64]) -> float:
    """Ney's estimate of the absolute discount from how many things were seen once and twice."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def _smooth(counts: npt.NDArray[np.int64], lower: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rows of `counts` [contexts, 256] as distributions, discounted and interpolated with `lower`."""
    discount = _discount(counts)
    total = counts.sum(axis=1, keepdims=True)
    kinds = (counts > 0).sum(axis=1, keepdims=True)
    norm = np.maximum(total, 1)
    mixed = np.maximum(counts - discount, 0.0) / norm + discount * kinds / norm * lower
    return np.asarray(np.where(total > 0, mixed, lower))
