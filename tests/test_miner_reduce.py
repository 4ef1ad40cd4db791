"""Reducing shards: owners and a third party come to the same bytes; what is bad is named; a failing store is not."""

import asyncio
import functools

import msgspec
import numpy as np
import pytest

from iota.core import reduce as rd
from iota.core import tasks
from iota.core.manifest import chunk_count, element_range
from iota.core.values import CHUNK_BYTES, sha256
from iota.errors import IotaError, Unreachable
from iota.nodes.miner.reduce import Reducer
from iota.nodes.miner.stage import Given
from iota.nodes.reducing import old_from_checkpoint, reduce_shards
from iota.store.blobs import MemoryBlobs
from iota.store.manifest import checkpoint_zero
from iota.store.remote import DirectObjects
from miner_case import HUB, NOW, Case, Inline


class Counting:
    """`Objects` that counts reads by object name, and how many run at once."""

    def __init__(self, objects, fail=""):
        self.objects, self.fail = objects, fail
        self.reads, self.now, self.most = [], 0, 0

    async def get(self, url, start=0, stop=None, *, expect_sha256=None):
        name = url.partition("/blobs/")[2].partition("?")[0]
        if self.fail and self.fail in name:
            raise Unreachable(f"{name} stood still")
        self.reads.append(name)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return await self.objects.get(url, start, stop, expect_sha256=expect_sha256)

    async def put(self, url, parts):
        await self.objects.put(url, parts)


@pytest.fixture(params=["nesterov", "assign"])
def merge(request, tmp_path_factory):
    """Three members of stage 0 with uploads in the store, and the rows of a sheet; the store is as new in each test."""
    case, workers, rows, objects = made(request.param, tmp_path_factory.getbasetemp() / "reduce")
    case.blobs = MemoryBlobs()
    for name, data in objects.items():
        case.blobs._keep(name, data)
    case.objects = DirectObjects(case.blobs, HUB.key, lambda: NOW)
    return case, workers, rows


@functools.cache
def made(outer, folder):
    case = Case(merge=dict(outer=outer), model=dict(width=64))
    workers = [case.worker(folder / outer / name, 0, name) for name in ("ann", "bob", "cy")]
    rows = []
    for worker in workers:
        for sample in range(2):
            case.do_pass(worker, sample, sample > 0, sample > 0)
        result = worker.turn(True, True, tasks.Commit(task=9, epoch=1, deadline=NOW), Given()).result
        base = f"uploads/1/0/{worker.key}"
        asyncio.run(case.blobs.put(f"{base}/state.bin", worker.upload.pieces))
        asyncio.run(case.blobs.put(f"{base}/manifest.bin", [worker.upload.encoded]))
        links = [case.get_link(f"{base}/{name}.bin") for name in ("state", "manifest")]
        rows.append(tasks.Contribution(worker.key, result.root, 0.0, *links))
    rows.sort(key=lambda row: row.key)
    shares = rd.coefficients({row.key: 3 + i for i, row in enumerate(rows)}, 2.0)
    rows = tuple(msgspec.structs.replace(row, coefficient=shares[row.key]) for row in rows)
    return case, workers, rows, dict(case.blobs._objects)


def sheet_for(case, rows, who, chunks):
    half = chunks // 2
    work = [
        tasks.ShardWork(number, start, stop, case.put_link(f"merge/1/0/{number}/{who}.bin"))
        for number, (start, stop) in enumerate(((0, half), (half, chunks)))
    ]
    return tasks.ReduceSheet(rows, tuple(work), None, {})


def reduce_by(case, worker, rows, objects=None, who=None):
    task = tasks.Reduce(task=11, epoch=1, stage=0, deadline=NOW)
    sheet = sheet_for(case, rows, who or worker.key, chunk_count(worker.parameters))
    return asyncio.run(Reducer(objects or case.objects, Inline(), worker).reduce(task, sheet))


def rewrite(case, worker, change, name="state"):
    key = f"uploads/1/0/{worker.key}/{name}.bin"
    data = bytearray(asyncio.run(case.blobs.get(key)))
    data = change(data) or data
    asyncio.run(case.blobs.put(key, [bytes(data)]))


