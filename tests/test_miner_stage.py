"""The stage worker: what a verdict does, transcript and snapshots, loading and proving, retention, committing."""

import asyncio

import msgspec
import numpy as np
import pytest

from iota.core import manifest as chunks
from iota.core import tasks
from iota.core.values import Checkpoint, Cut, Piece, sha256, transcript_next, transcript_start
from iota.errors import IotaError
from iota.nodes import evidence
from iota.nodes.miner.device import check_disk, check_memory, memory_need, pick_device
from iota.nodes.miner.show import evidence_for, note_drawn
from iota.nodes.miner.stage import Given
from iota.store.manifest import checkpoint_zero
from miner_case import NOW, Case, corrupt, state_bytes


@pytest.fixture(scope="module")
def case():
    return Case(merge=dict(outer="nesterov"))


# --------------------------------------------------------------------------------------------------- the hand-over


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_refused_result_leaves_no_trace_in_the_weights(case, tmp_path, stage):
    plain, other = case.worker(tmp_path / "a", stage), case.worker(tmp_path / "b", stage)
    state = case.rng.bit_generator.state
    case.do_pass(plain, 3)
    plain.turn(True, True, None, Given())
    case.do_pass(other, 7)
    other.turn(False, False, None, Given())
    case.rng.bit_generator.state = state
    case.do_pass(other, 3)
    other.turn(True, True, None, Given())
    assert state_bytes(plain) == state_bytes(other) != state_bytes(case.worker(tmp_path / "c", stage))
    assert [e.op for e in other.chain.entries if e.sample in (-1, 7)] == [
        "load", *(["forward"] if stage == 2 else ["forward", "backward"]), "drop", "step"
    ]  # fmt: skip


def test_a_step_happens_only_when_told_and_averages_all_accepted_since(case, tmp_path):
    worker = case.worker(tmp_path, 1)
    before = state_bytes(worker)
    for sample in range(3):
        case.do_pass(worker, sample, accepted=True)
    assert state_bytes(worker) == before
    worker.turn(True, False, None, Given())
    assert state_bytes(worker) == before and worker.passes == 3
    worker.turn(False, True, None, Given())
    last = worker.chain.entries[-1]
    assert state_bytes(worker) != before
    assert (last.op, last.number, last.out) == ("step", 3, sha256(worker.trainer.state().weights.tobytes()))


def test_transcript_heads_chain_and_go_with_every_result(case, tmp_path):
    worker = case.worker(tmp_path, 1)
    results = []
    for sample in range(4):
        work = worker.turn(True, False, *case.forward(worker, sample))
        results += [work.result, worker.turn(True, False, *case.backward(worker, sample)).result]
        results.append(worker.turn(True, True, *case.forward(worker, sample + 10)).result)
        assert work.result.out == work.heads[0].digest == sha256(work.tensors[0].data)
    head, heads = transcript_start(case.run, worker.key, 1, 1), []
    for entry in worker.chain.entries:
        head = transcript_next(head, entry)
        heads.append(head)
    assert all(result.head in heads for result in results)
    assert [heads.index(result.head) for result in results] == sorted(heads.index(r.head) for r in results)
    transcript = evidence.decode_transcript(evidence.encode_transcript(worker.chain.transcript()))
    facts = dict(run=case.run, key=worker.key, session=1, epoch=1)
    assert evidence.check_transcript(transcript, **facts, heads=[r.head for r in results]) is None
    assert evidence.check_transcript(transcript, **facts, heads=[r.head for r in results[::-1]])
    assert evidence.check_transcript(transcript, **{**facts, "epoch": 2}, heads=[])
    assert evidence.accepted_passes(transcript.entries, False) == [0, 1, 2, 3]


