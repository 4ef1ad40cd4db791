"""The journal in one SQLite file: WAL mode, an exclusive lock, one writer thread that commits in groups.

Cost matters here, since every reply waits for its commit. The loop only makes a future and puts it on a queue; the
writer takes all that is queued into one transaction and wakes the loop once for it. Rows go in by statements of up to
256 rows: sqlite3 lets go of the interpreter lock at each step, and taking it back from a busy loop can cost
milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sqlite3
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from iota.errors import IotaError
from iota.store.files import disk_error, make_folder
from iota.store.journal import Entry, Row, chain_next, chain_start, check_marks, journal_closed
from iota.store.wal import inspect_wal

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows
    (seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL, hash BLOB NOT NULL);
"""
_FORMAT = "iota journal 1"
_SIZES = (256, 32, 4, 1)
_INSERT = {n: "INSERT INTO rows VALUES " + ",".join(["(?,?,?,?,?)"] * n) for n in _SIZES}
_MARK = (
    "INSERT INTO marks SELECT key, value FROM json_each(?) WHERE true ON CONFLICT DO UPDATE SET value = excluded.value"
)
_PAGE = 1024
_FAILURES = (sqlite3.Error, OSError, TypeError, ValueError, AttributeError, struct.error)
"""What a commit can raise, rows of a wrong type included: the writer must tell everyone who waits, whatever it was."""
_GROUP = 4096
"""Most appends taken into one transaction."""


class _Wanted(NamedTuple):
    rows: Sequence[Entry]
    marks: Mapping[str, int] | None
    last: int
    done: asyncio.Future[int]


