"""The orchestrator and the blob service as real processes: operators' orders over HTTP, restart, damaged folders."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from iota.cli.main import main
from ports import free_ports

TINY = str(Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml")
SMALL = ("data.max_bytes=100000", "data.heldout_tokens=1024")


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    monkeypatch.setattr("iota.cli.main.limit_threads", lambda threads: None)


class Served:
    """Orchestrator and blob service of one run folder, each a process."""

    def __init__(self, folder):
        self.folder = folder
        port, blob_port = free_ports(2)
        self.sets = [f"swarm.port={port}", f"swarm.blob_port={blob_port}", f"folder={folder}", *SMALL]
        self.processes = {}
        self.blobs = self.start("blobs")

    def start(self, role, *sets):
        words = [word for value in (*self.sets, *sets) for word in ("--set", value)]
        process = subprocess.Popen(
            [sys.executable, "-m", "iota.cli.main", role, TINY, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.processes[role] = process
        return process

    def orchestrator(self, *sets):
        """Start it and wait until it serves."""
        process = self.start("orchestrator", *sets)
        words = ""
        for line in process.stdout:
            words += line
            if "join URL" in line:
                return process
        raise AssertionError(words)

    def refused(self, *sets):
        """Start an orchestrator that must refuse; what it says."""
        process = self.start("orchestrator", *sets)
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 1, told
        return told

    def end(self, role):
        self.processes[role].send_signal(signal.SIGINT)
        return self.processes[role].wait(20)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path / "run")
    yield served
    served.close()


def ask(capsys, *argv):
    """A command that must work; its output decoded from JSON."""
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_orders_restart_and_extension(served, capsys, tmp_path):
    process, folder = served.orchestrator(), served.folder
    status = ask(capsys, "status", folder)
    assert status["phase"] == "gather" and not status["paused"] and status["run"].startswith("tiny-")
    url = (folder / "join.url").read_text().strip()

    assert ask(capsys, "pause", folder) == {"done": "pause"}
    assert ask(capsys, "status", url)["paused"]
    assert main(["pause", url, "--key", str(folder / "operator.key")]) == 1
    assert "already paused" in capsys.readouterr().err

    assert main(["key", "new", str(tmp_path / "stranger")]) == 0
    assert main(["resume", url, "--key", str(tmp_path / "stranger")]) == 1
    assert "not an operator" in capsys.readouterr().err
    wrong = url[: url.index("#") + 1] + "0" * 32
    assert main(["status", wrong]) == 1
    assert "the join URL names another" in capsys.readouterr().err

    process.kill()  # what was ordered is in the journal
    process.wait()
    served.orchestrator("stop=epochs >= 5")
    status = ask(capsys, "status", folder)
    assert status["paused"] and status["stop"] == "epochs >= 5"
    assert ask(capsys, "resume", folder) == {"done": "resume"}
    assert not ask(capsys, "status", folder)["paused"]
    assert ask(capsys, "ledger", "verify", folder)["problems"] == []
    assert ask(capsys, "ban", folder, "ab" * 32)["done"].startswith("ban")
    assert main(["explain", str(folder), "12"]) == 1
    assert "no member's key begins with" in capsys.readouterr().err

    assert served.end("orchestrator") == 130
    assert json.loads((folder / "history.json").read_text())["run"] == status["run"]
    assert (folder / "orchestrator" / "key").stat().st_mode & 0o077 == 0
    assert (folder / "orchestrator" / "secret").stat().st_mode & 0o077 == 0


def test_damage_is_refused_with_the_place_and_an_unfinished_end_dropped(served, tmp_path):
    served.orchestrator()
    assert served.end("orchestrator") == 130
    journal = served.folder / "orchestrator" / "journal.sqlite"
    whole = journal.read_bytes()
    assert not journal.with_name("journal.sqlite-wal").exists()

    told = served.refused("train.lr=0.5")
    assert "exists with another configuration: train.lr is" in told and journal.read_bytes() == whole

    with sqlite3.connect(journal) as db:
        db.execute("UPDATE rows SET payload = x'00' WHERE seq = 1")
    db.close()
    damaged = journal.read_bytes()
    told = served.refused()
    assert "journal.sqlite: row 1 does not match its hash" in told and journal.read_bytes() == damaged

    journal.write_bytes(whole[:100] + b"\xff" * 4000 + whole[4100:])
    assert "malformed" in served.refused() or "not a journal" in served.refused()

    journal.write_bytes(whole)
    with sqlite3.connect(journal) as db:
        db.execute("UPDATE rows SET payload = x'00' WHERE seq = (SELECT max(seq) FROM rows)")
    db.close()
    process = served.start("orchestrator")
    for line in process.stdout:
        if "notice: " in line:
            assert "the last row" in line and "dropped" in line
            break
        assert "join URL" not in line
    served.end("orchestrator")


def test_another_runs_folder_is_refused(served, tmp_path):
    """Journal, key and objects belong together: none is taken from another run, none is changed."""
    served.orchestrator()
    assert served.end("orchestrator") == 130
    other = Served(tmp_path / "other")
    try:
        other.orchestrator("seed=5")
        assert other.end("orchestrator") == 130
    finally:
        other.close()
    journal = served.folder / "orchestrator" / "journal.sqlite"
    own = journal.read_bytes()
    journal.write_bytes((tmp_path / "other" / "orchestrator" / "journal.sqlite").read_bytes())
    told = served.refused()
    assert "is the journal of run tiny-" in told and "Give the folder of this run" in told
    journal.write_bytes(own)
    key = served.folder / "orchestrator" / "key"
    key.unlink()
    told = served.refused()
    assert "not signed by the orchestrator" in told
    key.write_text("{}")
    key.chmod(0o600)
    assert "the key file" in served.refused()


def test_two_blob_services_cannot_share_a_port(served):
    first = served.blobs
    assert "waiting for" in first.stdout.readline()  # for the public key, which the orchestrator writes
    second = served.start("blobs")
    served.processes["first"] = first
    served.orchestrator()
    deadline = time.monotonic() + 20
    while first.poll() is None and second.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    winner, loser = (second, first) if first.poll() is not None else (first, second)
    assert loser.wait(5) == 1 and winner.poll() is None
    assert "the port is in use" in loser.stdout.read()
