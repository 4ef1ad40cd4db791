"""Verdicts on real evidence: honest miners are valid, every cheat and every forgery is invalid, our own trouble is
inconclusive. Cheats live here, in test code."""

import functools

import msgspec
import numpy as np
import pytest

from iota.core.manifest import build_manifest
from iota.core.values import Cut, Entry, Tensor, sha256
from iota.errors import IotaError, Unreachable
from iota.nodes.evidence import ACTIVATION, Transcript, decode_transcript, encode_transcript, snapshot_parts
from iota.nodes.validator.audit import Auditor
from iota.nodes.validator.engine import Engine
from iota.nodes.validator.inline import InlineReplayer
from validator_case import (
    ORCHESTRATOR,
    SAMPLES,
    SEGMENTS,
    STAGES,
    Case,
    Clock,
    Inline,
    Miner,
    Sent,
    identity,
    sheet_and_task,
    train,
)


def make_auditor(case, objects=None, dtype="float32", replayer=None):
    engine = Engine(case.config, case.cuts, "cpu", dtype)
    replayer = replayer or InlineReplayer(engine, Inline())
    return Auditor(case.manifest, objects or case.objects, case.train, replayer, Inline(), Clock())


async def epoch(cheat=None, stage=1, dtype="float32", **how):
    """A whole epoch with `cheat` (a Miner class) at one stage."""
    case = Case(**how)
    miners = [(cheat if cheat and s == stage else Miner)(case, s, dtype=dtype) for s in range(STAGES)]
    await train(case, miners)
    return case, miners


@functools.cache
def _honest_case():
    return []


async def honest():
    """The honest epoch, made once: tests only read it."""
    kept = _honest_case()
    if not kept:
        kept.append(await epoch())
    return kept[0]


async def audit(case, miner, start=2, stop=4, change=None, facts=None, hide=(), **how):
    files = miner.show(start, stop)
    if change:
        change(files)
    task, sheet = await sheet_and_task(case, miner, start, stop, files, hide)
    if facts:
        sheet = msgspec.structs.replace(sheet, facts=msgspec.structs.replace(sheet.facts, **facts))
    result = await make_auditor(case, **how).audit(task, sheet)
    assert (result.task, result.audit) == (9, 4)
    assert all(np.isfinite([row.cosine, row.norm_ratio]).all() for row in result.worst)
    return result


def check_invalid(result, *words):
    assert result.verdict == "invalid", result
    for word in words:
        assert word in result.why, result.why


# ------------------------------------------------------------------------------------------------------------ honest


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("segment", SEGMENTS)
async def test_an_honest_segment_is_equal_to_the_bit(stage, segment):
    case, miners = await honest()
    result = await audit(case, miners[stage], *segment)
    assert result.verdict == "valid" and "equal to the bit" in result.why, result
    assert result.operations >= 4 and not result.worst


@pytest.mark.parametrize("outer, inner", [("assign", "merge"), ("nesterov", "carry"), ("nesterov", "reset")])
async def test_honest_under_every_merge_setting(outer, inner):
    case, miners = await epoch(outer=outer, inner_state=inner)
    for miner in miners:
        assert (await audit(case, miner, 0, 2)).verdict == "valid"
        assert (await audit(case, miner, 4, 6)).verdict == "valid"


@pytest.mark.parametrize("stage", range(STAGES))
async def test_rounding_noise_is_within_tolerance(stage):
    """Noise of one part in a hundred thousand on everything computed: what another machine's kernels may give."""

    class Noisy(Miner):
        def train_step(self):
            self.trainer._sum.mul_(1 + 1e-4)  # what rounds differently is the gradient
            self.trainer._weights.mul_(1 + 1e-7)
            super().train_step()

    case, miners = await epoch(Noisy, stage)
    for segment in SEGMENTS:
        result = await audit(case, miners[stage], *segment)
        assert result.verdict == "valid" and "within tolerance" in result.why, result
        assert result.worst and min(row.cosine for row in result.worst) > 0.999


async def test_bfloat16_compute_against_float32_is_within_tolerance_for_passes():
    """Another compute dtype: outputs and gradients stay close; it says so with numbers."""
    case, miners = await honest()
    result = await audit(case, miners[1], 2, 4, dtype="bfloat16")
    passes = [row for row in result.worst if row.kind in ("forward", "backward")]
    assert passes and all(row.cosine > 0.99 and 0.95 < row.norm_ratio < 1.05 for row in passes)


async def test_accumulated_passes_and_a_short_last_step():
    case, miners = await epoch(accumulate=4)
    for miner in miners:
        assert [cut.step for cut in miner.cuts] == [0, 2]
        assert (await audit(case, miner, 0, 2)).verdict == "valid"


