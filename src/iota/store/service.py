"""The blob service: any `Blobs` over HTTP, each request allowed by a signed link (`iota.store.links`).

    GET, HEAD /blobs/KEY?...   whole (200) or one range (206); sent in bounded blocks
    PUT       /blobs/KEY?...   into a temporary place, hashed on the way, visible once whole and right (201)
    GET       /health          200, no link needed

A PUT is refused before its body is read when the length is missing (411), too large (413) or not the pinned one (409),
and after it when the digest is not the pinned one (422) or other bytes lie there already (409); whatever happens,
nothing of a refused or broken upload stays.
An upload must be whole before its link expires, by this service's clock, and must not pause longer than the idle limit.
Every refusal is a JSON body {code, cause, remedy}: 403 for links, 404 no_object, 416 bad_range, 507 disk_full.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from iota.errors import IotaError, Refused
from iota.store.blobs import Blobs, FolderBlobs, Reader, Staged
from iota.store.links import ROUTE, Link, check_digest, check_length, check_link, same_object

BLOCK = 1024 * 1024
"""Bytes held in memory for one transfer at a time."""

_STATUS = {
    "bad_signature": 403,
    "expired": 403,
    "wrong_verb": 403,
    "bad_key": 400,
    "no_object": 404,
    "bad_range": 416,
    "no_length": 411,
    "too_large": 413,
    "wrong_length": 409,
    "exists": 409,
    "busy": 503,
    "corrupt": 422,
    "idle": 408,
    "disk_full": 507,
}
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})", re.ASCII)
_log = logging.getLogger("iota.store")


class _Service:
    def __init__(self, blobs: Blobs, public_key: str, now: Callable[[], float], max_object: int, idle: float) -> None:
        self._blobs = blobs
        self._public_key = public_key
        self._now = now
        self._max_object = max_object
        self._idle = idle
        self._keeping: set[str] = set()

    def check(self, request: web.Request) -> Link:
        """The request's link; for a PUT also its declared length. Raises before a byte of the body is read."""
        link = check_link(self._public_key, request.method, request.raw_path, self._now())
        if request.method == "PUT":
            if request.content_length is None:
                raise IotaError("no_length", "an upload must declare its Content-Length")
            check_length(link, request.content_length, self._max_object)
        return link

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """`Expect: 100-continue`: refuse before the client sends the body."""
        if request.headers.get("Expect", "").lower() == "100-continue":
            try:
                self.check(request)
            except IotaError as error:
                return _refusal(error)
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            link = self.check(request)
            if request.method == "PUT":
                return await self._put(request, link)
            reader = await self._blobs.open(link.key)
            try:
                return await self._get(request, reader)
            finally:
                await reader.close()
        except IotaError as error:
            if error.code in ("disk_full", "disk_failed"):
                _log.error("%s", error)
                error = IotaError(
                    error.code, "the blob store cannot keep the object: its disk is full or failed", "Try later"
                )
            return _refusal(error)

    async def _get(self, request: web.Request, reader: Reader) -> web.StreamResponse:
        try:
            start, stop, partial = _range(request, reader.size)
        except IotaError as error:
            refusal = _refusal(error)
            refusal.headers["Content-Range"] = f"bytes */{reader.size}"
            return refusal
        reply = web.StreamResponse(status=206 if partial else 200)
        reply.content_type = "application/octet-stream"
        reply.content_length = stop - start
        reply.headers["Accept-Ranges"] = "bytes"
        if partial:
            reply.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{reader.size}"
        try:
            await reply.prepare(request)
            while start < stop and request.method == "GET":
                block = await reader.read(start, min(start + BLOCK, stop))
                start += len(block)
                async with asyncio.timeout(self._idle):
                    await reply.write(block)
            await reply.write_eof()
        except (TimeoutError, ConnectionError):
            # The other side stopped reading, or is gone: the length is short, so it cannot take it as whole.
            if request.transport is not None:
                request.transport.abort()
        return reply

    async def _put(self, request: web.Request, link: Link) -> web.StreamResponse:
        staged = await self._blobs.stage(link.key, request.content_length)
        try:
            await self._receive(request, link, staged)
            if staged.length != request.content_length:
                raise IotaError("wrong_length", f"{staged.length} of {request.content_length} declared bytes arrived")
            check_digest(link, staged.digest())
            if self._now() > link.expires:
                raise _too_late(link)
            await self._keep(link.key, staged)
            return _json(201, {"key": link.key, "length": staged.length, "sha256": staged.digest()})
        finally:
            await staged.abort()

    async def _keep(self, key: str, staged: Staged) -> None:
        """Make an upload visible, unless these bytes already are; one upload of a key at a time."""
        if key in self._keeping:
            raise IotaError("busy", f"{key} is being written by another upload", "Send it again in a moment")
        self._keeping.add(key)
        try:
            if not await same_object(self._blobs, key, staged.length, staged.digest()):
                await staged.commit()
        finally:
            self._keeping.discard(key)

    async def _receive(self, request: web.Request, link: Link, staged: Staged) -> None:
        """Body to `staged` in blocks of about `BLOCK` bytes."""
        block = bytearray()
        while True:
            piece = await self._piece(request, link)
            block += piece
            if len(block) >= BLOCK or (block and not piece):
                await staged.write(block)
                block = bytearray()
            if not piece:
                return

    async def _piece(self, request: web.Request, link: Link) -> bytes:
        left = link.expires - self._now()
        try:
            async with asyncio.timeout(min(self._idle, left)):
                return await request.content.readany()
        except TimeoutError:
            if left <= self._idle:
                raise _too_late(link) from None
            raise IotaError("idle", f"no byte came for {self._idle:g} s", "Send the object again") from None


