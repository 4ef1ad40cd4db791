"""One contract for every blob store: in memory, in a folder, and either through links, over HTTP or directly."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from iota.core.values import sha256
from iota.errors import IotaError
from iota.store import files
from iota.store.blobs import Blobs, FolderBlobs, Listing, MemoryBlobs, Reader, Staged, check_key
from iota.store.links import sign_link
from iota.store.remote import HttpObjects
from iota.store.service import address, serve_blobs


class Signer:
    """An orchestrator's identity, as far as links need one."""

    def __init__(self, seed: int = 1) -> None:
        self._key = SigningKey(bytes([seed]) * 32)
        self.key = bytes(self._key.verify_key).hex()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data).signature


class LinkedBlobs:
    """`put` and `get` through signed links over HTTP, the rest straight: holds the service to the same contract."""

    def __init__(self, blobs: Blobs, base: str, signer: Signer, objects: HttpObjects) -> None:
        self._blobs, self._base, self._signer, self._objects = blobs, base, signer, objects

    async def put(self, key, parts) -> None:
        url = sign_link(self._signer, self._base, "PUT", key, 100.0, max_length=10**9)
        try:
            await self._objects.put(url, parts)
        except IotaError as error:
            if error.code != "exists":
                raise
            await self._blobs.put(key, parts)  # a link writes once; replacing is the store owner's

    async def get(self, key, start=0, stop=None) -> bytes:
        return await self._objects.get(sign_link(self._signer, self._base, "GET", key, 100.0), start, stop)

    async def size(self, key: str) -> int | None:
        return await self._blobs.size(key)

    async def delete(self, key: str) -> bool:
        return await self._blobs.delete(key)

    async def list(self, prefix: str = "") -> Listing:
        return await self._blobs.list(prefix)

    async def stage(self, key: str, need: int | None = None) -> Staged:
        return await self._blobs.stage(key, need)

    async def open(self, key: str) -> Reader:
        return await self._blobs.open(key)


@pytest.fixture(params=["memory", "folder", "http-memory", "http-folder"])
async def blobs(request, tmp_path: Path) -> AsyncIterator[Blobs]:
    inner: Blobs = FolderBlobs(tmp_path / "blobs") if request.param.endswith("folder") else MemoryBlobs()
    if not request.param.startswith("http"):
        yield inner
        return
    signer, objects = Signer(), HttpObjects()
    runner = await serve_blobs(inner, signer.key, "127.0.0.1", 0, lambda: 0.0, 10**9)
    yield LinkedBlobs(inner, "http://{}:{}".format(*address(runner)), signer, objects)
    await objects.close()
    await runner.cleanup()


async def code_of(awaitable) -> str:
    with pytest.raises(IotaError) as caught:
        await awaitable
    return caught.value.code


async def test_put_then_get_whole_and_ranges(blobs: Blobs) -> None:
    await blobs.put("run/e1/s0", [b"abc", bytearray(b"def"), memoryview(b"ghij")])
    assert await blobs.get("run/e1/s0") == b"abcdefghij"
    assert await blobs.get("run/e1/s0", 2, 5) == b"cde"
    assert await blobs.get("run/e1/s0", 7) == b"hij"
    assert await blobs.get("run/e1/s0", 0, 1) == b"a"
    assert await blobs.get("run/e1/s0", 10) == b""
    assert await blobs.get("run/e1/s0", 4, 4) == b""
    assert await blobs.get("run/e1/s0", 10, 10) == b""
    assert await blobs.get("run/e1/s0", 0, 0) == b""
    assert await blobs.size("run/e1/s0") == 10


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (8, 12), (11, None), (11, 11), (11, 12), (5, 4), (-1, 3)])
async def test_a_range_outside_the_object_is_refused(blobs: Blobs, start: int, stop: int | None) -> None:
    await blobs.put("x", [b"0123456789"])
    assert await code_of(blobs.get("x", start, stop)) == "bad_range"


async def test_empty_object(blobs: Blobs) -> None:
    await blobs.put("empty", [])
    assert await blobs.get("empty") == b""
    assert await blobs.get("empty", 0, 0) == b""
    assert await blobs.size("empty") == 0
    assert await code_of(blobs.get("empty", 0, 1)) == "bad_range"