async def test_a_one_stage_run():
    case = Case(stages=1)
    for kind, verdict in ((Miner, "valid"), (StartWeights, "invalid"), (Liar, "invalid")):
        miner = kind(case, 0)
        for sample in range(4):
            ids, labels = await case.train.batch_windows(sample)
            assert miner.do("forward", sample, ids=ids, labels=labels) is None
        miner.commit()
        assert (await audit(case, miner, 2, 4)).verdict == verdict


async def test_a_backward_whose_forward_somebody_else_did():
    """The pathway broke: the neighbour gets the stored input with the gradient, signed by the stage before."""
    case = Case()
    lost, miners = Miner(case, 1, "lost"), [Miner(case, stage) for stage in range(STAGES)]
    for sample in range(2):
        ids, labels = await case.train.batch_windows(sample)
        hidden = miners[0].do("forward", sample, ids=ids)
        gradient = miners[2].do("forward", sample, lost.do("forward", sample, hidden), labels=labels)
        miners[0].do("backward", sample, miners[1].do("backward", sample, gradient, given=hidden))
    for miner in miners:
        miner.commit()
        result = await audit(case, miner, 0, 2)
        assert result.verdict == "valid" and "to the bit" in result.why, result
    check_invalid(await audit(case, miners[1], 0, 2, change=lambda f: f.update(inputs=b"")), "was not shown")


# ------------------------------------------------------------------------------------------------------------ cheats


class StartWeights(Miner):
    """Computes passes, never trains; its snapshots claim the right step count."""

    def train_step(self):
        self.trainer.passes = 0

    def state(self):
        return self.steps, *super().state()[1:]


