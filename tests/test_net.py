"""One contract suite over every transport, signed calls on top of it, and what only HTTP can get wrong."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest

from iota.core.tasks import Done, Join, Turn
from iota.core.values import Tensor
from iota.errors import IotaError, Refused, Unreachable
from iota.net.address import format_join, parse_join
from iota.net.http import HttpChannel, HttpServer
from iota.net.memory import MemoryNetwork
from iota.net.peer import Caller, Incoming, Outgoing, PeerRefused, Receiver
from iota.net.transport import Buffer, Channel, Handler
from iota.wire.codes import refused
from iota.wire.keys import Identity, fingerprint
from iota.wire.message import check_origin, decode_body, seal
from iota.wire.nonces import NonceBook

MINER, HUB, EVE = (Identity.new(bytes([number]) * 32) for number in (1, 2, 3))
NOW = 1_700_000_000.0
LIMIT = 4 << 20


@dataclass
class Bench:
    """Servers and channels of one kind of transport."""

    kind: str
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    servers: dict[str, HttpServer] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)

    async def serve(self, handler: Handler) -> str:
        if self.kind == "memory":
            address = f"node-{len(self.network._listeners)}"
            self.network.listen(address, handler, limit=LIMIT)
            return address
        server = HttpServer(handler, "127.0.0.1", 0, limit=LIMIT, grace=0.1)
        await server.start()
        address = f"http://127.0.0.1:{server.port}"
        self.servers[address] = server
        return address

    async def down(self, address: str) -> None:
        if self.kind == "memory":
            self.network.unlisten(address)
        else:
            await self.servers[address].close()

    def channel(self, address: str) -> Channel:
        channel: Channel = self.network.channel(address) if self.kind == "memory" else HttpChannel(address, idle=5.0)
        self.channels.append(channel)
        return channel


@pytest.fixture(params=["memory", "http"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(request.param)
    yield bench
    for channel in bench.channels:
        await channel.close()
    for server in bench.servers.values():
        await server.close()


async def echo(message: bytes) -> Sequence[Buffer]:
    return [b"<", memoryview(message), b">"]


# ------------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 3_000_000])
async def test_parts_arrive_as_one_message_and_come_back_whole(bench: Bench, size: int) -> None:
    channel = bench.channel(await bench.serve(echo))
    body = np.random.default_rng(size).bytes(size)
    parts: list[Buffer] = [b"a", memoryview(body), bytearray(b"z")]
    assert await channel.request(parts, timeout=10) == b"<a" + body + b"z>"


async def test_200_concurrent_requests_map_to_their_replies(bench: Bench) -> None:
    async def slow_echo(message: bytes) -> Sequence[Buffer]:
        await asyncio.sleep((int(message) * 37 % 11) * 0.002)
        return [message]

    channel = bench.channel(await bench.serve(slow_echo))
    replies = await asyncio.gather(*(channel.request([str(n).encode()], timeout=20) for n in range(200)))
    assert [int(reply) for reply in replies] == list(range(200))


async def test_nobody_there(bench: Bench) -> None:
    address = await bench.serve(echo)
    channel = bench.channel(address)
    await channel.request([b"x"], timeout=5)
    await bench.down(address)
    with pytest.raises(Unreachable, match=address):
        await channel.request([b"x"], timeout=5)


async def test_no_reply_in_time_and_the_handler_runs_on(bench: Bench) -> None:
    handled = asyncio.Event()

    async def slow(message: bytes) -> Sequence[Buffer]:
        await asyncio.sleep(0.2)
        handled.set()
        return [message]

    channel = bench.channel(await bench.serve(slow))
    with pytest.raises(Unreachable, match=r"within 0.05 s"):
        await channel.request([b"x"], timeout=0.05)
    await asyncio.wait_for(handled.wait(), 5)


async def test_a_server_that_goes_away_during_a_request(bench: Bench) -> None:
    started = asyncio.Event()

    async def stuck(message: bytes) -> Sequence[Buffer]:
        started.set()
        await asyncio.Event().wait()
        return [message]

    address = await bench.serve(stuck)
    request = asyncio.create_task(bench.channel(address).request([b"x"], timeout=30))
    await started.wait()
    await bench.down(address)
    with pytest.raises(Unreachable, match=address):
        await request


async def test_closing_a_channel_ends_its_requests(bench: Bench) -> None:
    started = asyncio.Event()

    async def stuck(message: bytes) -> Sequence[Buffer]:
        started.set()
        await asyncio.sleep(0.5)
        return [message]

    channel = bench.channel(await bench.serve(stuck))
    request = asyncio.create_task(channel.request([b"x"], timeout=30))
    await started.wait()
    await channel.close()
    with pytest.raises(Unreachable):
        await request
    with pytest.raises(Unreachable, match="closed"):
        await channel.request([b"x"], timeout=5)


async def test_too_large_is_refused_before_the_handler(bench: Bench) -> None:
    seen: list[int] = []

    async def count(message: bytes) -> Sequence[Buffer]:
        seen.append(len(message))
        return [b"ok"]

    channel = bench.channel(await bench.serve(count))
    with pytest.raises(IotaError) as raised:
        await channel.request([bytes(LIMIT), b"1"], timeout=10)
    assert raised.value.code == "too_large" and str(LIMIT) in raised.value.cause and seen == []
    assert await channel.request([bytes(LIMIT)], timeout=10) == b"ok" and seen == [LIMIT]


async def test_a_failing_handler_is_unreachable_and_visible(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(message: bytes) -> Sequence[Buffer]:
        raise ZeroDivisionError("a bug")

    channel = bench.channel(await bench.serve(broken))
    with pytest.raises(Unreachable):
        await channel.request([b"x"], timeout=5)
    await asyncio.sleep(0)
    assert "a bug" in caplog.text


async def test_an_address_is_served_once(bench: Bench) -> None:
    address = await bench.serve(echo)
    with pytest.raises(IotaError) as raised:
        if bench.kind == "memory":
            bench.network.listen(address, echo)
        else:
            await HttpServer(echo, "127.0.0.1", bench.servers[address].port, limit=1, option="swarm.port").start()
    assert raised.value.code == "port_in_use"
    assert bench.kind == "memory" or "swarm.port" in raised.value.remedy


# ---------------------------------------------------------------------------------------------------- signed calls

TURN = Turn(session=3, seq=9, result=None, shown=(), draining=False)


def receiver(now: Callable[[], float] = lambda: NOW, nonces: NonceBook | None = None, who: Identity = HUB) -> Receiver:
    book = NonceBook() if nonces is None else nonces
    return Receiver(who, "r", now, nonces=book, request_types=Turn | Join, limits={"Turn": 1 << 20})


async def relay(incoming: Incoming) -> Outgoing:
    return Outgoing(Done(task=incoming.body.seq), incoming.tensors, incoming.control.tensors)


def turn(caller: Caller, tensors: Sequence[Tensor] = (), seq: int = 9) -> Awaitable[Any]:
    body = Turn(session=3, seq=seq, result=None, shown=(), draining=False)
    return caller.call(body, tensors, id=f"3/{seq}", session=3, timeout=20, reply_types=Done)


async def caller(bench: Bench, handler: Handler, now: Callable[[], float] = lambda: NOW, **changes: Any) -> Caller:
    channel = bench.channel(await bench.serve(handler))
    return Caller(MINER, channel, changes.get("recipient", HUB.key), changes.get("run", "r"), now)


async def test_a_tensor_goes_there_and_back_with_its_origin(bench: Bench) -> None:
    kept: list[Incoming] = []

    async def keep(incoming: Incoming) -> Outgoing:
        kept.append(incoming)
        return await relay(incoming)

    data = np.arange(5000, dtype="<f4")
    tensor = Tensor("float32", (5000,), memoryview(data).cast("B"))
    reply = await turn(await caller(bench, receiver().handler(keep)), [tensor])
    assert reply.body == Done(task=9) and bytes(reply.tensors[0].data) == data.tobytes()
    assert (kept[0].sender, kept[0].session, kept[0].id) == (MINER.key, 3, "3/9")
    produced = check_origin(kept[0].origin, run="r", sender=MINER.key, digest=tensor.head().digest)
    assert decode_body(produced, Turn) == TURN
    assert check_origin(reply.origin, run="r", sender=HUB.key).reply_to == kept[0].digest


async def test_200_concurrent_signed_calls(bench: Bench) -> None:
    """Requests of one sender overtake each other on several connections: those refused as replays are signed again."""
    one = await caller(bench, receiver().handler(relay))
    many = [Caller(Identity.new(bytes([9, n]) * 16), one.channel, HUB.key, "r", lambda: NOW) for n in range(194)]
    replies = await asyncio.gather(*(turn(who, seq=n) for n, who in enumerate([*many, *[one] * 6])))
    assert [reply.body.task for reply in replies] == list(range(200))


async def test_a_handlers_refusal_arrives(bench: Bench) -> None:
    async def decline(incoming: Incoming) -> Outgoing:
        raise Refused("lease_lost", "the lease ended", "Ask for another task.")

    with pytest.raises(PeerRefused) as raised:
        await turn(await caller(bench, receiver().handler(decline)))
    error = raised.value
    assert (error.code, error.cause, error.remedy) == ("lease_lost", "the lease ended", "Ask for another task.")
    assert error.time == NOW


@pytest.mark.parametrize("skew", [2.0, 70.0, -70.0, 3600.0])
async def test_a_skewed_client_learns_the_servers_time(bench: Bench, skew: float) -> None:
    who = await caller(bench, receiver().handler(relay), now=lambda: NOW + skew)
    if abs(skew) > 60:
        with pytest.raises(PeerRefused, match=f"{abs(skew):.1f} s") as raised:
            await turn(who)
        assert raised.value.code == "clock" and raised.value.time == NOW
        assert raised.value.offset == pytest.approx(-skew)
        who.offset = raised.value.offset
    assert (await turn(who)).body == Done(task=9)


async def test_refusals_by_the_receiver(bench: Bench) -> None:
    handler = receiver().handler(relay)
    for code, changes in (("wrong_run", {"run": "x"}), ("wrong_signer", {"recipient": EVE.key})):
        with pytest.raises(Refused) as raised:
            await turn(await caller(bench, handler, **changes))
        assert raised.value.code == code
    who = await caller(bench, handler)
    with pytest.raises(PeerRefused, match="Join, Turn") as refusal:
        await who.call(Done(task=1), id="", session=0, timeout=5, reply_types=Done)
    assert refusal.value.code == "unknown_method"
    big = Tensor("uint8", ((1 << 20) + 1,), bytes((1 << 20) + 1))
    for bad, code in ((big, "too_large"), (Tensor("float32", (1,), b"\x00\x00\xc0\x7f"), "not_finite")):
        with pytest.raises(PeerRefused) as refusal:
            await turn(who, [bad])
        assert refusal.value.code == code
    join = Join(role="miner", token="", software="", device="", dtype="", memory=0, disk=0, owner="")
    with pytest.raises(PeerRefused) as refusal:
        await who.call(join, [Tensor("uint8", (1,), b"1")], id="", session=0, timeout=5, reply_types=Done)
    assert refusal.value.code == "too_large", "a method without a limit takes no tensors"


async def test_a_newcomer_needs_no_run(bench: Bench) -> None:
    async def welcome(incoming: Incoming) -> Outgoing:
        return Outgoing(Done(task=1))

    who = await caller(bench, receiver().handler(welcome), run="")
    join = Join(role="miner", token="", software="", device="", dtype="", memory=0, disk=0, owner="")
    reply = await who.call(join, id="", session=0, timeout=5, reply_types=Done)
    assert reply.control.run == "r"
    with pytest.raises(PeerRefused) as raised:
        await turn(who)
    assert raised.value.code == "wrong_run"


async def test_replies_of_others_are_refused(bench: Bench) -> None:
    hub, eve, kept = receiver(), receiver(who=EVE), []

    async def impostor(raw: bytes) -> Sequence[Buffer]:
        return eve.reply(hub.open(raw), Done(task=1))

    async def repeater(raw: bytes) -> Sequence[Buffer]:
        kept.append(hub.reply(hub.open(raw), Done(task=1)))
        return kept[0]

    async def misfit(raw: bytes) -> Sequence[Buffer]:
        return hub.reply(hub.open(raw), TURN)

    with pytest.raises(Refused) as raised:
        await turn(await caller(bench, impostor))
    assert raised.value.code == "wrong_signer"
    who = await caller(bench, repeater, now=lambda: NOW + 1)
    await turn(who)
    with pytest.raises(Refused) as raised:
        await turn(who)
    assert raised.value.code == "wrong_reply"
    with pytest.raises(Refused) as raised:
        await turn(await caller(bench, misfit, now=lambda: NOW + 2))
    assert raised.value.code == "malformed" and not isinstance(raised.value, PeerRefused)


async def test_a_replay_is_refused_and_a_sender_behind_catches_up(bench: Bench) -> None:
    book, seen = NonceBook(), []

    async def count(incoming: Incoming) -> Outgoing:
        seen.append(incoming.control.nonce)
        return Outgoing(Done(task=1))

    handler = receiver(nonces=book).handler(count)
    await turn(await caller(bench, handler, now=lambda: NOW + 50))
    await turn(await caller(bench, handler))  # the clock was set back between two starts
    assert len(seen) == 2 and seen[1] > seen[0] > NOW * 1e9
    raw = b"".join(seal(MINER, recipient=HUB.key, run="r", session=3, time=NOW, nonce=seen[1], id="3/9", body=TURN))
    fresh = NonceBook()
    fresh.restore(book.export())
    with pytest.raises(Refused) as raised:
        receiver(nonces=fresh).open(raw)
    assert raised.value.code == "replayed"


def test_a_peer_cannot_use_up_our_nonces() -> None:
    """A hub that always says `replayed` with an absurd nonce gets a refusal raised, not a loop."""

    class Lying:
        asked = 0

        async def request(self, parts: Sequence[Buffer], *, timeout: float) -> bytes:
            self.asked += 1
            book = NonceBook()
            book.restore({MINER.key: (2**62, NOW)})
            hub = receiver(nonces=book)
            raw = b"".join(parts)
            try:
                hub.open(raw)
            except Refused as error:
                return b"".join(hub.refuse(raw, error))
            raise AssertionError

        async def close(self) -> None: ...

    channel = Lying()
    with pytest.raises(PeerRefused, match="nonce"):
        asyncio.run(_turn(channel))
    assert channel.asked == 1


async def _turn(channel: Channel) -> None:
    await turn(Caller(MINER, channel, HUB.key, "r", lambda: NOW))


# -------------------------------------------------------------------------------------------------------- HTTP only


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    async def page(query: Any) -> bytes:
        if "miner" not in query:
            raise IotaError("no_miner", "no miner was named", "Add ?miner=KEY.")
        return json.dumps({"miner": query["miner"]}).encode()

    server = HttpServer(
        receiver().handler(relay), "127.0.0.1", 0, limit=1000, body_timeout=0.2, pages={"/explain": page}
    )
    await server.start()
    yield server
    await server.close()


async def raw_http(server: HttpServer, text: str) -> tuple[int, dict[str, Any]]:
    """Send bytes as they are (headers promise more than is sent), return status and JSON."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(text.replace("\n", "\r\n").encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    body = await asyncio.wait_for(reader.readexactly(length), 5)
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    ("request_text", "status", "code"),
    [
        ("POST /iota/v1 HTTP/1.1\nHost: a\nContent-Length: 1001\n\n", 413, "too_large"),
        ("POST /iota/v1 HTTP/1.1\nHost: a\nContent-Length: 1152921504606846976\n\n", 413, "too_large"),
        ("POST /iota/v1 HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n\n1\na\n0\n\n", 411, "no_length"),
        ("POST /iota/v1 HTTP/1.1\nHost: a\n\n", 411, "no_length"),
        ("POST /iota/v1?a=1 HTTP/1.1\nHost: a\nContent-Length: 1\n\na", 400, "malformed"),
        ("POST /iota/v1 HTTP/1.1\nHost: a\nContent-Encoding: gzip\nContent-Length: 1\n\na", 400, "malformed"),
        ("POST /iota/v1 HTTP/1.1\nHost: a\nContent-Length: 5\n\nabc", 408, "too_slow"),
        ("POST /other HTTP/1.1\nHost: a\nContent-Length: 1\n\na", 404, "no_such_path"),
        ("PUT /iota/v1 HTTP/1.1\nHost: a\nContent-Length: 1\n\na", 405, "wrong_method"),
        ("GET /nothing HTTP/1.1\nHost: a\n\n", 404, "no_such_path"),
        ("GET /explain HTTP/1.1\nHost: a\n\n", 404, "no_miner"),
    ],
)
async def test_http_errors_are_json(server: HttpServer, request_text: str, status: int, code: str) -> None:
    got, body = await raw_http(server, request_text)
    assert (got, body["code"]) == (status, code) and body["cause"]


