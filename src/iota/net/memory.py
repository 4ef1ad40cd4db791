"""Transport in memory: the same interface and the same failures as HTTP, for tests and the simulator.

Time is the running loop's alone (`asyncio` timers), so it works under a virtual-time loop. Messages are copied at both
ends, as a socket would; a handler runs on when its client gave up, and ends when its address is taken down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from iota.errors import IotaError, Unreachable
from iota.net.transport import Buffer, Handler


class _Listener:
    """One address: its handler and the handler tasks that run."""

    def __init__(self, handler: Handler, limit: int) -> None:
        self.handler = handler
        self.limit = limit
        self.tasks: set[asyncio.Task[None]] = set()


class MemoryNetwork:
    """A set of addresses (any strings). One network is one "internet": what is not listening is unreachable."""

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}

    def listen(self, address: str, handler: Handler, *, limit: int = 1 << 40) -> None:
        """Serve `address`; messages over `limit` bytes are refused before the handler sees them. Raises IotaError
        `port_in_use` when it is taken."""
        if address in self._listeners:
            raise IotaError("port_in_use", f"{address} is already in use", "Choose another address.")
        self._listeners[address] = _Listener(handler, limit)

    def unlisten(self, address: str) -> None:
        """Take the address down at once: running handlers are cancelled, their clients get `Unreachable`."""
        listener = self._listeners.pop(address, None)
        for task in list(listener.tasks) if listener else ():
            task.cancel()

    def channel(self, address: str) -> MemoryChannel:
        """A way to `address`, whether or not anything listens there yet."""
        return MemoryChannel(self, address)

    def _deliver(self, address: str, message: bytes, reply: asyncio.Future[bytes]) -> None:
        """Start the handler; `reply` is resolved unless its client is gone by then."""
        listener = self._listeners.get(address)
        if listener is None:
            raise Unreachable(f"nothing listens at {address}")
        if len(message) > listener.limit:
            raise IotaError(
                "too_large", f"{address} takes messages of at most {listener.limit} bytes, this one has {len(message)}"
            )
        task = asyncio.get_running_loop().create_task(_serve(listener.handler, message, reply))
        listener.tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            listener.tasks.discard(task)
            if not reply.done():
                reply.set_exception(Unreachable(f"{address} broke off without a reply"))
            # A handler's own error stays visible: the loop reports the task's exception, as an HTTP server logs it.
            if not task.cancelled() and task.exception() is not None:
                context = {"message": f"handler at {address} failed", "exception": task.exception(), "task": task}
                task.get_loop().call_exception_handler(context)

        task.add_done_callback(ended)


async def _serve(handler: Handler, message: bytes, reply: asyncio.Future[bytes]) -> None:
    parts = await handler(message)
    if not reply.done():
        reply.set_result(b"".join(parts))


class MemoryChannel:
    """`Channel` over a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self.address = address
        self._closed = False
        self._waiting: set[asyncio.Future[bytes]] = set()

    async def request(self, parts: Sequence[Buffer], *, timeout: float) -> bytes:
        if self._closed:
            raise Unreachable(f"the channel to {self.address} is closed")
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.add(reply)
        try:
            self._network._deliver(self.address, b"".join(parts), reply)
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError:
            raise Unreachable(f"no reply from {self.address} within {timeout:g} s") from None
        finally:
            self._waiting.discard(reply)
            if not reply.done():
                reply.cancel()

    async def close(self) -> None:
        self._closed = True
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(Unreachable(f"the channel to {self.address} was closed"))
