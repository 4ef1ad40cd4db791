"""Text to tokens, tokens to shards in the blob store, and shards back to the windows that a sample names.

The corpus is one row of tokens. Every document is followed by a separator: for the "bytes" tokenizer (vocabulary 256)
a newline and a byte 0, which no document contains (NULs are removed from text); for a `tokenizers` JSON file its
end-of-text token, where it has one. Shards are plain little-endian uint8, uint16 or uint32 files of `SHARD_TOKENS`
tokens (the last may be shorter); their digests stand in the signed manifest, so nobody has to trust who serves them.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from iota.config.schema import DataConfig, Manifest, RunConfig, TokenShard
from iota.core.values import Digest, sha256
from iota.errors import ConfigError, IotaError
from iota.model.data import count_windows, ids_and_labels, sample_windows, window_range
from iota.store.blobs import Blobs
from iota.store.files import read_checked, write_atomic

SHARD_TOKENS = 4 * 1024 * 1024
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

Ids = npt.NDArray[np.int64]
Fetch = Callable[[str], Awaitable[bytes]]
"""Brings a whole object of the blob store by its key (through a signed URL, or straight from the store)."""


# ----------------------------------------------------------------------------------------------------- tokenizers


class Tokenizer(Protocol):
    """`size`: one more than the largest id. `digest` names the tokenizer in the manifest; `file` is its JSON, b"" for
    bytes."""

    size: int
    digest: Digest
    file: bytes

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """One document's ids, its separator included; any text at all can be encoded."""
        ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids."""

    size = 256
    digest = sha256(b"iota bytes tokenizer 1: UTF-8, documents end with newline and NUL")
    file = b""

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        data = text.replace("\0", "").rstrip("\n").encode("utf-8", "replace") + b"\n\0"
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: list[int]) -> str:
        return bytes(number for number in ids if 0 < number < 256).decode("utf-8", "replace")


class FileTokenizer:
    """A `tokenizers` JSON file, as published with most models."""

    def __init__(self, data: bytes, place: str) -> None:
        try:
            library: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            raise IotaError(
                "missing_extra",
                f"data.tokenizer = {place!r} needs the package tokenizers, which is not installed",
                "Install it: pip install 'iota-train[tokenizers]'",
            ) from None
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:
            raise ConfigError(
                f"data.tokenizer = {place!r} is no tokenizers JSON file: {error}", "Correct the path"
            ) from error
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"data.tokenizer = {place!r} has an empty vocabulary", "Use another tokenizer file")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.file = data
        self.digest = sha256(data)
        self.size = max(vocabulary.values()) + 1
        self._end = next((vocabulary[token] for token in END_TOKENS if token in vocabulary), None)

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if self._end is not None:
            ids.append(self._end)
        return np.asarray(ids, dtype=np.uint32)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


def open_tokenizer(data: DataConfig, vocabulary: int) -> Tokenizer:
    """The run's tokenizer, checked against the model: its largest id must lie below `vocabulary`.

    Raises ConfigError (missing or bad file, vocabulary too small), IotaError `missing_extra`.
    """
    tokenizer: Tokenizer
    if data.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    else:
        try:
            content = Path(data.tokenizer).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer = {data.tokenizer!r} cannot be read: {error.strerror}",
                'Write "bytes" or the path of a tokenizers JSON file',
            ) from None
        tokenizer = FileTokenizer(content, data.tokenizer)
    if tokenizer.size > vocabulary:
        raise ConfigError(
            f"model.vocabulary = {vocabulary} is too small for data.tokenizer = {data.tokenizer!r}, whose largest id "
            f"is {tokenizer.size - 1}",
            f"Write model.vocabulary = {tokenizer.size} or more",
        )
    return tokenizer


def token_dtype(vocabulary: int) -> str:
    """The smallest of uint8, uint16, uint32 that holds every id below `vocabulary`."""
    return "uint8" if vocabulary <= 2**8 else "uint16" if vocabulary <= 2**16 else "uint32"


# ------------------------------------------------------------------------------------------------ writing shards


class ShardWriter:
    """Writes a row of tokens as shards `data/<name>-0000.bin`, ... of at most `shard_tokens` tokens."""

    def __init__(self, blobs: Blobs, name: str, dtype: str, shard_tokens: int = SHARD_TOKENS) -> None:
        self._blobs = blobs
        self._name = name
        self._dtype = dtype
        self._limit = shard_tokens
        self._parts: list[npt.NDArray[Any]] = []
        self._held = 0
        self.shards: list[TokenShard] = []
        self.tokens = 0

    async def add(self, ids: npt.NDArray[np.uint32]) -> None:
        """Append ids; whole shards are stored as they fill."""
        while ids.size:
            taken = ids[: self._limit - self._held].astype(DTYPES[self._dtype])
            self._parts.append(taken)
            self._held += taken.size
            self.tokens += taken.size
            ids = ids[taken.size :]
            if self._held == self._limit:
                await self._flush()

    async def _flush(self) -> None:
        data = b"".join(part.tobytes() for part in self._parts)
        key = f"data/{self._name}-{len(self.shards):04d}.bin"
        await self._blobs.put(key, [data])
        self.shards.append(TokenShard(key, self._held, self._dtype, sha256(data)))
        self._parts, self._held = [], 0

    async def finish(self) -> tuple[TokenShard, ...]:
        """Store the rest; all shards in order."""
        if self._held:
            await self._flush()
        return tuple(self.shards)


# ------------------------------------------------------------------------------------------------ reading shards


class TokenReader:
    """Reads ranges and windows of a sharded corpus. A shard is fetched once, whole, when first needed, and believed
    only when its SHA-256 is the manifest's; then it is kept: in `folder` as a file (mapped), else in memory.

    Safe for concurrent calls: one fetch a shard. Raises IotaError `corrupt` naming the object when fetched bytes are
    not those of the manifest (nothing is kept then; a later call fetches again), and whatever `fetch` raises.
    """

    def __init__(
        self, shards: tuple[TokenShard, ...], fetch: Fetch, config: RunConfig, folder: Path | None = None
    ) -> None:
        self._shards = shards
        self._fetch = fetch
        self._seed = config.seed
        self._batch = config.train.batch
        self._sequence = config.model.sequence
        self._folder = folder
        self._loaded: dict[int, npt.NDArray[Any]] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self.tokens = int(self._ends[-1]) if shards else 0
        self.windows = count_windows(self.tokens, self._sequence)

    @classmethod
    def train(cls, manifest: Manifest, fetch: Fetch, folder: Path | None = None) -> TokenReader:
        """Reader of a run's training tokens."""
        return cls(manifest.train_shards, fetch, manifest.config, folder)

    @classmethod
    def heldout(cls, manifest: Manifest, fetch: Fetch, folder: Path | None = None) -> TokenReader:
        """Reader of a run's held-out tokens."""
        return cls(manifest.heldout_shards, fetch, manifest.config, folder)

    async def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop) as the shards' dtype. Raises ValueError outside the corpus."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"tokens {start} to {stop} of a corpus of {self.tokens}")
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            shard = await self._shard(number)
            first = int(self._ends[number]) - shard.size
            part = shard[start - first : stop - first]
            parts.append(part)
            start += part.size
            number += 1
        if not parts:
            return np.zeros(0, dtype=DTYPES[self._shards[0].dtype if self._shards else "uint8"])
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    async def batch_windows(self, sample: int) -> tuple[Ids, Ids]:
        """ids and labels, int64 [batch, sequence] each, of training sample `sample` (design section 2)."""
        return await self._stack(sample_windows(self._seed, self._batch, self.windows, sample))

    async def in_order(self, batch: int) -> AsyncIterator[tuple[Ids, Ids]]:
        """All windows one after another, `batch` at a time (the last may be fewer): how the held-out loss is read."""
        for first in range(0, self.windows, batch):
            yield await self._stack(list(range(first, min(first + batch, self.windows))))

    async def _stack(self, windows: list[int]) -> tuple[Ids, Ids]:
        rows = [await self.read(*window_range(window, self._sequence)) for window in windows]
        return ids_and_labels(np.stack(rows))

    async def _shard(self, number: int) -> npt.NDArray[Any]:
        if number not in self._loaded:
            async with self._locks.setdefault(number, asyncio.Lock()):
                if number not in self._loaded:
                    self._loaded[number] = await self._load(self._shards[number])
        return self._loaded[number]

    async def _load(self, shard: TokenShard) -> npt.NDArray[Any]:
        dtype = np.dtype(DTYPES[shard.dtype])
        path = None if self._folder is None else self._folder / f"{shard.digest}.bin"
        if path is None or not _is_whole(path, shard):
            data = await self._fetch(shard.object)
            found = hashlib.sha256(data).hexdigest()
            if found != shard.digest or len(data) != shard.tokens * dtype.itemsize:
                raise IotaError(
                    "corrupt",
                    f"token shard {shard.object} ({len(data)} bytes) has digest {found}, the manifest {shard.digest}",
                    "The store holds other bytes than the run was created with: restore the object",
                )
            if path is None:
                return np.frombuffer(data, dtype=dtype)
            write_atomic(path, [data], durable=False)
        return np.memmap(path, dtype=dtype, mode="r")


def _is_whole(path: Path, shard: TokenShard) -> bool:
    """Whether an earlier process left this shard's very bytes; a damaged copy is simply fetched again."""
    try:
        read_checked(path, shard.digest)
    except IotaError as error:
        if error.code not in ("no_object", "corrupt"):
            raise
        return False
    return True
