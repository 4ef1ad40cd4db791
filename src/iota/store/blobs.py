"""Objects by key: the blob store behind one interface, in memory and in a folder.

An object is whole and visible, or it is not there: no reader ever sees half a write, and who has opened an object
keeps reading the same bytes while another replaces it. The HTTP service (`iota.store.service`) serves any `Blobs`.

Errors (IotaError): `bad_key`, `no_object`, `bad_range` (it must lie inside the object), `disk_full`, `disk_failed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from iota.errors import IotaError
from iota.store.files import TEMP_SUFFIX, Buffer, TempFile, make_folder, sweep

Listing = list[tuple[str, int]]

MAX_KEY = 512
_SEGMENT = r"[a-z0-9._-]+"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*", re.ASCII)
_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?", re.ASCII)
_RULE = f"Use a-z 0-9 . _ - in parts joined by /, without '..', at most {MAX_KEY} characters (255 a part)"


def check_key(key: str) -> str:
    """`key` itself when it follows the grammar, else IotaError `bad_key`.

    Parts of [a-z0-9._-]+ joined by "/"; no empty part, no part ".", no ".." anywhere, at most 512 characters and 255 a
    part (what file systems take). So a key can never name anything outside the store, nor forge a log line.
    """
    if len(key) > MAX_KEY or not _KEY.fullmatch(key) or not _plain(key):
        raise IotaError("bad_key", f"bad object key {key[:80]!r}", _RULE)
    return key


def _check_prefix(prefix: str) -> None:
    if len(prefix) > MAX_KEY or not _PREFIX.fullmatch(prefix) or not _plain(prefix):
        raise IotaError("bad_key", f"bad key prefix {prefix[:80]!r}", _RULE)


def _plain(key: str) -> bool:
    return ".." not in key and all(part != "." and len(part) <= 255 for part in key.split("/"))


def _check_range(key: str, size: int, start: int, stop: int | None) -> int:
    end = size if stop is None else stop
    if not 0 <= start <= end <= size:
        raise IotaError("bad_range", f"range {start} to {end} is not inside {key} of {size} bytes")
    return end


def _no_object(key: str) -> IotaError:
    return IotaError("no_object", f"there is no object {key}", "It was never uploaded whole, or was deleted")


class Staged(Protocol):
    """An object being written. Nobody sees it before `commit`; `abort` leaves nothing and may follow anything."""

    length: int

    async def write(self, block: Buffer) -> None: ...

    def digest(self) -> str:
        """SHA-256 of what was written so far."""
        ...

    async def commit(self) -> None: ...

    async def abort(self) -> None: ...


class Reader(Protocol):
    """One object's bytes as they were when it was opened."""

    size: int

    async def read(self, start: int, stop: int) -> bytes: ...

    async def close(self) -> None: ...


class Blobs(Protocol):
    """The store. All methods are safe to call concurrently; of two writers of one key the later commit stays."""

    async def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Store the concatenation of `parts`, replacing what was there."""
        ...

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of the object (`stop` None: to its end)."""
        ...

    async def size(self, key: str) -> int | None:
        """Length in bytes, or None when there is no such object."""
        ...

    async def delete(self, key: str) -> bool:
        """Remove the object; False when there was none."""
        ...

    async def list(self, prefix: str = "") -> Listing:
        """(key, bytes) of all whole objects whose key begins with `prefix`, sorted by key."""
        ...

    async def stage(self, key: str, need: int | None = None) -> Staged:
        """Begin an object that arrives piece by piece; `need` is its declared length."""
        ...

    async def open(self, key: str) -> Reader:
        """Open the object for several reads of the same bytes; must be closed."""
        ...