def test_a_cut_goes_with_results_until_one_that_carries_it_is_accepted(case, tmp_path):
    worker = case.worker(tmp_path, 2, segment_steps=2)
    told = []
    first = case.do_pass(worker, 0)
    assert first.cut is None and [cut.step for cut in worker.shelf.cuts] == [0]
    assert case.do_pass(worker, 1, True, True).cut is None
    second = case.do_pass(worker, 2, True, True)
    assert second.cut is not None and second.cut.step == 2
    again = case.do_pass(worker, 3, accepted=False)
    assert again.cut == second.cut, "its result was refused, so nobody heard of the cut"
    told.append(again.cut)
    assert case.do_pass(worker, 4, True, True).cut is None
    parts = evidence.snapshot_parts(*[getattr(worker.trainer.state(), k) for k in ("t", "weights", "m", "v")])
    result = worker.turn(True, True, tasks.Commit(task=50, epoch=1, deadline=NOW), Given()).result
    assert isinstance(result, tasks.Committed) and result.steps == 4
    assert [cut.step for cut in result.cuts] == [0, 2, 4] and list(result.cuts[1:2]) == told
    parts = evidence.snapshot_parts(*[getattr(worker.trainer.state(), k) for k in ("t", "weights", "m", "v")])
    whole = b"".join(bytes(part) for part in parts)
    assert result.cuts[-1].digest == sha256(whole) and whole == worker.shelf.path_of(4).read_bytes()
    assert not worker.shelf.path_of(0).exists(), "the first state is the checkpoint: no need to keep it"
    t, weights, m, v = evidence.read_snapshot(whole, worker.parameters, result.cuts[-1])
    assert (t, weights.tobytes(), m.tobytes(), v.tobytes()) == (4, *state_bytes(worker)[:3])
    for bad, cut in ((whole[:-4], result.cuts[-1]), (whole, Cut(4, "0" * 64))):
        with pytest.raises(IotaError, match="snapshot"):
            evidence.read_snapshot(bad, worker.parameters, cut)


# ------------------------------------------------------------------------------------------------ tasks refused


def test_tasks_that_cannot_be_done_fail_with_a_code_and_change_nothing(case, tmp_path):
    worker = case.worker(tmp_path, 1)
    x = case.boundary()
    before, entries = state_bytes(worker), len(worker.chain.entries)
    tries = [
        (*case.forward(worker, 0, epoch=2), "stale"),
        (case.forward(worker, 0)[0], case.given([]), "bad_input"),
        (*case.backward(worker, 99), "bad_input"),
        (*case.forward(worker, 0, x, origin=case.signed(0, x, of=1)), "bad_input"),
        (*case.forward(worker, 0, x, origin=case.signed(0, corrupt(x))), "bad_input"),
        (*case.forward(worker, 0, x, origin=b"forged" * 30), "bad_input"),
        (tasks.Commit(task=9, epoch=1, deadline=NOW), Given(), "stale"),
    ]
    for task, given, code in tries:
        work = worker.turn(False, False, task, given)
        assert isinstance(work.result, tasks.Failed), work.result
        assert (work.result.task, work.result.code) == (task.task, code) and work.notices
    assert state_bytes(worker) == before and len(worker.chain.entries) == entries


def test_a_step_without_use_counts_and_is_told(case, tmp_path):
    worker = case.worker(tmp_path, 1)
    before = state_bytes(worker)
    work = worker.turn(False, True, None, Given())
    assert worker.steps == worker.trainer.steps == 1 and state_bytes(worker) == before
    assert "changed nothing" in work.notices[0] and worker.chain.entries[-1].number == 0


# ---------------------------------------------------------------------------------------------------------- loading


def merged(case, worker, epoch=1, t=4):
    """A checkpoint after epoch 1 with every part, in two objects."""
    n = worker.parameters
    half, pieces, arrays = n // 2, [], {}
    for part in ("m", "momentum", "v", "weights"):
        arrays[part] = np.abs(case.rng.standard_normal(n)).astype(np.float32) * np.float32(0.01)
        for start, stop in ((0, half), (half, n)):
            data, name = arrays[part][start:stop].tobytes(), f"merge/{part}/{start}.bin"
            asyncio.run(case.blobs.put(name, [b"pad!", data]))
            pieces.append(Piece(part, start, stop, name, 4, sha256(data)))
    return Checkpoint(case.run, epoch, worker.stage, n, t, tuple(pieces)), arrays


