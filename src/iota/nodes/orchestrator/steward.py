"""What the orchestrator does itself between requests: shards that nobody else can settle, checks of what peers say they
uploaded, and clearing away what nobody needs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from iota.core import manifest as chunk_manifest
from iota.core import reduce as reducing
from iota.core import tasks
from iota.core.machine import auditing, merging
from iota.core.machine.soft import Lease
from iota.core.machine.state import Member, StageMerge
from iota.core.values import Checkpoint, sha256
from iota.errors import IotaError

if TYPE_CHECKING:
    from iota.nodes.orchestrator.node import Orchestrator

Parts = dict[str, np.ndarray]
READ_BYTES = 8 << 20
"""Read and hashed at once: a moment of the event loop's time."""


async def upload_problem(node: Orchestrator, m: Member) -> tuple[str, str]:
    """A member says it uploaded: both objects must lie in the store with the committed lengths (the store checked the
    digests when it took them)."""
    s = node.machine.state
    committed = s.commitments.get(m.number)
    if committed is None:
        return "", ""
    names = merging.upload_keys(s.epoch, m.stage, m.key)
    for name, length in zip(names, (committed.length, committed.manifest_length), strict=True):
        size = await node.blobs.size(name)
        if size != length:
            return "no_object", f"{name} has {size} bytes in the store, {length} were committed"
    return "", ""


async def check_shown(node: Orchestrator, m: Member, shown: tuple[tasks.Shown, ...]) -> tuple[tasks.Shown, ...]:
    """A member says it showed its evidence: every object asked for must lie in the store, or it was not shown. So a
    validator that later finds nothing there knows that the loss is not the miner's."""
    rows = []
    for row in shown:
        audit = node.machine.state.audits.get(row.audit)
        if audit is None or audit.number != m.number or audit.state != "show" or row.problem:
            rows.append(row)
            continue
        need, missing = auditing.needed(node.machine, audit), []
        for name, key in auditing.objects(audit).items():
            if need.get(name, True) and await node.blobs.size(key) is None:
                missing.append(name)
        rows.append(tasks.Shown(row.audit, f"not in the store: {', '.join(missing)}") if missing else row)
    return tuple(rows)


async def reduced_problem(node: Orchestrator, lease: Lease, result: tasks.Reduced) -> tuple[str, str]:
    """A reducer says it put its shards: each object must lie in the store with the bytes that were reported, part by
    part. The merged checkpoint names them, so an object that is not what its owner says would stop all at SYNC."""
    if not isinstance(lease.attach, tuple) or lease.attach[0] != "reduce":
        return "", ""
    urls = {work.shard: work.url for work in lease.attach[1].shards}
    for row in result.shards:
        name = urls.get(row.shard)
        if name is None:
            continue
        if await node.blobs.size(name) != row.length:
            return "no_object", f"shard {row.shard} is not in the store with {row.length} bytes"
        whole, parts = await _digests(node, name, row.length, len(row.parts))
        if (whole, parts) != (row.digest, [digest for _, digest in row.parts]):
            return "wrong_digest", f"shard {row.shard} does not lie in the store with the bytes reported"
    return "", ""


async def _digests(node: Orchestrator, name: str, length: int, parts: int) -> tuple[str, list[str]]:
    """SHA-256 of an object and of each of its equally long parts, read piece by piece."""
    whole, digests = hashlib.sha256(), []
    size = length // max(1, parts)
    for part in range(parts):
        one = hashlib.sha256()
        for start in range(part * size, (part + 1) * size, READ_BYTES):
            data = await node.blobs.get(name, start, min(start + READ_BYTES, (part + 1) * size))
            one.update(data)
            whole.update(data)
        digests.append(one.hexdigest())
    return whole.hexdigest(), digests


async def serve_wants(node: Orchestrator) -> None:
    """Do what the machine wants of the orchestrator: keep a shard's old value, or recompute a disputed one when no
    validator is there."""
    for kind, stage, shard in merging.wanted(node.machine, node.clock.now()):
        merge = node.machine.state.merges[stage]
        url = merging.shard_object(node.machine.state.epoch, stage, shard, "orchestrator")
        old = await _old_parts(node, merge, shard)
        if kind == "keep":
            parts: Parts = reducing.keep(old, merging.outer(node.machine))
            bad: tuple[tuple[int, str, str], ...] = ()
        else:
            parts, bad = await _recompute(node, merge, shard, old)
        row = await _put(node, shard, url, parts)
        if kind == "keep":
            merging.on_kept(node.machine, stage, shard, row, url)
        elif node.machine.state.phase == "reduce":
            work = tasks.ShardWork(shard, 0, 0, url)
            result = tasks.Reduced(task=0, shards=(row,), bad=bad)
            merging.record_report(node.machine, merging.ORCHESTRATOR, 0, "", stage, True, result, {shard: work})
        node.machine.tick(node.clock.now())
        await node.commit()


