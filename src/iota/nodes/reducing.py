"""Reducing shards of a merge from members' uploads: the same code for owners and for recomputing third parties.

Every byte read is checked against the contribution's chunk manifest, and the manifest against the committed root; what
contradicts them is left out of that shard by everybody alike (design section 5 "Commit", "Reduce").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from iota.config.schema import RunConfig
from iota.core import manifest as chunks
from iota.core.reduce import Floats, Outer, reduce_shard
from iota.core.tasks import Contribution, ReduceSheet, ShardResult, ShardWork
from iota.core.values import Checkpoint, Key, sha256
from iota.errors import IotaError
from iota.nodes.effects import Compute
from iota.store.remote import Objects

Old = Callable[[int, int], Awaitable[Mapping[str, Floats]]]
"""The present value of elements [from, to) of a stage: weights, momentum, and m and v when these are merged."""
THEIR_FAULT = ("no_object", "bad_range", "too_large")
"""What a store says when an upload is not there or not whole; anything else is our own trouble and is raised."""


@dataclass
class ShardReport:
    """What `Reduced` reports: results in the sheet's order; `bad`: (shard, key, why) of what was left out."""

    shards: list[ShardResult] = field(default_factory=list)
    bad: list[tuple[int, Key, str]] = field(default_factory=list)


def outer_of(config: RunConfig) -> Outer:
    """The outer step of a run."""
    merge = config.merge
    return Outer(kind=merge.outer, lr=merge.outer_lr, momentum=merge.outer_momentum)


def moments_merged(config: RunConfig) -> bool:
    return config.merge.inner_state == "merge"


async def reduce_shards(
    sheet: ReduceSheet,
    parameters: int,
    config: RunConfig,
    old: Old,
    objects: Objects,
    compute: Compute,
    own: tuple[Key, Mapping[str, Floats]] | None = None,
) -> ShardReport:
    """Reduce every shard on the sheet and put its result.

    `parameters`: of the stage. `own`: this node's key and its own upload's parts (float32 [parameters] each, as
    committed), which are then not downloaded. Raises IotaError when the store cannot be reached or refuses a result:
    nothing is reported then.
    """
    outer, moments = outer_of(config), moments_merged(config)
    names = outer.upload_parts(moments)
    manifests = {
        c.key: await _manifest(c, names, parameters, objects) for c in sheet.contributions if not own or c.key != own[0]
    }
    share = {c.key: c.coefficient for c in sheet.contributions}
    report = ShardReport()
    for work in sheet.shards:
        low, high = chunks.element_range(work.start, work.stop, parameters)
        given: dict[Key, Mapping[str, Floats] | str] = {}
        for c in sheet.contributions:
            if own and c.key == own[0]:
                given[c.key] = {name: own[1][name][low:high] for name in names}
            else:
                given[c.key] = await _shard_of(c, manifests[c.key], work, high - low, objects, compute)
        reduced = await compute.run(reduce_shard, given, share, await old(low, high), outer)
        pieces = [memoryview(np.ascontiguousarray(part, "<f4").data).cast("B") for part in reduced.parts.values()]
        digests, whole = await compute.run(_digests, pieces)
        await objects.put(work.url, pieces)
        parts = tuple(zip(reduced.parts, digests, strict=True))
        report.shards.append(ShardResult(work.shard, parts, sum(len(piece) for piece in pieces), whole))
        report.bad += [(work.shard, key, why) for key, why in reduced.dropped]
    return report


def _digests(pieces: list[memoryview]) -> tuple[list[str], str]:
    return [sha256(piece) for piece in pieces], sha256(b"".join(pieces))


async def _manifest(
    c: Contribution, names: tuple[str, ...], parameters: int, objects: Objects
) -> chunks.ChunkManifest | str:
    """A contribution's checked manifest, or why it has none."""
    try:
        manifest = chunks.decode(await objects.get(c.manifest_url), names=names, parameters=parameters)
    except ValueError as error:
        return str(error)
    except IotaError as error:
        if error.code not in THEIR_FAULT:
            raise
        return f"no chunk manifest: {error.cause}"
    return manifest if manifest.root() == c.root else "the chunk manifest does not have the committed root"


async def _shard_of(
    c: Contribution,
    manifest: chunks.ChunkManifest | str,
    work: ShardWork,
    length: int,
    objects: Objects,
    compute: Compute,
) -> Mapping[str, Floats] | str:
    """A contribution's parts of one shard, float32 [length] each, or why they cannot be used."""
    if isinstance(manifest, str):
        return manifest
    parts: dict[str, Floats] = {}
    for name in manifest.names:
        try:
            data = await objects.get(c.url, *manifest.part_chunk_range(name, work.start, work.stop))
        except IotaError as error:
            if error.code not in THEIR_FAULT:
                raise
            return f"part {name} cannot be read: {error.cause}"
        problem = await compute.run(chunks.check_chunks, manifest, manifest.upload_chunk(name, work.start), data)
        if problem:
            return problem
        parts[name] = np.frombuffer(data, dtype="<f4")[:length]
    return parts


# -------------------------------------------------------------------------------------------------- from a checkpoint


async def checkpoint_range(
    checkpoint: Checkpoint, urls: Mapping[str, str], part: str, low: int, high: int, objects: Objects
) -> Floats:
    """Elements [low, high) of a checkpoint's part, each piece touched checked by its digest; zeros for a part that it
    does not have (checkpoint 0 has weights only). Raises IotaError `corrupt` when the pieces do not cover the range."""
    out = np.zeros(high - low, dtype="<f4")
    pieces = sorted((p for p in checkpoint.pieces if p.part == part), key=lambda p: p.start)
    at = low
    for piece in pieces:
        if piece.stop <= low or piece.start >= high:
            continue
        if piece.start > at:
            break
        stop = piece.offset + 4 * (piece.stop - piece.start)
        data = await objects.get(urls[piece.object], piece.offset, stop, expect_sha256=piece.digest)
        values = np.frombuffer(data, dtype="<f4")
        upto = min(high, piece.stop)
        out[at - low : upto - low] = values[at - piece.start : upto - piece.start]
        at = upto
    if pieces and at < high:
        raise IotaError(
            "corrupt", f"checkpoint {checkpoint.epoch} of stage {checkpoint.stage}: {part} has a gap at {at}"
        )
    return out


def old_from_checkpoint(checkpoint: Checkpoint, urls: Mapping[str, str], config: RunConfig, objects: Objects) -> Old:
    """A third party's `old`: read from the checkpoint's objects."""
    names = outer_of(config).result_parts(moments_merged(config))

    async def old(low: int, high: int) -> Mapping[str, Floats]:
        return {name: await checkpoint_range(checkpoint, urls, name, low, high, objects) for name in names}

    return old
