"""Child processes and what is shown of a run."""

import asyncio
import io
import os
import sys

import pytest

from iota.cli import supervisor as supervising
from iota.cli.progress import Display, short_line, size, status_lines
from iota.cli.supervisor import Supervisor, last_words, rotate
from iota.cli.up import disk_bytes


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_dead_children_are_restarted_with_growing_pauses(tmp_path, monkeypatch):
    monkeypatch.setattr(supervising, "FIRST_PAUSE", 0.01)
    said = []
    supervisor = Supervisor(tmp_path, said.append)
    child = supervisor.start("keys", ["key", "show", str(tmp_path / "absent")])
    try:
        await until(lambda: len(said) >= 2)
        assert child.starts >= 2 and child.code is None
        assert "ended with code 1: there is no key file" in said[0] and "restarted in" in said[0]
    finally:
        await supervisor.stop([["keys"]], 5.0)
    assert not child.alive


async def test_a_child_that_is_done_stays_done(tmp_path):
    supervisor = Supervisor(tmp_path, lambda text: None)
    child = supervisor.start("key", ["key", "new", str(tmp_path / "made")])
    assert await supervisor.wait(["key"], 20.0)
    assert child.code == 0 and child.starts == 1 and (tmp_path / "made").exists()


async def test_an_essential_child_that_cannot_start_fails_the_whole(tmp_path):
    supervisor = Supervisor(tmp_path, lambda text: None)
    child = supervisor.start("blobs", ["blobs", str(tmp_path / "no.toml")], essential=True)
    await until(lambda: supervisor.failed is not None)
    assert child.starts == 1
    assert "blobs could not start: run file" in str(supervisor.failed) and "does not exist" in str(supervisor.failed)


async def test_kill_ends_every_child_at_once(tmp_path):
    supervisor = Supervisor(tmp_path, lambda text: None)
    url = f"http://127.0.0.1:1/#{'ab' * 32}"
    child = supervisor.start("v", ["validator", url, "--folder", str(tmp_path / "v")])
    await until(lambda: child.log.exists() and b"next try" in child.log.read_bytes())
    pid = child.process.pid
    supervisor.kill()
    await supervisor.wait(["v"], 10.0)
    assert gone(pid)


async def test_a_child_leaves_when_its_pipe_closes(tmp_path):
    """What happens when `iota up` is killed: nothing but the end of standard input tells the child."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "iota.cli.main", "validator", f"http://127.0.0.1:1/#{'ab' * 32}"),
        *("--folder", str(tmp_path / "v")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {supervising.ATTACHED: "1"},
    )
    await process.stdout.readline()
    process.stdin.close()
    async with asyncio.timeout(15.0):
        assert await process.wait() == 130


def test_logs_are_capped_and_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(supervising, "LOG_BYTES", 100)
    log = tmp_path / "a.log"
    log.write_text("x" * 50)
    rotate(log)
    assert log.stat().st_size == 50
    with log.open("ab") as writer:
        writer.write(b"y" * 100)
        writer.flush()
        rotate(log)
        assert log.stat().st_size == 0 and (tmp_path / "a.log.1").stat().st_size == 150
    log.write_text("07:00 starting\niota: the port is in use.\n  more of it\n")
    assert last_words(log) == "the port is in use. more of it"
    log.write_text("")
    assert last_words(log) == "it said nothing"


STATUS = {
    "run": "r-1", "time": 100.0, "epoch": 2, "phase": "train", "phase_since": 90.0, "phase_until": 130.0,
    "waiting_for": "waiting for stage 0", "paused": False, "stop": "epochs >= 3", "tokens": 12345,
    "tokens_per_s": 678.0, "seconds_since_last_pass": 1.0, "stalled": False, "train_loss": 2.5,
    "heldout_loss": 2.75, "heldout_epoch": 1, "wire_bytes": 1000, "uncompressed_bytes": 6000,
    "stages": [{"stage": 0, "blocks": [0, 2], "parameters": 5, "miners": [
        {"key": "ab" * 32, "role": "miner", "alive": True, "why_gone": "", "device": "cpu", "dtype": "float32",
         "passes_epoch": 4, "passes_total": 9, "task": "forward", "last_verdict": "valid", "paid": 1500},
        {"key": "cd" * 32, "role": "miner", "alive": False, "why_gone": "silent", "device": "cpu", "dtype": "float32",
         "passes_epoch": 0, "passes_total": 2, "task": None, "last_verdict": "", "paid": 0}]}],
    "validators": [],
}  # fmt: skip


def test_status_shows_what_counts():
    text = "\n".join(status_lines(STATUS, members=True))
    for part in (
        "epoch 2", "train for 10 s, at the latest in 30 s", "waits for stage 0", "2.500", "after epoch 1: 2.750",
        "12,345 tokens, 678/s", "5.0 kB saved (6.0x smaller)", "1 miners, passes this epoch: abababab:4  (1 gone)",
        "gone (silent)", "paid 1,500",
    ):  # fmt: skip
        assert part in text, part
    paused = STATUS | {"paused": True, "stalled": True, "heldout_loss": None, "train_loss": None, "wire_bytes": 0}
    text = "\n".join(status_lines(paused))
    assert "PAUSED, was in train" in text and "STALLED" in text and "not measured yet" in text
    assert "\n" not in short_line(STATUS) and "miners 1" in short_line(STATUS)
    assert [size(n) for n in (5, 1500, 2e6, 3e9, 4e12)] == ["5 B", "1.5 kB", "2.0 MB", "3.0 GB", "4.0 TB"]


def test_display_on_a_terminal_redraws_and_elsewhere_prints_lines():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, plain = Terminal(), io.StringIO()
    for out in (terminal, plain):
        display = Display(out)
        display.show(STATUS)
        display.show(STATUS)
        display.say("notice: something")
        display.close()
    assert terminal.getvalue().count("\x1b[4A\x1b[J") == 2
    assert plain.getvalue().count("epoch 2 train") == 1 and "\x1b" not in plain.getvalue()
    assert "notice: something" in plain.getvalue() and "notice: something" in terminal.getvalue()


def test_disk_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 10_000)
    os.symlink("/", tmp_path / "root")
    assert 10_000 <= disk_bytes(str(tmp_path)) < 100_000
    assert disk_bytes(str(tmp_path / "none")) == 0


@pytest.mark.parametrize("value", ["stop=epochs >= 2", 'stop="epochs >= 2"'])
def test_set_values_need_no_quotes(value):
    from iota.config.load import parse_run, with_values

    config = with_values(parse_run('name = "a"'), [value, "train.lr=0.5", "admit.allow=[]", "data.source=a b"])
    assert (config.stop, config.train.lr, config.admit.allow, config.data.source) == ("epochs >= 2", 0.5, (), "a b")