@pytest.mark.parametrize("inner", ["merge", "carry", "reset"])
def test_prove_takes_the_merged_state_and_the_right_moments(tmp_path, inner):
    case = Case(merge=dict(outer="nesterov", inner_state=inner))
    worker = case.worker(tmp_path, 1)
    case.do_pass(worker, 0)
    worker.turn(True, True, None, Given())
    own = state_bytes(worker)
    checkpoint, arrays = merged(case, worker)
    if inner != "merge":
        checkpoint = msgspec.structs.replace(
            checkpoint, pieces=tuple(p for p in checkpoint.pieces if p.part not in ("m", "v"))
        )
    work = worker.turn(False, False, *case.load(worker, checkpoint, kind=tasks.Prove))
    assert isinstance(work.result, tasks.Loaded) and work.result.root == checkpoint.root()
    weights, m, v, t = state_bytes(worker)
    zeros = np.zeros(worker.parameters, np.float32).tobytes()
    want = {"merge": (arrays["m"].tobytes(), arrays["v"].tobytes()), "carry": own[1:3], "reset": (zeros, zeros)}
    assert (weights, t) == (arrays["weights"].tobytes(), 4) and (m, v) == want[inner]
    assert worker.epoch == 2 and worker.steps == 0 and worker.chain.epoch == 2
    old = worker.old_parts(3, 9)
    assert old["momentum"].tobytes() == arrays["momentum"][3:9].tobytes()
    assert tuple(old) == (("weights", "momentum", "m", "v") if inner == "merge" else ("weights", "momentum"))
    assert worker.shelf.path_of(0).exists() == (inner == "carry")


def test_a_checkpoint_that_is_not_ours_or_not_whole_is_not_loaded(case, tmp_path):
    worker = case.worker(tmp_path, 1)
    checkpoint, arrays = merged(case, worker)
    task, given = case.load(worker, checkpoint)
    assert isinstance(given, Given)
    wrong = [
        msgspec.structs.replace(checkpoint, run="another"),
        msgspec.structs.replace(checkpoint, stage=2),
        msgspec.structs.replace(checkpoint, t=5),
        msgspec.structs.replace(checkpoint, pieces=checkpoint.pieces[1:]),
        msgspec.structs.replace(checkpoint, pieces=(*checkpoint.pieces, checkpoint.pieces[-1])),
        msgspec.structs.replace(checkpoint, pieces=checkpoint.pieces[:-2]),
    ]
    before = state_bytes(worker)
    for bad in wrong:
        work = worker.turn(False, False, task, Given(checkpoint=bad, arrays=arrays))
        assert isinstance(work.result, tasks.Failed) and work.result.code == "bad_input", bad
    changed = {**given.arrays, "m": given.arrays["m"] + np.float32(1)}
    work = worker.turn(False, False, task, Given(checkpoint=checkpoint, arrays=changed))
    assert isinstance(work.result, tasks.Failed) and work.result.code == "no_object"
    assert state_bytes(worker) == before and worker.epoch == 1
    asyncio.run(case.blobs.put("merge/v/0.bin", [b"other bytes"]))
    with pytest.raises(IotaError):
        case.load(worker, checkpoint)


def test_own_pieces_are_taken_from_memory_by_digest(case, tmp_path):
    worker = case.worker(tmp_path, 0)
    checkpoint = checkpoint_zero(case.manifest, 0)
    piece = checkpoint.pieces[0]
    data = asyncio.run(case.blobs.get(piece.object))
    worker.reduced[piece.digest] = np.frombuffer(data, "<f4")
    lost = msgspec.structs.replace(
        checkpoint, pieces=(msgspec.structs.replace(piece, object="not/there.bin"), *checkpoint.pieces[1:])
    )
    assert isinstance(worker.turn(False, False, *case.load(worker, lost)).result, tasks.Loaded)


# ------------------------------------------------------------------------------------------- evidence and retention


def trained(case, folder, **options):
    """A middle stage with five steps, segments of two, one backward with input, one pass refused."""
    worker = case.worker(folder, 1, **options)
    for sample in range(4):
        case.do_pass(worker, sample, sample > 0, sample > 0)
    case.do_pass(worker, 7, True, True)
    worker.turn(False, False, *case.backward(worker, 8, x=case.boundary()))
    worker.turn(True, True, None, Given())
    return worker