class SqliteJournal:
    """The journal of run `run` at `path`, created when missing. See `iota.store.journal` for what it promises.

    Raises IotaError at opening: `wrong_run` (another run's), `journal_locked` (another process has it open),
    `journal_damaged` (names file and row), `disk_full`, `bad_path`.
    """

    def __init__(self, path: Path, run: str, *, synchronous: str = "normal") -> None:
        if synchronous not in ("normal", "full"):
            raise ValueError(f"synchronous is normal or full, not {synchronous!r}")
        self.notices: list[str] = []
        self._path = path
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._failure: IotaError | None = None
        self._closed = False
        self._marks: dict[str, int] = {}
        self._db = self._open(run, synchronous)
        self._last = self._committed
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- opening

    def _open(self, run: str, synchronous: str) -> sqlite3.Connection:
        db: sqlite3.Connection | None = None
        try:
            make_folder(self._path.parent)
            if self._path.exists() and not self._path.stat().st_size:
                self.notices.append(f"{self._path} was empty; the journal begins anew")
            self._look_at_wal()
            db = sqlite3.connect(self._path, timeout=0.0, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("BEGIN EXCLUSIVE")
            db.execute("COMMIT")
            self._check(db, run, synchronous)
        except (sqlite3.Error, OSError) as error:
            if db is not None:
                db.close()
            raise self._explain(error) from error
        except IotaError:
            if db is not None:
                db.close()
            raise
        return db

    def _check(self, db: sqlite3.Connection, run: str, synchronous: str) -> None:
        fresh = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if fresh:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN")
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.executemany("INSERT INTO meta VALUES (?, ?)", [("format", _FORMAT), ("run", run)])
            db.execute("COMMIT")
        self._check_meta(db, run)
        if not fresh:
            problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise self._damaged(f"the database is malformed: {problem}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        self._verify(db, run)
        self._marks = dict(db.execute("SELECT key, value FROM marks"))

    def _look_at_wal(self) -> None:
        wal = self._path.with_name(self._path.name + "-wal")
        state = inspect_wal(wal)
        if state.bad_frame is not None:
            raise IotaError(
                "journal_damaged",
                f"{self._path}: frame {state.bad_frame} of {wal.name} is bad, and whole transactions follow it",
                f"Restore both files from a copy. To go on without what follows, cut {wal.name} to {state.end} bytes",
            )
        if state.dropped:
            self.notices.append(
                f"{wal}: the log was cut short or not finished; dropped its last {state.dropped} bytes, which hold no "
                "whole transaction"
            )

    def _check_meta(self, db: sqlite3.Connection, run: str) -> None:
        try:
            meta = dict(db.execute("SELECT key, value FROM meta"))
        except sqlite3.OperationalError as error:
            if "no such" not in str(error):
                raise
            meta = {}
        if meta.get("format") != _FORMAT:
            raise self._damaged("this is not a journal of this version")
        if meta.get("run") != run:
            raise IotaError(
                "wrong_run",
                f"{self._path} is the journal of run {meta.get('run')}, not of {run}",
                "Give the folder of this run, or a new one",
            )

    def _verify(self, db: sqlite3.Connection, run: str) -> None:
        """Walk the chain; drop a bad last row, refuse any other."""
        head, seq = chain_start(run), 0
        top = db.execute("SELECT max(seq) FROM rows").fetchone()[0] or 0
        for number, time, kind, payload, mark in db.execute(
            "SELECT seq, time, kind, payload, hash FROM rows ORDER BY seq"
        ):
            seq += 1
            if number != seq:
                raise self._damaged(f"row {seq} is missing")
            whole = isinstance(kind, str) and isinstance(payload, bytes) and isinstance(time, float)
            after = chain_next(head, seq, time, kind.encode(), payload) if whole else b""
            if after != mark:
                if number != top:
                    raise self._damaged(f"row {seq} does not match its hash")
                seq -= 1
                break
            head = after
        if seq != top:
            db.execute("DELETE FROM rows WHERE seq = ?", (top,))
            self.notices.append(f"{self._path}: the last row, {top}, does not match its hash and was dropped")
        self._head, self._committed = head, seq

    def _damaged(self, what: str) -> IotaError:
        return IotaError(
            "journal_damaged", f"{self._path}: {what}", "Restore the file from a copy; it was left as it was found"
        )

    def _explain(self, error: sqlite3.Error | OSError) -> IotaError:
        text = str(error)
        if isinstance(error, sqlite3.OperationalError) and "locked" in text:
            return IotaError("journal_locked", f"{self._path} is open in another process", "Stop that process first")
        if isinstance(error, OSError):
            return disk_error(error, self._path, None)
        if "full" in text:
            return IotaError("disk_full", f"{self._path}: {text}", "Free space; no committed row is lost")
        if "unable to open" in text or "readonly" in text:
            return IotaError("bad_path", f"cannot open {self._path}: {text}", "Check the path and its permissions")
        return self._damaged(text)

    # ----------------------------------------------------------------------------------------------- loop side

    @property
    def last(self) -> int:
        return self._last

    @property
    def head(self) -> str:
        return self._head.hex()

    def append(self, rows: Sequence[Entry], marks: Mapping[str, int] | None = None) -> asyncio.Future[int]:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise journal_closed()
        if marks:
            check_marks(marks)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._last += len(rows)
        self._queue.put(_Wanted(rows, marks, self._last, done))
        return done

    def replay(self, after: int = 0) -> Iterator[Row]:
        while True:
            if self._closed:
                raise journal_closed()
            with self._lock:
                page = self._db.execute(
                    "SELECT seq, time, kind, payload FROM rows WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
                    (after, self._committed, _PAGE),
                ).fetchall()
            yield from map(Row._make, page)
            if len(page) < _PAGE:
                return
            after = page[-1][0]

    def marks(self) -> dict[str, int]:
        with self._lock:
            return dict(self._marks)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._db.close()

    # --------------------------------------------------------------------------------------------- writer thread

    def _write(self) -> None:
        open_ = True
        while open_:
            group = [self._queue.get()]
            while len(group) < _GROUP and not self._queue.empty():
                group.append(self._queue.get_nowait())
            wanted = [item for item in group if item is not None]
            open_ = len(wanted) == len(group)
            if wanted:
                self._commit_or_fail(wanted)

    def _commit_or_fail(self, wanted: list[_Wanted]) -> None:
        if self._failure is None:
            try:
                with self._lock:
                    self._commit(wanted)
            except _FAILURES as error:
                self._failure = IotaError(
                    "journal_failed",
                    f"{self._path}: cannot commit: {error}",
                    "Free space or mend the disk and start again; committed rows are safe",
                )
        try:
            wanted[0].done.get_loop().call_soon_threadsafe(_resolve, wanted, self._failure)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _commit(self, wanted: list[_Wanted]) -> None:
        values: list[float | str | bytes | int] = []
        marks: dict[str, int] = {}
        head, seq = self._head, self._committed
        for item in wanted:
            for time, kind, payload in item.rows:
                seq += 1
                head = chain_next(head, seq, time, kind.encode(), payload)
                values += (seq, time, kind, payload, head)
            if item.marks:
                marks.update(item.marks)
        execute = self._db.execute
        try:
            execute("BEGIN")
            at = 0
            for size in _SIZES:
                while len(values) - at >= 5 * size:
                    execute(_INSERT[size], values[at : at + 5 * size])
                    at += 5 * size
            if marks:
                execute(_MARK, (json.dumps(marks),))
            execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                execute("ROLLBACK")
            raise
        self._head, self._committed = head, seq
        self._marks.update(marks)


def _resolve(wanted: list[_Wanted], failure: IotaError | None) -> None:
    for item in wanted:
        if item.done.done():  # cancelled by who waited; it is committed all the same
            continue
        if failure is None:
            item.done.set_result(item.last)
        else:
            item.done.set_exception(failure)
