"""The journal: an append-only log of rows with a hash chain, and small marks beside it, committed in groups.

Row i carries h_i = SHA-256(h_(i-1) || seq || time || kind || payload); h_0 binds the run. Events are journaled before a
reply leaves (design section 7): `append` returns at once, and what it returns resolves when the commit is done.

Durability (`iota.store.sqlite.SqliteJournal(synchronous=...)`, WAL mode): "normal", the default, never loses a resolved
append to the death of the process (kill -9) and may lose the last ones to a power loss, without damage to earlier rows;
"full" syncs each group commit and survives a power loss too, at the price of one disk sync a group.

Damage found at opening: a bad last row, or a write-ahead log cut short, is dropped and said in `notices`; damage
anywhere else is refused (IotaError `journal_damaged`, with file and row) and the files are left as they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from iota.errors import IotaError

Entry = tuple[float, str, bytes]
"""What is appended: time (seconds), kind, payload. The journal numbers it."""

_NUMBERS = struct.Struct("<QdI")
_MARK_LIMIT = 2**63


class Row(NamedTuple):
    """One journaled row; `seq` counts from 1 without gaps."""

    seq: int
    time: float
    kind: str
    payload: bytes


class Journal(Protocol):
    """Used from one event loop; appends are kept in the order of the calls."""

    notices: list[str]

    @property
    def last(self) -> int:
        """`seq` of the last row appended (0: none), whether or not it is committed yet."""
        ...

    @property
    def head(self) -> str:
        """Hex hash of the last committed row: names the whole log up to it."""
        ...

    def append(self, rows: Sequence[Entry], marks: Mapping[str, int] | None = None) -> asyncio.Future[int]:
        """Add rows and set marks in one transaction; resolves to the last row's seq once they are durable.

        After a failed commit every waiting append and every later call raises IotaError `journal_failed`: what is in
        memory is then ahead of the log, and the process must end. After `close`: `journal_closed`.
        """
        ...

    def replay(self, after: int = 0) -> Iterator[Row]:
        """The committed rows with seq > `after`, in order."""
        ...

    def marks(self) -> dict[str, int]:
        """A copy of the committed marks: small key -> integer values, the last one set."""
        ...

    def close(self) -> None:
        """Commit what waits, then release the log. Blocks; may be repeated."""
        ...


def chain_start(run: str) -> bytes:
    """h_0 of a run's journal."""
    return hashlib.sha256(b"iota journal 1\n" + run.encode()).digest()


def chain_next(head: bytes, seq: int, time: float, kind: bytes, payload: bytes) -> bytes:
    """h_i from h_(i-1); the kind's length goes before it, so that no two rows hash the same bytes."""
    return hashlib.sha256(head + _NUMBERS.pack(seq, time, len(kind)) + kind + payload).digest()


def check_marks(marks: Mapping[str, int]) -> None:
    """ValueError when a mark is not a 64-bit signed integer."""
    for key, value in marks.items():
        if not -_MARK_LIMIT <= value < _MARK_LIMIT:
            raise ValueError(f"mark {key} = {value} does not fit 64 bits")


def journal_closed() -> IotaError:
    return IotaError("journal_closed", "the journal was closed", "Open it again")


class MemoryJournal:
    """A journal in a list: committed at once, gone with the process. Simulated nodes restart on the same object."""

    def __init__(self, run: str = "") -> None:
        self.run = run
        self.notices: list[str] = []
        self._rows: list[Row] = []
        self._marks: dict[str, int] = {}
        self._head = chain_start(run)
        self._closed = False

    @property
    def last(self) -> int:
        return len(self._rows)

    @property
    def head(self) -> str:
        return self._head.hex()

    def append(self, rows: Sequence[Entry], marks: Mapping[str, int] | None = None) -> asyncio.Future[int]:
        if self._closed:
            raise journal_closed()
        if marks:
            check_marks(marks)
            self._marks.update(marks)
        for time, kind, payload in rows:
            row = Row(len(self._rows) + 1, time, kind, bytes(payload))
            self._head = chain_next(self._head, row.seq, time, kind.encode(), row.payload)
            self._rows.append(row)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        done.set_result(len(self._rows))
        return done

    def replay(self, after: int = 0) -> Iterator[Row]:
        for index in range(after, len(self._rows)):
            yield self._rows[index]

    def marks(self) -> dict[str, int]:
        return dict(self._marks)

    def close(self) -> None:
        self._closed = True

    def reopen(self) -> None:
        """What a restarted process does: the same log, open again."""
        self._closed = False
