"""Muon beside AdamW: against a plain implementation of its formula and torch's own optimizers on a plain module, as
flat state, in audits and in a swarm."""

import math

import msgspec
import numpy as np
import pytest
import torch

import validator_case
from iota.config.schema import ModelConfig, RunConfig, StagesConfig, TrainConfig
from iota.core.machine import events as ev
from iota.errors import ConfigError
from iota.model.data import ids_and_labels
from iota.model.layout import Layout, initial_state
from iota.model.llama import LlamaStage
from iota.model.optim import FlatOptimizer, adamw_runs, direction, learning_rate, muon_tensors, orthogonalised
from iota.model.partition import cut_blocks
from iota.model.trainer import StageTrainer
from swarm_case import run_swarm, tiny, weights
from test_validator_audit import audit, check_invalid, epoch
from validator_case import SEGMENTS, STAGES, Miner

torch.set_num_threads(1)
RNG = np.random.default_rng(3)


def run_config(stages=1, codec="identity", optimizer="muon", **train):
    return RunConfig(
        name="m",
        model=ModelConfig(width=32, blocks=3, heads=4, kv_heads=2, vocabulary=48, sequence=16),
        stages=StagesConfig(count=stages, codec=codec, channels=8, wire_dtype="float32"),
        train=TrainConfig(
            **(dict(batch=2, optimizer=optimizer, lr=5e-3, clip=1.0, warmup_tokens=96, lr_tokens=2000) | train)
        ),
    )


def layout_of(config, stage):
    return Layout.for_stage(config, stage, cut_blocks(config)[stage])


def newton_schulz(gradient):
    """Muon's quintic, five times, in float64."""
    x = gradient / max(np.linalg.norm(gradient), 1e-7)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if gradient.shape[0] > gradient.shape[1] else x


def close(ours, theirs, share):
    return np.linalg.norm(ours - theirs) <= share * np.linalg.norm(theirs)


# ----------------------------------------------------------------------------------------------------------- formula


@pytest.mark.parametrize(
    ("stage", "codec", "adamw"),
    [
        (0, "bottleneck", ["embedding.weight+boundaries.0.down.weight", "norms"]),
        (1, "bottleneck", ["boundaries.0.up.weight+boundaries.1.down.weight", "norms"]),
        (1, "identity", ["norms"]),
        (2, "identity", ["head.weight", "norms"]),
    ],
)
def test_muon_takes_the_blocks_matrices_and_adamw_the_runs_between(stage, codec, adamw):
    config = run_config(3, codec)
    layout = layout_of(config, stage)
    names = muon_tensors(config.train, layout)
    assert names == tuple(n for n in layout.names if n.startswith("blocks.") and "norm" not in n)
    assert len(names) == 7  # q, k, v, o, gate, up, down of one block
    runs = []
    for start, stop, decayed in adamw_runs(layout, names):
        inside = [n for n, offset in zip(layout.names, layout.offsets, strict=True) if start <= offset < stop]
        assert decayed == (start < layout.decayed) == (stop <= layout.decayed)
        runs.append("norms" if all("norm" in n for n in inside) else "+".join(inside))
    assert runs == adamw
    plain = msgspec.structs.replace(config.train, optimizer="adamw")
    assert muon_tensors(plain, layout) == ()
    assert adamw_runs(layout, ()) == [(0, layout.decayed, True), (layout.decayed, layout.size, False)]