async def _put(node: Orchestrator, shard: int, url: str, parts: Parts) -> tasks.ShardResult:
    buffers = [np.ascontiguousarray(array, dtype="<f4").tobytes() for array in parts.values()]
    await node.blobs.put(url, buffers)
    digests = tuple((name, sha256(buffer)) for name, buffer in zip(parts, buffers, strict=True))
    whole = b"".join(buffers)
    return tasks.ShardResult(shard, digests, len(whole), sha256(whole))


async def _old_parts(node: Orchestrator, merge: StageMerge, shard: int) -> Parts:
    """A shard's present value from the last checkpoint; parts it does not hold yet are zeros."""
    mc = node.machine
    checkpoint = mc.state.checkpoints[merge.stage]
    plan = merging.plan_of(mc, merge)
    low, high = chunk_manifest.element_range(*plan.range(shard), checkpoint.parameters)
    names = merging.outer(mc).result_parts(merging.moments(mc))
    return {name: await read_part(node, checkpoint, name, low, high) for name in names}


async def read_part(node: Orchestrator, checkpoint: Checkpoint, name: str, low: int, high: int) -> np.ndarray:
    """Elements [low, high) of one part, float32."""
    out = np.zeros(high - low, dtype="<f4")
    for piece in checkpoint.pieces:
        a, b = max(piece.start, low), min(piece.stop, high)
        if piece.part == name and a < b:
            start = piece.offset + 4 * (a - piece.start)
            data = await node.blobs.get(piece.object, start, start + 4 * (b - a))
            out[a - low : b - low] = np.frombuffer(data, dtype="<f4")
    return out


async def _recompute(
    node: Orchestrator, merge: StageMerge, shard: int, old: Parts
) -> tuple[Parts, tuple[tuple[int, str, str], ...]]:
    """Reduce a disputed shard from the uploads, as an owner would."""
    mc = node.machine
    plan = merging.plan_of(mc, merge)
    start, stop = plan.range(shard)
    given: dict[str, Parts | str] = {}
    for number in merge.members:
        key = mc.state.members[number].key
        root = mc.state.commitments[number].root
        names = merging.upload_keys(mc.state.epoch, merge.stage, key)
        given[key] = await _contribution(node, names, root, start, stop, mc.parameters[merge.stage])
    reduced = reducing.reduce_shard(given, merging.coefficients(mc, merge), old, merging.outer(mc))
    return reduced.parts, tuple((shard, key, why) for key, why in reduced.dropped)


async def _contribution(
    node: Orchestrator, names: tuple[str, str], root: str, start: int, stop: int, parameters: int
) -> Parts | str:
    """One member's parts of a chunk range, or why they cannot be used."""
    wanted = merging.outer(node.machine).upload_parts(merging.moments(node.machine))
    low, high = chunk_manifest.element_range(start, stop, parameters)
    try:
        manifest = chunk_manifest.decode(await node.blobs.get(names[1]), names=wanted, parameters=parameters)
        if manifest.root() != root:
            return "its manifest is not the committed one"
        parts: Parts = {}
        for name in wanted:
            a, b = manifest.part_chunk_range(name, start, stop)
            data = await node.blobs.get(names[0], a, b)
            problem = chunk_manifest.check_chunks(manifest, manifest.upload_chunk(name, start), data)
            if problem:
                return problem
            parts[name] = np.frombuffer(data, dtype="<f4")[: high - low]
    except (IotaError, ValueError) as error:
        return str(error)
    return parts


async def clear_away(node: Orchestrator) -> int:
    """Delete objects that nothing needs any more. Returns how many."""
    s = node.machine.state
    epoch = s.epoch if s.phase in ("train", "drain", "finished") else s.epoch - 1
    node.archive.forget(s.epoch)
    objects = [name for prefix in ("uploads/", "merge/", "audits/") for name, _ in await node.blobs.list(prefix)]
    gone = node.archive.rubbish(objects, epoch)
    for name in gone:
        await node.blobs.delete(name)
    return len(gone)
