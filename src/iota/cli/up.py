"""`iota up RUN.toml`: a whole swarm on this machine, watched, restarted where it fails, ended in order, reported."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from iota.cli.options import add_json, add_run_file, add_threads, read_run
from iota.errors import Refused, Unreachable

if TYPE_CHECKING:
    import asyncio

    from iota.cli.progress import Display
    from iota.cli.supervisor import Supervisor
    from iota.config.schema import RunConfig
    from iota.nodes.folder import RunFolder

LOOK_SECONDS = 0.5
DISK_SECONDS = 3.0
MAX_SAMPLES = 2000
LEAVE_SECONDS = 30.0
"""What each group of processes gets to leave in order."""
FINISH_SECONDS = 5.0
"""What peers get to leave by themselves: the orchestrator stayed until they had heard of the end."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "run a whole swarm on this machine, from creation to the report"
    parser = commands.add_parser(
        "up",
        help=text,
        description=text + ". Ctrl-C lets everyone finish what was begun and leave; again Ctrl-C ends all at once. "
        "Started again with the same run file it goes on where it was.",
    )
    add_run_file(parser)
    parser.add_argument("--no-report", action="store_true", help="do not write the report at the end")
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="for the miners")
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    import msgspec

    from iota.config.load import save_run
    from iota.nodes.folder import folder_of, prepare
    from iota.nodes.real import entropy
    from iota.store.files import write_atomic
    from iota.wire.locks import lock_folder

    config = read_run(arguments)
    config = msgspec.structs.replace(config, folder=str(Path(folder_of(config).path).absolute()))
    folder = folder_of(config)
    with lock_folder(folder.path):
        prepare(folder, config, entropy)
        write_atomic(folder.run_file, [save_run(config).encode()])
        finished = _run_swarm(config, folder, arguments)
    if not finished:
        return 130
    if not arguments.no_report:
        from iota.lab.report import write_report

        print(write_report(folder.path)["text"], file=sys.stderr if arguments.json else sys.stdout)
        if arguments.json:
            print((folder.path / "report.json").read_text())
        else:
            print(f"report: {folder.path / 'report.txt'}, report.json and report_*.png beside it")
    return 0


def _run_swarm(config: RunConfig, folder: RunFolder, arguments: argparse.Namespace) -> bool:
    """Returns whether the run came to its end; False after Ctrl-C."""
    import asyncio
    import sys

    from iota.cli.progress import Display

    display = Display(sys.stderr if arguments.json else sys.stdout)
    try:
        return asyncio.run(_supervise(config, folder, arguments, display))
    finally:
        display.close()


async def _supervise(config: RunConfig, folder: RunFolder, arguments: argparse.Namespace, display: Display) -> bool:
    import asyncio

    from iota.cli.supervisor import Supervisor

    supervisor = Supervisor(folder.logs, display.say)
    stop = asyncio.Event()
    usage = asyncio.ensure_future(_watch_disk(folder))
    with _signals(supervisor, stop, display):
        try:
            names = _start(supervisor, config, folder, arguments)
            display.say(f"run folder {folder.path}; logs in {folder.logs}")
            finished = await _until_finished(supervisor, folder, stop, display)
            order = [names, ["orchestrator"], ["blobs"]]
            if finished:
                await supervisor.wait(names, FINISH_SECONDS)
            await supervisor.stop(order, LEAVE_SECONDS)
            return finished
        finally:
            supervisor.kill()
            usage.cancel()
            await asyncio.gather(usage, return_exceptions=True)


@contextlib.contextmanager
def _signals(supervisor: Supervisor, stop: asyncio.Event, display: Display) -> Iterator[None]:
    import asyncio

    from iota.nodes.real import install_signals

    def drain() -> None:
        display.say("stopping: everyone finishes what was begun; again Ctrl-C ends all at once")
        stop.set()

    def leave() -> None:
        supervisor.kill()
        os._exit(130)

    restore = install_signals(asyncio.get_running_loop(), drain, leave)
    try:
        yield
    finally:
        restore()


def _start(supervisor: Supervisor, config: RunConfig, folder: RunFolder, arguments: argparse.Namespace) -> list[str]:
    """Start everyone at once: peers wait for the orchestrator while it creates the run. Returns the peers' names."""
    run_file, url, threads = str(folder.run_file), folder.join_url.read_text().strip(), str(arguments.threads)
    supervisor.start("blobs", ["blobs", run_file], essential=True)
    supervisor.start("orchestrator", ["orchestrator", run_file], essential=True)
    names = []
    for role, count in (("miner", config.swarm.miners), ("validator", config.swarm.validators)):
        for number in range(count):
            name = f"{role}-{number}"
            names.append(name)
            device = ["--device", arguments.device] if role == "miner" else ["--device", "cpu"]
            supervisor.start(
                name, [role, url, "--folder", str(folder.path / name), "--threads", threads, *device]
            )  # fmt: skip
    return names


async def _until_finished(supervisor: Supervisor, folder: RunFolder, stop: asyncio.Event, display: Display) -> bool:
    """Show how it goes until the orchestrator ended the run (True) or Ctrl-C (False). Raises the error of an essential
    process that could not start."""
    import asyncio

    from iota.core.queries import Status
    from iota.nodes.ask import Asker
    from iota.nodes.real import RealClock, entropy

    orchestrator = supervisor.children["orchestrator"]
    creating = asyncio.ensure_future(_follow(orchestrator.log, display))
    async with Asker(folder.join_url.read_text(), clock=RealClock(), entropy=entropy) as asker:
        try:
            while not stop.is_set() and orchestrator.code is None:
                if supervisor.failed is not None:
                    raise supervisor.failed
                try:
                    status: dict[str, Any] = await asker.json(Status(), timeout=5.0)
                except (Unreachable, Refused):
                    status = {}  # not there yet, or being restarted: the supervisor tells
                if status:
                    creating.cancel()
                    for child in supervisor.children.values():
                        child.came_up = True
                    display.show(status)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await stop.wait()
        finally:
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
    if supervisor.failed is not None:
        raise supervisor.failed
    return orchestrator.code == 0 and not stop.is_set()


async def _follow(log: Any, display: Display) -> None:
    """Repeat the orchestrator's words while it creates the run."""
    import asyncio

    at = log.stat().st_size if log.exists() else 0
    while True:
        if log.exists():
            with log.open("rb") as file:
                file.seek(at)
                for line in file.read().splitlines(keepends=True):
                    if line.endswith(b"\n"):
                        at += len(line)
                        display.say(line.decode("utf-8", "replace").rstrip().partition(" ")[2])
        await asyncio.sleep(0.3)


async def _watch_disk(folder: RunFolder) -> None:
    """Sample what the run's folder takes on disk, for the report: disk.json, {"samples": [[Unix seconds, bytes]]}."""
    import asyncio
    import json
    import time

    from iota.store.files import write_atomic

    path = folder.path / "disk.json"
    samples: list[list[float]] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        samples = json.loads(path.read_text())["samples"]
    while True:
        samples.append([time.time(), await asyncio.to_thread(disk_bytes, str(folder.path))])
        if len(samples) > MAX_SAMPLES:  # keep the larger of each two neighbours
            samples = [max(pair, key=lambda row: row[1]) for pair in zip(samples[::2], samples[1::2], strict=False)]
        write_atomic(path, [json.dumps({"samples": samples}).encode()], durable=False)
        await asyncio.sleep(DISK_SECONDS)


def disk_bytes(folder: str) -> int:
    """Bytes on disk of all files under a folder; files that go meanwhile count as gone."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    total += disk_bytes(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