class Noise(Miner):
    def sent(self, op, sample, out):
        if out is None:
            return None
        rng = np.random.default_rng(sample)
        size = len(out.data) // 2
        bits = (rng.standard_normal(size).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        return Tensor(out.dtype, out.shape, bits.tobytes())


class Scaled(Miner):
    """Cosine 1, norm 1.2."""

    def sent(self, op, sample, out):
        if out is None:
            return None
        values = (np.frombuffer(out.data, dtype="<u2").astype("<u4") << 16).view("<f4")
        bits = ((values * np.float32(1.2)).view("<u4") >> 16).astype("<u2")
        return Tensor(out.dtype, out.shape, bits.tobytes())


class Neighbour(Miner):
    """Sends what was computed for another sample."""

    def sent(self, op, sample, out):
        before = getattr(self, "before", {})
        self.before = {**before, op: out}
        return before.get(op, out)


class Liar(Miner):
    def told_loss(self, loss):
        return None if loss is None else loss * 0.9


@pytest.mark.parametrize("stage", range(STAGES))
async def test_no_training_is_invalid(stage):
    case, miners = await epoch(StartWeights, stage)
    for segment in SEGMENTS:
        check_invalid(await audit(case, miners[stage], *segment), "differ", "did not change")


@pytest.mark.parametrize("cheat", [Noise, Scaled, Neighbour])
@pytest.mark.parametrize("stage", [1, 2])
async def test_wrong_outputs_are_invalid(cheat, stage):
    case, miners = await epoch(cheat, stage)
    result = await audit(case, miners[stage], 2, 4)
    check_invalid(result, "differ", "wanted")
    assert {row.kind for row in result.worst} <= {"forward", "backward"}
    if cheat is Scaled:
        assert all(row.cosine > 0.9999 and 1.15 < row.norm_ratio < 1.25 for row in result.worst)


async def test_a_lying_loss_is_invalid():
    case, miners = await epoch(Liar, 2)
    result = await audit(case, miners[2], 2, 4)
    check_invalid(result, "loss")
    assert all(row.kind == "loss" and abs(row.norm_ratio - 0.9) < 1e-6 for row in result.worst)


async def test_a_forged_second_moment_is_invalid():
    class Poison(Miner):
        def state(self):
            t, weights, m, v = super().state()
            return t, weights, m, v * np.float32(1e-6)

    case, miners = await epoch(Poison, 1)
    check_invalid(await audit(case, miners[1], 0, 2), "second moment")


async def test_a_few_forged_second_moments_show_in_the_direction():
    """One in a hundred elements of v made tiny: hardly a change of v's norm, but poison for every later step."""

    class Poison(Miner):
        def state(self):
            t, weights, m, v = super().state()
            if self.steps:
                v = v.copy()
                v[np.argsort(v)[len(v) // 2 : len(v) // 2 + len(v) // 100]] *= np.float32(1e-12)
            return t, weights, m, v

    case, miners = await epoch(Poison, 1)
    result = await audit(case, miners[1], 0, 2)
    check_invalid(result, "direction of the moments")
    assert {row.kind for row in result.worst if row.cosine < 0.99} == {"direction"}


async def test_a_negative_second_moment_is_invalid():
    class Negative(Miner):
        def state(self):
            t, weights, m, v = super().state()
            return t, weights, m, v - np.float32(1e-3) * (self.steps > 0)

    case, miners = await epoch(Negative, 1)
    check_invalid(await audit(case, miners[1], 0, 2), "negative second moment")


@pytest.mark.parametrize("segment", SEGMENTS)
async def test_an_upload_that_was_not_trained_is_invalid(segment):
    class Other(Miner):
        def upload_root(self):
            _, weights, m, v = self.state()
            return build_manifest([("delta", weights * np.float32(0.5)), ("m", m), ("v", v)])[0].root()

    case, miners = await epoch(Other, 0)
    check_invalid(await audit(case, miners[0], *segment), "upload is not what was trained")


# --------------------------------------------------------------------------------------------------- forged evidence


def with_entries(change):
    """Rewrite the transcript's entries."""

    def rewrite(files):
        old = decode_transcript(files["transcript"])
        entries = list(old.entries)
        change(entries)
        files["transcript"] = encode_transcript(
            Transcript(old.version, old.run, old.key, old.session, old.epoch, tuple(entries))
        )

    return rewrite


def changed_entry(entries):
    entries[5] = msgspec.structs.replace(entries[5], out=sha256(b"other"))


def dropped_entry(entries):
    del entries[5]


def reordered_entries(entries):
    entries[5], entries[6] = entries[6], entries[5]


def added_entry(entries):
    entries.append(Entry("eval", 0, "", ""))


@pytest.mark.parametrize("change", [changed_entry, dropped_entry, reordered_entries, added_entry])
async def test_a_forged_transcript_is_invalid(change):
    case, miners = await honest()
    check_invalid(await audit(case, miners[1], change=with_entries(change)), "the transcript")


async def test_a_transcript_of_another_miner_is_invalid():
    case, miners = await honest()
    other = miners[2].show(2, 4)["transcript"]
    check_invalid(await audit(case, miners[1], change=lambda files: files.update(transcript=other)), "another run, key")


@pytest.mark.parametrize("name", ["transcript", "stop", "final", "inputs"])
@pytest.mark.parametrize("data", [b"", b"\xdd\xff\xff\xff\xff", bytes(100)])
async def test_garbage_is_invalid_and_harmless(name, data):
    case, miners = await honest()
    check_invalid(await audit(case, miners[1], change=lambda files: files.update({name: data})))


@pytest.mark.parametrize("name", ["start", "stop", "final"])
async def test_a_snapshot_that_is_not_the_committed_one_is_invalid(name):
    case, miners = await honest()

    def flip(files):
        data = bytearray(files[name])
        data[100] ^= 1
        files[name] = bytes(data)

    check_invalid(await audit(case, miners[1], change=flip), "not the committed one")


@pytest.mark.parametrize("name", ["transcript", "start", "stop", "final", "inputs"])
async def test_what_the_store_lost_after_it_was_shown_is_inconclusive(name):
    """That it was shown is checked by the orchestrator when the miner says so (tests/test_shown.py)."""
    case, miners = await honest()
    result = await audit(case, miners[1], hide=(name,))
    assert result.verdict == "inconclusive" and "no_object" in result.why


async def test_equal_digests_need_no_outputs_but_differing_ones_do():
    case, miners = await honest()
    assert (await audit(case, miners[1], hide=("outputs",))).verdict == "valid"
    case, miners = await epoch(Scaled, 1)
    assert (await audit(case, miners[1], hide=("outputs",))).verdict == "inconclusive"


async def test_books_that_count_other_passes_are_a_contradiction():
    case, miners = await honest()
    miner = miners[1]
    accepted = tuple(miner.accepted)
    check_invalid(await audit(case, miner, facts={"accepted": accepted[:-1]}), "passes")
    check_invalid(await audit(case, miner, facts={"accepted": accepted[::-1]}), "order")
    cuts = (*miner.cuts[:-1], Cut(SAMPLES + 1, miner.cuts[-1].digest))
    check_invalid(await audit(case, miner, facts={"cuts": cuts}), "inner steps")
    outs = (sha256(b"noise"), *miner.outs[1:])
    check_invalid(await audit(case, miner, facts={"outs": outs}), "sent another output")
    losses = (*miners[2].losses[:-1], 0.1)
    check_invalid(await audit(case, miners[2], facts={"losses": losses}), "reported the loss")
    assert (await audit(case, miner, facts={"outs": (), "losses": ()})).verdict == "valid"


async def test_passes_that_only_look_like_passes_are_a_contradiction():
    """Entries that a replay would skip can never be what was accepted."""

    class Hollow(Miner):
        def do(self, op, sample, received=None, **how):
            if op != "forward" or sample != 3:
                return super().do(op, sample, received, **how)
            self.chain.add("forward", sample, received.tensor.head().digest, "")
            self.heads.append(self.chain.head)
            self.outs.append("")
            self.losses.append(None)
            if self.last:
                self.accepted.append(sample)
            return Sent(received.tensor, self.sign(sample, received.tensor, received.tensor.head().digest))

        def step(self):
            if self.pending:
                super().step()

    case, miners = await epoch(Hollow, 2)
    check_invalid(await audit(case, miners[2], 2, 4), "every pass is a forward with its loss")


async def test_a_session_that_did_not_start_from_the_checkpoint_is_invalid():
    class Elsewhere(Miner):
        def __init__(self, case, stage, **how):
            case.weights[stage] = case.weights[stage] * np.float32(1.01)
            super().__init__(case, stage, **how)

    case, miners = await epoch(Elsewhere, 1)
    check_invalid(await audit(case, miners[1], 0, 2), "first snapshot is not the epoch's checkpoint")


# ------------------------------------------------------------------------------------------------------------ origins


def with_origin(make):
    """A miner that stores its activations with another origin."""

    class Forger(Miner):
        def receive(self, kind, sample, received):
            if kind == ACTIVATION:
                received = Sent(received.tensor, make(self, sample, received))
            return super().receive(kind, sample, received)

    return Forger


def no_origin(miner, sample, received):
    return b""


def flipped_origin(miner, sample, received):
    return received.origin[:70] + bytes([received.origin[70] ^ 1]) + received.origin[71:]


def own_origin(miner, sample, received):
    return miner.sign(sample, received.tensor, received.tensor.head().digest)


def other_samples_origin(miner, sample, received):
    producer = Miner(miner.case, 0)
    return producer.sign(sample + 1, received.tensor, received.tensor.head().digest)


def other_tensors_origin(miner, sample, received):
    producer = Miner(miner.case, 0)
    return producer.sign(sample, Tensor("float32", (1,), bytes(4)), sha256(bytes(4)))


@pytest.mark.parametrize("make", [no_origin, flipped_origin, own_origin, other_samples_origin, other_tensors_origin])
async def test_an_input_without_a_signed_origin_is_invalid(make):
    case, miners = await epoch(with_origin(make), 1)
    check_invalid(await audit(case, miners[1], 2, 4), "received for sample", "signed")


async def test_another_samples_input_is_invalid():
    """It computes every sample on the input of the one before: the tensor is signed, but not for this sample."""

    class Reuse(Miner):
        def do(self, op, sample, received=None, **how):
            if op == "forward":
                self.first = getattr(self, "first", received)
                received = self.first
            return super().do(op, sample, received, **how)

    case, miners = await epoch(Reuse, 1)
    check_invalid(await audit(case, miners[1], 2, 4), "signed origin", "sample")


# ----------------------------------------------------------------------------------------------------- inconclusive


class Failing:
    """A store that fails for one object."""

    def __init__(self, inner, part, error):
        self.inner, self.part, self.error = inner, part, error

    async def get(self, url, *args, **how):
        if self.part in url:
            raise self.error
        return await self.inner.get(url, *args, **how)


@pytest.mark.parametrize("part", ["transcript", "start", "stop", "inputs", "checkpoints/0"])
async def test_our_own_trouble_is_inconclusive(part):
    case, miners = await honest()
    segment = (0, 2) if part == "checkpoints/0" else (2, 4)
    errors = [Unreachable("the store did not answer"), IotaError("expired", "the link is too old")]
    if part == "checkpoints/0":
        errors.append(IotaError("no_object", "the checkpoint is gone"))
    for error in errors:
        result = await audit(case, miners[1], *segment, objects=Failing(case.objects, part, error))
        assert result.verdict == "inconclusive" and error.cause in result.why, result
        assert not result.worst and result.operations == 0


async def test_the_labels_are_the_validators_own():
    """A last stage that trains on labels of its choice does not follow from the corpus."""

    class OwnLabels(Miner):
        def run(self, op, sample, tensor, ids, labels):
            return super().run(op, sample, tensor, ids, np.zeros_like(labels))

    case, miners = await epoch(OwnLabels, 2)
    check_invalid(await audit(case, miners[2], 0, 2), "differ")


def test_the_case_is_what_it_says():
    assert identity("miner 1").key != ORCHESTRATOR.key and SEGMENTS == [(0, 2), (2, 4), (4, 6)]
    assert len(b"".join(bytes(p) for p in snapshot_parts(1, *[np.zeros(3, np.float32)] * 3))) == 8 + 36
