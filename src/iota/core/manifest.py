"""The upload format and its chunk manifest (design section 5 "Commit"; format final, version 1).

An upload is a list of float32 parts of the same `parameters` elements (`weights` or `delta`, then each merged moment
`m`, `v`), little-endian, each zero-padded to whole 64 KiB chunks, one after another. So every part has the same number
of chunks C, chunk c of part p is chunk p * C + c of the upload, and a shard is a chunk range [a, b) of EVERY part.

The manifest holds each chunk's SHA-256 and squared norm (float64) under one Merkle root:

    leaf = H(00 | chunk digest | norm as little-endian float64)        node = H(01 | left | right), an odd node moves up
    root = H(02 | tree | msgpack of (version, parameters, part names))

Whoever holds the manifest can check any chunk read by byte range alone, and both owners of a shard reject the same
ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from iota.core.values import CHUNK_BYTES, CHUNK_FLOATS, Digest, Key, sha256

Buffer = bytes | bytearray | memoryview
Floats = npt.NDArray[np.float32]

VERSION = 1
PART_NAMES = ("weights", "delta", "momentum", "m", "v")
"""The only names a part may have; `v` must be nowhere negative (a forged v is a poison, design section 3)."""
NORM_TOLERANCE = 1e-9
DIGEST_BYTES = 32
NORM_BYTES = 8


class ChunkManifest(msgspec.Struct, frozen=True, array_like=True):
    """`digests`: 32 bytes a chunk, `norms`: 8 bytes a chunk (float64 little-endian), both in order of the upload."""

    version: int
    parameters: int
    names: tuple[str, ...]
    digests: bytes
    norms: bytes

    @property
    def chunks(self) -> int:
        """Chunks of one part."""
        return chunk_count(self.parameters)

    @property
    def length(self) -> int:
        """Bytes of the whole upload (the paper's W)."""
        return len(self.names) * self.chunks * CHUNK_BYTES

    def norm_array(self) -> npt.NDArray[np.float64]:
        """Squared norms as float64 [parts, chunks], without a copy."""
        return np.frombuffer(self.norms, dtype="<f8").reshape(len(self.names), self.chunks)

    def part_index(self, part: int | str) -> int:
        return self.names.index(part) if isinstance(part, str) else part

    def part_chunk_range(self, part: int | str, start: int, stop: int) -> tuple[int, int]:
        """Byte range [from, to) in the upload of chunks [start, stop) of a part (its name or index)."""
        assert 0 <= start <= stop <= self.chunks, (start, stop, self.chunks)
        first = self.part_index(part) * self.chunks
        return (first + start) * CHUNK_BYTES, (first + stop) * CHUNK_BYTES

    def upload_chunk(self, part: int | str, chunk: int) -> int:
        """Index in the upload of a part's chunk: what `check_chunks` takes."""
        return self.part_index(part) * self.chunks + chunk

    def root(self) -> Digest:
        return merkle_root(self)


def chunk_count(parameters: int) -> int:
    """C = ceil(4 * parameters / 65,536)."""
    return -(-parameters * 4 // CHUNK_BYTES)


def element_range(start: int, stop: int, parameters: int) -> tuple[int, int]:
    """Elements [from, to) of a part that chunks [start, stop) hold, padding left out."""
    return min(start * CHUNK_FLOATS, parameters), min(stop * CHUNK_FLOATS, parameters)


def merkle_root(manifest: ChunkManifest) -> Digest:
    """The root (see the module's text). About 2 microseconds a chunk."""
    digests, norms, sha = manifest.digests, manifest.norms, hashlib.sha256
    level = [
        sha(b"\x00" + digests[32 * i : 32 * i + 32] + norms[8 * i : 8 * i + 8]).digest() for i in range(len(norms) // 8)
    ]
    while len(level) > 1:
        up = [sha(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = up + level[-1:] if len(level) % 2 else up
    tree = level[0] if level else b""
    names = msgspec.msgpack.encode((manifest.version, manifest.parameters, manifest.names))
    return sha256(b"\x02" + tree + names)


def commitment(root: Digest, key: Key, run: str, epoch: int, stage: int) -> Digest:
    """H(root, key, run, epoch, stage): binds an upload to its owner and place, so a copied root opens nothing."""
    return sha256(msgspec.msgpack.encode(("iota commitment", root, key, run, epoch, stage)))


def _bytes_of(array: Floats) -> memoryview:
    if array.dtype != np.dtype("<f4") or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(
            f"a part must be a flat contiguous little-endian float32 array, not {array.dtype} {array.shape}"
        )
    return memoryview(array.data).cast("B")


def build_manifest(parts: Sequence[tuple[str, Floats]]) -> tuple[ChunkManifest, list[Buffer]]:
    """Manifest and upload of the parts, float32 [parameters] each.

    The pieces, written one after another, are the upload; they are views of the arrays (which must not change until
    they are written) and of a zero page. Raises ValueError for a wrong name, shape or dtype and for a value that is
    not finite.
    """
    names = tuple(name for name, _ in parts)
    parameters = len(parts[0][1]) if parts else 0
    problem = _name_problem(names, parameters)
    if problem:
        raise ValueError(problem)
    digests, norms = bytearray(), list[float]()
    pieces: list[Buffer] = []
    padding = bytes(chunk_count(parameters) * CHUNK_BYTES - 4 * parameters)
    square = np.empty(CHUNK_FLOATS, dtype=np.float64)
    for name, array in parts:
        view = _bytes_of(array)
        if len(array) != parameters:
            raise ValueError(f"part {name} has {len(array)} elements, the first part {parameters}")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            digest = hashlib.sha256(chunk)
            if len(chunk) < CHUNK_BYTES:
                digest.update(padding)
            digests += digest.digest()
            norms.append(_square_norm(array[start // 4 : start // 4 + CHUNK_FLOATS], square))
            if not math.isfinite(norms[-1]):
                raise ValueError(f"part {name} has a value that is not finite in chunk {start // CHUNK_BYTES}")
        pieces += [view, padding] if padding else [view]
    packed = np.array(norms, dtype="<f8").tobytes()
    return ChunkManifest(VERSION, parameters, names, bytes(digests), packed), pieces


def _square_norm(values: Floats, scratch: npt.NDArray[np.float64]) -> float:
    """Sum of squares in float64; float32 input cannot overflow it."""
    out = scratch[: len(values)]
    return float(np.square(values, out=out, dtype=np.float64).sum())


def _name_problem(names: tuple[str, ...], parameters: int) -> str | None:
    if not names or len(set(names)) != len(names) or any(name not in PART_NAMES for name in names):
        return f"part names must be distinct and among {', '.join(PART_NAMES)}, not {names[:8]!r}"
    if parameters < 1:
        return f"a part needs at least one element, not {parameters}"
    return None


def encode(manifest: ChunkManifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def encoded_limit(parts: int, parameters: int) -> int:
    """No valid manifest of so many parts is longer: check a declared length against it before reading."""
    return parts * (chunk_count(parameters) * (DIGEST_BYTES + NORM_BYTES) + 16) + 64


def decode(data: Buffer, *, names: Sequence[str] | None = None, parameters: int | None = None) -> ChunkManifest:
    """A peer's manifest, checked as hostile input: after this every count, length and norm is right and finite.

    `names` and `parameters`, when given, are what the run expects. Raises ValueError with the reason. Whether it is the
    committed one, `merkle_root` tells.
    """
    if names is not None and parameters is not None and len(data) > encoded_limit(len(names), parameters):
        raise ValueError(f"manifest of {len(data)} bytes, at most {encoded_limit(len(names), parameters)} expected")
    try:
        manifest = msgspec.msgpack.decode(data, type=ChunkManifest)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a chunk manifest: {error}") from error
    if manifest.version != VERSION:
        raise ValueError(f"chunk manifest version {manifest.version}, this software knows {VERSION}")
    problem = _name_problem(manifest.names, manifest.parameters)
    if problem:
        raise ValueError(problem)
    if names is not None and manifest.names != tuple(names):
        raise ValueError(f"parts {manifest.names}, expected {tuple(names)}")
    if parameters is not None and manifest.parameters != parameters:
        raise ValueError(f"{manifest.parameters} elements a part, expected {parameters}")
    chunks = len(manifest.names) * manifest.chunks
    if len(manifest.digests) != chunks * DIGEST_BYTES or len(manifest.norms) != chunks * NORM_BYTES:
        raise ValueError(f"{chunks} chunks need {chunks * 32} digest and {chunks * 8} norm bytes")
    norms = manifest.norm_array()
    if not bool(np.isfinite(norms).all()) or bool((norms < 0).any()):
        raise ValueError("a chunk norm is negative or not finite")
    return manifest


def check_chunks(manifest: ChunkManifest, first_chunk: int, data: Buffer) -> str | None:
    """Why the bytes read for upload chunks from `first_chunk` on contradict the manifest or the format, or None.

    Checked chunk by chunk: digest, norm to 1e-9 relative, finiteness, v >= 0, and zero padding. Every
    owner finds the same reason for the same bytes.
    """
    view = memoryview(data).cast("B")
    total = len(manifest.names) * manifest.chunks
    count, rest = divmod(len(view), CHUNK_BYTES)
    if rest or first_chunk < 0 or first_chunk + count > total:
        return f"{len(view)} bytes from chunk {first_chunk} are not whole chunks of an upload of {total}"
    square = np.empty(CHUNK_FLOATS, dtype=np.float64)
    norms = manifest.norm_array().reshape(-1)
    for index in range(first_chunk, first_chunk + count):
        start = (index - first_chunk) * CHUNK_BYTES
        chunk = view[start : start + CHUNK_BYTES]
        part, place = divmod(index, manifest.chunks)
        name = f"chunk {place} of {manifest.names[part]}"
        if hashlib.sha256(chunk).digest() != manifest.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            return f"{name}: digest differs from the manifest"
        values = np.frombuffer(chunk, dtype="<f4")
        norm = _square_norm(values, square)
        if not math.isfinite(norm):
            return f"{name}: a value is not finite"
        if abs(norm - float(norms[index])) > NORM_TOLERANCE * norm:
            return f"{name}: squared norm is {norm!r}, the manifest says {float(norms[index])!r}"
        if manifest.names[part] == "v" and float(values.min()) < 0.0:
            return f"{name}: a second moment is negative"
        if place == manifest.chunks - 1 and values[manifest.parameters - place * CHUNK_FLOATS :].any():
            return f"{name}: padding is not zero"
    return None
