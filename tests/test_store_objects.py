"""One contract for both ways to use a link, and what HTTP adds: refusals, slow and broken transfers, retries."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from nacl.signing import SigningKey

from iota.core.values import sha256
from iota.errors import IotaError, Refused
from iota.store import files
from iota.store.blobs import Blobs, FolderBlobs, MemoryBlobs
from iota.store.links import sign_link
from iota.store.remote import DirectObjects, HttpObjects, Objects
from iota.store.service import address, run_service, serve_blobs


class Signer:
    def __init__(self, seed: int = 1) -> None:
        self._key = SigningKey(bytes([seed]) * 32)
        self.key = bytes(self._key.verify_key).hex()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data).signature


SIGNER = Signer()


class Store:
    """A store at virtual time `now`, and how a peer reaches it."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self.now = 1000.0
        self.base = "http://store"
        self.objects: Objects = DirectObjects(blobs, SIGNER.key, self.time, max_object=5_000_000)

    def time(self) -> float:
        return self.now

    def link(self, verb: str, key: str, **limits) -> str:
        return sign_link(SIGNER, self.base, verb, key, 1010.0, **limits)


@pytest.fixture(params=["direct", "http"])
async def store(request, tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(FolderBlobs(tmp_path / "blobs", durable=False))
    if request.param == "direct":
        yield store
        return
    async for served in serve(store):
        yield served


async def serve(store: Store, **more: float) -> AsyncIterator[Store]:
    runner = await serve_blobs(store.blobs, SIGNER.key, "127.0.0.1", 0, store.time, 5_000_000, **more)
    store.base = "http://{}:{}".format(*address(runner))
    store.objects = HttpObjects(pause=0.001)
    yield store
    await store.objects.close()
    await runner.cleanup()


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Store]:
    async for served in serve(Store(FolderBlobs(tmp_path / "blobs", durable=False)), idle=0.2):
        yield served


async def code_of(awaitable: Awaitable[object]) -> str:
    with pytest.raises(IotaError) as caught:
        await awaitable
    return caught.value.code


# ----------------------------------------------------------------------------------------------------- contract


async def test_put_then_get(store: Store) -> None:
    data = os.urandom(3_000_001)
    url = store.link("PUT", "r/up", length=len(data), sha256=sha256(data))
    await store.objects.put(url, [data[:10], memoryview(data)[10:2_000_000], bytearray(data[2_000_000:])])
    await store.objects.put(url, [data])  # a repeated upload of the same bytes is no error
    assert await store.blobs.get("r/up") == data
    get = store.link("GET", "r/up")
    assert await store.objects.get(get, expect_sha256=sha256(data)) == data
    assert await store.objects.get(get, 1_500_000, 1_500_007, expect_sha256=sha256(data[1_500_000:1_500_007]))
    assert await store.objects.get(get, 2_999_999) == data[2_999_999:]
    spans = [(n * 65536, (n + 1) * 65536) for n in range(40)]
    assert await asyncio.gather(*(store.objects.get(get, *span) for span in spans)) == [data[a:b] for a, b in spans]


async def test_an_object_is_written_once(store: Store) -> None:
    """Who holds a PUT link cannot change what others rely on already, not even by the same length."""
    link = store.link("PUT", "once", max_length=10)
    await store.objects.put(link, [b"right"])
    assert await code_of(store.objects.put(link, [b"wrong"])) == "exists"
    assert await code_of(store.objects.put(link, [b"longer one"])) == "exists"
    await store.objects.put(link, [b"ri", b"ght"])
    assert await store.blobs.get("once") == b"right"


async def test_empty_objects_and_ranges(store: Store) -> None:
    await store.objects.put(store.link("PUT", "e", max_length=0), [])
    assert await store.objects.get(store.link("GET", "e"), expect_sha256=sha256(b"")) == b""
    assert await store.objects.get(store.link("GET", "e"), 0, 0) == b""
    assert await code_of(store.objects.get(store.link("GET", "e"), 0, 1)) == "bad_range"
    assert await code_of(store.objects.get(store.link("GET", "e"), 1, 1)) == "bad_range"


