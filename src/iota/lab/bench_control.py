"""`iota bench control`: what the orchestrator can carry. Commands a second of the bare state machine, and requests per
CPU-second of the whole server with journal, signatures and HTTP.

The second figure divides by the CPU time (user and system, all threads) of the server process, not by the wall: the
load process needs more time than the server and may share its cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from iota.errors import IotaError
from iota.lab.bench_core import measure_core

GOAL_CORE, GOAL_HTTP = 30_000, 1_500


def measure_http(
    miners: int = 1000, seconds: float = 20.0, warmup: float = 5.0, repeats: int = 3, profile: Path | None = None
) -> dict[str, float | int]:
    """Requests answered per CPU-second of the server process: median, least and most of `repeats` fresh servers.

    `miners` keys over three stages, results of 8,192 bytes, every reply after its journal commit. Joins and loads come
    before the window. Raises IotaError `bench_failed` with the child's last words.
    """
    rows = sorted((_run(miners, seconds, warmup, profile) for _ in range(repeats)), key=lambda row: row["per_cpu_s"])
    middle = rows[len(rows) // 2]
    return {
        "http_requests_per_cpu_s": round(middle["per_cpu_s"]),
        "http_min": round(rows[0]["per_cpu_s"]),
        "http_max": round(rows[-1]["per_cpu_s"]),
        "http_requests": middle["requests"],
        "http_polls": middle["polls"],
        "http_declined": max(row["declined"] for row in rows),
        "http_requests_per_s": round(middle["requests"] / middle["wall_s"]),
        "http_server_cpu_share": round(middle["server_cpu_s"] / middle["wall_s"], 3),
        "http_journal_rows_per_request": round(middle["journal_rows"] / max(1, middle["requests"]), 3),
        "http_keys": miners,
    }


def _run(miners: int, seconds: float, warmup: float, profile: Path | None) -> dict[str, float]:
    miners -= miners % 3  # as many in every stage
    with tempfile.TemporaryDirectory(prefix="iota-bench-") as name:
        folder = Path(name)
        _write_text(folder / "text")
        extra = ["--profile", str(profile)] if profile else []
        server = _start("bench_server", str(folder), str(miners), *extra)
        try:
            ready = json.loads(_line(server))
            load = _start("bench_load")
            try:
                wanted = {**ready, "miners": miners, "warmup": warmup, "seconds": seconds, "profile": bool(profile)}
                _stdin(load).write(json.dumps(wanted) + "\n")
                _stdin(load).flush()
                figures: dict[str, float] = json.loads(_line(load))
            finally:
                _end(load)
        finally:
            _end(server)
    return figures


def _write_text(folder: Path) -> None:
    """A corpus just large enough for a run: nobody reads it."""
    folder.mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * 7919 + i * 104_729) % 5003}" for i in range(200))
        (folder / f"{number:02}.txt").write_text(words, encoding="utf-8")


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"iota.lab.{module}", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _stdin(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise IotaError("bench_failed", "the server or the load process ended early", "Its error stands above.")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    """Close its input, give it ten seconds, then kill it."""
    _stdin(process).close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(seconds: float = 20.0, miners: int = 1000, repeats: int = 3) -> dict[str, float | int | str]:
    """Both figures and a sentence about them."""
    commands = max(2_000, min(60_000, int(seconds * 3_000)))
    core = measure_core(miners=miners - miners % 3, commands=commands, repeats=repeats)
    http = measure_http(miners, seconds=seconds, warmup=min(5.0, seconds / 2), repeats=repeats)
    said = (
        f"The state machine takes {core['core_commands_per_s']:,} commands/s ({core['core_min']:,} to "
        f"{core['core_max']:,}; goal {GOAL_CORE:,}); the server answers {http['http_requests_per_cpu_s']:,} requests "
        f"per CPU-second ({http['http_min']:,} to {http['http_max']:,}; goal {GOAL_HTTP:,}) of {miners:,} keys over "
        f"{repeats} runs."
    )
    return {"bench": "control", **core, **http, "sentence": said}