@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16)])
def test_singular_values_come_near_one(shape):
    for size in (1e-5, 1.0, 1e4):
        matrix = torch.tensor(RNG.standard_normal(shape) * size, dtype=torch.float32)
        left, values, right = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
        for dtype, share in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
            out = orthogonalised(matrix, dtype).double().numpy()
            inside = np.diag(left.T @ out @ right.T)
            assert close(out, (left * inside) @ right, share), "the directions stay"
            assert close(out, newton_schulz(matrix.double().numpy()), share)
            clear = values > 1e-2 * np.linalg.norm(values)
            assert clear.sum() > 10 and (inside[clear] > 0.6).all() and (inside[clear] < 1.25).all()
    assert not orthogonalised(torch.zeros(shape), torch.float32).any()


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_steps_follow_the_formula(dtype, share):
    """Momentum, Nesterov, orthogonalisation, the scale that matches AdamW's, decoupled decay; AdamW for the rest."""
    config = run_config(3, "bottleneck", muon_momentum=0.9, weight_decay=0.3, dtype=dtype)
    train, layout = config.train, layout_of(config, 0)
    start = RNG.standard_normal(layout.size).astype(np.float32)
    w, m, v = torch.tensor(start), torch.zeros(layout.size), torch.zeros(layout.size)
    optimizer = FlatOptimizer(train, layout, w, m, v)
    muon = muon_tensors(train, layout)
    expected = {name: view.astype(np.float64) for name, view in layout.views(start).items()}
    first = {name: np.zeros_like(view) for name, view in expected.items()}
    second = {name: np.zeros_like(view) for name, view in expected.items()}
    for t in range(1, 5):
        gradient, lr = RNG.standard_normal(layout.size).astype(np.float32), 0.1 / t
        optimizer.step(torch.tensor(gradient), lr)
        assert optimizer.t == t
        for name, g in layout.views(gradient).items():
            if name in muon:
                first[name] = 0.9 * first[name] + 0.1 * g
                update = newton_schulz(0.1 * g + 0.9 * first[name]) * 0.2 * math.sqrt(max(g.shape))
                decay = train.weight_decay
            else:
                first[name] = train.beta1 * first[name] + (1 - train.beta1) * g
                second[name] = train.beta2 * second[name] + (1 - train.beta2) * g * g
                update = first[name] / (1 - train.beta1**t)
                update = update / (np.sqrt(second[name] / (1 - train.beta2**t)) + train.eps)
                decay = train.weight_decay if g.ndim == 2 else 0.0
            expected[name] = expected[name] * (1 - lr * decay) - lr * update
    for name, ours in layout.views(w.numpy()).items():
        change = expected[name] - layout.views(start)[name]
        assert close(ours - layout.views(start)[name], change, share if name in muon else 1e-4), name
        assert close(layout.views(m.numpy())[name], first[name], 1e-5), name
        assert close(layout.views(v.numpy())[name], second[name], 1e-5), name
        assert (name in muon) == (not layout.views(v.numpy())[name].any())


def test_an_update_is_as_large_as_adamws_for_every_shape():
    """Root mean square 0.2 of the learning rate, whatever the gradient's size."""
    config = run_config()
    layout = layout_of(config, 0)
    for size in (1e-5, 1.0, 1e3):
        m = (RNG.standard_normal(layout.size) * size).astype(np.float32)
        out = direction(config.train, layout, m, np.zeros(layout.size, np.float32), "cpu")
        for name in muon_tensors(config.train, layout):
            rms = math.sqrt(float(np.mean(layout.views(out)[name].astype(np.float64) ** 2)))
            assert 0.15 < rms < 0.25, (name, rms)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("optimizer", "lion", "train.optimizer = 'lion' is not known; write one of: adamw, muon"),
        ("muon_momentum", 1.0, "train.muon_momentum = 1.0 is out of range"),
        ("muon_momentum", -0.1, "train.muon_momentum = -0.1 is out of range"),
    ],
)
def test_settings_that_cannot_work_are_refused(key, value, wanted):
    with pytest.raises(ConfigError) as caught:
        tiny(train={key: value})
    assert wanted in str(caught.value)


# -------------------------------------------------------------------------------------------------- the stage's trainer


def trainer_of(config):
    trainer = StageTrainer(config, 0, (0, 3), "cpu", config.train.dtype)
    trainer.load(initial_state(config, 0, (0, 3), 0), None, None, 0, 0, 32)
    return trainer


def batch(number):
    return ids_and_labels(np.random.default_rng(number).integers(0, 12, (2, 17)))


def train(trainer, numbers):
    infos = []
    for number in numbers:
        trainer.forward_loss(number, None, *batch(number))
        trainer.accept()
        infos.append(trainer.step())
    return infos


