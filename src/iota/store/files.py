"""Files that are whole or not there: written under a temporary name, synced, renamed; read back with digest checked.

Everything here blocks; callers on an event loop run it in a thread. POSIX only (advisory locks tell a temporary file
that is being written from one that a dead process left behind).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from iota.core.values import sha256
from iota.errors import IotaError

Buffer = bytes | bytearray | memoryview

TEMP_SUFFIX = "~tmp"
"""Every temporary file's name ends so; no object key can ("~" is outside the key grammar)."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_error(error: OSError, path: Path, need: int | None) -> IotaError:
    """The error for a person: `disk_full` with the path, the bytes needed and the bytes free, else `disk_failed`."""
    if error.errno not in _FULL:
        return IotaError(
            "disk_failed", f"cannot write {path}: {error.strerror or error}", "Check the disk and permissions"
        )
    wanted = "more bytes than are free" if need is None else f"{need} bytes"
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(path.parent).free} are free"
    return IotaError(
        "disk_full", f"disk full: {path} needs {wanted}{free}", "Free space or move the folder; nothing was kept"
    )


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; each new name is synced in its parent."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


class TempFile:
    """A file being written that nobody sees until `commit`. Calls from several threads run one after another.

    Every failure (full disk, lost device) removes the temporary file and raises the error of `disk_error`.
    `need` is the final length when known; it only makes the error text better. `names` is held while the target's
    folder is made and the file renamed into it, by whoever removes empty folders too.
    """

    def __init__(
        self, folder: Path, need: int | None = None, mode: int = 0o644, names: threading.Lock | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._names = names
        self._need = need
        self._fd = -1
        self.path = folder
        try:
            self._open(folder, mode)
        except OSError as error:
            raise disk_error(error, folder, need) from error

    def _open(self, folder: Path, mode: int) -> None:
        while True:
            self.path = folder / f"{os.urandom(8).hex()}{TEMP_SUFFIX}"
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                self._fd = fd
                return
            os.close(fd)  # another process swept it between open and lock

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append `parts`."""
        with self._lock:
            self._need_open()
            try:
                for part in parts:
                    view = memoryview(part).cast("B")
                    while view:
                        view = view[os.write(self._fd, view) :]
            except OSError as error:
                self._drop()
                raise disk_error(error, self.path, self._need) from error

    def commit(self, target: Path, *, durable: bool = True) -> None:
        """Sync, then rename to `target`: from now on whole and visible. With `durable` it survives a power loss."""
        with self._lock:
            self._need_open()
            try:
                if durable:
                    os.fsync(self._fd)
                self._rename(target, durable)
            except OSError as error:
                self._drop()
                if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
                    raise IotaError("bad_key", f"{target}: one name cannot be both a file and a folder") from error
                raise disk_error(error, target, self._need) from error
            os.close(self._fd)
            self._fd = -1

    def _rename(self, target: Path, durable: bool) -> None:
        for attempt in range(8):
            try:
                with self._names or contextlib.nullcontext():
                    (make_folder if durable else _plain_folder)(target.parent)
                    os.replace(self.path, target)
                break
            except FileNotFoundError:  # another process removed the folder as empty in between
                if attempt == 7 or not self.path.exists():
                    raise
        if durable:
            with contextlib.suppress(FileNotFoundError):  # the object was deleted again, and its folder with it
                sync_folder(target.parent)

    def abort(self) -> None:
        """Remove what was written. After `commit`, or a second time, it does nothing."""
        with self._lock:
            self._drop()

    def _need_open(self) -> None:
        if self._fd < 0:
            raise IotaError("aborted", f"{self.path}: writing was given up", "Start the write again")

    def _drop(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def _plain_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def sweep(folder: Path) -> int:
    """Remove temporary files that no living writer holds; how many were removed."""
    removed = 0
    for path in sorted(folder.glob(f"*{TEMP_SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except BlockingIOError:
            pass  # someone is writing it now
        finally:
            os.close(fd)
    return removed


def write_atomic(path: Path, parts: Sequence[Buffer], *, mode: int = 0o644, durable: bool = True) -> int:
    """Write the concatenation of `parts` to `path`: the old file or the whole new one, never less. Returns the length.

    The file appears with `mode` (less the umask). Raises IotaError `disk_full` or `disk_failed`; the temporary file,
    which lies beside `path`, is then removed.
    """
    length = sum(memoryview(part).nbytes for part in parts)
    try:
        make_folder(path.parent)
    except OSError as error:
        raise disk_error(error, path, length) from error
    temp = TempFile(path.parent, length, mode)
    try:
        temp.write(parts)
        temp.commit(path, durable=durable)
    finally:
        temp.abort()
    return length


def read_checked(path: Path, digest: str | None = None) -> bytes:
    """The whole file. Raises IotaError `no_object` when there is none, `corrupt` when its SHA-256 is not `digest`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise IotaError("no_object", f"{path} does not exist") from error
    except OSError as error:
        raise IotaError("disk_failed", f"cannot read {path}: {error.strerror or error}", "Check the disk") from error
    if digest is not None and sha256(data) != digest:
        raise IotaError(
            "corrupt", f"{path} has digest {sha256(data)}, expected {digest}", "Fetch or build the file again"
        )
    return data