async def test_refusals(store: Store) -> None:
    await store.blobs.put("k", [b"0123456789"])
    get, put = store.link("GET", "k"), store.link("PUT", "k", length=3, sha256=sha256(b"abc"))
    objects = store.objects
    assert await code_of(objects.get(store.link("GET", "none"))) == "no_object"
    assert await code_of(objects.get(put)) == "wrong_verb"
    assert await code_of(objects.put(get, [b"abc"])) == "wrong_verb"
    assert await code_of(objects.put(put.replace("/k?", "/k2?"), [b"abc"])) == "bad_signature"
    assert await code_of(objects.get(get.partition("?")[0])) == "bad_signature"
    assert await code_of(objects.put(put, [b"abcd"])) == "wrong_length"
    assert await code_of(objects.put(put, [b"abd"])) == "corrupt"
    assert await code_of(objects.put(store.link("PUT", "k", max_length=3), [b"abcd"])) == "too_large"
    assert await code_of(objects.put(store.link("PUT", "k", max_length=10**9), [bytes(5_000_001)])) == "too_large"
    assert await code_of(objects.get(get, 5, 11)) == "bad_range"
    assert await code_of(objects.get(get, expect_sha256=sha256(b"other"))) == "corrupt"
    store.now = 1010.5
    with pytest.raises(Refused, match="fresh link") as caught:
        await objects.get(get)
    assert caught.value.code == "expired"
    assert await code_of(objects.put(put, [b"abc"])) == "expired"
    assert await store.blobs.list() == [("k", 10)]


async def test_forty_parallel_puts(store: Store) -> None:
    bodies = {f"p/{n}": os.urandom(30_000) for n in range(40)}
    await asyncio.gather(
        *(
            store.objects.put(store.link("PUT", key, length=30_000, sha256=sha256(body)), [body])
            for key, body in bodies.items()
        )
    )
    assert {key: await store.blobs.get(key) for key, _ in await store.blobs.list("p/")} == bodies


async def test_a_full_disk_is_said_and_leaves_nothing(store: Store, tmp_path: Path, monkeypatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", full)
        assert await code_of(store.objects.put(store.link("PUT", "k", max_length=9), [b"abc"])) == "disk_full"
    assert await store.blobs.list() == []
    assert list((tmp_path / "blobs" / files.TEMP_SUFFIX).iterdir()) == []
    await store.objects.put(store.link("PUT", "k", max_length=9), [b"abc"])


# -------------------------------------------------------------------------------------------------- the service


async def raw(store: Store, head: str, *pieces: bytes, pause: float = 0.0) -> tuple[int, dict[str, str]]:
    """Write a request by hand, piece by piece; the reply's status and JSON body."""
    host, port = store.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode())
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause)
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    status, _, body = reply.partition(b"\r\n\r\n")
    return int(status.split()[1]), json.loads(body)


def put_head(store: Store, link: str, *headers: str) -> str:
    path = link.removeprefix(store.base)
    return f"PUT {path} HTTP/1.1\nHost: x\nConnection: close\n" + "".join(f"{line}\n" for line in headers) + "\n"


def unfinished(http: Store) -> list[Path]:
    blobs = http.blobs
    assert isinstance(blobs, FolderBlobs)
    return list(blobs._temp.iterdir())


async def test_status_codes_and_json_bodies(http: Store) -> None:
    await http.blobs.put("k", [b"0123456789"])
    get, put = http.link("GET", "k"), http.link("PUT", "n", length=3, sha256=sha256(b"abc"))
    wanted = [
        ("GET", get, b"", 200, None),
        ("HEAD", get, b"", 200, None),
        ("GET", http.link("GET", "none"), b"", 404, "no_object"),
        ("PUT", get, b"abc", 403, "wrong_verb"),
        ("DELETE", get, b"", 403, "wrong_verb"),
        ("GET", put, b"", 403, "wrong_verb"),
        ("GET", get.replace("expires=1", "expires=2"), b"", 403, "bad_signature"),
        ("GET", get.partition("?")[0], b"", 403, "bad_signature"),
        ("PUT", put, b"abcd", 409, "wrong_length"),
        ("PUT", put, b"abd", 422, "corrupt"),
        ("PUT", http.link("PUT", "n", max_length=2), b"abc", 413, "too_large"),
        ("GET", http.base + "/elsewhere", b"", 404, "no_route"),
        ("PUT", put, b"abc", 201, None),
    ]
    async with aiohttp.ClientSession() as session:
        for method, url, body, status, code in wanted:
            async with session.request(method, url, data=body or None) as reply:
                assert reply.status == status, (method, url)
                if code is not None:
                    told = await reply.json()
                    assert told["code"] == code
                    assert set(told) == {"code", "cause", "remedy"}
        async with session.get(get, headers={"Range": "bytes=2-4"}) as reply:
            assert (reply.status, reply.headers["Content-Range"], await reply.read()) == (206, "bytes 2-4/10", b"234")
        async with session.get(get, headers={"Range": "bytes=8-99"}) as reply:
            assert (reply.status, await reply.read()) == (206, b"89")
        for bad in ("bytes=10-", "bytes=5-2", "bytes=0-1,3-4", "bytes=-3", "chars=0-1"):
            async with session.get(get, headers={"Range": bad}) as reply:
                assert reply.status == 416, bad
        async with session.get(http.base + "/health") as reply:
            assert reply.status == 200
        http.now = 1011.0
        async with session.get(get) as reply:
            assert (reply.status, (await reply.json())["code"]) == (403, "expired")