async def test_pages(server: HttpServer) -> None:
    assert await raw_http(server, "GET /health HTTP/1.1\nHost: a\n\n") == (200, {"status": "ok"})
    assert await raw_http(server, "GET /explain?miner=k HTTP/1.1\nHost: a\n\n") == (200, {"miner": "k"})


async def test_a_refusal_travels_under_its_status(server: HttpServer) -> None:
    url = f"http://127.0.0.1:{server.port}/iota/v1"
    async with aiohttp.ClientSession() as session, session.post(url, data=bytes(100)) as response:
        assert response.status == 400 and b"malformed" in await response.read()


async def test_what_else_may_answer_at_an_address() -> None:
    answers = {
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\nproxy": "HTTP 502",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n": "HTTP 302",
        b"SSH-2.0-OpenSSH\r\n": "cannot reach",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-iota-message\r\nContent-Length: 50\r\n\r\nhalf": "idle",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-iota-message\r\nContent-Length: 9999\r\n\r\n": "9999 bytes",
    }
    for answer, text in answers.items():

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await reader.read()
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        channel = HttpChannel(f"http://127.0.0.1:{port}", idle=0.2, limit=1000)
        with pytest.raises(IotaError, match=text) as raised:
            await channel.request([b"x"], timeout=5)
        assert raised.value.code == ("too_large" if "9999" in text else "unreachable")
        await channel.close()
        listener.close()