def show_of(begin, end, epoch=1, session=1, **urls):
    names = dict(transcript="t", start="s", stop="e", final="f", inputs="i", outputs="o") | urls
    return tasks.Show(
        audit=1, epoch=epoch, session=session, start_step=begin, stop_step=end, deadline=NOW,
        **{f"{name}_url": value for name, value in names.items()},
    )  # fmt: skip


def test_evidence_of_every_segment_is_whole_and_resolves(case, tmp_path):
    worker = trained(case, tmp_path)
    commit = worker.turn(False, False, tasks.Commit(task=50, epoch=1, deadline=NOW), Given()).result
    assert [cut.step for cut in commit.cuts] == [0, 2, 4, 5]
    counted = []
    for start, stop in ((0, 2), (2, 4), (4, 5)):
        shown = {
            url: b"".join(bytes(part) for part in parts)
            for url, parts in evidence_for(worker.retention, 1, show_of(start, stop, start="" if start == 0 else "s"))
        }
        transcript = evidence.decode_transcript(shown["t"])
        assert transcript.heads()[-1] == commit.head
        inputs = {record.digest: record for record in evidence.read_records(shown["i"])}
        outputs = {record.digest: record for record in evidence.read_records(shown["o"])}
        rows = evidence.operations(transcript, start, stop, stage=1, inputs=inputs, outputs=outputs)
        assert all((row.x is None) == (row.entry.op == "step") for row in rows)
        assert all((row.gradient is not None) == (row.entry.op == "backward") for row in rows)
        assert all(row.output is not None for row in rows if row.entry.op != "step")
        assert all(evidence.check_record_origin(record, case.run) for record in inputs.values())
        counted += [row.entry.sample for row in rows if row.entry.op == "backward" and not row.dropped]
        cuts = {cut.step: cut for cut in commit.cuts}
        for url, step in (("s", start), ("e", stop), ("f", 5)):
            if url in shown:
                evidence.read_snapshot(shown[url], worker.parameters, cuts[step])
        for key in list(inputs):
            with pytest.raises(IotaError, match="was not shown"):
                evidence.operations(transcript, start, stop, stage=1, inputs={k: inputs[k] for k in inputs if k != key})
        with pytest.raises(IotaError, match="another digest"):
            list(evidence.read_records(shown["i"][:-1] + bytes([shown["i"][-1] ^ 1])))
    assert counted == evidence.accepted_passes(worker.chain.entries, False) == [0, 1, 2, 3, 8]


def test_equal_tensors_of_two_samples_are_two_records(case, tmp_path):
    """A neighbour that sends everybody the same bytes must not make this miner's evidence incomplete."""
    worker, x, gradient = case.worker(tmp_path, 1), case.boundary(), case.boundary(0.01)
    for sample in (0, 1):
        worker.turn(True, False, *case.forward(worker, sample, x))
        worker.turn(True, False, *case.backward(worker, sample, gradient=gradient))
    worker.turn(True, True, None, Given())
    shown = dict(evidence_for(worker.retention, 1, show_of(0, 1, start="", stop="", final="")))
    records = list(evidence.read_records(b"".join(shown["i"])))
    assert sorted((r.kind, r.sample) for r in records) == [
        ("activation", 0), ("activation", 1), ("gradient", 0), ("gradient", 1)
    ]  # fmt: skip


