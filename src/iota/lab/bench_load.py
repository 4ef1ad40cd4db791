"""The load process of `iota bench control`: many miners with a key, a connection and a signature each, fake compute.

    python -m iota.lab.bench_load < JSON parameters

Every miner does what a real one does towards the orchestrator (join, load, then result in and next task out), signing
every request when it is made. What is left out is the client's own cost: outputs are one random finite tensor, and
replies are decoded without checking their signature. Prints one line of JSON when all have loaded and one at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import astuple, dataclass
from urllib.request import urlopen

import msgspec
import numpy as np

from iota.core import tasks
from iota.core.values import Tensor, sha256
from iota.lab.bench_core import STAGES
from iota.wire.keys import SIGNATURE_BYTES, Identity
from iota.wire.message import HEADER_BYTES, PATH, Control, Refusal, seal
from iota.wire.nonces import NonceSource


class Parameters(msgspec.Struct):
    """What the parent says: where the server is, how many miners, how long to warm up and to measure (seconds)."""

    port: int
    key: str
    run: str
    roots: list[str]
    miners: int
    warmup: float
    seconds: float
    profile: bool = False


_CONTROL = msgspec.msgpack.Decoder(Control)
_ANSWER = msgspec.msgpack.Decoder(tasks.Answer)
_WELCOME = msgspec.msgpack.Decoder(tasks.Welcome)


@dataclass
class Tally:
    """Replies that arrived, results that were accepted, polls, and what was not accepted."""

    replies: int = 0
    results: int = 0
    polls: int = 0
    declined: int = 0


class Wire(asyncio.Protocol):
    """One keep-alive connection: one POST at a time, as little work as HTTP/1.1 allows."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._need = 0
        self._body_at = 0
        self._reply: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._need:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._data[:end]).lower()
            self._body_at = end + 4
            self._need = self._body_at + int(head.split(b"content-length:")[1].split(b"\r\n", 1)[0])
        if len(self._data) >= self._need:
            body = bytes(self._data[self._body_at : self._need])
            self._data.clear()
            self._need = 0
            if self._reply is not None and not self._reply.done():  # else the benchmark just ended
                self._reply.set_result(body)

    def post(self, parts: list[bytes | bytearray | memoryview]) -> asyncio.Future[bytes]:
        assert self._transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        length = sum(len(part) for part in parts)
        head = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Length: {length}\r\n\r\n".encode()
        self._transport.write(b"".join((head, *parts)))
        return self._reply


class Miner:
    """One key."""

    def __init__(self, number: int, where: Parameters, tally: Tally) -> None:
        self.identity = Identity.new(sha256(f"bench miner {number}".encode()).encode()[:32])
        self.where, self.tally = where, tally
        self.nonces = NonceSource(time.time)
        self.wire = Wire()
        self.session = self.seq = 0
        self.stage = -1
        values = np.random.default_rng(number).standard_normal(64 * 64, dtype=np.float32)
        self.output = Tensor("bfloat16", (1, 64, 64), (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        self.head = self.output.head()

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.wire, "127.0.0.1", self.where.port)

    async def ask(self, body: msgspec.Struct, tensors: tuple[Tensor, ...] = ()) -> Control:
        """Sign, send, and read the control part of the reply. RuntimeError when it is a refusal."""
        message = seal(
            self.identity,
            recipient=self.where.key,
            run=self.where.run,
            session=self.session,
            time=time.time(),
            nonce=self.nonces.next(),
            id=f"{self.session}/{self.seq}",
            body=body,
            tensors=tensors,
        )
        raw = await self.wire.post(message)
        length = int.from_bytes(raw[SIGNATURE_BYTES:HEADER_BYTES], "little")
        control = _CONTROL.decode(raw[HEADER_BYTES : HEADER_BYTES + length])
        if control.status != "ok":
            raise RuntimeError(str(msgspec.msgpack.decode(control.body, type=Refusal)))
        return control

    async def join(self) -> None:
        request = tasks.Join(
            role="miner", token="", software="bench", device="cpu", dtype="float32", memory=0, disk=0, owner=""
        )
        welcome = _WELCOME.decode((await self.ask(request)).body)
        self.session, self.stage = welcome.session, welcome.stage
        task = (await self.turn(None)).task
        assert isinstance(task, tasks.Load), task
        loaded = tasks.Loaded(task=task.task, root=self.where.roots[self.stage], seconds=0.1)
        verdict = (await self.turn(loaded)).verdict
        assert verdict is not None and verdict.accepted, verdict

    async def turn(self, result: tasks.Result | None, tensors: tuple[Tensor, ...] = ()) -> tasks.Answer:
        self.seq += 1
        body = tasks.Turn(session=self.session, seq=self.seq, result=result, shown=(), draining=False)
        return _ANSWER.decode((await self.ask(body, tensors)).body)

    async def work(self) -> None:
        """For ever: ask, do nothing, answer."""
        answer = await self.turn(None)
        while True:
            task = answer.task
            if isinstance(task, tasks.Wait):
                answer = await self.turn(None)
                self.tally.polls += 1
            else:
                assert isinstance(task, tasks.Forward | tasks.Backward), task
                answer = await self._pass(task)
                self.tally.results += 1
                if answer.verdict is None or not answer.verdict.accepted:
                    self.tally.declined += 1
            self.tally.replies += 1

    async def _pass(self, task: tasks.Forward | tasks.Backward) -> tasks.Answer:
        first, last = self.stage == 0, self.stage == STAGES - 1
        tensors = () if first and isinstance(task, tasks.Backward) else (self.output,)
        result = tasks.Passed(
            task=task.task,
            sample=task.sample,
            head=self.head.digest,
            inp=self.head.digest,
            out=self.head.digest if tensors else "",
            cut=None,
            loss=2.0 if last else None,
            seconds=0.05,
            recomputed=False,
        )
        return await self.turn(result, tensors)


def page(port: int, name: str) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/{name}", timeout=60) as reply:
        figures: dict[str, float] = json.load(reply)
        return figures


async def play(where: Parameters) -> dict[str, float | int]:
    """All miners; the figures of the steady window."""
    tally = Tally()
    miners = [Miner(number, where, tally) for number in range(where.miners)]
    for miner in miners:
        await miner.connect()
    await asyncio.gather(*(miner.join() for miner in miners))
    work = [asyncio.create_task(miner.work()) for miner in miners]
    await _run_for(where.warmup, work)
    if where.profile:
        await asyncio.to_thread(page, where.port, "profile/start")
    before = await asyncio.to_thread(page, where.port, "cpu")
    start, first = time.perf_counter(), astuple(tally)
    await _run_for(where.seconds, work)
    after = await asyncio.to_thread(page, where.port, "cpu")
    wall = time.perf_counter() - start
    replies, results, polls, declined = (b - a for a, b in zip(first, astuple(tally), strict=True))
    for task in work:
        task.cancel()
    cpu = after["cpu"] - before["cpu"]
    return {
        "requests": replies,
        "results": results,
        "polls": polls,
        "declined": declined,
        "server_cpu_s": cpu,
        "wall_s": wall,
        "journal_rows": int(after["rows"] - before["rows"]),
        "per_cpu_s": replies / cpu,
    }


async def _run_for(seconds: float, work: list[asyncio.Task[None]]) -> None:
    """Let the miners work; whatever stops one of them stops the benchmark."""
    done, _ = await asyncio.wait(work, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def main() -> None:
    where = msgspec.json.decode(sys.stdin.buffer.readline(), type=Parameters)
    print(json.dumps(asyncio.run(play(where))), flush=True)


if __name__ == "__main__":
    main()
