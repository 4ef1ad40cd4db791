"""A seeded network in memory: latency, bandwidth and faults between handlers and channels of `iota.net.transport`.

A request is sent over its link, handled by the listener in a task of its own (which goes on when the client gives up,
as a real server does), and its reply sent back. The sender's uplink carries one message after another; latency is drawn
per message, keyed by (seed, link, message number), so traffic elsewhere does not change it. A lost message looks to the
client like every other silence: `errors.Unreachable` at its timeout. A killed or unknown peer refuses at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from iota.core.values import sha256
from iota.errors import IotaError, Unreachable
from iota.net.transport import Buffer, Handler
from iota.sim.effects import Gate, Host, draw
from iota.sim.faults import FaultPlan, Injector
from iota.sim.loop import VirtualLoop
from iota.store.remote import Objects


@dataclass(frozen=True)
class Link:
    """One direction between two nodes: seconds of latency, times a factor in [1, 1 + jitter); bytes per second."""

    latency: float = 0.02
    jitter: float = 0.5
    bandwidth: float = 12_500_000.0


@dataclass
class Listener:
    """A handler at an address. `close()` ends it: later requests are refused, those being handled are cut off."""

    address: str
    handler: Handler
    node: str
    limit: int | None
    host: Host | None
    network: SimNetwork
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        self.network._forget(self)

    @property
    def up(self) -> bool:
        return not self.closed and not (self.host and self.host.gate.dead)


class SimNetwork:
    """The network. `faults`: an `Injector`, or a plan to make one of. `attach` hosts before they listen, so that frozen
    and dead machines behave as such; nodes without a host are always up.

    `sent` counts messages and bytes by directed link ("a>b"); `digest()` identifies everything that ever happened.
    """

    def __init__(
        self, loop: VirtualLoop, seed: int = 0, faults: Injector | FaultPlan | None = None, link: Link | None = None
    ) -> None:
        self.sent: dict[str, Counter[str]] = {}
        self.injector = faults if isinstance(faults, Injector) else Injector(loop, faults or FaultPlan())
        self._loop = loop
        self._seed = seed
        self._default = link or Link()
        self._links: dict[tuple[str, str], Link] = {}
        self._listeners: dict[str, Listener] = {}
        self._hosts: dict[str, Host] = {}
        self._uplink_free: dict[str, float] = {}
        self._working: dict[asyncio.Task[Any], Listener | None] = {}
        self._story = hashlib.sha256()

    # ---------------------------------------------------------------------------------------------------- set up

    def attach(self, host: Host) -> None:
        """`host` is the machine of the node of its name from now on (also after a restart)."""
        self._hosts[host.name] = host
        self.injector.attach(host)

    def set_link(self, source: str, target: str, link: Link) -> None:
        """Other than the default for messages from `source` to `target` ("*": any)."""
        self._links[source, target] = link

    def listen(self, address: str, handler: Handler, *, node: str = "", limit: int | None = None) -> Listener:
        """Serve `address`, on the machine of `node` (default: the address names the node). `limit`: bytes a request may
        have. Raises IotaError("port_in_use") when someone listens there."""
        old = self._listeners.get(address)
        if old is not None and old.up:
            raise IotaError("port_in_use", f"Something already listens at {address}", "Choose another address.")
        name = node or address
        listener = self._listeners[address] = Listener(address, handler, name, limit, self._hosts.get(name), self)
        return listener

    def channel(self, source: str, address: str) -> SimChannel:
        """A way from node `source` to whoever listens at `address` when a request arrives."""
        return SimChannel(self, source, address)

    async def close(self) -> None:
        """Close every listener, lose what is on its way, and wait for the requests being handled to end."""
        for listener in list(self._listeners.values()):
            listener.close()
        while self._working:
            _cancel(self._working)
            await asyncio.wait(list(self._working))

    def digest(self) -> str:
        """SHA-256 over every message so far: when, whence, whither, length, fate. Equal for equal seeds."""
        return self._story.hexdigest()

    # ------------------------------------------------------------------------------------------------------ carry

    def gate(self, node: str) -> Gate | None:
        host = self._hosts.get(node)
        return host.gate if host else None

    async def pass_gate(self, node: str) -> None:
        gate = self.gate(node)
        if gate:
            await gate.passage()

    async def carry(self, source: str, target: str, size: int) -> bool:
        """Take the time of `size` bytes from one to the other; False when a cut swallowed them."""
        link = self._link(source, target)
        count = self.sent.setdefault(f"{source}>{target}", Counter())
        count["messages"] += 1
        count["bytes"] += size
        number = count["messages"]
        slow = self.injector.hit(source, target, "slow_link")
        factor = slow.value if slow else 1.0
        start = max(self._loop.time(), self._uplink_free.get(source, 0.0))
        leaves = self._uplink_free[source] = start + factor * size / link.bandwidth
        jitter = 1.0 + link.jitter * draw(self._seed, "latency", source, target, number)
        arrives = leaves + factor * link.latency * jitter
        late = self.injector.hit(source, target, "reorder")
        if late:
            arrives += (late.value or 1.0) * draw(self._seed, "reorder", source, target, number)
        lost = bool(self.injector.hit(source, target, "cut"))
        await asyncio.sleep(arrives - self._loop.time())
        lost = lost or bool(self.injector.hit(source, target, "cut"))
        self.note("lost" if lost else "carried", source, target, size)
        return not lost

    def damage(self, source: str, target: str, data: bytes) -> bytes:
        """The bytes as they arrive: up to four of them flipped when a `corrupt` fault hits."""
        if not data or not self.injector.hit(source, target, "corrupt"):
            return data
        self.note("corrupted", source, target, len(data))
        out = bytearray(data)
        number = self.sent[f"{source}>{target}"]["messages"]
        for flip in range(1 + int(4 * draw(self._seed, "flips", source, target, number))):
            place = int(len(out) * draw(self._seed, "place", source, target, number, flip))
            out[place] ^= 1 + int(255 * draw(self._seed, "mask", source, target, number, flip))
        return bytes(out)

    def note(self, what: str, source: str, target: str, size: int) -> None:
        self._story.update(f"{self._loop.time():.9f} {what} {source}>{target} {size}\n".encode())

    def send(self, trip: Coroutine[Any, Any, None], name: str) -> None:
        """Run what happens between two machines; it belongs to neither."""
        self._track(self._loop.create_task(trip, name=name), None)

    def serve(self, listener: Listener, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run the handling of a request on the listener's machine; a failure in it goes to the loop's `errors`."""
        if listener.host:
            task = listener.host.spawn(work, name)
        else:
            task = self._loop.create_task(work, name=f"{listener.node}/{name}")
        self._track(task, listener)

    def _track(self, task: asyncio.Task[None], listener: Listener | None) -> None:
        self._working[task] = listener
        task.add_done_callback(lambda done: self._working.pop(done, None))

    def _forget(self, listener: Listener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]
        _cancel(task for task, owner in self._working.items() if owner is listener)

    def _link(self, source: str, target: str) -> Link:
        keys = ((source, target), (source, "*"), ("*", target))
        return next((self._links[key] for key in keys if key in self._links), self._default)


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if not task.done():  # cancelling a task that failed would silence its failure
            task.cancel()


