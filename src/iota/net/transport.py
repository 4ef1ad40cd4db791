"""The transport interface: raw bytes to a peer and back. Signing and checking sit above it (`iota.net.peer`).

Two sides: a `Channel` carries one request and brings one reply; a `Handler` answers requests. Implementations: in
memory (`iota.net.memory`, also under the simulator's faults) and HTTP (`iota.net.http`). One contract suite holds them
all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview
Handler = Callable[[bytes], Awaitable[Sequence[Buffer]]]
"""Takes a whole request message, returns the reply message as buffers to be written one after another."""


class Channel(Protocol):
    """A way to one peer. Safe for concurrent requests; each reply belongs to its request."""

    async def request(self, parts: Sequence[Buffer], *, timeout: float) -> bytes:
        """Send the concatenation of `parts`, return the peer's whole reply.

        Raises `errors.Unreachable` when no whole reply came within `timeout` seconds, for whatever reason: the request
        may or may not have been handled, so only requests with an idempotency id may be repeated.
        Raises `errors.IotaError("too_large", ...)` when the peer's declared length limit forbids the request.
        """
        ...

    async def close(self) -> None:
        """Release connections; requests in flight fail with `Unreachable`."""
        ...


class RefusedReply(list[Buffer]):
    """Reply buffers of a signed refusal. A transport that has status codes may show `code` in them; what counts for the
    peer is the signed message."""

    def __init__(self, parts: Sequence[Buffer], code: str) -> None:
        super().__init__(parts)
        self.code = code