def test_owners_and_a_third_party_come_to_the_same_bytes(merge):
    case, (ann, bob, _), rows = merge
    first, second = reduce_by(case, ann, rows), reduce_by(case, bob, rows)
    assert first.shards == second.shards and first.bad == second.bad == () and len(first.shards) == 2
    checkpoint = checkpoint_zero(case.manifest, 0)
    urls = {piece.object: case.get_link(piece.object) for piece in checkpoint.pieces}
    old = old_from_checkpoint(checkpoint, urls, case.manifest.config, case.objects)
    sheet = sheet_for(case, rows, "third", chunk_count(ann.parameters))
    third = asyncio.run(reduce_shards(sheet, ann.parameters, case.manifest.config, old, case.objects, Inline()))
    assert tuple(third.shards) == first.shards
    names = ann.outer.result_parts(True)
    for row in first.shards:
        data = asyncio.run(case.blobs.get(f"merge/1/0/{row.shard}/{ann.key}.bin"))
        assert (len(data), sha256(data)) == (row.length, row.digest) and tuple(name for name, _ in row.parts) == names
        size = len(data) // len(names)
        for i, (_, digest) in enumerate(row.parts):
            assert sha256(data[i * size : (i + 1) * size]) == digest
            assert sha256(ann.reduced[digest].tobytes()) == digest, "kept for the sync"


def test_the_numbers_are_the_weighted_mean_and_the_outer_step(merge):
    case, workers, rows = merge
    reduce_by(case, workers[0], rows)
    by_key = {worker.key: worker for worker in workers}
    low, high = element_range(0, chunk_count(workers[0].parameters) // 2, workers[0].parameters)
    part = workers[0].outer.upload_part
    acc = np.zeros(high - low, np.float64)
    for row in rows:
        acc += row.coefficient * by_key[row.key].upload.arrays[part][low:high].astype(np.float64)
    if part == "delta":
        outer = workers[0].outer
        acc = workers[0].base["weights"][low:high] - outer.lr * (acc + outer.momentum * acc)
    data = asyncio.run(case.blobs.get(f"merge/1/0/0/{workers[0].key}.bin"))
    assert np.allclose(np.frombuffer(data, "<f4")[: high - low], acc, rtol=0, atol=1e-6)


def test_own_upload_is_not_read_manifests_once_and_few_transfers_run_at_once(merge):
    case, (ann, _, _), rows = merge
    objects = Counting(case.objects)
    reduce_by(case, ann, rows, objects)
    assert not any(ann.key in name for name in objects.reads)
    assert sum("manifest" in name for name in objects.reads) == 2
    assert sum("state" in name for name in objects.reads) == 2 * 2 * 3 and 1 < objects.most <= 4


def flip(data):
    data[5 * 4] ^= 1


def cut(data):
    return data[: len(data) - 100]


CASES = {
    "a flipped bit in the first shard": (flip, "state", {0}, "digest differs"),
    "an object cut short": (cut, "state", {1}, "not there as committed"),
    "another manifest": (lambda data: data[:-8] + bytes(8), "manifest", {0, 1}, "not the committed one"),
    "no manifest at all": (lambda data: b"what", "manifest", {0, 1}, "manifest"),
}


@pytest.mark.parametrize("what", CASES)
def test_a_bad_contribution_is_named_and_left_out_by_everyone_alike(merge, what):
    case, (ann, bob, cy), rows = merge
    change, name, shards, why = CASES[what]
    rewrite(case, cy, change, name)
    first, second = reduce_by(case, ann, rows), reduce_by(case, bob, rows)
    assert first.shards == second.shards and first.bad == second.bad
    assert {(shard, key) for shard, key, _ in first.bad} == {(shard, cy.key) for shard in shards}
    assert all(why in text for _, _, text in first.bad)
    assert all(bytes(piece) for piece in cy.upload.pieces)
    alone = [row for row in rows if row.key != cy.key]
    rest = rd.renormalise({row.key: row.coefficient for row in rows}, {row.key for row in alone})
    alone = tuple(msgspec.structs.replace(row, coefficient=rest[row.key]) for row in alone)
    without = reduce_by(case, ann, alone, who="without")
    assert all(first.shards[shard] == without.shards[shard] for shard in shards)


def test_a_member_that_uploaded_nothing_is_named(merge):
    case, (ann, _, cy), rows = merge
    asyncio.run(case.blobs.delete(f"uploads/1/0/{cy.key}/state.bin"))
    bad = reduce_by(case, ann, rows).bad
    assert [(shard, key) for shard, key, _ in bad] == [(0, cy.key), (1, cy.key)] and "no_object" in bad[0][2]


def test_a_store_that_fails_is_nobodys_fault(merge):
    case, (ann, _, cy), rows = merge
    for what in (f"{cy.key}/state", f"{cy.key}/manifest"):
        with pytest.raises(Unreachable):
            reduce_by(case, ann, rows, Counting(case.objects, what))
    with pytest.raises(IotaError, match="to reduce epoch 2"):
        asyncio.run(
            Reducer(case.objects, Inline(), ann).reduce(
                tasks.Reduce(task=1, epoch=2, stage=0, deadline=NOW), sheet_for(case, rows, "x", 4)
            )
        )
    assert ann.upload.manifest.chunks * CHUNK_BYTES >= 4 * ann.parameters
