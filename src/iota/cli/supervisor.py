"""Child processes of `iota up`: started in process groups of their own, logged, restarted with back-off, never left.

Each child's standard input is a pipe from this process: when it closes, for whatever reason, the child leaves
(`iota.cli.process.watch_parent`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iota.cli.process import ATTACHED
from iota.errors import IotaError

LOG_BYTES = 10 * 1024 * 1024
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
STEADY_SECONDS = 60.0
"""A child that ran so long is restarted after the first pause again."""
LOG_CHECK_SECONDS = 5.0


@dataclass
class Child:
    """One supervised process. `code`: exit code once it is done and will not be started again."""

    name: str
    arguments: Sequence[str]
    log: Path
    essential: bool
    process: asyncio.subprocess.Process | None = None
    code: int | None = None
    starts: int = 0
    watch: asyncio.Task[None] | None = None
    came_up: bool = False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


@dataclass
class Supervisor:
    """`say` gets a line for each notice. An essential child that fails before it `came_up` fails all (`failed`)."""

    logs: Path
    say: Callable[[str], None]
    children: dict[str, Child] = field(default_factory=dict)
    failed: IotaError | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, name: str, arguments: Sequence[str], *, essential: bool = False) -> Child:
        """Start `iota ARGUMENTS` and keep it running until it ends with 0 or `stop` is called."""
        log = self.logs / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        child = Child(name, arguments, log, essential)
        self.children[name] = child
        child.watch = asyncio.ensure_future(self._watch(child))
        return child

    async def _watch(self, child: Child) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            child.process = await self._spawn(child)
            code = await self._wait(child)
            if code == 0 or self._stopping.is_set():
                child.code = code
                return
            if child.essential and not child.came_up:
                cause = f"{child.name} could not start: {last_words(child.log)}"
                self.failed, child.code = IotaError("child_failed", cause, f"Its log is {child.log}"), code
                return
            pause = FIRST_PAUSE if time.monotonic() - began >= STEADY_SECONDS else pause
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}: {last_words(child.log)}"
            self.say(f"notice: {child.name} {how}; restarted in {pause:.0f} s (log: {child.log})")
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                pause = min(2 * pause, LONGEST_PAUSE)
        child.code = child.process.returncode if child.process else None

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        rotate(child.log)
        child.starts += 1
        with child.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-u",
                "-m",
                "iota.cli.main",
                *child.arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {ATTACHED: "1"},
            )

    async def _wait(self, child: Child) -> int:
        """Until the process ended; its log is capped meanwhile."""
        assert child.process is not None
        ended = asyncio.ensure_future(child.process.wait())
        try:
            while not (await asyncio.wait({ended}, timeout=LOG_CHECK_SECONDS))[0]:
                rotate(child.log)
        finally:
            ended.cancel()
        assert child.process.returncode is not None
        kill_group(child.process.pid)  # what it started itself must not outlive it
        return child.process.returncode

    async def wait(self, names: Sequence[str], timeout: float) -> bool:
        """Whether all of these children were done in time."""
        watches = [self.children[name].watch for name in names]
        waiting = {watch for watch in watches if watch is not None}
        return not waiting or not (await asyncio.wait(waiting, timeout=timeout))[1]

    async def stop(self, order: Sequence[Sequence[str]], grace: float) -> None:
        """Let the children leave, group after group, each within `grace` seconds; who does not is killed."""
        self._stopping.set()
        for names in order:
            there = [name for name in names if name in self.children]
            for name in there:
                process = self.children[name].process
                if process is not None and process.returncode is None:
                    process.send_signal(signal.SIGINT)
            if not await self.wait(there, grace):
                slow = [name for name in there if self.children[name].alive]
                self.say(f"notice: {', '.join(slow)} did not leave within {grace:.0f} s, killed")
                for name in slow:
                    kill_group(self.children[name].process.pid)  # type: ignore[union-attr]
                await self.wait(there, grace)

    def kill(self) -> None:
        """End every child at once; waits for nothing."""
        self._stopping.set()
        for child in self.children.values():
            if child.alive:
                assert child.process is not None
                kill_group(child.process.pid)


def kill_group(leader: int) -> None:
    """SIGKILL to a child's whole process group, if any of it is left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nobody is left (macOS says: not permitted)
        return


def rotate(log: Path) -> None:
    """Keep a log and one older part of it below about `LOG_BYTES` each; its writer appends, so it may be cut."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)


def last_words(log: Path) -> str:
    """What a process's log ends with: its error in one line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    ours = [number for number, line in enumerate(lines) if line.startswith("iota: ")]
    if ours and len(lines) - ours[-1] <= 20:
        return " ".join(lines[ours[-1] :]).removeprefix("iota: ")
    return lines[-1] if lines else "it said nothing"
