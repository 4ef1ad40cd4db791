"""The log's inspection agrees with SQLite's own recovery, wherever the log is cut."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from iota.store.wal import WalState, inspect_wal


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as a killed process leaves them: a log in its second round, so that old frames follow the new ones."""
    folder = tmp_path_factory.mktemp("wal")
    db = sqlite3.connect(folder / "live", isolation_level=None)
    db.execute("PRAGMA page_size = 512")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, x BLOB)")
    for n in range(1, 21):
        db.execute("INSERT INTO t VALUES (?, ?)", (n, b"a" * 300))
    assert db.execute("PRAGMA wal_checkpoint(FULL)").fetchone()[0] == 0
    for n in range(21, 26):
        db.execute("INSERT INTO t VALUES (?, ?)", (n, b"b" * 300))
    for name in ("", "-wal"):
        shutil.copyfile(folder / f"live{name}", folder / f"dead{name}")
    db.close()
    return folder / "dead"


def recovered(path: Path, wal: bytes, folder: Path) -> int:
    shutil.copyfile(path, folder / "db")
    (folder / "db-wal").write_bytes(wal)
    db = sqlite3.connect(folder / "db")
    top = db.execute("SELECT max(n) FROM t").fetchone()[0]
    db.close()
    return int(top)


def test_old_frames_after_the_end_are_no_damage(crashed: Path) -> None:
    wal = crashed.with_name("dead-wal")
    state = inspect_wal(wal)
    assert 32 < state.end < wal.stat().st_size
    assert (state.dropped, state.bad_frame) == (0, None)
    assert inspect_wal(wal.with_name("none")) == WalState(0, 0, None)


def test_every_cut_is_seen_and_cutting_at_the_end_it_names_loses_nothing_more(crashed: Path, tmp_path: Path) -> None:
    data = crashed.with_name("dead-wal").read_bytes()
    end = inspect_wal(crashed.with_name("dead-wal")).end
    assert recovered(crashed, data[:end], tmp_path) == 25
    probe = tmp_path / "probe"
    for size in range(0, end, 197):
        probe.write_bytes(data[:size])
        state = inspect_wal(probe)
        assert state.bad_frame is None
        assert state.dropped == size - state.end
        top = recovered(crashed, data[:size], tmp_path)
        assert recovered(crashed, data[: state.end], tmp_path) == top < 25


def test_a_flipped_byte_is_dropped_in_the_last_transaction_and_named_before(crashed: Path, tmp_path: Path) -> None:
    data = crashed.with_name("dead-wal").read_bytes()
    end = inspect_wal(crashed.with_name("dead-wal")).end
    probe, kinds = tmp_path / "probe", set()
    for at in range(0, end, 149):
        probe.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        state = inspect_wal(probe)
        assert state.dropped
        top = recovered(crashed, probe.read_bytes(), tmp_path)
        assert top < 25
        assert recovered(crashed, data[: state.end], tmp_path) == top
        kinds.add((top >= 24, state.bad_frame is None))
    assert kinds == {(True, True), (False, False)}
    probe.write_bytes(data[: end - 1000] + bytes(1000))  # a tail of zeros
    assert inspect_wal(probe).dropped
    os.unlink(probe)