async def test_an_upload_without_length_is_refused(http: Store) -> None:
    link = http.link("PUT", "k", max_length=100)
    status, told = await raw(http, put_head(http, link, "Transfer-Encoding: chunked"), b"3\r\nabc\r\n0\r\n\r\n")
    assert (status, told["code"]) == (411, "no_length")


async def test_expect_continue_is_refused_before_the_body(http: Store) -> None:
    link = http.link("PUT", "k", max_length=2)
    head = put_head(http, link, "Content-Length: 1000000", "Expect: 100-continue")
    assert (await raw(http, head))[0] == 413
    async with aiohttp.ClientSession() as session, session.put(link, data=b"ab", expect100=True) as reply:
        assert reply.status == 201


async def test_a_body_that_stops_is_given_up_and_leaves_nothing(http: Store) -> None:
    link = http.link("PUT", "k", length=10)
    status, told = await raw(http, put_head(http, link, "Content-Length: 10"), b"abc")
    assert (status, told["code"]) == (408, "idle")
    assert await http.blobs.list() == []
    assert unfinished(http) == []


async def test_a_slow_body_is_invisible_until_whole(http: Store) -> None:
    link = http.link("PUT", "k", length=10, sha256=sha256(b"0123456789"))
    seen = []

    async def look() -> None:
        while not task.done():
            seen.append(await http.blobs.size("k"))
            await asyncio.sleep(0.02)

    pieces = [b"%d" % n for n in range(10)]
    task = asyncio.create_task(raw(http, put_head(http, link, "Content-Length: 10"), *pieces, pause=0.03))
    await look()
    assert (await task)[0] == 201
    assert set(seen) <= {None, 10}
    assert seen[0] is None
    assert await http.blobs.get("k") == b"0123456789"


async def test_an_upload_that_outlives_its_link_is_refused(http: Store) -> None:
    link = http.link("PUT", "k", length=4)
    http.now = 1009.95
    status, told = await raw(http, put_head(http, link, "Content-Length: 4"), b"ab")
    assert (status, told["code"]) == (403, "expired")
    assert await http.blobs.list() == []
    assert unfinished(http) == []


async def test_a_client_that_dies_leaves_nothing(http: Store) -> None:
    host, port = http.base.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        put_head(http, http.link("PUT", "k", length=5_000_000), "Content-Length: 5000000")
        .replace("\n", "\r\n")
        .encode()
    )
    writer.write(bytes(2_000_000))
    await writer.drain()
    async with asyncio.timeout(10):
        while not unfinished(http):
            await asyncio.sleep(0.005)
        writer.transport.abort()
        while unfinished(http):
            await asyncio.sleep(0.005)
    assert await http.blobs.list() == []


async def test_a_port_in_use_and_a_bad_address_are_said(http: Store) -> None:
    port = int(http.base.rpartition(":")[2])
    with pytest.raises(IotaError, match=f"127.0.0.1:{port}.*in use") as caught:
        await serve_blobs(MemoryBlobs(), SIGNER.key, "127.0.0.1", port, http.time, 10)
    assert caught.value.code == "port_in_use"
    assert await code_of(serve_blobs(MemoryBlobs(), SIGNER.key, "192.0.2.1", 0, http.time, 10)) == "bad_address"


async def test_run_service_serves_until_told_to_stop(tmp_path: Path) -> None:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        run_service(
            tmp_path / "blobs",
            SIGNER.key,
            "127.0.0.1",
            0,
            now=lambda: 0.0,
            max_object=100,
            stop=stop,
            ready=lambda host, port: ready.set_result(f"http://{host}:{port}"),
        )
    )
    base, objects = await ready, HttpObjects()
    await objects.put(sign_link(SIGNER, base, "PUT", "k", 1.0, max_length=9), [b"abc"])
    await objects.close()
    stop.set()
    await task
    assert (tmp_path / "blobs" / "k").read_bytes() == b"abc"