class SimChannel:
    """`net.transport.Channel` over the simulated network."""

    def __init__(self, network: SimNetwork, source: str, address: str) -> None:
        self._network = network
        self._source = source
        self._address = address
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._requests = 0
        self._closed = False

    async def request(self, parts: Sequence[Buffer], *, timeout: float) -> bytes:
        """See `net.transport.Channel.request`. Raises CancelledError when the sender's own machine is dead."""
        if self._closed:
            raise Unreachable(f"The channel to {self._address} is closed")
        network = self._network
        await network.pass_gate(self._source)
        number = self._requests = self._requests + 1
        reply: asyncio.Future[bytes] = network._loop.create_future()
        self._pending[number] = reply
        # On the way the message belongs to the network: the sender may stop waiting, it still arrives.
        network.send(self._deliver(b"".join(parts), reply), f"network/{self._source}>{self._address}/{number}")
        try:
            async with asyncio.timeout(timeout):
                return await reply
        except TimeoutError:
            raise Unreachable(f"{self._address} did not answer within {timeout:g} s") from None
        finally:
            del self._pending[number]
            await network.pass_gate(self._source)

    async def close(self) -> None:
        self._closed = True
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(Unreachable(f"The channel to {self._address} was closed"))

    async def _deliver(self, body: bytes, reply: asyncio.Future[bytes]) -> None:
        network, injector = self._network, self._network.injector
        listener = network._listeners.get(self._address)
        target = listener.node if listener else self._address
        if not await network.carry(self._source, target, len(body)) or injector.hit(
            self._source, target, "drop_request"
        ):
            return
        listener = network._listeners.get(self._address)
        if listener is None or not listener.up:
            _fail(reply, Unreachable(f"Nothing listens at {self._address}"))
        elif listener.limit is not None and len(body) > listener.limit:
            text = f"A request of {len(body)} bytes is over the limit of {listener.limit} at {self._address}"
            _fail(reply, IotaError("too_large", text, "Send less in one request."))
        else:
            body = network.damage(self._source, target, body)
            network.serve(listener, self._handle(listener, body, reply), f"request from {self._source}")
            if injector.hit(self._source, target, "duplicate"):
                again = await network.carry(self._source, target, len(body))
                if again and listener.up:
                    network.serve(listener, self._handle(listener, body, reply), f"duplicate from {self._source}")

    async def _handle(self, listener: Listener, body: bytes, reply: asyncio.Future[bytes]) -> None:
        network = self._network
        try:
            await network.pass_gate(listener.node)
            answer = b"".join(await listener.handler(body))
            await network.pass_gate(listener.node)
        except asyncio.CancelledError:
            _fail(reply, Unreachable(f"{self._address} went away while it handled the request"))
            raise
        except Exception:
            _fail(reply, Unreachable(f"{self._address} failed while it handled the request"))
            raise
        if not await network.carry(listener.node, self._source, len(answer)):
            return
        if network.injector.hit(listener.node, self._source, "drop_reply"):
            return
        if not reply.done():
            reply.set_result(network.damage(listener.node, self._source, answer))


