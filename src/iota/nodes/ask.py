"""Asking an orchestrator from outside of the task loop: status, explanations, the ledger, an operator's orders.

Readers use a key of the moment; every answer is signed by the orchestrator that the join URL names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from iota.core import queries
from iota.core.values import Key
from iota.errors import IotaError, Unreachable
from iota.net.address import JoinAddress, parse_join
from iota.net.http import HttpChannel
from iota.net.peer import Caller
from iota.nodes.effects import Clock, Entropy
from iota.wire.keys import Identity, is_key

PAGE_LIMIT = 64 * 1024


class Health(msgspec.Struct, frozen=True):
    """An orchestrator's page /health, unsigned: what one needs to know before the first signed request."""

    run: str
    key: Key


async def get_page(url: str, timeout: float = 5.0) -> bytes:
    """A small GET. Raises `Unreachable`."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.get(url, allow_redirects=False) as reply,
        ):
            body = await reply.content.read(PAGE_LIMIT)
            if reply.status != 200:
                raise Unreachable(f"{url} answered HTTP {reply.status}", "Check that this is the right address.")
            return body
    except TimeoutError:
        raise Unreachable(f"no answer from {url} within {timeout:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"cannot reach {urlsplit(url).netloc}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return "connection refused (nothing listens there)" if isinstance(error, ConnectionRefusedError) or (
        isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)
    ) else str(error) or type(error).__name__  # fmt: skip


async def find(address: JoinAddress, timeout: float = 5.0) -> Health:
    """The orchestrator's run and whole key. Raises `Unreachable`, and IotaError `wrong_key` when another one answers
    there than the URL names."""
    page = await get_page(f"{address.base}/health", timeout)
    try:
        health = msgspec.json.decode(page, type=Health)
    except msgspec.MsgspecError:
        raise Unreachable(
            f"{address.base} is no orchestrator: its /health names no run and key",
            "Check the join URL's host and port.",
        ) from None
    if not is_key(health.key) or not address.matches(health.key):
        raise IotaError(
            "wrong_key",
            f"the orchestrator at {address.base} has the key {health.key[:16]}, the join URL names another",
            "Copy the join URL again from the run's operator (it lies in the run's folder as join.url).",
        )
    return health


class Asker:
    """A connection for queries. Use as an async context manager."""

    def __init__(self, url: str, *, clock: Clock, entropy: Entropy, identity: Identity | None = None) -> None:
        """Raises IotaError `bad_url`."""
        self.address = parse_join(url)
        self.identity = identity or Identity.new(entropy(32))
        self.run = ""
        self._clock, self._entropy = clock, entropy
        self._channel = HttpChannel(self.address.base)
        self._caller: Caller | None = None

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def ask(self, query: queries.Query, timeout: float = 20.0) -> bytes:
        """The answer's document. Raises `Unreachable`, `Refused` (the orchestrator's), IotaError `wrong_key`."""
        if self._caller is None:
            health = await find(self.address)
            self.run = health.run
            self._caller = Caller(self.identity, self._channel, health.key, health.run, self._clock.now)
        name = self._entropy(16).hex()
        reply = await self._caller.call(query, id=name, session=0, timeout=timeout, reply_types=queries.Document)
        return bytes(reply.tensors[0].data) if reply.tensors else b""

    async def json(self, query: queries.Query, timeout: float = 20.0) -> Any:
        """The answer decoded from JSON."""
        return msgspec.json.decode(await self.ask(query, timeout))


async def retry_until_found(
    address: JoinAddress, *, clock: Clock, say: Callable[[str], None], give_up: float, pause: float = 1.0
) -> Health:
    """Wait for an orchestrator: back-off from `pause` to 10 s, one line each, at most `give_up` seconds (0: for ever).

    Raises the last `Unreachable` then; a wrong key is raised at once."""
    end = clock.now() + give_up if give_up else float("inf")
    while True:
        try:
            return await find(address)
        except Unreachable as error:
            if clock.now() + pause > end:
                raise
            say(f"{error.cause}; next try in {pause:.0f} s")
        await clock.sleep(pause)
        pause = min(2 * pause, 10.0)
