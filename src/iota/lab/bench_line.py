"""The line between this machine and another, for `iota bench device --url`; the other side is `--serve HOST:PORT`.

GET URL?bytes=N answers N bytes, POST URL takes a body and answers nothing: any server that does so will do. Sizes grow
until one transfer takes long enough to count; the round trip is the median of small requests on an open connection.
"""

from __future__ import annotations

import http.client
import statistics
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from iota.errors import ConfigError, IotaError
from iota.lab.bench_device import Line

FIRST, LARGEST = 64 * 1024, 256 * 1024 * 1024
PIECE = 64 * 1024
LONG_ENOUGH = 1.0
"""Seconds of a transfer that count as a measurement."""
TRIPS = 9
TIMEOUT = 60.0


def measure_line(url: str, long_enough: float = LONG_ENOUGH) -> Line:
    """Both directions and the round trip. Raises ConfigError for a URL that cannot be, IotaError `unreachable` when the
    server does not answer as it should."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname if parts.scheme in ("http", "https") else None, parts.port
    except ValueError:  # brackets that do not close, a port that cannot be
        host = None
    if not host:
        raise ConfigError(f"--url = {url!r} is no address", "Give http://HOST:PORT of an `iota bench device --serve`")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=TIMEOUT)
    path = parts.path or "/"
    try:
        _exchange(connection, "GET", f"{path}?bytes=1", b"", 1)
        trips = [_exchange(connection, "GET", f"{path}?bytes=1", b"", 1) for _ in range(TRIPS)]
        down, up = (_rate(connection, method, path, long_enough) for method in ("GET", "POST"))
    except (OSError, http.client.HTTPException) as error:
        raise IotaError(
            "unreachable", f"{url} did not answer: {error}", "Start `iota bench device --serve` there"
        ) from error
    finally:
        connection.close()
    return Line(round(up, 2), round(down, 2), round(1000 * statistics.median(trips), 2))


def _rate(connection: http.client.HTTPConnection, method: str, path: str, long_enough: float) -> float:
    """Mbit/s of the first transfer that takes long enough, or of the largest."""
    size = FIRST
    while True:
        if method == "GET":
            seconds = _exchange(connection, method, f"{path}?bytes={size}", b"", size)
        else:
            seconds = _exchange(connection, method, path, bytes(size), None)
        if seconds >= long_enough or size >= LARGEST:
            return size * 8 / seconds / 10**6
        size = min(LARGEST, size * 4)


def _exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes, expected: int | None
) -> float:
    """Seconds of one request with its whole answer."""
    start = time.perf_counter()
    connection.request(method, path, body or None)
    response = connection.getresponse()
    got = 0
    while piece := response.read(PIECE):
        got += len(piece)
        if got > (expected or 0) + PIECE:
            break
    if response.status >= 300 or (expected is not None and got != expected):
        raise http.client.HTTPException(f"{method} was answered with {response.status} and {got} bytes")
    return time.perf_counter() - start


class _Handler(BaseHTTPRequestHandler):
    """Zeros out, anything in, nothing kept; a request above `LARGEST` is refused."""

    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT

    def do_GET(self) -> None:
        wanted = parse_qs(urlsplit(self.path).query).get("bytes", ["0"])[0]
        size = int(wanted) if wanted.isascii() and wanted.isdigit() and len(wanted) <= 10 else LARGEST + 1
        self._answer(size)
        if size <= LARGEST:
            for start in range(0, size, PIECE):
                self.wfile.write(bytes(min(PIECE, size - start)))

    def do_POST(self) -> None:
        given = self.headers.get("Content-Length", "")
        size = int(given) if given.isascii() and given.isdigit() and len(given) <= 10 else LARGEST + 1
        left = size if size <= LARGEST else 0
        while left > 0:
            piece = self.rfile.read(min(PIECE, left))
            if not piece:
                self.close_connection = True
                return
            left -= len(piece)
        self._answer(0 if size <= LARGEST else LARGEST + 1)

    def _answer(self, size: int) -> None:
        good = size <= LARGEST
        self.send_response(200 if good else 413)
        self.send_header("Content-Length", str(size if good else 0))
        self.end_headers()
        if not good:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


def line_server(host: str, port: int) -> ThreadingHTTPServer:
    """The other side, bound and not yet serving. Raises OSError when the address is taken."""
    return ThreadingHTTPServer((host, port), _Handler)
