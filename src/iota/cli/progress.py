"""A run's status as text: for `iota status`, and live beside `iota up` (one block redrawn, or plain lines)."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, TextIO

Status = dict[str, Any]

BRIEF = 1.0
"""Least seconds between two plain lines."""


def status_lines(status: Status, members: bool = False) -> list[str]:
    """The run now, a few lines. `status` as `iota.nodes.orchestrator.views.status` makes it."""
    phase = "PAUSED, was in " + status["phase"] if status["paused"] else status["phase"]
    until = status["phase_until"]
    limit = "" if until is None or status["paused"] else f", at the latest in {max(0.0, until - status['time']):.0f} s"
    since = max(0.0, status["time"] - status["phase_since"])
    lines = [
        f"run {status['run']}   epoch {status['epoch']}   {phase} for {since:.0f} s{limit}   until {status['stop']}",
        f"waits for {waits_for(status)}" if status["waiting_for"] else "",
        f"loss {_loss(status)}   {status['tokens']:,} tokens, {status['tokens_per_s']:,.0f}/s   {saved(status)}",
    ]
    if status.get("stalled"):
        idle = status["seconds_since_last_pass"]
        lines.append(f"STALLED: no pass was accepted for {idle:.0f} s")
    for stage in status["stages"]:
        lines.append(_stage(stage))
        lines += [_member(m) for m in stage["miners"]] if members else []
    if members:
        lines += ["validators", *[_member(m) for m in status["validators"]]]
    return [line for line in lines if line]


def waits_for(status: Status) -> str:
    """What the phase waits for, to follow these words."""
    return str(status["waiting_for"]).removeprefix("waiting for ")


def _loss(status: Status) -> str:
    train = "-" if status["train_loss"] is None else f"{status['train_loss']:.3f}"
    if status["heldout_loss"] is None:
        return f"{train} (held-out: not measured yet)"
    return f"{train} (held-out after epoch {status['heldout_epoch']}: {status['heldout_loss']:.3f})"


def saved(status: Status) -> str:
    """Bytes that compression kept off the wire."""
    wire, whole = status["wire_bytes"], status["uncompressed_bytes"]
    return f"{size(whole - wire)} saved ({whole / wire:.1f}x smaller)" if wire else "0 B saved"


def size(count: float) -> str:
    """Bytes for people: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _stage(stage: Status) -> str:
    miners = stage["miners"]
    alive = [m for m in miners if m["alive"]]
    names = " ".join(f"{m['key'][:8]}:{m['passes_epoch']}" for m in alive)
    gone = f"  ({len(miners) - len(alive)} gone)" if len(alive) < len(miners) else ""
    first, last = stage["blocks"]
    return f"stage {stage['stage']} (blocks {first}-{last - 1})  {len(alive)} miners, passes this epoch: {names}{gone}"


def _member(m: Status) -> str:
    state = (m["task"] or "idle") if m["alive"] else f"gone ({m['why_gone']})"
    work = ""
    if m["role"] == "miner":
        work = f"  passes {m['passes_total']}  paid {m['paid']:,}  last verdict {m['last_verdict'] or 'none yet'}"
    return f"  {m['key'][:16]}  {state:<10} {m['device']} {m['dtype']}{work}"


def short_line(status: Status) -> str:
    """The run now in one line, for logs."""
    alive = "/".join(str(sum(m["alive"] for m in stage["miners"])) for stage in status["stages"])
    phase = "paused" if status["paused"] else status["phase"]
    until = status["phase_until"]
    limit = "" if until is None else f" (<= {max(0.0, until - status['time']):.0f} s)"
    waits = f"; waits for {waits_for(status)}" if status["waiting_for"] else ""
    return (
        f"epoch {status['epoch']} {phase}{limit}: loss {_loss(status)}, {status['tokens_per_s']:,.0f} tokens/s, "
        f"{saved(status)}, miners {alive}{waits}"
    )


class Display:
    """Shows status and notices. On a terminal one block is redrawn in place and notices scroll above it; elsewhere one
    plain line every `every` seconds, and sooner (`BRIEF`) when the phase changes."""

    def __init__(self, out: TextIO | None = None, every: float = 5.0) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._every = every
        self._drawn = 0
        self._shown: tuple[int, str] | None = None
        self._at = float("-inf")
        self._lines: list[str] = []

    def say(self, text: str) -> None:
        """A line that stays."""
        self._wipe()
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._out)
        self._draw()
        self._out.flush()

    def show(self, status: Status) -> None:
        now = time.monotonic()
        if self._live:
            self._wipe()
            self._lines = status_lines(status)
            self._draw()
            self._out.flush()
        elif now - self._at >= (self._every if (status["epoch"], status["phase"]) == self._shown else BRIEF):
            self._shown, self._at = (status["epoch"], status["phase"]), now
            self.say(short_line(status))

    def close(self) -> None:
        """Leave the last block standing."""
        self._drawn, self._lines = 0, []

    def _wipe(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _draw(self) -> None:
        if self._live and self._lines:
            width = shutil.get_terminal_size().columns - 1
            self._out.write("".join(line[:width] + "\n" for line in self._lines))
            self._drawn = len(self._lines)