async def test_hosts_that_cannot_be() -> None:
    with pytest.raises(IotaError) as raised:
        await HttpServer(echo, "192.0.2.1", 0, limit=1).start()
    assert raised.value.code == "bad_address"
    channel = HttpChannel("http://does-not-exist.invalid:8400", connect=2.0)
    with pytest.raises(Unreachable, match=r"does-not-exist"):
        await channel.request([b"x"], timeout=3)
    await channel.close()


# ---------------------------------------------------------------------------------------------------------- join URL


def test_join_urls() -> None:
    for base in ("http://10.0.0.1:8400", "https://hub.example", "http://[2001:db8::1]:8400", "http://localhost:1"):
        full = parse_join(format_join(base, HUB.key))
        assert (full.base, full.key) == (base, HUB.key) and full.matches(HUB.key) and not full.matches(EVE.key)
        short = parse_join(f"{base}/#{fingerprint(HUB.key)}")
        assert short.key == "" and short.matches(HUB.key) and not short.matches(EVE.key)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://0.0.0.0:8400/#" + HUB.key, "0.0.0.0 means every address"),
        ("http://[::]:8400/#" + HUB.key, ":: means every address"),
        ("http://host:0/#" + HUB.key, "port 0"),
        ("http://host:99999/#" + HUB.key, "out of range"),
        ("http://host:x/#" + HUB.key, "could not be cast"),
        ("http://:8400/#" + HUB.key, "host is missing"),
        ("http://host:8400/", "key after # is missing"),
        ("http://host:8400/#abc", "no key"),
        ("http://host:8400/#" + "g" * 64, "no key"),
        ("ftp://host:8400/#" + HUB.key, "http://"),
        ("host:8400#" + HUB.key, "http://"),
        ("http://user@host:8400/#" + HUB.key, "only host"),
        ("http://host:8400/x#" + HUB.key, "only host"),
        ("http://[host:8400/#" + HUB.key, "cannot be used"),
    ],
)
def test_wrong_join_urls(url: str, text: str) -> None:
    with pytest.raises(IotaError, match="cannot be used") as raised:
        parse_join(url)
    assert text in raised.value.cause + " cannot be used" and "http://host:8400/#<key>" in raised.value.remedy


def test_refused_is_what_the_table_makes() -> None:
    assert isinstance(refused("clock", "x"), Refused)
