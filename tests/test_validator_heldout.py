"""The held-out loss, stage after stage, is what plain PyTorch computes for the same weights; recomputed shards are what
the reduction says."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from iota.core import tasks
from iota.core.manifest import build_manifest, chunk_count, encode
from iota.core.reduce import coefficients, reduce_shard
from iota.core.values import CHUNK_FLOATS, Checkpoint, CheckpointSheet, Piece, sha256
from iota.errors import IotaError, Unreachable
from iota.model.layout import Layout
from iota.model.llama import LlamaStage
from iota.nodes.reducing import checkpoint_range, moments_merged, old_from_checkpoint, outer_of, reduce_shards
from iota.nodes.validator.engine import Engine
from iota.nodes.validator.heldout import measure_heldout
from iota.nodes.validator.inline import InlineReplayer
from validator_case import NOW, STAGES, Case, Clock, Inline, identity


def plain_loss(case, weights):
    """One pass through all stages; boundaries in bfloat16, as they travel."""
    with torch.no_grad():
        tokens = torch.tensor(case.heldout_tokens.astype(np.int64))
        windows = tokens[:-1].unfold(0, 32, 32), tokens[1:].unfold(0, 32, 32)
        hidden = windows[0]
        for stage, cut in enumerate(case.cuts):
            module = LlamaStage(case.config, stage, cut)
            for name, values in Layout.of(module).views(weights[stage]).items():
                module.get_parameter(name).copy_(torch.tensor(values))
            hidden = module(hidden)
            if stage < STAGES - 1:
                hidden = hidden.bfloat16().float()
        return F.cross_entropy(hidden.double().flatten(0, 1), windows[1].flatten()).item(), windows[1].numel()


async def measured(case, checkpoints, epoch):
    engine = Engine(case.config, case.cuts, "cpu", "float32")
    sheets = [CheckpointSheet(checkpoint, case.urls(checkpoint)) for checkpoint in checkpoints]
    task = tasks.Heldout(task=7, epoch=epoch, deadline=NOW + 100)
    result = await measure_heldout(
        task, sheets, case.manifest, case.heldout, case.objects, InlineReplayer(engine, Inline()), Clock()
    )
    assert engine._boundary == [] and (result.task, result.epoch) == (7, epoch)
    return result


async def test_heldout_loss_is_plain_pytorchs():
    case = Case()
    expected, tokens = plain_loss(case, case.weights)
    result = await measured(case, case.checkpoints, 0)
    assert result.tokens == tokens == 5 * 32
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.loss == pytest.approx(np.log(64), rel=0.03)


async def test_heldout_loss_of_a_merged_checkpoint():
    """Pieces of several parts in one object, in the order of shards."""
    case = Case()
    checkpoints, weights = [], []
    for stage in range(STAGES):
        values = case.weights[stage] * np.float32(1.5)
        third, pieces = len(values) // 3, []
        for number, (low, high) in enumerate(((0, third), (third, len(values)))):
            parts = [("m", np.ones(high - low, "<f4")), ("weights", values[low:high])]
            name = f"merge/1/{stage}/{number}/a.bin"
            case.put(name, b"".join(part.tobytes() for _, part in parts))
            pieces += [
                Piece(part, low, high, name, 4 * (high - low) * i, sha256(array.tobytes()))
                for i, (part, array) in enumerate(parts)
            ]
        order = tuple(sorted(pieces, key=lambda p: (p.part, p.start)))
        checkpoints.append(Checkpoint(case.run, 1, stage, len(values), 3, order))
        weights.append(values)
    result = await measured(case, checkpoints, 1)
    assert result.loss == pytest.approx(plain_loss(case, weights)[0], rel=1e-6)
    ranged = await checkpoint_range(checkpoints[0], case.urls(checkpoints[0]), "weights", 10, 5000, case.objects)
    assert np.array_equal(ranged, weights[0][10:5000])


async def test_checkpoints_out_of_order_or_damaged_are_not_measured():
    case = Case()
    with pytest.raises(IotaError, match="expected checkpoint 0"):
        await measured(case, case.checkpoints[::-1], 0)
    with pytest.raises(IotaError, match="expected checkpoint 4"):
        await measured(case, case.checkpoints, 4)
    name = case.checkpoints[1].pieces[1].object
    case.put(name, bytes(len(case.blobs._objects[name])))
    with pytest.raises(IotaError, match="SHA-256"):
        await measured(case, case.checkpoints, 0)


# ------------------------------------------------------------------------------------------------------- third party


def upload(case, name, seed, damage=False, lie=False):
    """A member's upload in the store; its contribution row and parts."""
    key, rng = identity(name).key, np.random.default_rng(seed)
    size = len(case.weights[1])
    parts = {
        "delta": rng.standard_normal(size, dtype=np.float32),
        "m": rng.standard_normal(size, dtype=np.float32),
        "v": rng.random(size, dtype=np.float32),
    }
    manifest, pieces = build_manifest(list(parts.items()))
    data = bytearray(b"".join(bytes(piece) for piece in pieces))
    if damage:
        data[4 * CHUNK_FLOATS] ^= 1  # the first byte of the first part's second chunk, or of the next part
    root = manifest.root() if not lie else sha256(b"another root")
    case.put(f"uploads/{name}/state.bin", data)
    case.put(f"uploads/{name}/manifest.bin", encode(manifest))
    return key, parts, root, f"uploads/{name}/state.bin", f"uploads/{name}/manifest.bin"