# ----------------------------------------------------------------------------------------------- a troubled store


class Trouble:
    """An HTTP server whose first answers are the given ones; afterwards 200 with `body`."""

    def __init__(self, *answers: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self.answers, self.requests = list(answers), 0
        self.body = b"the object"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if self.answers:
            return await self.answers.pop(0)(request)
        await request.read()
        return web.Response(body=self.body)


@pytest.fixture
async def trouble() -> AsyncIterator[Callable[..., Awaitable[tuple[Trouble, str]]]]:
    runners = []

    async def start(*answers) -> tuple[Trouble, str]:
        server, app = Trouble(*answers), web.Application()
        app.router.add_route("*", "/{rest:.*}", server.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return server, "http://{}:{}/blobs/k?x".format(*runner.addresses[0][:2])

    yield start
    for runner in runners:
        await runner.cleanup()


def status(code: int, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=code, text="<html>busy</html>", headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return answer


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    """Headers, half the body, then nothing."""
    reply = web.StreamResponse()
    reply.content_length = 10
    await reply.prepare(request)
    await reply.write(b"the o")
    await asyncio.sleep(30)
    return reply


async def trickle(request: web.Request) -> web.StreamResponse:
    """A byte now and then, for ever."""
    reply = web.StreamResponse()
    await reply.prepare(request)
    for _ in range(10_000):
        await reply.write(b"x")
        await asyncio.sleep(0.01)
    return reply


async def cut(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse()
    reply.content_length = 10
    await reply.prepare(request)
    await reply.write(b"the o")
    assert request.transport is not None
    request.transport.abort()
    return reply


async def other_bytes(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"the obJect")


def client(pauses: list[float], **settings) -> HttpObjects:
    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    return HttpObjects(sleep=sleep, entropy=lambda n: b"\x80" * n, **{"idle": 0.15, "pause": 0.2, **settings})


async def test_a_read_survives_what_passes(trouble) -> None:
    pauses: list[float] = []
    objects = client(pauses, attempts=8)
    server, url = await trouble(status(503), hang, half, trickle, cut, other_bytes)
    assert await objects.get(url, expect_sha256=sha256(server.body)) == server.body
    assert server.requests == 7
    jitter = 0.5 + 0x8080 / 131072
    assert pauses == pytest.approx([min(0.2 * 2**n, 5.0) * jitter for n in range(6)])
    await objects.close()


async def test_a_write_survives_what_passes_and_waits_as_told(trouble) -> None:
    pauses: list[float] = []
    objects = client(pauses)
    server, url = await trouble(status(429, Retry_After="7"), hang, status(500))
    await objects.put(url, [bytes(1_000_000)])
    assert server.requests == 4
    assert pauses[0] == 7.0
    await objects.close()


async def test_attempts_and_patience_are_bounded(trouble) -> None:
    pauses: list[float] = []
    objects = client(pauses, attempts=3)
    server, url = await trouble(*[status(503)] * 9)
    with pytest.raises(IotaError, match="503") as caught:
        await objects.get(url)
    assert (caught.value.code, server.requests, len(pauses)) == ("unreachable", 3, 2)
    assert "?x" not in caught.value.cause  # an error text carries no usable link
    await objects.close()
    clock = iter(range(0, 1000, 40))
    objects = client(pauses, attempts=100, patience=130.0, now=lambda: float(next(clock)))
    assert await code_of(objects.get(url)) == "unreachable"
    assert server.requests < 9
    await objects.close()


async def test_refusals_are_not_repeated_and_a_strangers_page_is_understood(trouble) -> None:
    objects = client([])
    for code, told in [(404, "no_object"), (403, "bad_signature"), (413, "too_large"), (418, "refused")]:
        server, url = await trouble(status(code))
        assert await code_of(objects.get(url)) == told
        assert server.requests == 1
    await objects.close()


async def test_nobody_there_and_too_large(trouble) -> None:
    objects = client([], attempts=2, max_object=9)
    assert await code_of(objects.get("http://127.0.0.1:9/blobs/k?x")) == "unreachable"
    server, url = await trouble()
    assert await code_of(objects.get(url)) == "too_large"
    assert server.requests == 1
    assert await code_of(objects.get("not an address")) == "bad_url"
    await objects.close()
