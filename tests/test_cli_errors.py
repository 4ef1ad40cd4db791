"""Each bad input gives one line that says what is wrong and what to do, exit code 1, and loses nothing."""

import json
import socket
from pathlib import Path

import pytest

from iota.cli.main import error_line, main
from iota.errors import IotaError

TINY = str(Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml")
KEY = "ab" * 32


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("iota.cli.main.limit_threads", lambda threads: None)


def fails(capsys, *argv):
    """Run a command that must fail; its one error line."""
    assert main([str(word) for word in argv]) == 1
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert lines and lines[0].startswith("iota: "), captured
    return captured.err


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_error_line():
    assert error_line(IotaError("x", "the cause", "Do this.")) == "iota: the cause. Do this."
    assert error_line(IotaError("x", "the cause.")) == "iota: the cause."


@pytest.mark.parametrize("command", ["up", "orchestrator", "blobs"])
def test_wrong_run_file(command, capsys, tmp_path):
    assert "does not exist" in fails(capsys, command, "missing.toml")
    (tmp_path / "bad.toml").write_text('name = "x"\n[model]\nwidht = 3\n')
    told = fails(capsys, command, "bad.toml")
    assert "'widht'" in told and "Did you mean 'width'" in told and "Valid keys there: width, blocks" in told
    (tmp_path / "worse.toml").write_text('name = "x"\nstop = "epochs >= "\n')
    assert "stop" in fails(capsys, command, "worse.toml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml", "worse.toml"]


def test_set_values(capsys):
    told = fails(capsys, "orchestrator", TINY, "--set", "train.lrr=1")
    assert "unknown key 'lrr'" in told
    assert "KEY=VALUE" in fails(capsys, "orchestrator", TINY, "--set", "train.lr")
    assert "a fraction" in fails(capsys, "orchestrator", TINY, "--set", "swarm.port=1.5")
    assert "no section" in fails(capsys, "orchestrator", TINY, "--set", "name.port=1")
    assert "blob_port" in fails(capsys, "orchestrator", TINY, "--set", "swarm.port=8401")


@pytest.mark.parametrize(
    "command", [["status"], ["ledger", "show"], ["pause", "--key", "op"], ["miner"], ["validator"]]
)
def test_bad_urls(command, capsys):
    main(["key", "new", "op"])
    capsys.readouterr()
    assert "key after # is missing" in fails(capsys, *command, "http://127.0.0.1:8400")
    assert "neither a join URL nor a run's folder" in fails(capsys, *command, "runs/nothing")


def test_unreachable_orchestrator(capsys):
    url = f"http://127.0.0.1:{free_port()}/#{KEY}"
    assert "nothing listens there" in fails(capsys, "status", url)
    assert main(["validator", url, "--give-up", "1.5", "--folder", "v"]) == 1
    captured = capsys.readouterr()
    assert "next try in 1 s" in captured.out and "nothing listens there" in captured.err


def test_keys(capsys, tmp_path):
    assert main(["key", "new", "mine"]) == 0
    made = capsys.readouterr().out.strip()
    assert main(["key", "show", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["key"] == made
    assert "already a key file" in fails(capsys, "key", "new", "mine")
    assert "iota key new" in fails(capsys, "key", "show", "absent")
    (tmp_path / "mine").chmod(0o644)
    assert "chmod 600" in fails(capsys, "key", "show", "mine")
    (tmp_path / "broken").write_text("{}")
    (tmp_path / "broken").chmod(0o600)
    url = f"http://127.0.0.1:1/#{KEY}"
    assert "is damaged" in fails(capsys, "pause", url, "--key", "broken")
    assert "is damaged" in fails(capsys, "validator", url, "--key", "broken", "--folder", "v")
    assert "no operator's key" in fails(capsys, "pause", url)


def test_run_folder_in_use(capsys, tmp_path):
    from iota.wire.locks import lock_folder

    with lock_folder(tmp_path / "run"):
        assert "already in use by process" in fails(capsys, "up", TINY, "--set", "folder=run")
    with lock_folder(tmp_path / "run" / "orchestrator"):
        assert "already in use by process" in fails(capsys, "orchestrator", TINY, "--set", "folder=run")
    with lock_folder(tmp_path / "m"):
        assert "already in use" in fails(capsys, "validator", f"http://127.0.0.1:1/#{KEY}", "--folder", "m")


def test_port_in_use_before_anything_is_made(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = fails(capsys, "orchestrator", TINY, "--set", f"swarm.port={port}", "--set", "folder=run")
        assert "port is in use" in told and "swarm.port" in told
    assert not (tmp_path / "run" / "blobs").exists()


def test_sizes():
    from argparse import ArgumentTypeError

    from iota.cli.nodes import byte_count

    assert [byte_count(text) for text in ("5", "1.5k", "2MB", "3g")] == [5, 1500, 2_000_000, 3_000_000_000]
    with pytest.raises(ArgumentTypeError, match="8G"):
        byte_count("much")