async def recompute(case, rows, share, work, objects=None, own=None):
    contributions = tuple(
        sorted(
            (
                tasks.Contribution(key, root, share[key], case.get_link(url), case.get_link(manifest))
                for key, _, root, url, manifest in rows
            ),
            key=lambda c: c.key,
        )
    )
    base = case.checkpoints[1]
    sheet = tasks.ReduceSheet(contributions, work, base, case.urls(base))
    old = old_from_checkpoint(base, sheet.urls, case.config, objects or case.objects)
    return await reduce_shards(sheet, base.parameters, case.config, old, objects or case.objects, Inline(), own)


async def test_a_third_party_recomputes_shards_from_uploads():
    case = Case()
    rows = [upload(case, "a", 1), upload(case, "b", 2), upload(case, "damaged", 3, damage=True),
            upload(case, "liar", 4, lie=True)]  # fmt: skip
    share = coefficients({row[0]: 4 for row in rows}, 2.0)
    size, chunks = len(case.weights[1]), chunk_count(len(case.weights[1]))
    work = (tasks.ShardWork(0, 0, chunks, case.put_link("merge/1/1/0/v.bin")),)
    report = await recompute(case, rows, share, work)
    zeros = np.zeros(size, dtype=np.float32)
    old = {"weights": case.weights[1], "momentum": zeros, "m": zeros, "v": zeros}
    given = {row[0]: row[1] for row in rows[:2]} | {row[0]: "bad" for row in rows[2:]}
    expected = reduce_shard(given, share, old, outer_of(case.config))
    data = case.blobs._objects["merge/1/1/0/v.bin"]
    assert data == b"".join(part.tobytes() for part in expected.parts.values())
    (shard,) = report.shards
    assert (shard.shard, shard.length, shard.digest) == (0, len(data), sha256(data))
    assert shard.parts == tuple((name, sha256(part.tobytes())) for name, part in expected.parts.items())
    why = {key: text for _, key, text in report.bad}
    assert set(why) == {rows[2][0], rows[3][0]}
    assert "digest differs" in why[rows[2][0]] and "committed root" in why[rows[3][0]]

    own = (rows[0][0], rows[0][1])
    assert await recompute(case, rows, share, work, own=own) == report


async def test_a_missing_upload_is_left_out_but_our_own_trouble_is_raised():
    case = Case()
    rows = [upload(case, "a", 1), upload(case, "b", 2)]
    share = coefficients({row[0]: 4 for row in rows}, 2.0)
    work = (tasks.ShardWork(3, 0, 1, case.put_link("merge/1/1/3/v.bin")),)
    await case.blobs.delete("uploads/b/state.bin")
    report = await recompute(case, rows, share, work)
    assert [(shard, key) for shard, key, _ in report.bad] == [(3, rows[1][0])]

    class Down:
        async def get(self, url, *args, **how):
            raise Unreachable("no answer")

    with pytest.raises(Unreachable):
        await recompute(case, rows, share, work, objects=Down())
    assert moments_merged(case.config)
