"""StageTrainer: what a pass leaves behind, recomputation, refusals, and the optimizer's numbers."""

import hashlib
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from iota.config.schema import ModelConfig, RunConfig, StagesConfig, TrainConfig
from iota.core.values import Tensor
from iota.errors import IotaError
from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor
from iota.model.layout import Layout, initial_state
from iota.model.llama import LlamaStage
from iota.model.optim import learning_rate
from iota.model.partition import cut_blocks
from iota.model.trainer import StageTrainer
from iota.model.wires import pack, pack_floats, unpack

torch.set_num_threads(1)
CPU = torch.device("cpu")
RNG = np.random.default_rng(2)


def run_config(stages=3, wire="float32", codec="identity", **train):
    return RunConfig(
        name="t",
        model=ModelConfig(width=32, blocks=3, heads=2, kv_heads=1, vocabulary=40, sequence=8),
        stages=StagesConfig(count=stages, codec=codec, channels=4, wire_dtype=wire),
        train=TrainConfig(**(dict(batch=2, lr=1e-2, warmup_tokens=10, lr_tokens=10_000) | train)),
    )


def trainer_of(config, stage, dtype="float32", t=0, per_step=16):
    cut = cut_blocks(config)[stage]
    trainer = StageTrainer(config, stage, cut, "cpu", dtype)
    trainer.load(initial_state(config, stage, cut, 0), None, None, t, 100, per_step)
    return trainer


def token_pair():
    return RNG.integers(0, 40, (2, 8)), RNG.integers(0, 40, (2, 8))


def boundary(channels=32, wire="float32", scale=1.0):
    return pack_floats(torch.tensor(RNG.standard_normal((2, 8, channels)) * scale), wire)


def one_pass(trainer, sample=0, accept=True):
    x, grad = boundary(), boundary(scale=0.01)
    trainer.forward(sample, x)
    trainer.backward(sample, grad)
    trainer.accept() if accept else trainer.drop()


def snapshot(trainer):
    state = trainer.state()
    return state.weights.tobytes(), state.m.tobytes(), state.v.tobytes(), state.t, trainer.passes, trainer.steps


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["identity", "bottleneck"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_twice_gives_the_same_bytes(wire, codec, dtype):
    config = run_config(wire=wire, codec=codec)
    trainer = trainer_of(config, 1, dtype)
    x = boundary(trainer.module.boundaries["0"].channels, wire)
    first, second = trainer.forward(0, x), trainer.forward(0, x)
    assert bytes(first.data) == bytes(second.data) == bytes(trainer.evaluate(x).data)
    assert first.dtype == wire and first.shape == x.shape


def test_what_left_stays_as_it_was():
    trainer = trainer_of(run_config(), 1)
    out = trainer.forward(0, boundary())
    before = bytes(out.data)
    for sample in range(1, 4):
        one_pass(trainer, sample)
        trainer.step()
    assert bytes(out.data) == before


def test_drop_leaves_no_trace():
    config = run_config()
    ours, other = trainer_of(config, 1), trainer_of(config, 1)
    kept = [(boundary(), boundary(scale=0.01)) for _ in range(3)]
    for sample, (x, grad) in enumerate(kept):
        for trainer in (ours, other):
            if trainer is ours:
                before = snapshot(ours)
                one_pass(ours, 100 + sample, accept=False)
                assert snapshot(ours) == before
            trainer.forward(sample, x)
            trainer.backward(sample, grad)
            trainer.accept()
    assert ours.step() == other.step()
    assert snapshot(ours) == snapshot(other) and ours.weights_digest() == other.weights_digest()


def test_a_dropped_backward_can_be_asked_again():
    trainer = trainer_of(run_config(), 1)
    x, grad = boundary(), boundary()
    trainer.forward(5, x)
    first, recomputed = trainer.backward(5, grad)
    assert not recomputed
    trainer.drop()
    assert trainer.held() == (5,)
    second, recomputed = trainer.backward(5, grad)
    assert recomputed and bytes(first.data) == bytes(second.data)
    trainer.accept()
    assert trainer.held() == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_between_forward_and_backward_recomputes_with_the_weights_of_the_moment(stage, dtype):
    config = run_config()
    trainer = trainer_of(config, stage, dtype)
    ids, _ = token_pair()
    inputs = [{"x": None, "ids": ids}] * 2 if stage == 0 else [{"x": boundary(), "ids": None} for _ in range(2)]
    gradients = [boundary(scale=0.1) for _ in range(2)]
    for sample in range(2):
        trainer.forward(sample, **inputs[sample])
    assert trainer.backward(0, gradients[0])[1] is False
    trainer.accept()
    trainer.step()
    back, recomputed = trainer.backward(1, gradients[1])
    assert recomputed
    trainer.accept()

    module = LlamaStage(config, stage, trainer.cut)  # plain PyTorch at the current weights
    for name, values in trainer.layout.views(trainer.state().weights.copy()).items():
        module.get_parameter(name).data = torch.tensor(values)
    if stage == 0:
        leaf = torch.tensor(ids)
    else:
        leaf = torch.frombuffer(bytearray(inputs[1]["x"].data), dtype=torch.float32).view(2, 8, 32).requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        out = module(leaf)
    out.backward(torch.frombuffer(bytearray(gradients[1].data), dtype=torch.float32).view(2, 8, 32))
    assert back is None if stage == 0 else bytes(back.data) == leaf.grad.numpy().tobytes()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9).item()
    assert trainer.step().norm == norm


