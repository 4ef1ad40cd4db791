"""How a miner or validator gets the run's data: token shards by signed link, asked of the orchestrator when needed.

`TokenReader.train(manifest, data_fetch(...), folder)` then checks each shard's digest against the signed manifest, so
neither the store nor a peer can supply other ids or labels (design section 2).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from iota.core import queries
from iota.net.peer import Caller
from iota.store.remote import Objects


def data_fetch(
    caller: Caller, objects: Objects, name_request: Callable[[], str], *, timeout: float = 30.0
) -> Callable[[str], Awaitable[bytes]]:
    """A `fetch(object name) -> bytes` for `TokenReader`. `name_request` gives a fresh message id.

    Raises what `Caller.call` and `Objects.get` raise; an expired link is simply asked for again by the next fetch."""

    async def fetch(name: str) -> bytes:
        reply = await caller.call(
            queries.DataLinks(names=(name,)),
            id=name_request(),
            session=0,
            timeout=timeout,
            reply_types=queries.Document,
        )
        urls = msgspec.json.decode(reply.tensors[0].data, type=dict[str, str])
        return await objects.get(urls[name])

    return fetch
