"""Chunk manifest: format, hostile input, and checks of byte ranges."""

import hashlib
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.core import manifest as mf
from iota.core.values import CHUNK_BYTES, CHUNK_FLOATS

SIZE = 2 * CHUNK_FLOATS + 100
LIMITED = settings(derandomize=True, deadline=None, max_examples=30)


def parts(size: int = SIZE, seed: int = 0) -> list[tuple[str, np.ndarray]]:
    x = np.random.default_rng(seed).standard_normal((3, size), dtype=np.float32)
    return [("delta", x[0]), ("m", x[1]), ("v", np.square(x[2]))]


def upload(pieces: list) -> bytearray:
    return bytearray(b"".join(pieces))


def reference_root(arrays: list[tuple[str, np.ndarray]]) -> str:
    """The format in ten lines."""
    level = []
    for _, array in arrays:
        data = array.tobytes() + bytes(-4 * len(array) % CHUNK_BYTES)
        for i in range(0, len(data), CHUNK_BYTES):
            chunk = data[i : i + CHUNK_BYTES]
            norm = float(np.square(np.frombuffer(chunk, "<f4"), dtype=np.float64)[: len(array) - i // 4].sum())
            level.append(hashlib.sha256(b"\0" + hashlib.sha256(chunk).digest() + struct.pack("<d", norm)).digest())
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [hashlib.sha256(b"\1" + b"".join(p)).digest() if len(p) == 2 else p[0] for p in pairs]
    names = msgspec.msgpack.encode((1, len(arrays[0][1]), tuple(name for name, _ in arrays)))
    return hashlib.sha256(b"\2" + level[0] + names).hexdigest()


@pytest.mark.parametrize("size", [1, CHUNK_FLOATS - 1, CHUNK_FLOATS, CHUNK_FLOATS + 1, SIZE])
def test_format(size: int) -> None:
    arrays = parts(size)
    manifest, pieces = mf.build_manifest(arrays)
    data = upload(pieces)
    assert manifest.chunks == mf.chunk_count(size) == -(-size // CHUNK_FLOATS)
    assert len(data) == manifest.length == 3 * manifest.chunks * CHUNK_BYTES
    assert manifest.root() == reference_root(arrays)
    for name, array in arrays:
        start, stop = manifest.part_chunk_range(name, 0, manifest.chunks)
        assert bytes(data[start:stop]) == array.tobytes() + bytes(-4 * size % CHUNK_BYTES)
    assert mf.check_chunks(manifest, 0, data) is None
    assert mf.decode(mf.encode(manifest), names=("delta", "m", "v"), parameters=size) == manifest
    assert len(mf.encode(manifest)) <= mf.encoded_limit(3, size)


def test_pieces_are_views() -> None:
    arrays = parts()
    _, pieces = mf.build_manifest(arrays)
    for (_, array), piece in zip(arrays, pieces[::2], strict=True):
        assert np.shares_memory(np.frombuffer(piece, "<f4"), array)


def test_ranges_of_a_shard() -> None:
    manifest, pieces = mf.build_manifest(parts())
    data = upload(pieces)
    for part in ("delta", "m", "v"):
        for a, b in ((0, 1), (1, 3), (2, 3), (1, 1)):
            start, stop = manifest.part_chunk_range(part, a, b)
            assert mf.check_chunks(manifest, manifest.upload_chunk(part, a), data[start:stop]) is None
    assert mf.element_range(1, 3, SIZE) == (CHUNK_FLOATS, SIZE)
    assert mf.element_range(0, 1, SIZE) == (0, CHUNK_FLOATS)
    with pytest.raises(AssertionError):
        manifest.part_chunk_range("m", 0, 4)


@LIMITED
@given(st.integers(0, 9 * CHUNK_BYTES - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found_in_its_chunk(at: int, bit: int) -> None:
    manifest, pieces = mf.build_manifest(parts())
    data = upload(pieces)
    data[at] ^= 1 << bit
    chunk = at // CHUNK_BYTES
    for index in range(9):
        found = mf.check_chunks(manifest, index, data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        assert (found is not None) == (index == chunk)


def forged(arrays: list[tuple[str, np.ndarray]], norms: list[float] | None = None) -> tuple[mf.ChunkManifest, bytes]:
    """A liar's manifest: true digests of bad bytes, norms as it likes."""
    data = b"".join(a.tobytes() for _, a in arrays)
    chunks = [np.frombuffer(data[i : i + CHUNK_BYTES], "<f4") for i in range(0, len(data), CHUNK_BYTES)]
    digests = b"".join(hashlib.sha256(c.tobytes()).digest() for c in chunks)
    values = norms or [float(np.square(c, dtype=np.float64).sum()) for c in chunks]
    names = tuple(name for name, _ in arrays)
    return mf.ChunkManifest(1, SIZE, names, digests, np.array(values, "<f8").tobytes()), data


def padded(name: str) -> tuple[str, np.ndarray]:
    return name, np.ones(3 * CHUNK_FLOATS, np.float32) * (np.arange(3 * CHUNK_FLOATS) < SIZE).astype(np.float32)


def test_lies_with_true_digests_are_found() -> None:
    good = padded("v")
    assert mf.check_chunks(*_order(forged([good]))) is None
    for place, value, words in ((5, np.nan, "not finite"), (5, np.inf, "not finite"), (7, -1e-30, "negative")):
        array = good[1].copy()
        array[place] = value
        assert words in (mf.check_chunks(*_order(forged([("v", array)]))) or "")
    tail = good[1].copy()
    tail[-1] = 1.0
    assert "padding" in (mf.check_chunks(*_order(forged([("v", tail)]))) or "")
    exact = float(CHUNK_FLOATS)
    for factor, ok in ((1 + 1e-10, True), (1 + 1e-8, False), (0.0, False)):
        found = mf.check_chunks(*_order(forged([good], [exact * factor, exact, 100.0])))
        assert (found is None) == ok


def _order(pair: tuple[mf.ChunkManifest, bytes]) -> tuple[mf.ChunkManifest, int, bytes]:
    return pair[0], 0, pair[1]


def test_ranges_that_are_not_chunks() -> None:
    manifest, pieces = mf.build_manifest(parts())
    data = bytes(upload(pieces))
    for first, piece in ((0, data[:-1]), (-1, data[:CHUNK_BYTES]), (9, data[:CHUNK_BYTES]), (1, data)):
        assert "whole chunks" in (mf.check_chunks(manifest, first, piece) or "")


def test_root_binds_names_and_counts() -> None:
    manifest, _ = mf.build_manifest(parts())
    renamed = msgspec.structs.replace(manifest, names=("weights", "m", "v"))
    longer = msgspec.structs.replace(manifest, parameters=SIZE + 1)
    assert len({manifest.root(), renamed.root(), longer.root()}) == 3
    keys = [mf.commitment(manifest.root(), key, "run", epoch, 0) for key in ("aa", "bb") for epoch in (1, 2)]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": 2}, "version 2"),
        ({"parameters": 0}, "at least one element"),
        ({"parameters": 2**62}, "need"),
        ({"parameters": -5}, "at least one element"),
        ({"names": ()}, "part names"),
        ({"names": ("delta", "delta", "v")}, "distinct"),
        ({"names": ("../x", "m", "v")}, "part names"),
        ({"names": ("delta", "m")}, "need"),
        ({"digests": b"x"}, "need"),
        ({"norms": b""}, "need"),
        ({"norms": np.array([np.nan] * 9).tobytes()}, "not finite"),
        ({"norms": np.array([np.inf] * 9).tobytes()}, "not finite"),
        ({"norms": np.array([-1.0] * 9).tobytes()}, "negative"),
    ],
)
def test_hostile_manifests(change: dict, words: str) -> None:
    manifest, _ = mf.build_manifest(parts())
    with pytest.raises(ValueError, match=words):
        mf.decode(mf.encode(msgspec.structs.replace(manifest, **change)))


def test_manifest_of_another_run_is_refused() -> None:
    data = mf.encode(mf.build_manifest(parts())[0])
    for wrong in ({"names": ("weights", "m", "v")}, {"parameters": SIZE + 1}):
        with pytest.raises(ValueError, match="expected"):
            mf.decode(data, **wrong)
    with pytest.raises(ValueError, match="at most"):
        mf.decode(bytes(10_000), names=("delta",), parameters=10)


@LIMITED
@given(st.binary(max_size=200))
def test_garbage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        mf.decode(data)


def test_bad_arrays_are_refused() -> None:
    good = np.ones(10, np.float32)
    for bad in (good.astype(np.float64), good.reshape(2, 5), np.ones(20, np.float32)[::2]):
        with pytest.raises(ValueError, match="float32"):
            mf.build_manifest([("delta", bad)])
    with pytest.raises(ValueError, match="elements"):
        mf.build_manifest([("delta", good), ("m", np.ones(11, np.float32))])
    with pytest.raises(ValueError, match="not finite"):
        mf.build_manifest([("delta", np.full(10, np.nan, np.float32))])
    with pytest.raises(ValueError, match="part names"):
        mf.build_manifest([("gradient", good)])
