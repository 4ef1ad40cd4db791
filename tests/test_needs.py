"""What a stage takes: sums by hand, what torch and numpy really take, and a miner that refuses before it downloads."""

import asyncio
import contextlib
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F

from iota.config.load import check, load_run, parse_run
from iota.core import reduce as rd
from iota.core import tasks
from iota.core.manifest import chunk_count
from iota.errors import IotaError
from iota.model import needs
from iota.model.boundary import CODECS, FORWARD, boundary_tensor
from iota.model.llama import LlamaStage
from iota.model.needs import disk_need, memory_need
from iota.model.partition import count_parameters
from iota.net.peer import Caller
from iota.nodes.miner import device, retain
from iota.nodes.miner.device import Room, check_disk, check_memory, room_here
from iota.nodes.miner.node import Miner, MinerSettings
from iota.nodes.miner.reduce import Reducer
from iota.nodes.miner.stage import Given
from iota.sim.effects import Host
from iota.sim.loop import run as simulate
from iota.wire.keys import Identity
from miner_case import NOW, Case, Inline
from test_miner_run import HUB, Swarm, two_by_two

TINY = check(load_run(Path(__file__).parent.parent / "recipes" / "tiny.toml"))
CUT = (1, 2)


def changed(config, section, **values):
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **values)})


# --------------------------------------------------------------------------------------------------------- by hand


def test_memory_by_hand():
    config = changed(TINY, "merge", outer="nesterov")
    need = memory_need(config, 1, CUT)
    p = 4 * count_parameters(config, 1, CUT)
    assert (need.parameters, need.gradients, need.moments, need.workspace, need.casts) == (p, 2 * p, 2 * p, 0, 0)
    assert (need.base, need.upload, need.others, need.results, need.scratch) == (4 * p, p, 3 * p, 4 * p, p)
    assert need.device == 0 and need.copies == 0
    assert need.total == need.host == need.program + 9 * p + max(need.activations, 9 * p)
    plain = memory_need(changed(TINY, "merge", outer="assign", inner_state="reset"), 1, CUT)
    assert (plain.base, plain.upload, plain.others, plain.results) == (p, 0, p, p)


def test_a_device_with_its_own_memory_holds_what_trains():
    config = changed(TINY, "merge", outer="nesterov")
    need, p = memory_need(config, 1, CUT, separate=True), 4 * count_parameters(config, 1, CUT)
    assert need.device == 5 * p + need.activations
    assert need.host == need.program + 4 * p + max(3 * p, (3 + 3 + 4 + 1) * p)
    assert need.total == need.device + need.host


def test_bfloat16_passes_keep_copies_of_the_weights_and_muon_wants_room():
    config = changed(TINY, "train", max_in_flight=3)
    need = memory_need(config, 1, CUT, dtype="bfloat16")
    assert need.casts == 3 * need.parameters // 2
    first = memory_need(config, 0, (0, 1), dtype="bfloat16")
    assert first.casts == 3 * (first.parameters - 4 * 256 * 32) // 2, "an embedding is looked up, not cast"
    muon = memory_need(changed(config, "train", optimizer="muon"), 1, CUT)
    assert muon.workspace == 16 * 32 * config.model.ffn


def test_a_subspace_stage_holds_the_fixed_channels_of_every_token():
    config = changed(TINY, "stages", codec="subspace", channels=8)
    for stage in range(3):
        need = memory_need(config, stage, (stage, stage + 1))
        assert need.tables == 4 * 256 * (32 - 8)
        assert need.resident == 5 * need.parameters + need.tables