async def test_missing_object(blobs: Blobs) -> None:
    await blobs.put("a/b", [b"1"])
    assert await code_of(blobs.get("nothing")) == "no_object"
    assert await code_of(blobs.get("a", 0, 1)) == "no_object"
    assert await code_of(blobs.get("a/b/c")) == "no_object"
    assert await code_of(blobs.open("nothing")) == "no_object"
    assert await blobs.size("a") is None
    assert await blobs.size("a/b/c") is None
    assert await blobs.delete("a") is False
    assert await blobs.delete("nothing") is False


async def test_replace_delete_and_list(blobs: Blobs) -> None:
    for key, data in [("r/a", b"1"), ("r/b/c", b"22"), ("r/b.d", b"333"), ("s", b"4444")]:
        await blobs.put(key, [data])
    assert await blobs.list("") == [("r/a", 1), ("r/b.d", 3), ("r/b/c", 2), ("s", 4)]
    assert await blobs.list("r/") == [("r/a", 1), ("r/b.d", 3), ("r/b/c", 2)]
    assert await blobs.list("r/b") == [("r/b.d", 3), ("r/b/c", 2)]
    assert await blobs.list("r/b/") == [("r/b/c", 2)]
    assert await blobs.list("none/") == []
    await blobs.put("r/a", [b"other"])
    assert await blobs.get("r/a") == b"other"
    assert await blobs.delete("r/b/c") is True
    assert await blobs.delete("r/b/c") is False
    assert await blobs.list("r/") == [("r/a", 5), ("r/b.d", 3)]
    await blobs.put("r/b", [b"a name freed by the delete"])
    with pytest.raises(IotaError, match="prefix"):
        await blobs.list("../")


async def test_one_name_is_not_both_object_and_folder(blobs: Blobs) -> None:
    await blobs.put("a/b", [b"1"])
    assert await code_of(blobs.put("a", [b"2"])) == "bad_key"
    assert await code_of(blobs.put("a/b/c", [b"3"])) == "bad_key"
    assert await blobs.list() == [("a/b", 1)]


async def test_a_staged_object_is_invisible_until_commit(blobs: Blobs) -> None:
    staged = await blobs.stage("k", 6)
    await staged.write(b"abc")
    assert await blobs.size("k") is None
    assert await blobs.list() == []
    await staged.write(b"def")
    assert (staged.length, staged.digest()) == (6, sha256(b"abcdef"))
    await staged.commit()
    await staged.abort()
    assert await blobs.get("k") == b"abcdef"
    dropped = await blobs.stage("k", 3)
    await dropped.write(b"new")
    await dropped.abort()
    await dropped.abort()
    assert await blobs.get("k") == b"abcdef"


async def test_an_open_reader_keeps_its_bytes(blobs: Blobs) -> None:
    await blobs.put("k", [b"old bytes"])
    reader = await blobs.open("k")
    await blobs.put("k", [b"new"])
    assert await reader.read(4, 9) == b"bytes"
    await reader.close()
    assert await blobs.get("k") == b"new"


async def test_forty_parallel_puts_and_concurrent_range_reads(blobs: Blobs) -> None:
    bodies = {f"p/{n}": os.urandom(20_000 + n) for n in range(40)}
    await asyncio.gather(*(blobs.put(key, [data[:7], data[7:]]) for key, data in bodies.items()))
    assert await blobs.list("p/") == sorted((key, len(data)) for key, data in bodies.items())
    spans = [(key, at, at + 5000) for key in bodies for at in (0, 5000, 15_000)]
    read = await asyncio.gather(*(blobs.get(*span) for span in spans))
    assert read == [bodies[key][start:stop] for key, start, stop in spans]


async def test_parallel_puts_of_one_key_leave_one_whole_object(blobs: Blobs) -> None:
    bodies = [bytes([n]) * 50_000 for n in range(12)]
    await asyncio.gather(*(blobs.put("same", [body]) for body in bodies))
    assert await blobs.get("same") in bodies


# --------------------------------------------------------------------------------------------------------- keys

SEGMENT = st.text("abz019._-", min_size=1, max_size=8).filter(lambda part: ".." not in part and part != ".")


@given(st.lists(SEGMENT, min_size=1, max_size=6).map("/".join))
def test_keys_of_the_grammar_are_taken(key: str) -> None:
    assert check_key(key) == key