def _too_late(link: Link) -> Refused:
    return Refused("expired", f"the link to {link.key} expired before the upload was whole", "Ask for a fresh link")


def _range(request: web.Request, size: int) -> tuple[int, int, bool]:
    """(start, stop, partial) of the Range header, clipped to the object as HTTP says; one plain range only."""
    header = request.headers.get("Range")
    if header is None:
        return 0, size, False
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        raise IotaError("bad_range", "only one range of the form bytes=FIRST-LAST is served")
    start = int(match[1])
    stop = min(int(match[2]) + 1 if match[2] else size, size)
    if start >= stop:
        raise IotaError("bad_range", f"range {header[:64]} lies outside the object of {size} bytes")
    return start, stop, True


def _json(status: int, body: dict[str, str | int]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _refusal(error: IotaError) -> web.Response:
    body: dict[str, str | int] = {"code": error.code, "cause": error.cause, "remedy": error.remedy}
    return _json(_STATUS.get(error.code, 500), body)


async def _health(request: web.Request) -> web.Response:
    return _json(200, {"status": "ok"})


async def _nothing(request: web.Request) -> web.Response:
    return _json(
        404, {"code": "no_route", "cause": "there is nothing at this address", "remedy": f"Objects lie under {ROUTE}"}
    )


async def serve_blobs(
    blobs: Blobs,
    public_key: str,
    host: str,
    port: int,
    now: Callable[[], float],
    max_object: int,
    *,
    idle: float = 10.0,
) -> web.AppRunner:
    """Serve `blobs` on host:port (port 0: any free one, see `address`) until `runner.cleanup()`.

    `public_key` is the hex Ed25519 key whose links are honoured, `max_object` the most bytes of one object, `idle` the
    seconds a transfer may pause. Raises IotaError `port_in_use` or `bad_address`.
    """
    service = _Service(blobs, public_key, now, max_object, idle)
    app = web.Application()
    app.router.add_route("*", ROUTE + "{key:.*}", service.handle, expect_handler=service.expect)
    app.router.add_get("/health", _health)
    app.router.add_route("*", "/{rest:.*}", _nothing)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=2.0, lingering_time=min(2.0, idle), read_bufsize=BLOCK // 4
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, reuse_address=True).start()
    except OSError as error:
        await runner.cleanup()
        raise _listen_error(error, host, port) from error
    return runner


def _listen_error(error: OSError, host: str, port: int) -> IotaError:
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return IotaError(
            "port_in_use",
            f"cannot listen on {where}: the port is in use",
            "Stop the other process or choose another port",
        )
    reason = "the name is unknown" if isinstance(error, socket.gaierror) else error.strerror or str(error)
    return IotaError(
        "bad_address",
        f"cannot listen on {where}: {reason}",
        "Give an address of this machine and a free port above 1023",
    )


def address(runner: web.AppRunner) -> tuple[str, int]:
    """(host, port) that the service listens on."""
    host, port = runner.addresses[0][:2]
    return str(host), int(port)


async def run_service(
    folder: Path,
    public_key: str,
    host: str,
    port: int,
    *,
    now: Callable[[], float],
    max_object: int,
    stop: asyncio.Event,
    ready: Callable[[str, int], None],
) -> None:
    """The blob process's whole life: open the folder, listen, call `ready(host, port)`, serve until `stop` is set.

    Errors are those of `FolderBlobs` and `serve_blobs`;
    uploads in flight at the end are broken off and leave nothing.
    """
    blobs = await asyncio.to_thread(FolderBlobs, folder)
    runner = await serve_blobs(blobs, public_key, host, port, now, max_object)
    try:
        ready(*address(runner))
        await stop.wait()
    finally:
        await runner.cleanup()
