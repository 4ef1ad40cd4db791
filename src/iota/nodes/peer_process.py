"""What miners' and validators' processes share: folder, key, locks, the way to the orchestrator, a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from iota.errors import IotaError
from iota.net.address import parse_join
from iota.net.http import HttpChannel
from iota.net.peer import Caller
from iota.nodes.ask import retry_until_found
from iota.nodes.effects import Clock, Compute, Entropy
from iota.nodes.folder import load_or_new
from iota.nodes.link import Link
from iota.nodes.real import ThreadCompute
from iota.store.files import sweep
from iota.store.remote import HttpObjects, Objects
from iota.wire.locks import lock_folder, lock_key

T = TypeVar("T")

STATUS_SECONDS = 10.0
LEAVE_SECONDS = 5.0
"""After a request to stop, how long an orchestrator that does not answer is waited for."""
LOOK_SECONDS = 0.5
TOKENS = "tokens"
"""In the peer's folder: token shards that it fetched."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class PeerOptions:
    """The command line. `key` None: the folder's own; `dtype` "": the run's; limits in bytes, 0: none; `give_up`
    seconds of silence, 0: never."""

    url: str
    folder: Path
    key: Path | None = None
    device: str = "auto"
    dtype: str = ""
    max_memory: int = 0
    max_disk: int = 0
    owner: str = ""
    threads: int = 1
    give_up: float = 0.0


@dataclass(frozen=True)
class Effects:
    """What a process gives a node."""

    clock: Clock
    entropy: Entropy
    say: Say
    stop: asyncio.Event


class Node(Protocol):
    """What `attend` needs of a miner or validator."""

    link: Link

    async def run(self) -> str:
        """Work until there is nothing more to do; why, in words."""
        ...

    def drain(self) -> None:
        """Finish what was begun, take nothing new."""
        ...


Line = Callable[[float], str]
Make = Callable[[Caller, Objects, Compute], tuple[Node, Line]]
"""Builds the node; beside it, its status line at a time ("": nothing to tell)."""


async def attend(options: PeerOptions, effects: Effects, role: str, make: Make, *, patience: float = 600.0) -> bool:
    """Take part until the run ends (True), or until `effects.stop` is set and the work in hand is done (False).
    `patience`: seconds for one object of the blob store.

    Raises IotaError: `bad_url`, `folder_in_use`, `key_in_use`, `bad_key`, `wrong_key`, the orchestrator's refusal,
    `unreachable` after `give_up` seconds."""
    clock, say = effects.clock, effects.say
    address = parse_join(options.url)
    with lock_folder(options.folder):
        for place in (options.folder, options.folder / TOKENS):
            sweep(place)  # what was half written when this peer was killed
        identity = load_or_new(options.key or options.folder / "key", effects.entropy)
        with lock_key(identity.key):
            say(f"{role} {identity.key} in {options.folder}")
            finding = retry_until_found(address, clock=clock, say=say, give_up=options.give_up)
            health = await unless_stopped(finding, effects.stop)
            if health is None:
                return False
            channel, objects, compute = HttpChannel(address.base), HttpObjects(patience=patience), ThreadCompute()
            try:
                caller = Caller(identity, channel, health.key, health.run, clock.now)
                node, line = make(caller, objects, compute)
                return await _work(node, line, effects)
            finally:
                compute.close()
                await objects.close()
                await channel.close()


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """What `work` gives, or None (and it is cancelled) when `stop` is set first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _cancel(working, stopping)


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


async def _work(node: Node, line: Callable[[float], str], effects: Effects) -> bool:
    working = asyncio.ensure_future(node.run())
    telling = asyncio.ensure_future(_tell(line, effects))
    stopping = asyncio.ensure_future(effects.stop.wait())
    try:
        waiting: set[asyncio.Future[Any]] = {working, stopping}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            node.drain()
            await _leave(node, working, effects)
        if not working.done():
            effects.say("the orchestrator does not answer; leaving without its word (what it accepted stays booked)")
            return False
        effects.say(working.result())
        return not effects.stop.is_set()
    except IotaError as error:
        if error.code != "finished":
            raise
        effects.say(f"the run has ended: {error.cause}")
        return True
    finally:
        await _cancel(working, telling, stopping)


async def _leave(node: Node, working: asyncio.Future[str], effects: Effects) -> None:
    """Until the node is done, or has waited for a silent orchestrator for `LEAVE_SECONDS`."""
    silent_since: float | None = None
    while not working.done():
        await asyncio.wait({working}, timeout=LOOK_SECONDS)
        if not node.link.waiting:
            silent_since = None
        elif silent_since is None:
            silent_since = effects.clock.now()
        elif effects.clock.now() - silent_since > LEAVE_SECONDS:
            return


async def _tell(line: Callable[[float], str], effects: Effects) -> None:
    """The status line, when there is something to tell."""
    while True:
        await effects.clock.sleep(STATUS_SECONDS)
        text = line(effects.clock.now())
        if text:
            effects.say(text)