def test_disk_by_hand():
    config = changed(TINY, "merge", min_batches=8)  # steps 16 at twice B_min; segment_steps 4, segments_per_epoch 4
    snapshot = 12 * count_parameters(config, 1, CUT)
    payload = boundary_tensor(config, FORWARD).nbytes
    need = disk_need(config, 1, CUT)
    assert need.tensors == 16 * 4 * payload, "in and out, forward and backward"
    assert need.snapshots == 9 * snapshot and need.least == 3 * snapshot
    assert need.drawn == 3 * (3 * snapshot + need.tensors // 8)
    assert need.total == need.tensors + need.snapshots + need.drawn
    assert disk_need(config, 0, (0, 1)).tensors == disk_need(config, 2, (2, 3)).tensors == need.tensors // 2
    every = disk_need(changed(config, "audit", segments=0), 1, CUT)
    assert every.drawn == 3 * (9 * snapshot + need.tensors)


def test_as_many_epochs_are_counted_as_are_kept():
    assert needs.KEEP_EPOCHS == retain.KEEP_EPOCHS


# ------------------------------------------------------------------------------------------------------- as measured


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_activations_are_what_autograd_keeps(stage, dtype):
    text = 'name = "a"\n[model]\nwidth = 64\nblocks = 6\nheads = 4\nkv_heads = 2\nvocabulary = 512\nsequence = 128\n'
    config = check(parse_run(text + "[train]\nbatch = 2\nmax_in_flight = 1\n"))
    cut = (2 * stage, 2 * stage + 2)
    check_kept(config, stage, cut, dtype)


@pytest.mark.parametrize("codec", [name for name, spec in CODECS.items() if spec.narrow])
def test_codecs_keep_no_more_than_is_counted(codec):
    text = 'name = "a"\n[model]\nwidth = 64\nblocks = 3\nheads = 4\nkv_heads = 2\nvocabulary = 64\nsequence = 128\n'
    text += f'[stages]\ncodec = "{codec}"\nchannels = 32\n[data]\ntokenizer = "x"\n'
    config = check(parse_run(text + "[train]\nbatch = 2\nmax_in_flight = 1\n"))
    check_kept(config, 1, (1, 2), "float32")


def check_kept(config, stage, cut, dtype):
    kept = saved_bytes(config, stage, cut, dtype)
    need = memory_need(config, stage, cut, dtype=dtype)
    assert kept <= need.activations + need.casts <= 2.5 * kept, "an upper bound, not far above"


def saved_bytes(config, stage, cut, dtype):
    """Bytes of the storages that a pass's graph keeps, without the stage's own tensors."""
    module = LlamaStage(config, stage, cut)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    batch, sequence, vocabulary = config.train.batch, config.model.sequence, config.model.vocabulary
    ids = torch.randint(0, vocabulary, (batch, sequence))
    channels = boundary_tensor(config, FORWARD).channels
    x = ids if stage == 0 else torch.randn(batch, sequence, channels, requires_grad=True)
    kept, alive = {}, []

    def keep(tensor):
        alive.append(tensor)  # or its memory would be used again for the next
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), cast:
        out = module(x, ids)
        if stage == 2:
            F.cross_entropy(out.float().flatten(0, 1), ids.flatten())
    return sum(size for place, size in kept.items() if place not in own)


@pytest.mark.parametrize("outer", ["nesterov", "assign"])
def test_a_merge_of_two_takes_as_much_as_is_counted(tmp_path, outer):
    case = Case(merge=dict(outer=outer), model=dict(width=128, ffn=512))
    workers, rows = [case.worker(tmp_path / name, 1, name) for name in ("ann", "bob")], []
    for worker in workers:
        case.do_pass(worker, 0)
        commit = tasks.Commit(task=9, epoch=1, deadline=NOW)
        if worker is workers[0]:
            tracemalloc.start()
        result = worker.turn(True, True, commit, Given()).result
        if worker is workers[0]:
            after_commit, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        base = f"uploads/1/1/{worker.key}"
        asyncio.run(case.blobs.put(f"{base}/state.bin", worker.upload.pieces))
        asyncio.run(case.blobs.put(f"{base}/manifest.bin", [worker.upload.encoded]))
        links = [case.get_link(f"{base}/{name}.bin") for name in ("state", "manifest")]
        rows.append(tasks.Contribution(worker.key, result.root, 0.5, *links))
    rows.sort(key=lambda row: row.key)
    assert rd.coefficients({row.key: 1 for row in rows}, 2.0) == {row.key: 0.5 for row in rows}
    peak = merge_peak(case, workers[0], tuple(rows))
    need = memory_need(case.manifest.config, 1, case.manifest.cuts[1])
    counted = need.others + need.results + need.scratch
    put = (needs.merge_parts(case.manifest.config)[1]) * need.parameters  # the memory store's own copy of what is put
    assert after_commit <= 1.2 * need.upload + 200_000
    assert 0.75 * counted <= peak - put <= 1.02 * counted + 50_000, "an upper bound, not far above"


