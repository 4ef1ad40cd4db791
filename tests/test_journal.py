"""One contract for every journal, what a kill -9 may lose (nothing that was promised), and damage found at opening."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from iota.errors import IotaError
from iota.store.journal import Journal, MemoryJournal, Row
from iota.store.sqlite import SqliteJournal
from iota.store.wal import inspect_wal

RUN = "tiny-0123"


class Shelf:
    """A journal that a test can close and open again as a restarted process would."""

    def __init__(self, kind: str, path: Path) -> None:
        self._kind, self._path = kind, path
        self.journal: Journal = MemoryJournal(RUN)
        if kind != "memory":
            self.journal = SqliteJournal(path, RUN, synchronous=kind)

    def reopen(self) -> Journal:
        self.journal.close()
        if isinstance(self.journal, MemoryJournal):
            self.journal.reopen()
        else:
            self.journal = SqliteJournal(self._path, RUN, synchronous=self._kind)
        return self.journal


@pytest.fixture(params=["memory", "normal", "full"])
def shelf(request, tmp_path: Path):
    shelf = Shelf(request.param, tmp_path / "run" / "journal.db")
    yield shelf
    shelf.journal.close()


async def test_rows_and_marks_come_back_in_order(shelf: Shelf) -> None:
    journal = shelf.journal
    assert (journal.last, list(journal.replay()), journal.marks()) == (0, [], {})
    assert await journal.append([(1.5, "joined", b"\x00a"), (2, "passed", b"")], {"n:a": 7, "t": -3}) == 2
    assert await journal.append([], {"n:a": 8, 'odd "key"\\ é\n': 2**63 - 1, "low": -(2**63)}) == 2
    assert await journal.append([(3.25, "merged", bytearray(b"xyz"))]) == 3
    rows = [Row(1, 1.5, "joined", b"\x00a"), Row(2, 2.0, "passed", b""), Row(3, 3.25, "merged", b"xyz")]
    marks = {"n:a": 8, "t": -3, 'odd "key"\\ é\n': 2**63 - 1, "low": -(2**63)}
    head = journal.head
    for reopened in (False, True):
        again = shelf.reopen() if reopened else journal
        assert list(again.replay()) == rows
        assert list(again.replay(after=2)) == rows[2:]
        assert (again.marks(), again.last, again.head, again.notices) == (marks, 3, head, [])
    assert await shelf.journal.append([(4.0, "x", b"")]) == 4
    assert shelf.journal.head != head


async def test_many_concurrent_appends_keep_the_order_of_calls(shelf: Shelf) -> None:
    journal = shelf.journal
    done = [journal.append([(float(n), "k", b"%d" % n)] * (n % 3), {"last": n, f"m{n % 5}": n}) for n in range(3000)]
    assert journal.last == 3000
    assert await asyncio.gather(*done) == [sum(k % 3 for k in range(n + 1)) for n in range(3000)]
    wanted = [b"%d" % n for n in range(3000) for _ in range(n % 3)]
    again = shelf.reopen()
    assert [row.payload for row in again.replay()] == wanted
    assert [row.seq for row in again.replay()] == list(range(1, 3001))
    assert again.marks()["last"] == 2999


async def test_a_cancelled_waiter_changes_nothing(shelf: Shelf) -> None:
    first = shelf.journal.append([(1.0, "a", b"1")])
    first.cancel()
    assert await shelf.journal.append([(2.0, "b", b"2")]) == 2
    assert [row.kind for row in shelf.reopen().replay()] == ["a", "b"]


async def test_closing_commits_what_waits_and_refuses_more(shelf: Shelf) -> None:
    waiting = shelf.journal.append([(1.0, "a", b"1")])
    shelf.journal.close()
    shelf.journal.close()
    assert await waiting == 1
    with pytest.raises(IotaError, match="closed") as caught:
        shelf.journal.append([(2.0, "b", b"")])
    assert caught.value.code == "journal_closed"
    assert [row.seq for row in shelf.reopen().replay()] == [1]


async def test_a_mark_beyond_64_bits_is_refused_before_anything_is_queued(shelf: Shelf) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        shelf.journal.append([(1.0, "a", b"")], {"n": 2**63})
    assert shelf.journal.last == 0


async def test_same_rows_same_head_whatever_the_journal_and_another_run_another(tmp_path: Path) -> None:
    journals: list[Journal] = [MemoryJournal(RUN), SqliteJournal(tmp_path / "a", RUN), MemoryJournal("other")]
    for journal in journals:
        await journal.append([(1.0, "a", b"x"), (2.0, "b", b"y")])
    heads = [journal.head for journal in journals]
    assert heads[0] == heads[1] != heads[2]
    journals[1].close()


# ------------------------------------------------------------------------------------------------- group commit


async def test_one_wake_up_of_the_loop_for_a_whole_group(tmp_path: Path, monkeypatch) -> None:
    journal = SqliteJournal(tmp_path / "j", RUN)
    loop, wakes = asyncio.get_running_loop(), []
    call = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (wakes.append(len(args[1])), call(*args))[1])
    with journal._lock:  # the writer holds at its first commit, so the rest gathers behind it
        done = [journal.append([(1.0, "a", b"")]) for _ in range(1000)]
    await asyncio.gather(*done)
    assert sum(wakes) == 1000
    assert len(wakes) <= 3
    journal.close()


async def test_a_failed_commit_fails_everyone_waiting_and_everyone_later(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = SqliteJournal(path, RUN)
    await journal.append([(1.0, "a", b"kept")], {"m": 1})
    journal._db.execute(f"PRAGMA max_page_count = {journal._db.execute('PRAGMA page_count').fetchone()[0] + 2}")
    waiting = [journal.append([(2.0, "b", b"x" * 100_000)], {"m": 2}) for _ in range(3)]
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, IotaError)
        assert result.code == "journal_failed"
        assert str(path) in result.cause
        assert "full" in result.cause
    with pytest.raises(IotaError, match="cannot commit"):
        journal.append([(3.0, "c", b"")])
    journal.close()
    again = SqliteJournal(path, RUN)
    assert [row.payload for row in again.replay()] == [b"kept"]
    assert again.marks() == {"m": 1}
    again.close()


async def test_a_row_of_a_wrong_type_fails_loudly_instead_of_hanging(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "j", RUN)
    with pytest.raises(IotaError) as caught:
        await journal.append([("not a time", "a", b"")])  # type: ignore[list-item]
    assert caught.value.code == "journal_failed"
    journal.close()


# ------------------------------------------------------------------------------------------------------ kill -9

WRITER = """
    import asyncio, sys
    from pathlib import Path
    from iota.store.sqlite import SqliteJournal

    async def worker(journal, name):
        for n in range(10**9):
            await journal.append([(float(n), name, b"%d" % n * 40)], {name: n})
            sys.stdout.write(f"{name} {n}\\n")
            sys.stdout.flush()

    async def main():
        journal = SqliteJournal(Path(sys.argv[1]), sys.argv[2])
        await asyncio.gather(*(worker(journal, f"w{k}") for k in range(8)))

    asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, 700, 4000])
