"""`iota up` with real processes: a whole tiny run, its end, and its violent end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ports import free_ports

TINY = str(Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml")

pytestmark = pytest.mark.slow


def up(folder, stop, log, *options):
    port, blob_port = free_ports(2)
    sets = (f"swarm.port={port}", f"swarm.blob_port={blob_port}", f"folder={folder}", f"stop={stop}")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "iota.cli.main",
            "up",
            TINY,
            *options,
            *(word for value in sets for word in ("--set", value)),
        ],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def running(folder):
    """Processes that name this folder on their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(str(folder).encode() in word for word in words):
            found.append((int(place.name), words))
    return found


def until(condition, seconds, log):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def test_a_whole_run(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = up(folder, "epochs >= 2", log)
    assert process.wait(150) == 0, log.read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report["wire_bytes"] > 0 and report["uncompressed_bytes"] > report["wire_bytes"]
    assert report["peak_disk_bytes"] > 0 and report["tokens_per_s"] > 0
    history = json.loads((folder / "history.json").read_text())
    assert history["phase"] == "finished" and [row["epoch"] for row in history["epochs"]][:2] == [1, 2]
    assert {len(row) for row in history["emissions"]} == {3}
    assert all(audit["verdict"] == "valid" for audit in history["audits"])
    assert "epoch 1" in log.read_text() and "tokens/s" in log.read_text()
    assert running(folder) == []
    assert (folder / "report.txt").read_text().strip()

    again = up(folder, "epochs >= 3", log, "--no-report")  # a finished run is extended
    assert again.wait(150) == 0, log.read_text()
    assert len(json.loads((folder / "history.json").read_text())["emissions"]) == 3


def test_ctrl_c_ends_everything_in_order_and_a_killed_child_comes_back(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = up(folder, "epochs >= 100000", log)
    try:
        until(lambda: "epoch 2" in log.read_text(), 90, log)
        miner = next(pid for pid, words in running(folder) if _names(words, "miner-1"))
        os.kill(miner, signal.SIGKILL)
        until(lambda: "miner-1 was killed by signal 9; restarted in 1 s" in log.read_text(), 20, log)
        until(lambda: any(_names(words, "miner-1") for _, words in running(folder)), 20, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
        assert running(folder) == []
        assert "everyone finishes what was begun" in log.read_text()
    finally:
        process.kill()


def _names(words, name):
    return any(word.endswith(f"/{name}".encode()) for word in words)


def test_nothing_survives_a_killed_up(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = up(folder, "epochs >= 100000", log)
    until(lambda: "train" in log.read_text(), 90, log)
    assert len(running(folder)) >= 6
    process.kill()
    process.wait()
    until(lambda: not running(folder), 20, log)
