"""Reducing own shards: read every member's bytes, check them, reduce, step, put (design section 5 "Reduce").

A shard is read part by part and member by member, a few transfers at once, and is done before the next begins, so
memory holds one shard of every member. What contradicts its manifest, or is not there, is named and left out; what the
store could not deliver is nobody's fault and fails the task instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from iota.core import tasks
from iota.core.manifest import ChunkManifest, check_chunks, chunk_count, decode, element_range, merkle_root
from iota.core.reduce import Outer, reduce_shard
from iota.core.values import Digest, Key, sha256
from iota.errors import IotaError
from iota.nodes.effects import Compute
from iota.nodes.miner.load import FETCHES, Floats, gather_all
from iota.nodes.miner.retain import Buffer, digest_of
from iota.nodes.miner.stage import StageWorker
from iota.nodes.reducing import THEIR_FAULT
from iota.store.remote import Objects

Read = tuple[str, bytes] | str
"""One part's bytes of one contribution, or why there are none."""


@dataclass(frozen=True)
class Finished:
    """A reduced shard: its report, the bytes to put, each part's values by digest, and who was left out."""

    result: tasks.ShardResult
    parts: list[Buffer]
    values: dict[Digest, Floats]
    bad: list[tuple[int, Key, str]]


class Reducer:
    """Reduces for one stage worker. Manifests are read once an epoch."""

    def __init__(self, objects: Objects, compute: Compute, worker: StageWorker) -> None:
        self._objects = objects
        self._compute = compute
        self._worker = worker
        self._manifests: dict[Digest, ChunkManifest | str] = {}
        self._epoch = 0
        self._turns = asyncio.Semaphore(FETCHES)

    async def reduce(self, task: tasks.Reduce, sheet: tasks.ReduceSheet) -> tasks.Reduced:
        """All shards of the sheet. Raises IotaError when the store fails, `stale` when this stage is not at the task's
        epoch, `bad_input` for a sheet that cannot be."""
        worker = self._worker
        if task.epoch != worker.epoch or task.stage != worker.stage:
            raise IotaError("stale", f"to reduce epoch {task.epoch} of stage {task.stage}; loaded: {worker.epoch}")
        if self._epoch != task.epoch:
            self._manifests, self._epoch = {}, task.epoch
        others = [c for c in sheet.contributions if c.root not in self._manifests and not self._own(c)]
        for c, manifest in zip(others, await gather_all([self._manifest(c) for c in others]), strict=True):
            self._manifests[c.root] = manifest
        rows, bad = [], []
        for work in sheet.shards:
            done = await self._shard(work, sheet.contributions)
            await self._objects.put(work.url, done.parts)
            worker.reduced.update(done.values)
            rows.append(done.result)
            bad += done.bad
        return tasks.Reduced(task=task.task, shards=tuple(rows), bad=tuple(bad))

    def _own(self, contribution: tasks.Contribution) -> bool:
        """Our own upload is in memory, if it is the one that was committed."""
        upload = self._worker.upload
        return contribution.key == self._worker.key and upload is not None and upload.result.root == contribution.root

    async def _manifest(self, contribution: tasks.Contribution) -> ChunkManifest | str:
        worker = self._worker
        try:
            async with self._turns:
                data = await self._objects.get(contribution.manifest_url)
        except IotaError as error:
            return _missing(error, "its manifest")
        names = worker.outer.upload_parts(worker.moments)
        return await self._compute.run(_read_manifest, data, names, worker.parameters, contribution.root)

    async def _shard(self, work: tasks.ShardWork, contributions: tuple[tasks.Contribution, ...]) -> Finished:
        chunks = chunk_count(self._worker.parameters)
        if not 0 <= work.start < work.stop <= chunks:
            raise IotaError(
                "bad_input", f"shard {work.shard} [{work.start}, {work.stop}) is not within {chunks} chunks"
            )
        jobs = [
            self._part(c, name, work)
            for c in contributions
            if not self._own(c) and isinstance(self._manifests[c.root], ChunkManifest)
            for name in self._worker.outer.upload_parts(self._worker.moments)
        ]
        reads: dict[Key, list[Read]] = {}
        for key, read in await gather_all(jobs):
            reads.setdefault(key, []).append(read)
        return await self._compute.run(self._finish, work, contributions, reads)

    async def _part(self, contribution: tasks.Contribution, name: str, work: tasks.ShardWork) -> tuple[Key, Read]:
        manifest = self._manifests[contribution.root]
        assert isinstance(manifest, ChunkManifest)
        start, stop = manifest.part_chunk_range(name, work.start, work.stop)
        try:
            async with self._turns:
                return contribution.key, (name, await self._objects.get(contribution.url, start, stop))
        except IotaError as error:
            return contribution.key, _missing(error, f"its part {name}")

    # ------------------------------------------------------------------------------------- on the compute thread

    def _finish(
        self, work: tasks.ShardWork, contributions: tuple[tasks.Contribution, ...], reads: Mapping[Key, list[Read]]
    ) -> Finished:
        worker = self._worker
        low, high = element_range(work.start, work.stop, worker.parameters)
        given: dict[Key, Mapping[str, Floats] | str] = {}
        for c in contributions:
            manifest = self._manifests.get(c.root)
            if self._own(c):
                assert worker.upload is not None
                given[c.key] = {name: array[low:high] for name, array in worker.upload.arrays.items()}
            elif isinstance(manifest, ChunkManifest):
                given[c.key] = checked_parts(manifest, work.start, high - low, reads.get(c.key, []))
            else:
                given[c.key] = manifest or "no manifest"
        shares = {c.key: c.coefficient for c in contributions}
        return finish(work, given, shares, worker.old_parts(low, high), worker.outer)