def kept(trainer):
    state = trainer.state()
    return state.weights.copy(), state.m.copy(), state.v.copy(), state.t


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_equals_torchs_muon_and_adamw_on_a_plain_module(dtype):
    """Twelve clipped steps, to the bit in bfloat16: torch.optim's Muon and AdamW know nothing of flat buffers.
    In float32 torch's Muon still orthogonalises in bfloat16, so its matrices are close, not equal."""
    config = run_config(clip=2.0, dtype=dtype)
    trainer = trainer_of(config)
    module, c = LlamaStage(config, 0, (0, 3)), config.train
    for name, values in Layout.of(module).views(initial_state(config, 0, (0, 3), 0)).items():
        module.get_parameter(name).data = torch.tensor(values)
    named = dict(module.named_parameters())
    muon = [p for n, p in named.items() if n.startswith("blocks.") and p.ndim == 2]
    wide = [p for n, p in named.items() if not n.startswith("blocks.") and p.ndim == 2]
    rest = [p for p in named.values() if p.ndim == 1]
    assert len(muon) == 21 and len(wide) == 2
    both = [
        torch.optim.Muon(muon, weight_decay=c.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": wide, "weight_decay": c.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            betas=(c.beta1, c.beta2), eps=c.eps, fused=True,
        ),
    ]  # fmt: skip
    clipped = []
    for number in range(12):
        ids, labels = batch(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = module(torch.tensor(ids))
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), torch.tensor(labels).flatten()).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), c.clip).item()
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(c, 32 * (number + 1))
            optimizer.step()
            optimizer.zero_grad()
        (info,) = train(trainer, [number])
        assert info.norm == norm if dtype == "bfloat16" else math.isclose(info.norm, norm, rel_tol=0.05)
        clipped.append(info.clipped)
    assert any(clipped) and not all(clipped)
    ours = trainer.layout.views(trainer.state().weights)
    start = trainer.layout.views(initial_state(config, 0, (0, 3), 0))
    for name, parameter in named.items():
        theirs = parameter.detach().numpy()
        if dtype == "bfloat16":
            assert np.array_equal(ours[name], theirs), name
        assert close(ours[name] - start[name], theirs - start[name], 0.15), name


def test_the_state_is_the_flat_buffers_themselves():
    """Momentum lies in `m` in place: what a state shows is what the next step continues from."""
    trainer = trainer_of(run_config())
    live = trainer.state()
    for number in range(3):
        before = kept(trainer)
        train(trainer, [number])
        assert live.weights.ctypes.data == trainer.state().weights.ctypes.data
        muon = trainer.layout.views(live.m)
        assert all((muon[n] != trainer.layout.views(before[1])[n]).any() for n in muon)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_state_continues_to_the_same_bits(dtype):
    """What merge, carry, snapshots and replays rest on: a state says everything."""
    config = run_config(dtype=dtype)
    one = trainer_of(config)
    train(one, range(4))
    state = kept(one)
    other = trainer_of(config)
    train(other, range(9, 12))  # something else before
    for trainer in (one, other):
        trainer.load(*state, 128, 32)
        train(trainer, range(4, 8))
    assert [a.tobytes() for a in kept(one)[:3]] == [a.tobytes() for a in kept(other)[:3]]
    assert kept(one)[3] == kept(other)[3] == 8
    one.load(state[0], None, None, 0, 128, 32)  # inner_state = reset
    train(one, range(4, 8))
    assert kept(one)[1].tobytes() != kept(other)[1].tobytes() and kept(one)[3] == 4


def test_it_learns():
    losses = {}
    for optimizer in ("adamw", "muon"):
        trainer = trainer_of(run_config(optimizer=optimizer))
        row = []
        for number in range(25):
            row.append(trainer.forward_loss(number, None, *batch(number))[1])
            trainer.accept()
            trainer.step()
        losses[optimizer] = np.mean(row[-5:])
    assert losses["muon"] < math.log(48) - 1.0  # twelve tokens of 48 occur: ln 12 is the least
    assert abs(losses["muon"] - losses["adamw"]) < 0.5


# ------------------------------------------------------------------------------------------------------------- audits


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request, monkeypatch):
    """The case's run under Muon, in this dtype."""
    plain = validator_case.run_config

    def run_config(**how):
        config = plain(**how)
        changed = msgspec.structs.replace(config.train, optimizer="muon", dtype=request.param)
        return msgspec.structs.replace(config, train=changed)

    monkeypatch.setattr(validator_case, "run_config", run_config)
    return request.param


async def test_an_honest_segment_is_equal_to_the_bit(dtype):
    case, miners = await epoch(dtype=dtype)
    for stage in range(STAGES):
        for segment in SEGMENTS:
            result = await audit(case, miners[stage], *segment, dtype=dtype)
            assert result.verdict == "valid" and "equal to the bit" in result.why, result


