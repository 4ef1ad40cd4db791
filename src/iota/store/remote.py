"""Reading and writing objects by signed link: over HTTP, or straight into a `Blobs` with the same checks.

Both implementations of `Objects` pass one contract suite. Errors (IotaError, or Refused when the store declined):
`no_object`, `bad_range`, `expired`, `bad_signature`, `wrong_verb`, `wrong_length`, `too_large`, `corrupt`, `disk_full`,
and `unreachable` when no whole answer came within the attempts and the patience allowed.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from iota.core.values import sha256
from iota.errors import IotaError, Refused, Unreachable
from iota.store.blobs import Blobs
from iota.store.files import Buffer
from iota.store.links import check_digest, check_length, check_link, same_object

T = TypeVar("T")

MAX_OBJECT = 64 * 1024**3
"""Default most bytes of one object, either way."""

_PIECE = 256 * 1024
_RETRIED = (408, 429, 500, 502, 503, 504)
_CODES = {
    403: "bad_signature",
    404: "no_object",
    409: "wrong_length",
    413: "too_large",
    416: "bad_range",
    422: "corrupt",
}


class Objects(Protocol):
    """What a peer does with the links it was given."""

    async def get(
        self, url: str, start: int = 0, stop: int | None = None, *, expect_sha256: str | None = None
    ) -> bytes:
        """Bytes [start, stop) of the object, all of them; `corrupt` when they do not have the expected SHA-256."""
        ...

    async def put(self, url: str, parts: Sequence[Buffer]) -> None:
        """Store the concatenation of `parts`; when this returns the object is whole, visible and durable."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class DirectObjects:
    """`Objects` without HTTP: the same link checks in front of a `Blobs` of this process (the simulator's store)."""

    def __init__(
        self, blobs: Blobs, public_key: str, now: Callable[[], float], *, max_object: int = MAX_OBJECT
    ) -> None:
        self._blobs = blobs
        self._public_key = public_key
        self._now = now
        self._max_object = max_object

    async def get(
        self, url: str, start: int = 0, stop: int | None = None, *, expect_sha256: str | None = None
    ) -> bytes:
        link = check_link(self._public_key, "GET", url, self._now())
        data = await self._blobs.get(link.key, start, stop)
        _expect(url, data, expect_sha256)
        return data

    async def put(self, url: str, parts: Sequence[Buffer]) -> None:
        link = check_link(self._public_key, "PUT", url, self._now())
        check_length(link, _length(parts), self._max_object)
        data = b"".join(parts)
        digest = sha256(data)
        check_digest(link, digest)
        if not await same_object(self._blobs, link.key, len(data), digest):
            await self._blobs.put(link.key, [data])

    async def close(self) -> None:
        return None