def finish(
    work: tasks.ShardWork, given: Mapping[Key, Mapping[str, Floats] | str], shares: Mapping[Key, float],
    old: Mapping[str, Floats], outer: Outer,
) -> Finished:  # fmt: skip
    """Reduce one shard and describe the result: parts one after another in one object."""
    reduced = reduce_shard(given, shares, old, outer)
    buffers: list[Buffer] = []
    values: dict[Digest, Floats] = {}
    parts = []
    for name, array in reduced.parts.items():
        buffer = memoryview(np.ascontiguousarray(array, dtype="<f4").data).cast("B")
        digest = sha256(buffer)
        buffers.append(buffer)
        parts.append((name, digest))
        values[digest] = array
    length = sum(len(buffer) for buffer in buffers)
    result = tasks.ShardResult(work.shard, tuple(parts), length, digest_of(buffers))
    return Finished(result, buffers, values, [(work.shard, key, why) for key, why in reduced.dropped])


def checked_parts(manifest: ChunkManifest, start: int, size: int, reads: list[Read]) -> Mapping[str, Floats] | str:
    """One contribution's parts of a shard of `size` elements from chunk `start` on, or why it cannot be used."""
    parts: dict[str, Floats] = {}
    for read in reads:
        if isinstance(read, str):
            return read
        name, data = read
        problem = check_chunks(manifest, manifest.upload_chunk(name, start), data)
        if problem:
            return problem
        parts[name] = np.frombuffer(data, dtype="<f4", count=size)
    return parts


def _read_manifest(data: Buffer, names: tuple[str, ...], parameters: int, root: Digest) -> ChunkManifest | str:
    try:
        manifest = decode(data, names=names, parameters=parameters)
    except ValueError as error:
        return f"its manifest: {error}"
    if merkle_root(manifest) != root:
        return "its manifest is not the committed one"
    return manifest


def _missing(error: IotaError, what: str) -> str:
    if error.code not in THEIR_FAULT:
        raise error
    return f"{what} is not there as committed ({error.code})"
