"""The orchestrator as a process: folder and keys, creation of the run, journal, HTTP service, a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from iota.config.schema import Manifest, RunConfig
from iota.core.machine import events as ev
from iota.errors import IotaError, Unreachable
from iota.net.http import HttpServer
from iota.net.transport import Buffer
from iota.nodes import folder as folders
from iota.nodes.ask import get_page
from iota.nodes.checkpoint import write_checkpoints
from iota.nodes.effects import Clock, Entropy
from iota.nodes.folder import Keys, RunFolder
from iota.nodes.orchestrator import views
from iota.nodes.orchestrator.create import create_run
from iota.nodes.orchestrator.node import Orchestrator
from iota.nodes.peer_process import unless_stopped
from iota.store.blobs import FolderBlobs
from iota.store.files import sweep, write_atomic
from iota.store.manifest import OBJECT
from iota.store.sqlite import SqliteJournal
from iota.wire.locks import lock_folder

TELL_SECONDS = 15.0
"""How long a finished run's orchestrator stays for peers that have not heard of the end."""
LOOK_SECONDS = 0.2
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHOW_PAUSE = 5.0
"""Least seconds between two notices of a wait, and between two writes of the files for readers."""

Say = Callable[[str], None]


async def serve(
    config: RunConfig,
    folder: RunFolder,
    *,
    clock: Clock,
    entropy: Entropy,
    say: Say,
    stop: asyncio.Event,
) -> bool:
    """Create or open the run and serve it until it is finished and everyone alive heard so (True), or `stop` is set
    (False). State is durable at every moment; leaving loses nothing.

    Raises IotaError: `folder_in_use`, `port_in_use`, `bad_config`, those of the journal, `disk_full`, `bad_key`.
    """
    with lock_folder(folder.orchestrator):
        for place in (folder.path, folder.orchestrator):
            sweep(place)  # what was half written when the process was killed
        await _probe(config)
        keys = folders.prepare(folder, config, entropy)
        config = folders.with_operator(config, keys.operator)
        blobs = FolderBlobs(folder.blobs)
        creating = create_run(config, blobs, keys.identity.key, clock.now(), keys.identity.sign, say)
        manifest = await unless_stopped(creating, stop)
        if manifest is None:  # half a creation is no run: the next start creates it again
            return False
        await _await_blobs(config, clock, say, stop)
        journal = SqliteJournal(folder.journal, manifest.run)
        try:
            for notice in journal.notices:
                say(f"notice: {notice}")
            node = _node(config, manifest, await blobs.get(OBJECT), keys, journal, blobs, clock, entropy)
            await node.open()
            return await _serve(node, config, folder, clock, say, stop)
        finally:
            journal.close()


def _node(
    config: RunConfig,
    manifest: Manifest,
    sealed: bytes,
    keys: Keys,
    journal: SqliteJournal,
    blobs: FolderBlobs,
    clock: Clock,
    entropy: Entropy,
) -> Orchestrator:
    url = folders.blob_url(config)
    return Orchestrator(
        manifest,
        sealed,
        keys.identity,
        keys.secret,
        journal=journal,
        blobs=blobs,
        blob_url=url,
        clock=clock,
        entropy=entropy,
        stop=config.stop,
    )


async def _nobody(raw: bytes) -> Sequence[Buffer]:
    raise AssertionError("the probe is closed before anyone can ask")


async def _probe(config: RunConfig) -> None:
    """Fail now rather than after minutes of tokenising when the port cannot be had."""
    probe = HttpServer(_nobody, config.swarm.host, config.swarm.port, limit=0, grace=0.0)
    await probe.start()
    await probe.close()


async def _await_blobs(config: RunConfig, clock: Clock, say: Say, stop: asyncio.Event) -> None:
    """Peers can do nothing without the blob service: say so and wait for it."""
    url, told = folders.blob_url(config), float("-inf")
    while not stop.is_set():
        try:
            await get_page(f"{url}/health")
            return
        except Unreachable as error:
            if clock.now() - told >= SHOW_PAUSE:
                told = clock.now()
                say(f"waiting for the blob service (start: iota blobs RUN.toml): {error.cause}")
        await clock.sleep(LOOK_SECONDS)


async def _serve(
    node: Orchestrator, config: RunConfig, folder: RunFolder, clock: Clock, say: Say, stop: asyncio.Event
) -> bool:
    changed = asyncio.Event()

    def observe(event: ev.Event) -> None:
        if isinstance(event, ev.EpochOpened):
            changed.set()

    node.observers.append(observe)

    async def health(query: object) -> bytes:
        return _health(node, clock.now())

    swarm = config.swarm
    server = HttpServer(node.handler, swarm.host, swarm.port, limit=node.message_limit, pages={"/health": health})
    await server.start()
    say(f"join URL: {folder.join_url.read_text(encoding='ascii').strip()}")
    if swarm.host not in LOOPBACK and not config.admit.validators:
        say("notice: whoever reaches this address may join as a validator and judge; name yours in [admit.validators]")
    again = 0.0
    ticking = asyncio.ensure_future(node.run())
    try:
        while not ticking.done() and not stop.is_set() and not _all_told(node, clock.now()):
            if changed.is_set() and clock.now() >= again:
                again = clock.now() + SHOW_PAUSE
                try:
                    write_history(node, folder)
                    changed.clear()
                except IotaError as error:  # training does not need these files; the journal has all that is in them
                    say(f"notice: {error}; trying again in {SHOW_PAUSE:.0f} s")
            await asyncio.wait({ticking}, timeout=LOOK_SECONDS)
        if ticking.done():
            ticking.result()
        await node.close()
        await ticking
        write_history(node, folder)
        return node.finished
    finally:
        ticking.cancel()
        await node.close()
        await server.close()


def _all_told(node: Orchestrator, now: float) -> bool:
    """Whether the run is finished and every live peer was told so; or had the time to ask."""
    state = node.machine.state
    if not node.finished:
        return False
    if now - state.phase_at >= TELL_SECONDS:
        return True
    return all((m.number, m.session) in node.told for m in state.members if m.alive)


def write_history(node: Orchestrator, folder: RunFolder) -> None:
    """Put what the report and the export need into the run's folder: the history, and which checkpoint is the newest
    complete one. Raises IotaError `disk_full`."""
    write_atomic(folder.history, [msgspec.json.encode(views.history(node))], durable=False)
    checkpoints = node.machine.state.checkpoints
    if len({checkpoint.epoch for checkpoint in checkpoints}) == 1:
        write_checkpoints(folder.path, checkpoints)


def _health(node: Orchestrator, now: float) -> bytes:
    state = node.machine.state
    page = {
        "status": "ok",
        "run": state.run,
        "key": node.identity.key,
        "epoch": state.epoch,
        "phase": state.phase,
        "paused": state.paused is not None,
        "seconds_since_last_pass": round(now - node.meter.last_pass, 3),
        "peers": sum(m.alive for m in state.members),
    }
    return msgspec.json.encode(page)