def test_forget_frees_and_an_unknown_sample_is_refused():
    trainer = trainer_of(run_config(), 1)
    trainer.forward(3, boundary())
    trainer.forget(3)
    trainer.forget(3)
    before = snapshot(trainer)
    with pytest.raises(IotaError, match="sample 3 is not held") as error:
        trainer.backward(3, boundary())
    assert error.value.code == "bad_input" and snapshot(trainer) == before


def test_backward_with_its_input_needs_no_forward():
    config = run_config()
    one, two = trainer_of(config, 1), trainer_of(config, 1)
    x, grad = boundary(), boundary()
    one.forward(0, x)
    kept, _ = one.backward(0, grad)
    given, recomputed = two.backward(0, grad, x)
    assert recomputed and bytes(kept.data) == bytes(given.data)
    one.accept(), two.accept()
    assert one.step() == two.step() and one.weights_digest() == two.weights_digest()


def test_two_pending_passes_are_a_fault_of_the_caller():
    trainer = trainer_of(run_config(), 1)
    for sample in range(2):
        trainer.forward(sample, boundary())
    trainer.backward(0, boundary())
    with pytest.raises(AssertionError):
        trainer.backward(1, boundary())


def test_step_divides_once_and_reports():
    config = run_config(clip=1e9)
    trainer = trainer_of(config, 1, t=7)
    x, grad = boundary(), boundary(scale=0.1)
    for sample in range(4):
        trainer.forward(sample, x)
        trainer.backward(sample, grad)
        trainer.accept()
    info = trainer.step()
    single = trainer_of(config, 1, t=7)
    single.forward(0, x)
    single.backward(0, grad)
    single.accept()
    assert info.passes == 4 and not info.clipped
    assert info.norm == single.step().norm  # (g + g + g + g) / 4 = g exactly
    assert trainer.state().t == 8 and trainer.steps == 1
    assert info.lr == learning_rate(config.train, 100 + 16)
    with pytest.raises(IotaError, match="without an accepted pass"):
        trainer.step()


def test_the_loaded_step_count_and_moments_reach_adam():
    config = run_config(clip=1e9, weight_decay=0.0)
    trainer = trainer_of(config, 1)
    size = trainer.layout.size
    m, v = np.full(size, 1e-3, np.float32), np.full(size, 1e-4, np.float32)
    weights = trainer.state().weights.copy()
    trainer.load(weights, m, v, 9, 0, 10_000)
    x, grad = boundary(), boundary(scale=0.0)
    trainer.forward(0, x)
    trainer.backward(0, grad)
    trainer.accept()
    lr = trainer.step().lr
    state, train = trainer.state(), config.train
    assert state.t == 10 and lr == pytest.approx(train.lr * train.min_lr_share)
    rate = (1e-3 * train.beta1 / (1 - train.beta1**10)) / ((1e-4 * train.beta2 / (1 - train.beta2**10)) ** 0.5)
    assert np.allclose(weights - state.weights, lr * rate, atol=2e-7)
    assert np.allclose(state.m, 1e-3 * train.beta1) and np.allclose(state.v, 1e-4 * train.beta2)


def test_only_tensors_of_two_axes_decay():
    config = run_config(weight_decay=0.5)
    trainer = trainer_of(config, 1)
    before = trainer.state().weights.copy()
    trainer.forward(0, boundary())
    trainer.backward(0, boundary(scale=0.0))
    trainer.accept()
    lr = trainer.step().lr
    after = trainer.state().weights
    split = Layout.for_stage(config, 1, trainer.cut).decayed
    assert np.allclose(after[:split], before[:split] * (1 - lr * 0.5)) and np.array_equal(after[split:], before[split:])