async def test_rounding_noise_is_within_tolerance(dtype):
    """Orthogonalisation enlarges what is small, noise too: there is room for what another machine's kernels give."""

    class Noisy(Miner):
        def train_step(self):
            noise = torch.from_numpy(np.random.default_rng(self.steps).standard_normal(self.trainer.layout.size))
            self.trainer._sum.mul_((1 + 1e-4 * noise).float())
            super().train_step()

    case, miners = await epoch(Noisy, 1, dtype=dtype)
    for segment in SEGMENTS:
        result = await audit(case, miners[1], *segment, dtype=dtype)
        assert result.verdict == "valid" and "within tolerance" in result.why, result
        assert min(row.cosine for row in result.worst) > (0.9999 if dtype == "float32" else 0.998)


class Forged(Miner):
    """Snapshots and uploads moments other than those it trained with."""

    def state(self):
        t, weights, m, v = super().state()
        if self.steps:
            m, v = self.forge(m.copy(), v.copy())
        return t, weights, m, v

    def muon(self, flat):
        views = self.trainer.layout.views(flat)
        return [views[name] for name in muon_tensors(self.config.train, self.trainer.layout)]


class Turned(Forged):
    def forge(self, m, v):
        for matrix in self.muon(m):
            matrix *= -1
        return m, v


class Larger(Forged):
    def forge(self, m, v):
        for matrix in self.muon(m):
            matrix *= 2
        return m, v


class Whispered(Forged):
    """A hundredth of m's norm, put where its singular values are small: m's own cosine stays above 0.9999."""

    def forge(self, m, v):
        for matrix in self.muon(m):
            left, values, right = np.linalg.svd(matrix, full_matrices=False)
            values[len(values) // 4 :] = -0.01 * np.linalg.norm(values) / math.sqrt(0.75 * len(values))
            matrix[...] = (left * values) @ right
        return m, v


class Poisoned(Forged):
    """A few of AdamW's second moments made tiny."""

    def forge(self, m, v):
        held = np.flatnonzero(v)
        middle = held[np.argsort(v[held])][len(held) // 2 :]
        v[middle[: len(middle) // 50]] *= np.float32(1e-12)
        return m, v


class Planted(Forged):
    """A second moment where Muon has none."""

    def forge(self, m, v):
        for matrix in self.muon(v):
            matrix[...] = 1e-3
        return m, v


@pytest.mark.parametrize(
    ("cheat", "word"),
    [
        (Turned, "direction of the moments"),
        (Larger, "first moment"),
        (Whispered, "direction of the moments"),
        (Poisoned, "direction of the moments"),
        (Planted, "second moment"),
    ],
)
async def test_forged_moments_are_invalid(dtype, cheat, word):
    case, miners = await epoch(cheat, 1, dtype=dtype)
    result = await audit(case, miners[1], 0, 2, dtype=dtype)
    check_invalid(result, word)
    if cheat in (Whispered, Poisoned):
        assert {row.kind for row in result.worst if row.cosine < 0.99} == {"direction"}


# -------------------------------------------------------------------------------------------------------------- a swarm


def test_a_swarm_trains_merges_and_is_audited(tmp_path):
    config = tiny(
        stop="epochs >= 2",
        train=dict(optimizer="muon", lr=2e-3),
        merge=dict(outer="nesterov", min_batches=4, members=2),
        data=dict(max_bytes=60_000),
    )
    swarm = run_swarm(config, tmp_path, miners=6, validators=1)
    events = swarm.events()
    merged = [e for e in events if isinstance(e, ev.StageMerged)]
    assert [e.merged for e in merged] == [True] * 6
    assert {e.how for e in events if isinstance(e, ev.ShardSettled)} == {"agreed"}
    verdicts = [e for e in events if isinstance(e, ev.VerdictGiven) and e.validator >= 0]
    assert len(verdicts) >= 6 and all(e.verdict == "valid" and "to the bit" in e.why for e in verdicts)
    assert not [e for e in events if isinstance(e, ev.Declined)]
    for e in merged:
        layout = layout_of(swarm.manifest.config, e.stage)
        moments = {part: layout.views(weights(swarm, e.checkpoint, part)) for part in ("m", "v")}
        for name in muon_tensors(swarm.manifest.config.train, layout):
            assert moments["m"][name].any() and not moments["v"][name].any(), name