class MemoryBlobs:
    """Objects in a dict: the simulator's store and the tests'."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._folders: Counter[str] = Counter()

    async def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._keep(check_key(key), b"".join(parts))

    def _keep(self, key: str, data: bytes) -> None:
        folders = _folders(key)
        if self._folders[key] or any(folder in self._objects for folder in folders):
            raise IotaError("bad_key", f"{key}: one name cannot be both a file and a folder")
        if key not in self._objects:
            self._folders.update(folders)
        self._objects[key] = data

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self._find(key)
        return data[start : _check_range(key, len(data), start, stop)]

    def _find(self, key: str) -> bytes:
        data = self._objects.get(check_key(key))
        if data is None:
            raise _no_object(key)
        return data

    async def size(self, key: str) -> int | None:
        data = self._objects.get(check_key(key))
        return None if data is None else len(data)

    async def delete(self, key: str) -> bool:
        if self._objects.pop(check_key(key), None) is None:
            return False
        for folder in _folders(key):
            self._folders[folder] -= 1
            if not self._folders[folder]:
                del self._folders[folder]
        return True

    async def list(self, prefix: str = "") -> Listing:
        _check_prefix(prefix)
        return sorted((key, len(data)) for key, data in self._objects.items() if key.startswith(prefix))

    async def stage(self, key: str, need: int | None = None) -> Staged:
        return _MemoryStaged(self, check_key(key))

    async def open(self, key: str) -> Reader:
        return _MemoryReader(key, self._find(key))


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


class _MemoryStaged:
    def __init__(self, blobs: MemoryBlobs, key: str) -> None:
        self._blobs = blobs
        self._key = key
        self._parts: list[bytes] = []
        self._hash = hashlib.sha256()
        self.length = 0

    async def write(self, block: Buffer) -> None:
        self._parts.append(bytes(block))
        self._hash.update(block)
        self.length += len(self._parts[-1])

    def digest(self) -> str:
        return self._hash.hexdigest()

    async def commit(self) -> None:
        self._blobs._keep(self._key, b"".join(self._parts))

    async def abort(self) -> None:
        self._parts.clear()


class _MemoryReader:
    def __init__(self, key: str, data: bytes) -> None:
        self._key = key
        self._data = data
        self.size = len(data)

    async def read(self, start: int, stop: int) -> bytes:
        return self._data[start : _check_range(self._key, self.size, start, stop)]

    async def close(self) -> None:
        return None


class FolderBlobs:
    """Objects as files under `path`, one file an object, at the key's own path. Disk work runs in threads.

    Unfinished objects lie in `path/~tmp`; those that a dead process left are swept here, at opening; those that another
    living process is writing are left alone. `durable` False skips the syncs (throw-away stores): still atomic for
    readers and across kill -9, but not across a power loss. A key may not be both an object and a folder of objects.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._root = path
        self._temp = path / TEMP_SUFFIX
        self._durable = durable
        self._names = threading.Lock()
        make_folder(self._temp)
        self.swept = sweep(self._temp)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    async def put(self, key: str, parts: Sequence[Buffer]) -> None:
        await asyncio.to_thread(self._put, self._path(key), parts)

    def _put(self, target: Path, parts: Sequence[Buffer]) -> None:
        temp = TempFile(self._temp, sum(memoryview(part).nbytes for part in parts), names=self._names)
        try:
            temp.write(parts)
            temp.commit(target, durable=self._durable)
        finally:
            temp.abort()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await asyncio.to_thread(self._get, key, self._path(key), start, stop)

    def _get(self, key: str, path: Path, start: int, stop: int | None) -> bytes:
        fd = _open_file(key, path)
        try:
            end = _check_range(key, os.fstat(fd).st_size, start, stop)
            return _pread(fd, key, start, end)
        finally:
            os.close(fd)

    async def size(self, key: str) -> int | None:
        return await asyncio.to_thread(_file_size, self._path(key))

    async def delete(self, key: str) -> bool:
        return await asyncio.to_thread(self._delete, self._path(key))

    def _delete(self, path: Path) -> bool:
        if _file_size(path) is None:
            return False
        with self._names:
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            for folder in path.parents:
                if folder == self._root:
                    break
                try:
                    folder.rmdir()
                except OSError:  # not empty, or someone else removed it: either way nothing more to tidy
                    break
        return True

    async def list(self, prefix: str = "") -> Listing:
        _check_prefix(prefix)
        return await asyncio.to_thread(self._list, prefix)

    def _list(self, prefix: str) -> Listing:
        found: Listing = []
        top = self._root / prefix.rpartition("/")[0]
        for folder, folders, names in os.walk(top):
            folders[:] = [name for name in folders if name != TEMP_SUFFIX]
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix) and _KEY.fullmatch(key):
                    with contextlib.suppress(FileNotFoundError):  # deleted while we listed
                        found.append((key, path.stat().st_size))
        return sorted(found)

    async def stage(self, key: str, need: int | None = None) -> Staged:
        target = self._path(key)
        temp = await asyncio.to_thread(TempFile, self._temp, need, names=self._names)
        return _FolderStaged(temp, target, self._durable)

    async def open(self, key: str) -> Reader:
        fd = await asyncio.to_thread(_open_file, key, self._path(key))
        return _FolderReader(key, fd)


def _open_file(key: str, path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_object(key) from error
    if not os.path.isfile(path):
        os.close(fd)
        raise _no_object(key)
    return fd


def _file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _pread(fd: int, key: str, start: int, stop: int) -> bytes:
    blocks = []
    while start < stop:
        block = os.pread(fd, stop - start, start)
        if not block:
            raise IotaError("corrupt", f"the file of {key} ended at {start} while it was read", "Check the disk")
        blocks.append(block)
        start += len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


class _FolderStaged:
    def __init__(self, temp: TempFile, target: Path, durable: bool) -> None:
        self._temp = temp
        self._target = target
        self._durable = durable
        self._hash = hashlib.sha256()
        self.length = 0

    async def write(self, block: Buffer) -> None:
        await asyncio.to_thread(self._write, block)

    def _write(self, block: Buffer) -> None:
        self._temp.write([block])
        self._hash.update(block)
        self.length += len(block)

    def digest(self) -> str:
        return self._hash.hexdigest()

    async def commit(self) -> None:
        await asyncio.to_thread(self._temp.commit, self._target, durable=self._durable)

    async def abort(self) -> None:
        await asyncio.to_thread(self._temp.abort)


class _FolderReader:
    def __init__(self, key: str, fd: int) -> None:
        self._key = key
        self._fd = fd
        self.size = os.fstat(fd).st_size

    async def read(self, start: int, stop: int) -> bytes:
        end = _check_range(self._key, self.size, start, stop)
        return await asyncio.to_thread(_pread, self._fd, self._key, start, end)

    async def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
