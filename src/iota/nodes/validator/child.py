"""The validator's one child process: it holds torch, replays, and may die without taking the validator along.

Both ends are here: `ChildReplayer` (the validator's side) starts, feeds, limits and replaces the process; `main` is the
process. They speak over its standard input and output, without pickle: u32 little-endian header length, header
(msgpack of `Frame` or of an answer), then the command's buffers one after another.

This file alone may start processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, BinaryIO, TypeVar

import msgspec

from iota.config.schema import RunConfig
from iota.errors import IotaError
from iota.nodes.effects import Clock
from iota.nodes.validator.jobs import Answer, Broken, Buffer, Command, Ready, ReplayFailed, Setup

T = TypeVar("T")

MAX_HEADER = 256 * 1024 * 1024
START_LIMIT = 120.0
"""Seconds for a fresh child to import torch and build its engine."""
_SLICE = 4 * 1024 * 1024


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A command and the lengths of the buffers that follow."""

    command: Command
    sizes: tuple[int, ...]


# ------------------------------------------------------------------------------------------------ the validator's side


class ChildReplayer:
    """`Replayer` in a process of its own, started at the first command and kept.

    `device` as `pick_device` takes it; `threads`: of torch there; `memory`: bytes that it may take on top of its start
    size (0: no limit). A child that dies, breaks, is too slow, or whose command is cancelled, is killed; the next
    command starts another.
    """

    def __init__(
        self,
        config: RunConfig,
        cuts: Sequence[tuple[int, int]],
        clock: Clock,
        *,
        device: str = "cpu",
        dtype: str = "",
        threads: int = 1,
        memory: int = 0,
    ) -> None:
        self._setup = Setup(
            config=config, cuts=tuple(cuts), device=device, dtype=dtype or config.train.dtype, memory=memory
        )
        self._clock = clock
        self.arguments = (sys.executable, "-m", "iota.nodes.validator.child", str(threads))
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self.started = 0
        """How many processes were started so far."""

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before the first command."""
        return self._process.pid if self._process else None

    async def ask(self, command: Command, buffers: Sequence[Buffer], limit: float) -> Answer:
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            return await self._exchange(command, buffers, limit)

    async def close(self) -> None:
        await self._kill()

    async def _start(self) -> None:
        self.started += 1
        self._process = await asyncio.create_subprocess_exec(
            *self.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._exchange(self._setup, (), START_LIMIT)

    async def _exchange(self, command: Command, buffers: Sequence[Buffer], limit: float) -> Answer:
        """One command and its answer, or the end of this child."""
        process = self._process
        assert process is not None
        answer: Answer | None = None
        try:
            answer = await self._within(limit, _converse(process, command, buffers))
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self._kill()
            raise ReplayFailed(
                f"the replay process ended (exit code {process.returncode}): {error or type(error).__name__}"
            ) from error
        finally:
            if answer is None:
                await self._kill()
        if isinstance(answer, Broken):
            await self._kill()
            raise ReplayFailed(answer.text)
        return answer

    async def _within(self, limit: float, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        timer = asyncio.ensure_future(self._clock.sleep(limit))
        try:
            await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ReplayFailed(f"the replay process did not answer within {limit:.0f} s")
            return task.result()
        finally:
            for future in (task, timer):
                future.cancel()
            await asyncio.gather(task, timer, return_exceptions=True)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def _converse(process: asyncio.subprocess.Process, command: Command, buffers: Sequence[Buffer]) -> Answer:
    assert process.stdin is not None and process.stdout is not None
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    header = msgspec.msgpack.encode(Frame(command, tuple(len(view) for view in views)))
    process.stdin.write(len(header).to_bytes(4, "little") + header)
    for view in views:
        for at in range(0, len(view), _SLICE):
            process.stdin.write(view[at : at + _SLICE])
            await process.stdin.drain()
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(4), "little")
    if size > MAX_HEADER:
        raise EOFError(f"an answer of {size} bytes cannot be")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Answer)


# ---------------------------------------------------------------------------------------------------- the child's side


def main(threads: str) -> None:
    """The process: thread counts first, torch after, then one command after another until standard input ends."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the validator's to hear; it ends us by closing the pipe
    source = sys.stdin.buffer
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as sink:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not enter the protocol
        try:
            _serve(source, sink, int(threads))
        except BrokenPipeError:
            os._exit(1)  # the validator was killed: nobody hears the answer, and closing `sink` would fail again


def _serve(source: BinaryIO, sink: BinaryIO, threads: int) -> None:
    import torch

    from iota.nodes.miner.device import pick_device
    from iota.nodes.validator.engine import Engine

    torch.set_num_threads(threads)
    engine: Engine | None = None
    while (frame := _receive(source)) is not None:
        command, buffers = frame
        try:
            if isinstance(command, Setup):
                device = pick_device(command.device)
                engine = Engine(command.config, command.cuts, device, command.dtype)
                if command.memory and device == "cpu":
                    _limit_memory(command.memory)
                answer: Answer = Ready()
            else:
                assert engine is not None, "set up first"
                answer = engine.handle(command, buffers)
        except (
            MemoryError,
            RuntimeError,
            ValueError,
            IotaError,
        ) as error:  # torch reports lack of memory as RuntimeError
            answer = Broken(text=f"{type(error).__name__}: {str(error)[:400]}")
        data = msgspec.msgpack.encode(answer)
        sink.write(len(data).to_bytes(4, "little") + data)
        sink.flush()


def _receive(source: BinaryIO) -> tuple[Command, list[Buffer]] | None:
    """The next command with its buffers; None when the validator is gone."""
    start = source.read(4)
    if len(start) < 4:
        return None
    frame = msgspec.msgpack.decode(source.read(int.from_bytes(start, "little")), type=Frame)
    buffers: list[Buffer] = []
    for size in frame.sizes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = source.readinto(view[at:])  # type: ignore[attr-defined]
            if not count:
                return None
            at += count
        buffers.append(data)
    return frame.command, buffers


def _limit_memory(extra: int) -> None:
    """Allow `extra` bytes of address space on top of what is taken now (POSIX with /proc; elsewhere no limit)."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, now + extra))


if __name__ == "__main__":
    main(sys.argv[1])