def test_learning_rate_warms_up_and_decays():
    train = TrainConfig(lr=1.0, min_lr_share=0.1, warmup_tokens=100, lr_tokens=1100)
    assert [learning_rate(train, tokens) for tokens in (50, 100)] == [0.5, 1.0]
    assert learning_rate(train, 600) == pytest.approx(0.55)
    assert learning_rate(train, 1100) == learning_rate(train, 10**9) == pytest.approx(0.1)
    rates = [learning_rate(train, tokens) for tokens in range(100, 1200, 10)]
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(msgspec.structs.replace(train, lr_tokens=0), 1000) == pytest.approx(0.1)
    assert learning_rate(msgspec.structs.replace(train, warmup_tokens=0), 0) == 1.0


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradients_rounding_is_keyed_by_run_sample_and_boundary(stage):
    """What a validator must be able to draw again, whoever it is."""
    packed, exact = (run_config(codec=codec) for codec in ("resbm4", "resbm"))  # one learned part, two wire formats
    forward, backward = (boundary_tensor(packed, way) for way in (FORWARD, BACKWARD))
    values, gradient = (torch.tensor(RNG.standard_normal((2, 8, 4)) * scale).float() for scale in (1.0, 0.01))
    x, grad = pack(values, forward), pack(gradient, backward)
    plain = [pack_floats(unpack(one, way, CPU, "x"), "float32") for one, way in ((x, forward), (grad, backward))]
    _, labels = token_pair()

    def back(trainer, sample, x, grad):
        out, _ = (
            trainer.forward_loss(sample, x, None, labels) if trainer.last else trainer.backward(sample, grad, x, None)
        )
        trainer.drop()
        return out

    trainer = trainer_of(packed, stage)
    want = unpack(back(trainer_of(exact, stage), 0, *plain), boundary_tensor(exact, BACKWARD), CPU, "x")
    outs = [back(trainer, sample, x, grad).data for sample in (5, 6)]
    for sample, out in zip((5, 6), outs, strict=True):
        assert bytes(out) == bytes(pack(want, backward, f"iota rounding 0 {sample} {stage - 1} backward".encode()).data)
    assert bytes(outs[0]) != bytes(outs[1])


def test_ids_are_those_of_the_tensor():
    trainer = trainer_of(run_config(codec="resbm+ids"), 1)
    x = boundary(4)
    with pytest.raises(IotaError, match=r"ids \(2, 5\) are not those of a tensor"):
        trainer.evaluate(x, token_pair()[0][:, :5])


def test_weights_digest_is_over_the_flat_bytes():
    trainer = trainer_of(run_config(), 1)
    assert trainer.weights_digest() == hashlib.sha256(trainer.state().weights.tobytes()).hexdigest()


def test_a_one_stage_run():
    trainer = trainer_of(run_config(stages=1), 0)
    ids, labels = token_pair()
    losses = []
    for sample in range(12):
        gradient, loss = trainer.forward_loss(sample, None, ids, labels)
        assert gradient is None
        trainer.accept()
        trainer.step()
        losses.append(loss)
    assert losses[-1] < losses[0] - 0.5
    assert trainer.evaluate_loss(None, ids, labels) < losses[-1]
    logits = trainer.evaluate(None, ids[:1, :5])
    assert logits.dtype == "float32" and logits.shape == (1, 5, 40)


def test_evaluate_leaves_no_trace_and_takes_other_batches():
    trainer = trainer_of(run_config(), 1)
    before = snapshot(trainer)
    values = torch.randn(5, 3, 32)
    assert trainer.evaluate(pack_floats(values, "float32")).shape == (5, 3, 32)
    assert snapshot(trainer) == before and trainer.held() == ()


def bad(dtype="float32", shape=(2, 8, 32), fill=0.0, cut=0):
    data = np.full(shape, fill, np.float32).tobytes()
    return Tensor(dtype, shape, data[: len(data) - cut])