@given(st.text(max_size=40))
@example("../x")
@example("a/../b")
@example("a//b")
@example("/a")
@example("a/")
@example("a/./b")
@example("a\n")
@example("a.b..c")
@example("A")
@example("аbc")  # a Cyrillic look-alike
@example("~tmp/x")
@example("a" * 256)
@example("a/" * 256 + "b")
@example("")
def test_a_key_is_taken_only_if_it_follows_the_grammar(key: str) -> None:
    parts = key.split("/")
    fits = all(
        part
        and part != "."
        and ".." not in part
        and len(part) <= 255
        and set(part) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")
        for part in parts
    )
    if fits and len(key) <= 512:
        assert check_key(key) == key
    else:
        with pytest.raises(IotaError) as caught:
            check_key(key)
        assert caught.value.code == "bad_key"
        assert "\n" not in caught.value.cause


async def test_bad_keys_are_refused_by_every_method() -> None:
    store = MemoryBlobs()
    for call in (
        store.put("../x", []),
        store.get("../x"),
        store.size("../x"),
        store.delete("../x"),
        store.stage("../x"),
    ):
        assert await code_of(call) == "bad_key"


# -------------------------------------------------------------------------------------------------- folder only


def leftovers(folder: Path) -> list[Path]:
    return list((folder / files.TEMP_SUFFIX).iterdir())


async def test_stale_temporary_files_are_swept_and_living_ones_left(tmp_path: Path) -> None:
    first = FolderBlobs(tmp_path)
    stale = tmp_path / files.TEMP_SUFFIX / f"00112233{files.TEMP_SUFFIX}"
    stale.write_bytes(b"half an object")
    living = await first.stage("k")
    await living.write(b"half ")
    second = FolderBlobs(tmp_path)
    assert second.swept == 1
    assert not stale.exists()
    await living.write(b"and half")
    await living.commit()
    assert await second.get("k") == b"half and half"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
async def test_full_disk_leaves_nothing_and_says_where_and_how_much(tmp_path: Path, monkeypatch, call: str) -> None:
    store = FolderBlobs(tmp_path)
    await store.put("k", [b"old"])

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, full)
        with pytest.raises(IotaError) as caught:
            await store.put("k", [b"x" * 1000])
    assert caught.value.code == "disk_full"
    assert str(tmp_path) in caught.value.cause
    assert "1000 bytes" in caught.value.cause
    assert leftovers(tmp_path) == []
    assert await store.get("k") == b"old"
    await store.put("k", [b"new"])
    assert await store.get("k") == b"new"


async def test_short_writes_are_completed(tmp_path: Path, monkeypatch) -> None:
    write = os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: write(fd, data[:3]))
    store = FolderBlobs(tmp_path)
    await store.put("k", [b"0123456789", b"ab"])
    assert await store.get("k") == b"0123456789ab"


async def test_a_cancelled_put_is_whole_or_absent(tmp_path: Path, monkeypatch) -> None:
    gate, entered, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        entered.set()
        assert gate.wait(10)
        fsync(fd)

    store = FolderBlobs(tmp_path)
    monkeypatch.setattr(files.os, "fsync", slow)
    task = asyncio.create_task(store.put("k", [b"whole"]))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.size("k") is None
    gate.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (tmp_path / "k").read_bytes() == b"whole"


async def test_deleting_and_putting_in_one_folder_race_without_error(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, durable=False)

    async def work(n: int) -> None:
        for _ in range(15):
            await store.put(f"deep/er/{n}", [b"x"])
            assert await store.delete(f"deep/er/{n}")

    await asyncio.gather(*(work(n) for n in range(8)))
    assert await store.list() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [files.TEMP_SUFFIX]


# -------------------------------------------------------------------------------------------------------- files


def test_write_atomic_and_read_checked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    assert files.write_atomic(path, [b"ab", memoryview(b"cd")], mode=0o600) == 4
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.read_checked(path, sha256(b"abcd")) == b"abcd"
    with pytest.raises(IotaError, match="digest") as caught:
        files.read_checked(path, sha256(b"other"))
    assert caught.value.code == "corrupt"
    with pytest.raises(IotaError) as caught:
        files.read_checked(tmp_path / "none")
    assert caught.value.code == "no_object"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, [b"old"])

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(IotaError, match="disk full"):
        files.write_atomic(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
