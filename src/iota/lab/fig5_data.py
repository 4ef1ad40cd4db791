"""The text of `iota lab fig5`: documents to a BPE and to two rows of tokens, made once and kept in the lab's folder.

Deterministic: the same text gives the same tokenizer and tokens, whose digest stands in every result.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from iota.config.schema import DataConfig
from iota.core.values import sha256
from iota.errors import ConfigError, IotaError
from iota.lab.fig5_spec import Corpus
from iota.model.data import count_windows, ids_and_labels, sample_windows, window_range
from iota.store.files import write_atomic
from iota.store.split import Split
from iota.store.text import Document, Reading, documents
from iota.store.tokens import END_TOKENS, FileTokenizer, token_dtype

SPLIT_SEED = 0
HELDOUT_SHARE = 0.2
HELDOUT_ROOM = 6
"""Bytes of held-out text kept for each token wanted: a token of a BPE of 4096 is about 3.5 bytes."""
BPE_BYTES = 20_000_000
"""The tokenizer is trained on so much of the training text."""
BLOCK = 8
"""Windows of held-out text that make a block, whose loss is recorded by itself."""


class Kept(msgspec.Struct, frozen=True):
    """What lies in the cache: for which corpus, and the digest of its tokens."""

    corpus: Corpus
    digest: str
    bytes_per_token: float


@dataclass(frozen=True)
class Tokens:
    """`train` and `heldout` are rows of token ids; `digest` names both; `bytes_per_token` of the held-out text."""

    train: np.ndarray
    heldout: np.ndarray
    digest: str
    bytes_per_token: float
    sequence: int

    def sample(self, seed: int, batch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels, int64 [batch, T], of training sample `number` in the run's order (design section 2)."""
        windows = sample_windows(seed, batch, count_windows(self.train.size, self.sequence), number)
        return self._stack(self.train, windows)

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """ids and labels of the held-out windows in order, `BLOCK` at a time; only whole blocks."""
        windows = count_windows(self.heldout.size, self.sequence)
        for first in range(0, windows - BLOCK + 1, BLOCK):
            yield self._stack(self.heldout, list(range(first, first + BLOCK)))

    def _stack(self, row: np.ndarray, windows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        ranges = [window_range(window, self.sequence) for window in windows]
        return ids_and_labels(np.stack([row[start:stop] for start, stop in ranges]))


def prepare(corpus: Corpus, folder: Path, tell: Callable[[str], None] = lambda text: None) -> Tokens:
    """The tokens of a corpus, from `folder` when they lie there. Raises IotaError `missing_extra` without the package
    tokenizers, ConfigError when the text gives too few tokens, and what reading the source raises."""
    place = folder / sha256(msgspec.json.encode(corpus))[:16]
    if not (place / "corpus.json").exists():
        tell(f"reading {corpus.source!r} and training a BPE of {corpus.vocabulary}")
        _build(corpus, place)
    return open_tokens(corpus, folder)


def open_tokens(corpus: Corpus, folder: Path) -> Tokens:
    """The same from a cache that is known to be there; the rows are mapped, and checked by digest."""
    place = folder / sha256(msgspec.json.encode(corpus))[:16]
    try:
        kept = msgspec.json.decode((place / "corpus.json").read_bytes(), type=Kept)
        train, heldout = (
            np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("train", "heldout")
        )
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise IotaError("corrupt", f"the token cache {place} cannot be read: {error}", "Remove it.") from None
    if kept.corpus != corpus or _digest(train, heldout) != kept.digest:
        raise IotaError("corrupt", f"the token cache {place} holds other tokens than it says", "Remove it.")
    return Tokens(train, heldout, kept.digest, kept.bytes_per_token, corpus.sequence)


def _digest(train: np.ndarray, heldout: np.ndarray) -> str:
    return sha256(b"".join(sha256(row.tobytes()).encode() + str(row.dtype).encode() for row in (train, heldout)))


def _build(corpus: Corpus, place: Path) -> None:
    data = DataConfig(source=corpus.source, max_bytes=corpus.max_bytes)
    split = Split(SPLIT_SEED, HELDOUT_SHARE, HELDOUT_ROOM * corpus.heldout_tokens)
    for document in documents(data, Reading()):
        split.consider(document)
    text = [document.text for document in _training(data, split)]
    tokenizer = FileTokenizer(train_bpe(text, corpus.vocabulary), "the lab's BPE")
    dtype = token_dtype(tokenizer.size)
    train = np.concatenate([tokenizer.encode(part).astype(dtype) for part in text])
    wanted = corpus.heldout_tokens // (corpus.sequence * BLOCK) * corpus.sequence * BLOCK + 1
    heldout, ratio = _heldout(split, tokenizer, wanted)
    if train.size < corpus.sequence + 1 or heldout.size < wanted:
        raise ConfigError(
            f"text source {corpus.source!r} gives {train.size} training and {heldout.size} held-out tokens; "
            f"{corpus.sequence + 1} and {wanted} are needed",
            "Give more text.",
        )
    place.mkdir(parents=True, exist_ok=True)
    write_atomic(place / "tokenizer.json", [tokenizer.file], durable=False)
    for name, row in (("train", train), ("heldout", heldout.astype(dtype))):
        np.save(place / f"{name}.npy", row, allow_pickle=False)
    kept = Kept(corpus, _digest(train, heldout.astype(dtype)), ratio)
    write_atomic(place / "corpus.json", [msgspec.json.encode(kept)], durable=False)


def _training(data: DataConfig, split: Split) -> Iterator[Document]:
    return (document for document in documents(data, Reading()) if split.train(document))


def _heldout(split: Split, tokenizer: FileTokenizer, wanted: int) -> tuple[np.ndarray, float]:
    """At most `wanted` tokens, and UTF-8 bytes a token."""
    parts: list[np.ndarray] = []
    found = size = 0
    for piece in split.heldout():
        parts.append(tokenizer.encode(piece))
        found += parts[-1].size
        size += len(piece.encode("utf-8"))
        if found >= wanted:
            break
    if not parts:
        return np.zeros(0, dtype=np.uint32), 0.0
    return np.concatenate(parts)[:wanted], size / found


def train_bpe(text: list[str], vocabulary: int) -> bytes:
    """The JSON of a byte-level BPE. Raises IotaError `missing_extra`."""
    try:
        library: Any = importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise IotaError(
            "missing_extra", "the lab's BPE needs the package tokenizers", "Install it: pip install 'iota-train[dev]'"
        ) from None
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(text, BPE_BYTES), trainer)
    return str(tokenizer.to_str()).encode("utf-8")


def _first(text: list[str], limit: int) -> Iterator[str]:
    for part in text:
        if limit <= 0:
            return
        limit -= len(part)
        yield part