@pytest.mark.parametrize(
    ("tensor", "code"),
    [
        (bad(shape=(2, 8, 31)), "bad_input"),
        (bad(shape=(1, 8, 32)), "bad_input"),
        (bad(shape=(2, 8, 32, 1)), "bad_input"),
        (bad(dtype="bfloat16"), "bad_input"),
        (bad(cut=4), "bad_input"),
        (bad(fill=np.nan), "not_finite"),
        (bad(fill=np.inf), "not_finite"),
        (None, "bad_input"),
    ],
)
def test_bad_tensors_touch_nothing(tensor, code):
    config = run_config()
    inner, last = trainer_of(config, 1), trainer_of(config, 2)
    _, labels = token_pair()
    inner.forward(0, boundary())
    before = snapshot(inner), snapshot(last)
    calls = [lambda: inner.forward(1, tensor), lambda: last.forward_loss(1, tensor, None, labels)]
    if tensor is not None:
        calls += [lambda: inner.backward(0, tensor), lambda: inner.backward(1, boundary(), tensor)]
    for call in calls:
        with pytest.raises(IotaError) as error:
            call()
        assert error.value.code == code
    assert (snapshot(inner), snapshot(last)) == before and inner.held() == (0,)
    assert inner.backward(0, boundary())[1] is False  # the held graph is still good


@pytest.mark.parametrize(
    "ids",
    [np.zeros((2, 7), int), np.zeros((1, 8), int), np.zeros((2, 8)), np.full((2, 8), 40), np.full((2, 8), -1)],
)
def test_bad_tokens_are_refused(ids):
    first, last = trainer_of(run_config(), 0), trainer_of(run_config(), 2)
    for call in (lambda: first.forward(0, None, ids), lambda: last.forward_loss(0, boundary(), None, ids)):
        with pytest.raises(IotaError, match="expected") as error:
            call()
        assert error.value.code == "bad_input"
    assert first.held() == () and last.passes == 0
    with pytest.raises(IotaError, match="first stage"):
        first.forward(0, boundary(), np.zeros((2, 8), int))


def test_bad_states_are_refused_and_the_old_one_stays():
    trainer = trainer_of(run_config(), 1)
    before, size = snapshot(trainer), trainer.layout.size
    good = np.zeros(size, np.float32)
    poison, negative = good.copy(), good.copy()
    poison[3], negative[3] = np.nan, -1e-12
    states = [
        (good[:-1], None, None, "bad_input"),
        (good.astype(np.float64), None, None, "bad_input"),
        (good, good[:-1], None, "bad_input"),
        (poison, None, None, "not_finite"),
        (good, poison, None, "not_finite"),
        (good, good, negative, "not_finite"),
    ]
    for weights, m, v, code in states:
        with pytest.raises(IotaError) as error:
            trainer.load(weights, m, v, 0, 0, 1)
        assert error.value.code == code
    with pytest.raises(IotaError, match="negative"):
        trainer.load(good, None, None, -1, 0, 1)
    assert snapshot(trainer) == before


def test_an_exploded_gradient_does_not_reach_the_weights():
    trainer = trainer_of(run_config(), 0)
    ids, _ = token_pair()
    trainer.forward(0, None, ids)
    trainer.backward(0, bad(fill=3e38))
    trainer.accept()
    before = trainer.weights_digest()
    with pytest.raises(IotaError, match="norm") as error:
        trainer.step()
    assert error.value.code == "not_finite" and trainer.weights_digest() == before
    assert trainer.passes == trainer.steps == trainer.state().t == 0
    trainer.forward(1, None, ids)
    trainer.backward(1, boundary())
    trainer.accept()
    assert np.isfinite(trainer.step().norm)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(IotaError, match="float16"):
        StageTrainer(run_config(), 0, (0, 1), "cpu", "float16")


LIGHT = """
import sys
from iota.config.schema import RunConfig, TrainConfig
from iota.model.layout import initial_state
from iota.model.partition import cut_blocks
from iota.model.trainer import StageTrainer
import numpy as np

for optimizer in ("adamw", "muon"):
    config = RunConfig(name="t", train=TrainConfig(batch=1, optimizer=optimizer))
    for dtype in ("float32", "bfloat16"):
        cut = cut_blocks(config)[0]
        trainer = StageTrainer(config, 0, cut, "cpu", dtype)
        trainer.load(initial_state(config, 0, cut, 0), None, None, 0, 0, 1)
        out = trainer.forward(0, None, np.zeros((1, config.model.sequence), dtype=np.int64))
        trainer.backward(0, out)
        trainer.accept()
        trainer.step()
heavy = {"torch._dynamo", "torch._inductor"} & set(sys.modules)
assert not heavy, heavy
"""


def test_training_does_not_load_the_compiler():
    """It takes seconds in every miner and validator, between joining and the first word."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-800:]