def _length(parts: Sequence[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def _expect(url: str, data: bytes, digest: str | None) -> None:
    if digest is not None and sha256(data) != digest:
        raise IotaError("corrupt", f"{_name(url)}: the bytes read do not have the expected SHA-256 {digest}")


def _name(url: str) -> str:
    return url.partition("?")[0]


class _TryAgain(Exception):
    """An attempt failed in a way that another may cure. `error` is what to raise when none is left."""

    def __init__(self, error: IotaError, pause: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.pause = pause


class _Flow:
    """Bytes moved by one attempt, so that a transfer that stands still is told from a slow one."""

    def __init__(self) -> None:
        self.moved = 0
        self.sent = False


class HttpObjects:
    """`Objects` over HTTP, with bounded attempts, back-off with jitter and no wait without a limit.

    `idle`: seconds within which at least `floor` bytes must move, else the attempt is given up (a store that trickles a
    byte a second counts as dead); `patience`: seconds for all attempts together; `pause`: the first back-off, doubled
    each time up to 5 s, times a random factor of 0.5 to 1. A reply "429" or "503" with Retry-After is obeyed. At most
    `connections` transfers run at once.
    """

    def __init__(
        self,
        *,
        attempts: int = 5,
        idle: float = 10.0,
        patience: float = 600.0,
        pause: float = 0.2,
        floor: int = 4096,
        connections: int = 16,
        max_object: int = MAX_OBJECT,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        entropy: Callable[[int], bytes] = os.urandom,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempts = attempts
        self._idle = idle
        self._patience = patience
        self._pause = pause
        self._floor = floor
        self._turns = asyncio.Semaphore(connections)
        self._max_object = max_object
        self._sleep = sleep
        self._entropy = entropy
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._idle),
                auto_decompress=False,
                read_bufsize=_PIECE,
                skip_auto_headers=("User-Agent",),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(
        self, url: str, start: int = 0, stop: int | None = None, *, expect_sha256: str | None = None
    ) -> bytes:
        if start < 0 or (stop is not None and stop < start):
            raise IotaError("bad_range", f"{_name(url)}: range {start} to {stop}")
        return await self._retry(url, lambda flow: self._get(flow, url, start, stop, expect_sha256))

    async def put(self, url: str, parts: Sequence[Buffer]) -> None:
        await self._retry(url, lambda flow: self._put(flow, url, parts))

    async def _get(self, flow: _Flow, url: str, start: int, stop: int | None, digest: str | None) -> bytes:
        empty = stop == start  # HTTP has no empty range: ask for one byte, to learn whether `start` lies inside
        last = "" if stop is None else start if empty else stop - 1
        headers = {} if start == 0 and stop is None else {"Range": f"bytes={start}-{last}"}
        async with self._http().get(url, headers=headers) as reply:
            total = _total(reply)
            if reply.status == 416 and total == start and (empty or stop is None):
                data = b""
            elif reply.status not in (200, 206):
                raise await _declined(reply, url)
            elif headers and reply.status != 206:
                raise IotaError("bad_range", f"{_name(url)}: the store does not serve ranges", "Use a store that does")
            else:
                data = await self._body(flow, reply, url)
                data = b"" if empty else data
            if stop is not None and len(data) != stop - start:
                raise IotaError("bad_range", f"{_name(url)}: range {start} to {stop} is not inside {total} bytes")
        try:
            _expect(url, data, digest)
        except IotaError as error:
            raise _TryAgain(error) from error
        return data

    async def _body(self, flow: _Flow, reply: aiohttp.ClientResponse, url: str) -> bytes:
        pieces = []
        if (reply.content_length or 0) > self._max_object:
            raise IotaError(
                "too_large", f"{_name(url)} has {reply.content_length} bytes, at most {self._max_object} are taken"
            )
        while piece := await reply.content.readany():
            flow.moved += len(piece)
            pieces.append(piece)
            if flow.moved > self._max_object:
                raise IotaError("too_large", f"{_name(url)} has more than {self._max_object} bytes")
        return b"".join(pieces)

    async def _put(self, flow: _Flow, url: str, parts: Sequence[Buffer]) -> None:
        headers = {"Content-Length": str(_length(parts)), "Content-Type": "application/octet-stream"}
        async with self._http().put(url, data=_feed(flow, parts), headers=headers) as reply:
            if reply.status not in (200, 201):
                error = await _declined(reply, url)
                raise _TryAgain(error) if isinstance(error, IotaError) and error.code == "corrupt" else error

    async def _retry(self, url: str, attempt: Callable[[_Flow], Awaitable[T]]) -> T:
        end = self._now() + self._patience
        for number in range(self._attempts):
            try:
                async with self._turns:  # here, so that waiting for a turn does not count as standing still
                    return await self._watched(url, attempt, end)
            except _TryAgain as failure:
                jitter = 0.5 + int.from_bytes(self._entropy(2), "little") / 131072
                pause = max(failure.pause, min(self._pause * 2**number, 5.0) * jitter)
                if number + 1 == self._attempts or self._now() + pause >= end:
                    raise failure.error from failure
            await self._sleep(pause)
        raise AssertionError("at least one attempt")

    async def _watched(self, url: str, attempt: Callable[[_Flow], Awaitable[T]], end: float) -> T:
        """One attempt under the idle limit. Looks twice an idle limit, so a stall ends within it."""
        flow = _Flow()
        task = asyncio.ensure_future(attempt(flow))
        quiet = 0
        try:
            while True:
                before, left = flow.moved, end - self._now()
                done, _ = await asyncio.wait({task}, timeout=max(min(self._idle / 2, left), 0.0))
                if done:
                    return task.result()
                quiet = 0 if flow.moved - before >= self._floor / 2 else quiet + 1
                # A store may need a while to sync a large object after its last byte.
                limit = 2 + (int(flow.moved / 20e6 / self._idle) if flow.sent else 0)
                if quiet >= limit or left <= self._idle / 2:
                    raise _TryAgain(Unreachable(f"{_name(url)}: the transfer stood still after {flow.moved} bytes"))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, aiohttp.InvalidURL):
                raise IotaError("bad_url", f"not a usable address: {_name(url)}") from error
            reason = str(error) or type(error).__name__
            raise _TryAgain(Unreachable(f"{_name(url)}: {reason}")) from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


async def _feed(flow: _Flow, parts: Sequence[Buffer]) -> AsyncIterator[bytes | memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), _PIECE):
            yield view[at : at + _PIECE]
            flow.moved += len(view[at : at + _PIECE])
    flow.sent = True


def _total(reply: aiohttp.ClientResponse) -> int | None:
    """The object's whole length, as far as the reply tells."""
    span = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", reply.headers.get("Content-Range", ""))
    return int(span[1]) if span else reply.content_length


class _Refusal(msgspec.Struct):
    code: str
    cause: str = ""
    remedy: str = ""


async def _declined(reply: aiohttp.ClientResponse, url: str) -> Exception:
    """What a refusing reply means: an error to raise, or a reason to try again."""
    body = await reply.content.read(65536)
    try:
        told = msgspec.json.decode(body, type=_Refusal)
    except msgspec.DecodeError:  # not our service, such as a proxy's page
        told = _Refusal(_CODES.get(reply.status, "refused"), f"HTTP {reply.status} {reply.reason}")
    if reply.status in _RETRIED:
        wait = reply.headers.get("Retry-After", "")
        return _TryAgain(
            Unreachable(f"{_name(url)}: HTTP {reply.status} {told.cause}"), float(wait) if wait.isdecimal() else 0.0
        )
    if reply.status == 404 and told.code != "no_object":
        told = _Refusal("no_object", f"{_name(url)} does not exist", told.remedy)
    return Refused(told.code, told.cause, told.remedy)
