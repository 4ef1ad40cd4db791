"""Fetching a checkpoint and proving that what is in memory is it (design section 3 "SYNC")."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from iota.core.manifest import PART_NAMES
from iota.core.values import Checkpoint, CheckpointSheet, Digest, Piece, sha256
from iota.errors import IotaError
from iota.nodes.effects import Compute
from iota.store.remote import Objects

Floats = npt.NDArray[np.float32]

FETCHES = 4
"""Transfers at once."""


def check_checkpoint(checkpoint: Checkpoint, *, run: str, epoch: int, stage: int, parameters: int, t: int) -> None:
    """Raises IotaError `bad_input` unless it is this stage's state of this epoch and its pieces cover each part."""
    found = (checkpoint.run, checkpoint.epoch, checkpoint.stage, checkpoint.parameters, checkpoint.t)
    if found != (run, epoch, stage, parameters, t):
        raise _bad(f"told to load {(run, epoch, stage, parameters, t)}, the sheet names {found}")
    ends: dict[str, int] = {}
    for piece in checkpoint.pieces:
        if piece.part not in PART_NAMES or piece.start != ends.get(piece.part, 0) or piece.stop <= piece.start:
            raise _bad(f"piece {piece.part[:16]} [{piece.start}, {piece.stop}) leaves a gap or overlaps")
        ends[piece.part] = piece.stop
    if "weights" not in ends or any(end != parameters for end in ends.values()):
        raise _bad(f"the pieces end at {ends}, a part has {parameters} elements")


def _bad(cause: str) -> IotaError:
    return IotaError("bad_input", f"this checkpoint cannot be loaded: {cause}")


async def fetch_state(
    objects: Objects, compute: Compute, sheet: CheckpointSheet, own: Mapping[Digest, Floats]
) -> dict[str, Floats]:
    """Every part of a checked checkpoint as a float32 array [parameters]. Each piece is read by range, and believed
    only with its SHA-256; pieces of `own` (by digest) are not read at all. Raises what `Objects.get` raises."""
    checkpoint = sheet.checkpoint
    arrays = {part: np.empty(checkpoint.parameters, dtype=np.float32) for part in {p.part for p in checkpoint.pieces}}
    turns = asyncio.Semaphore(FETCHES)

    async def bring(piece: Piece) -> None:
        target = arrays[piece.part][piece.start : piece.stop]
        mine = own.get(piece.digest)
        if mine is not None and mine.shape == target.shape:
            await compute.run(np.copyto, target, mine)
            return
        async with turns:
            end = piece.offset + 4 * (piece.stop - piece.start)
            url = url_of(sheet.urls, piece.object)
            data = await objects.get(url, piece.offset, end, expect_sha256=piece.digest)
            target[:] = np.frombuffer(data, dtype="<f4")

    await gather_all([bring(piece) for piece in checkpoint.pieces])
    return arrays


def url_of(urls: Mapping[str, str], name: str) -> str:
    url = urls.get(name)
    if url is None:
        raise IotaError("no_object", f"the sheet has no link for object {name[:120]}", "Ask for the task again.")
    return url


async def gather_all(jobs: list) -> list:  # type: ignore[type-arg]
    """Run coroutines together; when one fails, the others are cancelled and awaited before its error is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def recomputed_root(checkpoint: Checkpoint, arrays: Mapping[str, Floats]) -> Digest:
    """The root that these arrays have: every piece's digest is taken from the bytes in memory."""
    pieces = []
    for piece in checkpoint.pieces:
        data = memoryview(arrays[piece.part][piece.start : piece.stop].data).cast("B")
        pieces.append(msgspec.structs.replace(piece, digest=sha256(data)))
    return msgspec.structs.replace(checkpoint, pieces=tuple(pieces)).root()