def merge_peak(case, worker, rows):
    """Bytes that numpy and Python take at most while a worker reduces the one shard of two members."""
    chunks = chunk_count(worker.parameters)
    work = tasks.ShardWork(0, 0, chunks, case.put_link(f"merge/1/1/0/{worker.key}.bin"))
    sheet = tasks.ReduceSheet(rows, (work,), None, {})
    task = tasks.Reduce(task=99, epoch=1, stage=1, deadline=NOW + 60)
    reducer = Reducer(case.objects, Inline(), worker)
    tracemalloc.start()
    try:
        asyncio.run(reducer.reduce(task, sheet))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------ refusal


def test_refusals_name_the_number_and_whose_it_is():
    need = memory_need(TINY, 1, CUT)
    assert check_memory(TINY, 1, CUT, need.total, room=Room(memory=need.total)) == need
    with pytest.raises(IotaError, match=f"needs about {need.total:,} bytes.*--max-memory allows {need.total - 1:,}"):
        check_memory(TINY, 1, CUT, need.total - 1)
    with pytest.raises(IotaError, match=f"this machine's main memory is {need.total - 1:,}") as caught:
        check_memory(TINY, 1, CUT, 0, room=Room(memory=need.total - 1))
    assert caught.value.code == "no_memory" and f"{need.merging:,} more at a merge" in str(caught.value)
    own = memory_need(TINY, 1, CUT, separate=True)
    with pytest.raises(IotaError, match=f"needs about {own.device:,} bytes.*cuda has {own.device - 1:,}"):
        check_memory(TINY, 1, CUT, 0, device="cuda", room=Room(memory=own.host, device=own.device - 1))
    disk = disk_need(TINY, 1, CUT)
    assert check_disk(TINY, 1, CUT, disk.total, room=Room(disk=disk.least)) == disk.total
    with pytest.raises(IotaError, match=f"{disk.total:,} bytes of evidence.*--max-disk allows {disk.total - 1:,}"):
        check_disk(TINY, 1, CUT, disk.total - 1)
    with pytest.raises(IotaError, match=f"free on this disk are {disk.least - 1:,}"):
        check_disk(TINY, 1, CUT, 0, room=Room(disk=disk.least - 1))


def test_the_room_here_is_this_machines(tmp_path, monkeypatch):
    room = room_here("cpu", tmp_path / "not" / "there")
    assert room.memory > 10**8 and room.disk > 0 and room.device == 0
    limit = tmp_path / "limit"
    monkeypatch.setattr(device, "CGROUP_LIMITS", (str(limit), str(tmp_path / "none")))
    limit.write_text("12345\n")
    assert room_here("cpu", tmp_path).memory == 12345
    limit.write_text("max\n")
    assert room_here("cpu", tmp_path).memory == room.memory or room.memory < room_here("cpu", tmp_path).memory


class NoObjects:
    """A store from which nothing may be asked."""

    def __init__(self):
        self.asked = []

    async def get(self, url, start=0, stop=None, *, expect_sha256=None):
        self.asked.append(url)
        raise AssertionError("downloaded before it was checked")

    async def put(self, url, parts):
        self.asked.append(url)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (dict(max_memory=1000), "no_memory"),
        (dict(max_disk=1000), "no_disk"),
        (dict(room=Room(memory=1000)), "no_memory"),
        (dict(room=Room(disk=1000)), "no_disk"),
    ],
)
def test_a_miner_refuses_before_it_downloads_anything(tmp_path, options, code):
    box = {}

    async def body():
        loop = asyncio.get_running_loop()
        swarm = Swarm(loop, tmp_path, two_by_two())
        await swarm.start(0)
        host, objects = Host(loop, "small"), NoObjects()
        miner = Miner(
            MinerSettings(folder=tmp_path / "small", **options),
            Caller(Identity.new(b"s" * 32), swarm.channel(), HUB.key, "", host.clock.now),
            objects,
            clock=host.clock,
            compute=host.compute,
            entropy=host.entropy,
        )
        ended = host.spawn(miner.run())
        (box["error"],) = await asyncio.gather(ended, return_exceptions=True)
        box["asked"], box["worker"] = objects.asked, miner.worker
        await swarm.stop()

    simulate(body(), limit=600.0)
    assert isinstance(box["error"], IotaError) and box["error"].code == code
    assert box["asked"] == [] and box["worker"] is None, "neither downloaded nor built"
