"""Transport over HTTP/1.1: one POST route for messages, GET pages beside it. No TLS here: messages are signed, and a
reverse proxy may add it.

The declared length is checked against the limit before a byte of the body is read; bodies are never decompressed.
Answers: 200 with a message; the refusal code's status with a message; anything else is a small JSON error
{"code", "cause", "remedy"} from the transport itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from yarl import URL

from iota.errors import IotaError, Unreachable
from iota.net.transport import Buffer, Handler, RefusedReply
from iota.wire.codes import status_of
from iota.wire.message import PATH

MESSAGE_TYPE = "application/x-iota-message"
JOIN_BYTES = 64 * 1024
"""Messages up to this size are sent as one buffer; the parts of larger ones one after another, without copying."""

Page = Callable[[Mapping[str, str]], Awaitable[bytes]]
"""Answers GET with the query's parameters; returns JSON. May raise IotaError, shown as a 404."""


def _error(status: int, code: str, cause: str, remedy: str = "", *, close: bool = True) -> web.Response:
    """A transport error. The connection is closed when an unread body may follow."""
    body = msgspec.json.encode({"code": code, "cause": cause, "remedy": remedy})
    response = web.Response(status=status, body=body, content_type="application/json")
    if close:
        response.force_close()
    return response


class HttpServer:
    """Serves a `Handler` at POST /iota/v1 and JSON pages at GET paths ("/health" exists always).

    `limit`: most bytes of a message. `body_timeout`: seconds in which a declared body must arrive whole. `option`: the
    setting named when the port cannot be had. `grace`: seconds that `close` gives running requests to finish, and once
    more to be cancelled.
    """

    def __init__(
        self,
        handler: Handler,
        host: str,
        port: int,
        *,
        limit: int,
        pages: Mapping[str, Page] | None = None,
        body_timeout: float = 120.0,
        option: str = "swarm.port",
        grace: float = 2.0,
    ) -> None:
        self._handler = handler
        self._host, self._wanted = host, port
        self._limit = limit
        self._pages: dict[str, Page] = {"/health": _healthy, **(pages or {})}
        self._body_timeout = body_timeout
        self._option = option
        self._grace = grace
        self._runner: web.ServerRunner | None = None
        self.port = port

    async def start(self) -> None:
        """Listen; `port` is then the real one (also when 0 was asked). IotaError: `port_in_use`, `bad_address`."""
        server = web.Server(
            self._answer,
            request_factory=self._request,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=75.0,
            lingering_time=2.0,
        )
        runner = web.ServerRunner(server, shutdown_timeout=self._grace)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._wanted, backlog=1024).start()
        except OSError as error:
            await runner.cleanup()
            raise self._cannot_listen(error) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    def _cannot_listen(self, error: OSError) -> IotaError:
        where = f"{self._host}:{self._wanted}"
        if error.errno == errno.EADDRINUSE:
            return IotaError(
                "port_in_use", f"cannot listen on {where}: the port is in use", f"Set {self._option} to another port."
            )
        if error.errno == errno.EACCES:
            return IotaError(
                "port_denied", f"cannot listen on {where}: not permitted", f"Set {self._option} above 1023."
            )
        reason = error.strerror or str(error)
        return IotaError("bad_address", f"cannot listen on {where}: {reason}", f"Check the host beside {self._option}.")

    async def close(self) -> None:
        """Stop listening, give running requests `grace` seconds, then drop them. Safe to call twice."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: aiohttp.abc.AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return await self._page(request)
        if request.path != PATH:
            return _error(404, "no_such_path", f"nothing is at {request.path[:100]}", f"Messages go to {PATH}.")
        if request.method != "POST":
            return _error(405, "wrong_method", f"{request.method[:16]} is not served", f"Use POST {PATH}.")
        declared = request.headers.get("Content-Length")
        if declared is None or not (declared.isascii() and declared.isdigit()):
            return _error(411, "no_length", "the message's length is not declared", "Send Content-Length.")
        if "Content-Encoding" in request.headers or request.query_string:
            return _error(400, "malformed", "compressed messages and queries are not served", "Send the plain message.")
        length = int(declared)
        if length > self._limit:
            return _error(
                413, "too_large", f"messages have at most {self._limit} bytes, {length} are declared", "Send less."
            )
        body = await self._read(request.content, length)
        if body is None:
            return _error(408, "too_slow", f"the body did not arrive whole within {self._body_timeout:g} s")
        return await self._write(request, await self._handler(body))

    async def _read(self, content: StreamReader, length: int) -> bytes | None:
        """Exactly `length` bytes with one copy at most; None when they do not come."""
        blocks: list[bytes] = []
        held = 0
        try:
            async with asyncio.timeout(self._body_timeout):
                while held < length:
                    block = await content.readany()
                    if not block:
                        return None
                    blocks.append(block)
                    held += len(block)
        except TimeoutError:
            return None
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def _write(self, request: web.BaseRequest, parts: Sequence[Buffer]) -> web.StreamResponse:
        status = status_of(parts.code) if isinstance(parts, RefusedReply) else 200
        total = sum(len(part) for part in parts)
        if total <= JOIN_BYTES:
            return web.Response(status=status, body=b"".join(parts), content_type=MESSAGE_TYPE)
        response = web.StreamResponse(status=status, headers={"Content-Type": MESSAGE_TYPE})
        response.content_length = total
        with contextlib.suppress(ConnectionError):  # the peer is gone: it asks again when it is back
            await response.prepare(request)
            for part in parts:
                await response.write(part)
            await response.write_eof()
        return response

    async def _page(self, request: web.BaseRequest) -> web.Response:
        page = self._pages.get(request.path)
        if page is None:
            return _error(
                404, "no_such_path", f"nothing is at {request.path[:100]}", f"Pages: {', '.join(sorted(self._pages))}"
            )
        try:
            return web.Response(body=await page(request.query), content_type="application/json")
        except IotaError as error:
            return _error(404, error.code, error.cause, error.remedy, close=False)


async def _healthy(query: Mapping[str, str]) -> bytes:
    return b'{"status":"ok"}'


class HttpChannel:
    """`Channel` to `base_url` ("http://host:port"), with one session of keep-alive connections.

    `idle`: seconds without a byte after which a reply is given up (longer than the longest poll). `limit`: most bytes
    of a reply, checked before it is read. `connections`: most at once; more requests queue inside their timeout.
    """

    def __init__(
        self, base_url: str, *, idle: float = 30.0, connect: float = 10.0, limit: int = 1 << 31, connections: int = 256
    ) -> None:
        self.address = base_url.rstrip("/")
        self._url = URL(self.address + PATH)
        self._idle, self._connect, self._limit, self._connections = idle, connect, limit, connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def _open(self) -> aiohttp.ClientSession:
        """Made with the first request: a session belongs to the running loop. Idle connections are dropped well before
        the server would (75 s), so that a request never meets one that is just being closed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=30.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                headers={"Content-Type": MESSAGE_TYPE},
            )
        return self._session

    async def request(self, parts: Sequence[Buffer], *, timeout: float) -> bytes:
        if self._closed:
            raise Unreachable(f"the channel to {self.address} is closed")
        total = sum(len(part) for part in parts)
        data: bytes | AsyncIterator[Buffer] = b"".join(parts) if total <= JOIN_BYTES else _stream(parts)
        headers = None if total <= JOIN_BYTES else {"Content-Length": str(total)}
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect, sock_read=self._idle)
        try:
            async with self._open().post(
                self._url, data=data, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                return await self._reply(response)
        except TimeoutError:
            raise Unreachable(
                f"no whole reply from {self.address} within {timeout:g} s ({self._idle:g} s idle)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"cannot reach {self.address}: {_reason(error)}") from error

    async def _reply(self, response: aiohttp.ClientResponse) -> bytes:
        if response.content_type != MESSAGE_TYPE:
            raise await self._transport_error(response)
        length = response.content_length
        if length is None:
            raise Unreachable(f"{self.address} sent a reply without a length")
        if length > self._limit:
            raise IotaError(
                "too_large", f"{self.address} wants to send {length} bytes, at most {self._limit} are taken"
            )
        return await response.read()

    async def _transport_error(self, response: aiohttp.ClientResponse) -> IotaError:
        """What the server's HTTP layer, a proxy, or something else at this address answered instead of a message."""
        text = (await response.content.read(4096)).decode("utf-8", "replace")
        if response.status == 413:
            return IotaError(
                "too_large", f"{self.address} refused the message for its length: {text[:500]}", "Send less at once."
            )
        return Unreachable(
            f"{self.address} answered HTTP {response.status} instead of a message: {text[:200]!r}",
            "Check that this is the address of an orchestrator; a proxy or another server may answer there.",
        )

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()


async def _stream(parts: Sequence[Buffer]) -> AsyncIterator[Buffer]:
    for part in parts:
        yield part


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError) or isinstance(error.__cause__, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return "connection refused (nothing listens there)"
    return str(error) or type(error).__name__
