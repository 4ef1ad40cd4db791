"""What a miner keeps on disk so that it can show its work: boundary tensors and snapshots (design section 6).

One folder an epoch: `inputs.bin` and `outputs.bin` grow by whole records (`iota.nodes.evidence`), `cut-STEP.bin` is one
snapshot. Everything of an epoch is kept until its audits are drawn, then only the drawn segments', at most to the end
of epoch + 3. Nothing survives a start: a session's evidence is asked of that session only. So nothing is synced; a
crash loses what nobody could ask for any more.

All methods block and are called on the compute thread, one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from iota.core.values import Cut, Digest, Tensor, TensorHead
from iota.errors import IotaError
from iota.nodes.evidence import Chain, record_parts, segment, tensors_wanted
from iota.store.files import disk_error

Buffer = bytes | bytearray | memoryview

KEEP_EPOCHS = 3
"""Evidence of epoch e is drawn for the last time when epoch e + 2 merges; what is shown then is uploaded during e + 3,
and must still be there when an upload has to be tried again."""


Place = tuple[str, int, Digest]
"""Kind, sample, digest: what a record is found by."""


class _Row(msgspec.Struct, frozen=True):
    """Where a record lies in its file."""

    offset: int
    length: int


class TensorFile:
    """An append-only file of records with its index in memory. Each tensor of a sample is kept once; equal tensors of
    two samples are two records, each with its own origin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Place, _Row] = {}
        self.size = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def append(self, place: Place, parts: Sequence[Buffer]) -> int:
        """One record, one system call; bytes added. A record that did not fit leaves no trace. Raises OSError."""
        if place in self.rows:
            return 0
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        length = sum(len(view) for view in views)
        try:
            written = os.writev(self._fd, views)
            while written < length:
                written += os.writev(self._fd, _skip(views, written))
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.rows[place] = _Row(self.size, length)
        self.size += length
        return length

    def digests(self) -> set[Digest]:
        return {place[2] for place in self.rows}

    def read(self, wanted: set[Digest]) -> list[Buffer]:
        """The records of these tensors, in the order in which they were written."""
        return [os.pread(self._fd, row.length, row.offset) for place, row in self.rows.items() if place[2] in wanted]

    def shrink(self, wanted: set[Digest]) -> None:
        """Keep only these tensors."""
        smaller = TensorFile(self.path.with_suffix(".part"))
        for place, row in self.rows.items():
            if place[2] in wanted:
                smaller.append(place, [os.pread(self._fd, row.length, row.offset)])
        os.replace(smaller.path, self.path)
        os.close(self._fd)
        self._fd, self.rows, self.size = smaller._fd, smaller.rows, smaller.size

    def close(self) -> None:
        os.close(self._fd)


def _skip(views: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    rest = []
    for view in views:
        if count < len(view):
            rest.append(view[count:])
        count = max(0, count - len(view))
    return rest


class EpochShelf:
    """One epoch's evidence: transcript, tensors, snapshots."""

    def __init__(self, folder: Path, chain: Chain) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.chain = chain
        self.inputs = TensorFile(folder / "inputs.bin")
        self.outputs = TensorFile(folder / "outputs.bin")
        self.cuts: list[Cut] = []
        self.snapshots: dict[int, int] = {}
        """Bytes of each snapshot on disk, by step."""
        self.drawn: set[tuple[int, int]] = set()

    def path_of(self, step: int) -> Path:
        return self.folder / f"cut-{step}.bin"

    def size(self) -> int:
        return self.inputs.size + self.outputs.size + sum(self.snapshots.values())

    def trim(self) -> None:
        """The draw is over: keep the drawn segments' tensors and snapshots, and the final snapshot."""
        received: set[Digest] = set()
        sent: set[Digest] = set()
        steps = {self.cuts[-1].step} if self.cuts else set()
        for start, stop in self.drawn:
            more, out = tensors_wanted(self.chain.entries, *segment(self.chain.entries, start, stop))
            received |= more
            sent |= out
            steps |= {start, stop}
        for step in set(self.snapshots) - steps:
            self.path_of(step).unlink(missing_ok=True)
            del self.snapshots[step]
        for file, wanted in ((self.inputs, received), (self.outputs, sent)):
            if any(place[2] not in wanted for place in file.rows):
                file.shrink(wanted)

    def close(self) -> None:
        self.inputs.close()
        self.outputs.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Retention:
    """All epochs' evidence of one session under `folder`, at most `max_disk` bytes (0: no limit).

    Writing raises IotaError `no_disk` (the limit) or `disk_full` / `disk_failed` (the disk), with the path."""

    def __init__(self, folder: Path, max_disk: int = 0) -> None:
        self.folder = folder / "retained"
        self.max_disk = max_disk
        self.epochs: dict[int, EpochShelf] = {}
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self, epoch: int, chain: Chain) -> EpochShelf:
        """A fresh epoch (a second load of the same one starts over). Older ones are trimmed to what was drawn."""
        for old in list(self.epochs):
            if old == epoch or old < epoch - KEEP_EPOCHS or (old < epoch and not self.epochs[old].drawn):
                self.epochs.pop(old).close()
            elif old < epoch:
                with self._writing(self.epochs[old].folder, 0):
                    self.epochs[old].trim()
        path = self.folder / f"epoch-{epoch}"
        with self._writing(path, 0):
            self.epochs[epoch] = EpochShelf(path, chain)
        return self.epochs[epoch]

    def size(self) -> int:
        return sum(shelf.size() for shelf in self.epochs.values())

    def keep(
        self, file: TensorFile, kind: str, sample: int, tensor: Tensor, head: TensorHead, origin: bytes = b""
    ) -> None:
        """Keep a boundary tensor."""
        parts = record_parts(kind, sample, tensor, head, origin)
        with self._writing(file.path, sum(len(part) for part in parts)):
            file.append((kind, sample, head.digest), parts)

    def snapshot(self, shelf: EpochShelf, step: int, parts: Sequence[Buffer]) -> None:
        """Write a snapshot; a failed one leaves no file."""
        path, length = shelf.path_of(step), sum(len(part) for part in parts)
        with self._writing(path, length):
            try:
                with open(path, "wb", buffering=0) as file:
                    views = [memoryview(part) for part in parts]
                    written = os.writev(file.fileno(), views)
                    while written < length:
                        written += os.writev(file.fileno(), _skip(views, written))
            except OSError:
                path.unlink(missing_ok=True)
                raise
        shelf.snapshots[step] = length

    def read_snapshot(self, shelf: EpochShelf, step: int) -> memoryview:
        """A snapshot, mapped: it stays readable when its file is removed."""
        if step not in shelf.snapshots:
            raise IotaError("no_object", f"there is no snapshot of step {step} in {shelf.folder}")
        with open(shelf.path_of(step), "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @contextlib.contextmanager
    def _writing(self, path: Path, need: int) -> Iterator[None]:
        if self.max_disk and self.size() + need > self.max_disk:
            raise IotaError(
                "no_disk",
                f"{path} needs {need} bytes; {self.size()} are kept for audits and --max-disk allows {self.max_disk}",
                "Allow more with --max-disk.",
            )
        try:
            yield
        except OSError as error:
            raise disk_error(error, path, need) from error

    def close(self) -> None:
        """Forget everything."""
        for shelf in self.epochs.values():
            shelf.close()
        self.epochs.clear()


def digest_of(parts: Sequence[Buffer]) -> Digest:
    """SHA-256 of the parts written one after another."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()
