"""The held-out text: split off by document, near-duplicates of training text removed, the corpus's own mix kept.

A hash of a document's content (keyed by the run's seed) decides; so the split needs no list and no second opinion. The
source is read twice: once to collect held-out candidates, once for training text, against which they are compared.
A candidate is a near-duplicate when more than half of its shingles (50-byte windows of the text in lower case with
whitespace collapsed, one window in eight, chosen by its hash) occur in training text; it goes out of both.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from iota.store.text import Document

SHINGLE = 50
SAMPLED = 8
PIECE = 1024
"""Bytes of held-out text taken from one place, so that a small held-out set comes from many places."""
OVERLAP = 0.5
FEW = 10

_BASE = 0x9E3779B97F4A7C15
_UNBASE = pow(_BASE, -1, 2**64)


def content_rank(seed: int, text: str) -> float:
    """A number in [0, 1) drawn from a document's content; below `heldout_share` it is a held-out candidate."""
    digest = hashlib.sha256(b"iota held-out %d\0" % seed + text.encode("utf-8")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def shingles(text: str) -> npt.NDArray[np.uint64]:
    """Sorted, distinct hashes that stand for a text's wording wherever it is embedded, plus one of the whole text.

    Rolling polynomial hashes modulo 2^64, taken for all windows at once: (P[i+50] - P[i]) / B^i with prefix sums P.
    """
    data = np.frombuffer(" ".join(text.lower().split()).encode("utf-8"), dtype=np.uint8)
    whole = np.frombuffer(hashlib.sha256(data.tobytes()).digest()[:8], dtype="<u8").astype(np.uint64)
    if data.size < SHINGLE:
        return whole
    powers = np.full(data.size, _BASE, dtype=np.uint64)
    powers[0] = 1
    np.cumprod(powers, out=powers)
    sums = np.zeros(data.size + 1, dtype=np.uint64)
    np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers, out=sums[1:])
    inverse = np.full(data.size - SHINGLE + 1, _UNBASE, dtype=np.uint64)
    inverse[0] = 1
    np.cumprod(inverse, out=inverse)
    hashes = (sums[SHINGLE:] - sums[:-SHINGLE]) * inverse
    hashes ^= hashes >> np.uint64(31)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(29)
    return np.unique(np.concatenate([hashes[hashes % np.uint64(SAMPLED) == 0], whole]))


class Split:
    """One run's split. First `consider` every document, then `train` every document again, then `heldout`.

    Of the candidates only those of smallest rank are kept, up to `room` bytes (the share is an upper bound: text that
    the held-out set cannot use stays in training), so memory stays bounded however large the corpus is. A kind of text
    with at least FEW documents and no candidate gives its document of smallest rank, so that no kind is missing.
    """

    def __init__(self, seed: int, share: float, room: int) -> None:
        self.seed = seed
        self.room = room
        self.bytes: Counter[str] = Counter()
        self.dropped = 0
        self._limit = share
        self._size = 0
        self._heap: list[tuple[float, str, Document]] = []
        self._ranks: set[float] = set()
        self._count: Counter[str] = Counter()
        self._best: dict[str, tuple[float, Document]] = {}
        self._candidates: dict[float, Document] | None = None
        self._known: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._seen: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def consider(self, document: Document) -> None:
        """First pass: keep the document if it may be held out; exact copies of a candidate are kept once."""
        size = len(document.text.encode("utf-8"))
        self.bytes[document.kind] += size
        self._count[document.kind] += 1
        rank = content_rank(self.seed, document.text)
        if document.kind not in self._best or rank < self._best[document.kind][0]:
            self._best[document.kind] = rank, document
        if rank >= self._limit or rank in self._ranks:
            return
        heapq.heappush(self._heap, (-rank, document.name, document))
        self._ranks.add(rank)
        self._size += size
        while self._size > self.room and len(self._heap) > 1:
            worst, _, out = heapq.heappop(self._heap)
            self._limit = -worst
            self._ranks.discard(-worst)
            self._size -= len(out.text.encode("utf-8"))

    def _fix(self) -> dict[float, Document]:
        """The first pass is over: the candidates by rank, and their shingles to compare training text with."""
        found = {-rank: document for rank, _, document in self._heap}
        kinds = {document.kind for document in found.values()}
        for kind, (rank, document) in self._best.items():
            if kind not in kinds and self._count[kind] >= FEW:
                found[rank] = document
        if found:
            self._known = np.unique(np.concatenate([shingles(document.text) for document in found.values()]))
            self._seen = np.zeros(self._known.size, dtype=np.bool_)
        self._candidates = found
        return found

    def train(self, document: Document) -> bool:
        """Second pass: True if the document is training text (candidates are then compared with it)."""
        candidates = self._fix() if self._candidates is None else self._candidates
        if content_rank(self.seed, document.text) in candidates:
            return False
        if self._known.size:
            mine = shingles(document.text)
            place = np.minimum(np.searchsorted(self._known, mine), self._known.size - 1)
            self._seen[place[self._known[place] == mine]] = True
        return True

    def heldout(self) -> Iterator[str]:
        """Pieces of held-out text, best first: any beginning of this sequence has about the mix of the whole corpus.

        Every next piece comes from the kind that is furthest behind its share of the corpus; within a kind the order is
        by hash. Near-duplicates are left out and counted in `dropped`.
        """
        candidates = self._fix() if self._candidates is None else self._candidates
        pools: dict[str, list[tuple[float, str]]] = {}
        self.dropped = 0
        for document in candidates.values():
            if self._overlap(document) > OVERLAP:
                self.dropped += 1
                continue
            pool = pools.setdefault(document.kind, [])
            pool += [(content_rank(self.seed + 1, piece), piece) for piece in _pieces(document.text)]
        for pool in pools.values():
            pool.sort(reverse=True)
        taken: Counter[str] = Counter()
        while pools:
            kind = min(pools, key=lambda name: (taken[name] / max(1, self.bytes[name]), name))
            piece = pools[kind].pop()[1]
            taken[kind] += len(piece)
            if not pools[kind]:
                del pools[kind]
            yield piece

    def _overlap(self, document: Document) -> float:
        mine = shingles(document.text)
        return float(self._seen[np.searchsorted(self._known, mine)].mean())


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of about PIECE characters, cut at line ends where there are any."""
    while len(text) > PIECE:
        cut = text.rfind("\n", PIECE // 2, PIECE) + 1 or PIECE
        yield text[:cut]
        text = text[cut:]
    if text.strip():
        yield text