def _fail(reply: asyncio.Future[bytes], error: IotaError) -> None:
    if not reply.done():
        reply.set_exception(error)


class SimObjects:
    """`store.remote.Objects` with the simulated network between node `source` and the store on node `store`.

    `objects` does the storing (`DirectObjects`). One attempt: what `HttpObjects` would repeat, callers here see.

    A lost message is `Unreachable` after `timeout` seconds. On `drop_reply` a put is stored although it seems to fail;
    `corrupt` damages what is put (a store that checks digests refuses it) or got; the store's `full_disk` raises
    IotaError("disk_full") from `put`.
    """

    def __init__(
        self, objects: Objects, network: SimNetwork, source: str, store: str = "store", timeout: float = 30.0
    ) -> None:
        self._objects = objects
        self._network = network
        self._source = source
        self._store = store
        self._timeout = timeout

    async def get(
        self, url: str, start: int = 0, stop: int | None = None, *, expect_sha256: str | None = None
    ) -> bytes:
        await self._there(256)
        data = await self._objects.get(url, start, stop)
        await self._back(len(data))
        data = self._network.damage(self._store, self._source, data)
        if expect_sha256 is not None and sha256(data) != expect_sha256:
            raise IotaError("corrupt", f"The bytes read from {self._store} are not those with SHA-256 {expect_sha256}")
        return data

    async def put(self, url: str, parts: Sequence[Buffer]) -> None:
        body = b"".join(parts)
        await self._there(len(body))
        if self._network.injector.active(self._store, "full_disk"):
            raise IotaError("disk_full", f"The disk of {self._store} is full", "Free space there, then repeat.")
        await self._objects.put(url, [self._network.damage(self._source, self._store, body)])
        await self._back(64)

    async def close(self) -> None:
        await self._objects.close()

    async def _there(self, size: int) -> None:
        network = self._network
        await network.pass_gate(self._source)
        carried = await network.carry(self._source, self._store, size)
        store = network.gate(self._store)
        if carried and store and store.dead:
            raise Unreachable(f"Nothing listens at {self._store}")
        if not carried or network.injector.hit(self._source, self._store, "drop_request"):
            await self._silence()
        if store and store.frozen:
            try:
                async with asyncio.timeout(self._timeout):
                    await store.passage()
            except TimeoutError:
                raise Unreachable(f"{self._store} did not answer within {self._timeout:g} s") from None

    async def _back(self, size: int) -> None:
        network = self._network
        carried = await network.carry(self._store, self._source, size)
        if not carried or network.injector.hit(self._store, self._source, "drop_reply"):
            await self._silence()
        await network.pass_gate(self._source)

    async def _silence(self) -> None:
        await asyncio.sleep(self._timeout)
        raise Unreachable(f"{self._store} did not answer within {self._timeout:g} s")
