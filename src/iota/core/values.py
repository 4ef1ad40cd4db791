"""Value types that cross between processes: keys, digests, tensors, checkpoints, transcript entries.

Frozen, plain data (msgspec structs: declarations only, no I/O). Keys and digests are lowercase hex strings:
a key is an Ed25519 public key (64 characters), a digest a SHA-256 (64 characters). Hex keeps them safe in paths,
JSON and logs alike.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated

import msgspec
import numpy as np

Key = str
Digest = Annotated[str, msgspec.Meta(max_length=64)]
"""Peers' digests are journaled and kept: whoever sends a longer one is not understood."""

CHUNK_BYTES = 64 * 1024
"""Fixed chunk of uploads and manifests (design section 5)."""
CHUNK_FLOATS = CHUNK_BYTES // 4

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1}
"""The only dtypes that may cross the wire. Any other name is refused, never guessed."""


def sha256(data: bytes | bytearray | memoryview) -> Digest:
    """SHA-256 of raw bytes, as lowercase hex."""
    return hashlib.sha256(data).hexdigest()


class TensorHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a message's control part says of one attached tensor; checked before its bytes are looked at."""

    dtype: str
    shape: tuple[int, ...]
    length: int
    digest: Digest


class Tensor(msgspec.Struct, frozen=True):
    """A dense little-endian C-order tensor as bytes. `data` may be any bytes-like object and is never copied here."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def head(self) -> TensorHead:
        return TensorHead(self.dtype, self.shape, len(self.data), sha256(self.data))


def check_head(head: TensorHead) -> str | None:
    """Why a declared tensor cannot be right (unknown dtype, negative side, contradicting length), or None."""
    size = DTYPE_BYTES.get(head.dtype)
    if size is None:
        return f"unknown dtype {head.dtype[:32]!r}; known: {', '.join(DTYPE_BYTES)}"
    if len(head.shape) > 8 or any(side < 0 for side in head.shape):
        return f"impossible shape {head.shape[:8]}"
    if math.prod(head.shape) * size != head.length:
        return f"shape {head.shape} of {head.dtype} needs {math.prod(head.shape) * size} bytes, {head.length} declared"
    return None


def is_finite(tensor: Tensor) -> bool:
    """True when every element is finite; integers always are. 16-bit floats are tested by their exponent bits."""
    if tensor.dtype == "float32":
        return bool(np.isfinite(np.frombuffer(tensor.data, dtype="<f4")).all())
    if tensor.dtype in ("bfloat16", "float16"):
        mask = 0x7F80 if tensor.dtype == "bfloat16" else 0x7C00
        bits = np.frombuffer(tensor.data, dtype="<u2")
        return not bool(((bits & mask) == mask).any())
    return True


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One part's element range [start, stop) of a stage's state and where its float32 bytes lie.

    `part` is "weights", "momentum" (outer), "m" or "v" (inner moments). The bytes are
    `object[offset : offset + 4 * (stop - start)]` and their SHA-256 is `digest`.
    """

    part: str
    start: int
    stop: int
    object: str
    offset: int
    digest: Digest


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The merged state of one stage after epoch `epoch` (0: as created). The merged shards ARE the checkpoint.

    `pieces` are sorted by (part, start) and cover every part without gap or overlap; a part without any piece is all
    zeros (checkpoint 0 has weights only). `t` is the AdamW step count.
    """

    run: str
    epoch: int
    stage: int
    parameters: int
    t: int
    pieces: tuple[Piece, ...]

    def root(self) -> Digest:
        """The digest that a miner proves: over t and the pieces' ranges and digests, not over where they lie."""
        rows = [(p.part, p.start, p.stop, p.digest) for p in self.pieces]
        return sha256(msgspec.msgpack.encode((self.run, self.epoch, self.stage, self.parameters, self.t, rows)))


class CheckpointSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `Load` and `Prove` attach: the checkpoint and a signed, expiring GET URL for each object it names."""

    checkpoint: Checkpoint
    urls: dict[str, str]


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One operation in a miner's transcript (format final).

    op: load | forward | backward | step | share | eval | drop. `sample` is -1 where none is meant. `inp`/`out` are the
    digests of the operation's input and output (load: checkpoint root / -; step: - / weights digest; the first stage's
    forward has no input tensor: ""). `number`: for `step` the passes it averaged, for `forward` at the last stage and
    `load` 0. `loss` only at the last stage.
    """

    op: str
    sample: int
    inp: Digest
    out: Digest
    number: int = 0
    loss: float | None = None


def transcript_start(run: str, key: Key, session: int, epoch: int) -> Digest:
    """The chain's first head: binds a transcript to one run, miner, session and epoch."""
    return sha256(msgspec.msgpack.encode(("iota transcript", run, key, session, epoch)))


def transcript_next(head: Digest, entry: Entry) -> Digest:
    """Head after one more entry."""
    return sha256(bytes.fromhex(head) + msgspec.msgpack.encode(entry))


class Cut(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Commitment to a snapshot. `step`: local inner steps done in this epoch at the cut (0: just loaded).

    A snapshot's digest is SHA-256 over `t` as 8 little-endian bytes, then weights, m and v as float32 bytes.
    """

    step: int
    digest: Digest
