"""One process at a time for a folder or a key on this machine (a kernel lock: it ends with its process)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType

from iota.core.values import Key
from iota.errors import IotaError


class Held:
    """A lock that this process holds until `release` or its end. The lock file stays: removing it would let a third
    process lock a file that a second one no longer sees."""

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self.path = path

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_folder(folder: str | Path) -> Held:
    """Lock a node's folder (made if missing). Raises IotaError `folder_in_use`, naming the other process."""
    folder = Path(folder)
    return _hold(
        folder / "lock",
        "folder_in_use",
        f"the folder {folder}",
        "Choose another folder (--folder), or stop the other process.",
    )


def lock_key(key: Key, folder: str | Path | None = None) -> Held:
    """Lock a key for this user of this machine, also when its file was copied into a second folder. Raises IotaError
    `key_in_use`. `folder` is where the lock files lie (default: a private one in the system's temporary folder)."""
    where = Path(folder) if folder else Path(tempfile.gettempdir()) / f"iota-keys-{os.getuid()}"
    return _hold(
        where / f"{key}.lock",
        "key_in_use",
        f"the key {key[:16]}",
        "Give each process a key of its own (`iota key new`).",
    )


def _hold(path: Path, code: str, what: str, remedy: str) -> Held:
    try:
        import fcntl
    except ImportError:
        raise IotaError(
            "no_locks", "this system has no file locks (fcntl)", "Run iota on Linux, macOS or WSL."
        ) from None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        raise IotaError("no_disk", f"cannot make the lock file {path}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise IotaError(code, f"{what} is already in use by process {owner}", remedy) from None
    except OSError as error:
        os.close(handle)
        raise IotaError("no_locks", f"cannot lock {path}: {error.strerror}", "Use a folder on a local disk.") from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return Held(handle, path)
