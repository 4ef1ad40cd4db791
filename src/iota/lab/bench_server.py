"""The server process of `iota bench control`: a real orchestrator with its SQLite journal behind HTTP.

    python -m iota.lab.bench_server FOLDER MINERS [--profile FILE]

Creates the run in FOLDER from FOLDER/text, prints one line of JSON when it listens, serves GET /cpu (the process's CPU
seconds so far and the journal's last row) beside the protocol, and ends when its standard input closes. With
`--profile`, cProfile's figures of the time between GET /profile/start and the end are written to FILE.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from iota.lab.bench_core import control_config
from iota.net.http import HttpServer
from iota.nodes.orchestrator.create import create_run
from iota.nodes.orchestrator.node import Orchestrator
from iota.nodes.real import RealClock, entropy
from iota.store.blobs import FolderBlobs
from iota.store.manifest import OBJECT
from iota.store.sqlite import SqliteJournal
from iota.wire.keys import Identity

HOST = "127.0.0.1"


async def serve(folder: Path, miners: int, profile: Path | None) -> None:
    """Serve until standard input ends."""
    clock = RealClock()
    identity = Identity.new(b"bench orchestrator".ljust(32))
    blobs = FolderBlobs(folder / "blobs", durable=False)
    config = control_config(miners, source=str(folder / "text"))
    manifest = await create_run(config, blobs, identity.key, clock.now(), identity.sign)
    journal = SqliteJournal(folder / "journal.sqlite", manifest.run)
    node = Orchestrator(
        manifest,
        await blobs.get(OBJECT),
        identity,
        "11" * 32,
        journal=journal,
        blobs=blobs,
        blob_url=f"http://{HOST}:1",
        clock=clock,
        entropy=entropy,
    )
    await node.open()
    profiler = cProfile.Profile()

    async def cpu(query: Mapping[str, str]) -> bytes:
        state = node.machine.state
        figures = {"cpu": time.process_time(), "rows": journal.last, "phase": state.phase, "tokens": state.tokens}
        return json.dumps(figures).encode()

    async def start_profile(query: Mapping[str, str]) -> bytes:
        profiler.enable()
        return b"{}"

    pages = {"/cpu": cpu, **({"/profile/start": start_profile} if profile else {})}
    server = HttpServer(node.handler, HOST, 0, limit=node.message_limit, pages=pages)
    await server.start()
    ticking = asyncio.create_task(node.run())
    ready = {"port": server.port, "key": identity.key, "run": manifest.run, "roots": _roots(node)}
    print(json.dumps(ready), flush=True)
    await _until_stdin_ends()
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)
    await node.close()
    ticking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticking
    await server.close()
    journal.close()


def _roots(node: Orchestrator) -> list[str]:
    """What a miner of each stage proves after loading checkpoint 0."""
    return [checkpoint.root() for checkpoint in node.machine.state.checkpoints]


async def _until_stdin_ends() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def on_input() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ended.set()

    loop.add_reader(0, on_input)
    await ended.wait()


def main(arguments: list[str]) -> None:
    profile = Path(arguments[3]) if len(arguments) > 3 and arguments[2] == "--profile" else None
    asyncio.run(serve(Path(arguments[0]), int(arguments[1]), profile))


if __name__ == "__main__":
    main(sys.argv[1:])