def test_after_the_draw_only_drawn_segments_stay_and_three_epochs_later_nothing(case, tmp_path):
    worker = trained(case, tmp_path)
    worker.turn(False, False, tasks.Commit(task=50, epoch=1, deadline=NOW), Given())
    shelf, before = worker.shelf, worker.retention.size()
    show = show_of(2, 4)
    note_drawn(worker.retention, 1, show)
    want = [(url, b"".join(map(bytes, parts))) for url, parts in evidence_for(worker.retention, 1, show)]
    checkpoint, _ = merged(case, worker)
    for epoch in (1, 2, 3, 4):
        later = msgspec.structs.replace(checkpoint, epoch=epoch)
        assert isinstance(worker.turn(False, False, *case.load(worker, later)).result, tasks.Loaded)
        if epoch < 4:
            assert worker.retention.size() < before
            assert [(u, b"".join(map(bytes, p))) for u, p in evidence_for(worker.retention, 1, show)] == want
            with pytest.raises(IotaError):
                list(evidence_for(worker.retention, 1, show_of(0, 2, start="")))
    assert not shelf.folder.exists() and list(worker.retention.epochs) == [5]
    with pytest.raises(IotaError, match="not kept"):
        evidence_for(worker.retention, 1, show)
    with pytest.raises(IotaError, match="not kept"):
        evidence_for(worker.retention, 2, show_of(0, 1, epoch=4, session=1))
    worker.close()
    assert not list(tmp_path.rglob("*.bin"))


def test_a_full_disk_fails_the_pass_with_the_path_and_leaves_no_trace(case, tmp_path):
    worker = case.worker(tmp_path, 2, max_disk=1000)
    before = state_bytes(worker)
    work = worker.turn(False, False, *case.forward(worker, 0))
    assert work.result.code == "no_disk" and "inputs.bin" in work.result.text and "--max-disk" in work.notices[0]
    assert worker.trainer._pending is None and state_bytes(worker) == before
    assert [entry.op for entry in worker.chain.entries] == ["load"]


def test_a_snapshot_without_room_makes_the_segment_longer(case, tmp_path):
    worker = case.worker(tmp_path, 2, segment_steps=1, max_disk=100_000)
    case.do_pass(worker, 0)
    work = worker.turn(True, True, *case.forward(worker, 1))
    assert "segment grows longer" in work.notices[0] and isinstance(work.result, tasks.Passed)
    assert work.result.cut is None and worker.steps == 1 and not worker.shelf.path_of(1).exists()
    worker.retention.max_disk = 0
    assert worker.turn(True, True, *case.forward(worker, 2)).result.cut.step == 2


# ---------------------------------------------------------------------------------------------------------- commit


@pytest.mark.parametrize("outer", ["nesterov", "assign"])
def test_the_upload_is_what_the_commitment_says(tmp_path, outer):
    case = Case(merge=dict(outer=outer))
    worker = trained(case, tmp_path)
    task = tasks.Commit(task=50, epoch=1, deadline=NOW)
    result = worker.turn(False, False, task, Given()).result
    data = b"".join(bytes(piece) for piece in worker.upload.pieces)
    names = (("weights" if outer == "assign" else "delta"), "m", "v")
    assert (len(data), sha256(data)) == (result.length, result.digest)
    encoded = worker.upload.encoded
    assert (len(encoded), sha256(encoded)) == (result.manifest_length, result.manifest_digest)
    manifest = chunks.decode(encoded, names=names, parameters=worker.parameters)
    assert manifest.root() == result.root and chunks.check_chunks(manifest, 0, data) is None
    assert result.commitment == chunks.commitment(result.root, worker.key, case.run, 1, 1)
    first = np.frombuffer(data, "<f4")[: worker.parameters]
    state = worker.trainer.state()
    want = state.weights if outer == "assign" else worker.base["weights"] - state.weights
    assert first.tobytes() == want.tobytes() and result.head == worker.chain.head and result.steps == 5
    assert worker.turn(False, False, task, Given()).result == result, "committing again says the same"


# ------------------------------------------------------------------------------------------------------------ limits


def test_device_memory_and_disk_are_checked_before_anything_is_built(case):
    assert pick_device("cpu") == "cpu" and pick_device("auto") in ("cpu", "cuda", "mps")
    with pytest.raises(IotaError, match="not available"):
        pick_device("tpu")
    config, cut = case.manifest.config, case.manifest.cuts[0]
    need = memory_need(config, 0, cut)
    assert check_memory(config, 0, cut, 0) == check_memory(config, 0, cut, need.total) == need
    with pytest.raises(IotaError, match=f"{need.total:,}"):
        check_memory(config, 0, cut, need.total - 1)
    disk = check_disk(config, 0, cut, 0)
    with pytest.raises(IotaError, match="--max-disk"):
        check_disk(config, 0, cut, disk - 1)