def test_kill_9_loses_only_what_was_never_acknowledged(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "j"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), RUN]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    acknowledged = {line for line in said if line.endswith("\n")}
    journal = SqliteJournal(path, RUN)
    kept = {f"{row.kind} {int(row.time)}\n" for row in journal.replay()}
    marks = journal.marks()
    journal.close()
    assert acknowledged <= kept
    assert marks == {name: max(int(row.split()[1]) for row in kept if row.startswith(name)) for name in marks}
    assert (
        len(kept) - len(acknowledged) <= 16
    )  # at most what eight workers had in flight, once more for what was printing


# ------------------------------------------------------------------------------------------------------- damage


async def fill(path: Path, rows: int = 5, run: str = RUN) -> None:
    journal = SqliteJournal(path, run)
    for n in range(rows):
        await journal.append([(float(n), "k", b"payload %d" % n)])
    journal.close()


def refused(path: Path, run: str = RUN) -> IotaError:
    with pytest.raises(IotaError) as caught:
        SqliteJournal(path, run)
    return caught.value


def edit(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()


@pytest.mark.parametrize("change", ["payload = x'00'", "payload = substr(payload, 1, 3)", "hash = x''", "time = 9.0"])
async def test_a_bad_last_row_is_dropped_with_a_notice(tmp_path: Path, change: str) -> None:
    path = tmp_path / "j"
    await fill(path)
    edit(path, f"UPDATE rows SET {change} WHERE seq = 5")
    journal = SqliteJournal(path, RUN)
    assert [row.seq for row in journal.replay()] == [1, 2, 3, 4]
    assert len(journal.notices) == 1
    assert "last row, 5" in journal.notices[0]
    assert str(path) in journal.notices[0]
    assert await journal.append([(9.0, "k", b"anew")]) == 5
    journal.close()
    again = SqliteJournal(path, RUN)
    assert again.notices == []
    assert [row.payload for row in again.replay()][-1] == b"anew"
    again.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rows SET payload = x'00' WHERE seq = 3",
        "DELETE FROM rows WHERE seq = 3",
        "UPDATE rows SET kind = 'z' WHERE seq = 3",
    ],
)
async def test_a_bad_earlier_row_is_refused_by_name(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "j"
    await fill(path)
    edit(path, statement)
    before = path.read_bytes()
    error = refused(path)
    assert error.code == "journal_damaged"
    assert str(path) in error.cause
    assert "row 3" in error.cause
    assert path.read_bytes() == before


async def test_a_malformed_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    await fill(path, 400)
    whole = path.read_bytes()
    other = tmp_path / "other.db"
    edit(other, "CREATE TABLE t (x)")
    for bytes_ in (
        b"not a database " * 100,
        whole[: len(whole) // 2],
        whole[:8192] + b"\xa5" * 4096 + whole[12288:],
        other.read_bytes(),
    ):
        path.write_bytes(bytes_)
        error = refused(path)
        assert error.code == "journal_damaged"
        assert str(path) in error.cause


async def test_another_runs_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    await fill(path)
    error = refused(path, "other-run")
    assert error.code == "wrong_run"
    assert RUN in error.cause
    assert "other-run" in error.cause
    SqliteJournal(path, RUN).close()


async def test_an_open_journal_is_refused_to_a_second_opener(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = SqliteJournal(path, RUN)
    await first.append([(1.0, "a", b"")])
    assert refused(path).code == "journal_locked"
    script = "import sys, pathlib, iota.store.sqlite as s; s.SqliteJournal(pathlib.Path(sys.argv[1]), sys.argv[2])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script, str(path), RUN], env=environment, capture_output=True, text=True
    )
    assert other.returncode != 0
    assert "open in another process" in other.stderr
    assert await first.append([(2.0, "b", b"")]) == 2
    first.close()


def test_a_path_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    error = refused(tmp_path / "file" / "j")
    assert error.code == "disk_failed"
    assert "file" in error.cause
    assert refused(tmp_path).code == "bad_path"


# ---------------------------------------------------------------------------------------------------------- WAL


async def crashed(folder: Path, rows: int = 6) -> Path:
    """A copy of the files as a killed process leaves them: every row in the log, none moved to the database yet."""
    source = SqliteJournal(folder / "source", RUN)
    for n in range(rows):
        await source.append([(float(n), "k", b"payload %d" % n)], {"m": n})
    for name in ("", "-wal"):
        shutil.copyfile(folder / f"source{name}", folder / f"copy{name}")
    source.close()
    return folder / "copy"


def ends(wal: Path) -> list[int]:
    """Where each whole transaction of the log ends."""
    data = wal.read_bytes()
    size = int.from_bytes(data[8:12], "big") + 24
    frames = range(32, len(data), size)
    return [at + size for at in frames if int.from_bytes(data[at + 4 : at + 8], "big")]


async def test_a_whole_log_is_taken_without_notice(tmp_path: Path) -> None:
    path = await crashed(tmp_path)
    state = inspect_wal(tmp_path / "copy-wal")
    assert (state.dropped, state.bad_frame) == (0, None)
    journal = SqliteJournal(path, RUN)
    assert (journal.last, journal.marks(), journal.notices) == (6, {"m": 5}, [])
    journal.close()


@pytest.mark.parametrize("cut", [1, 30, 2000, 4120, 4125])
async def test_a_cut_log_loses_its_last_transaction_with_a_notice(tmp_path: Path, cut: int) -> None:
    path = await crashed(tmp_path)
    wal = tmp_path / "copy-wal"
    size = ends(wal)[-1]
    os.truncate(wal, size - cut)
    journal = SqliteJournal(path, RUN)
    assert [row.seq for row in journal.replay()] == [1, 2, 3, 4, 5]
    assert journal.marks() == {"m": 4}  # rows and marks go together
    assert len(journal.notices) == 1
    assert str(wal) in journal.notices[0]
    assert await journal.append([(9.0, "k", b"")]) == 6
    journal.close()


async def test_damage_in_the_logs_last_transaction_is_dropped_and_in_an_earlier_one_refused(tmp_path: Path) -> None:
    path = await crashed(tmp_path)
    wal = tmp_path / "copy-wal"
    whole, places = wal.read_bytes(), ends(wal)
    wal.write_bytes(whole[: places[-1] - 9] + b"\x5a" + whole[places[-1] - 8 :])
    journal = SqliteJournal(path, RUN)
    assert (journal.last, len(journal.notices)) == (5, 1)
    journal.close()
    path = await crashed(tmp_path)
    for at in (places[-4] - 9, 20):  # inside an earlier transaction; inside the header
        damaged = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        wal.write_bytes(damaged)
        error = refused(path)
        assert error.code == "journal_damaged"
        assert "copy-wal" in error.cause
        assert f"cut copy-wal to {places[-5] if at > 32 else 0} bytes" in error.remedy
        assert wal.read_bytes() == damaged


async def test_an_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"")
    journal = SqliteJournal(tmp_path / "j", RUN)
    assert "empty" in journal.notices[0]
    journal.close()
