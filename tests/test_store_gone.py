"""A client that goes away in the middle of a download is no error of the blob service: it serves on, silently."""

import asyncio
import logging
from urllib.parse import urlsplit

from iota.store.blobs import MemoryBlobs
from iota.store.links import sign_link
from iota.store.remote import HttpObjects
from iota.store.service import address, serve_blobs
from test_store_blobs import Signer


async def test_a_reader_that_goes_away_leaves_no_traceback(caplog):
    blobs, signer, objects = MemoryBlobs(), Signer(), HttpObjects()
    await blobs.put("big", [bytes(64 * 1024 * 1024)])
    runner = await serve_blobs(blobs, signer.key, "127.0.0.1", 0, lambda: 0.0, 10**9)
    host, port = address(runner)
    url = sign_link(signer, f"http://{host}:{port}", "GET", "big", 100.0)
    place = urlsplit(url)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET {place.path}?{place.query} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            await reader.readexactly(1000)
            writer.transport.abort()
            await asyncio.sleep(0.2)
        assert await objects.get(url, 5, 15) == bytes(10)
    await objects.close()
    await runner.cleanup()
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
