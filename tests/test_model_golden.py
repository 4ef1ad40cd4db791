"""Golden test 1, in process: three stages exchanging only boundary bytes equal one plain PyTorch process, to the bit.

The reference below knows nothing of the trainer: one autograd graph through the whole model, gradients summed by
autograd, divided once, clipped per stage, and torch's fused AdamW on the concatenated regions of each stage.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from iota.config.schema import ModelConfig, RunConfig, StagesConfig, TrainConfig
from iota.model.data import ids_and_labels, sample_windows
from iota.model.layout import Layout, initial_state
from iota.model.llama import LlamaStage
from iota.model.partition import cut_blocks
from iota.model.trainer import StageTrainer

torch.set_num_threads(1)
STEPS = 52
TOKENS = np.random.default_rng(0).integers(0, 48, 4000).repeat(2)  # each token twice: something to learn


def run_config(accumulate, dtype, codec="identity", stages=3):
    return RunConfig(
        name="golden",
        seed=11,
        model=ModelConfig(width=32, blocks=4, heads=4, kv_heads=2, vocabulary=48, sequence=16),
        stages=StagesConfig(count=stages, codec=codec, channels=8, wire_dtype="float32"),
        train=TrainConfig(
            batch=2,
            accumulate=accumulate,
            dtype=dtype,
            lr=3e-3,
            clip=0.6 if stages > 1 else 1.2,
            warmup_tokens=400,
            lr_tokens=4000,
        ),
    )


def sample_tokens(config, sample):
    length = config.model.sequence
    windows = sample_windows(config.seed, config.train.batch, (len(TOKENS) - 1) // length, sample)
    return ids_and_labels(np.stack([TOKENS[w * length : w * length + length + 1] for w in windows]))


class PlainModel:
    """The same model in one process."""

    def __init__(self, config):
        self.config, self.t = config, 0
        self.stages, self.optimizers = [], []
        for stage, cut in enumerate(cut_blocks(config)):
            module, state = LlamaStage(config, stage, cut), initial_state(config, stage, cut, config.seed)
            for name, values in Layout.of(module).views(state).items():
                module.get_parameter(name).data = torch.tensor(values)
            wide = [p for p in module.parameters() if p.ndim >= 2]
            flat = [p for p in module.parameters() if p.ndim < 2]
            regions = [torch.cat([p.detach().flatten() for p in part]) for part in (wide, flat)]
            train = config.train
            optimizer = torch.optim.AdamW(
                [
                    {"params": [regions[0]], "weight_decay": train.weight_decay},
                    {"params": [regions[1]], "weight_decay": 0.0},
                ],
                lr=train.lr,
                betas=(train.beta1, train.beta2),
                eps=train.eps,
                fused=True,
            )
            self.stages.append(module)
            self.optimizers.append((optimizer, (wide, flat), regions))

    def logits(self, values):
        for module in self.stages:
            values = module(values)
        return values

    def accumulate(self, ids, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.train.dtype == "bfloat16"):
            logits = self.logits(torch.tensor(ids))
        loss = F.cross_entropy(logits.float().flatten(0, 1), torch.tensor(labels).flatten())
        loss.backward()
        return loss.item()

    def step(self, passes, tokens):
        self.t += 1
        norms, train = [], self.config.train
        seen = tokens * self.t
        if seen < train.warmup_tokens:
            lr = train.lr * seen / train.warmup_tokens
        else:
            progress = min(1.0, (seen - train.warmup_tokens) / (train.lr_tokens - train.warmup_tokens))
            cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
            lr = train.lr * (train.min_lr_share + (1.0 - train.min_lr_share) * cosine)
        for module, (optimizer, parts, regions) in zip(self.stages, self.optimizers, strict=True):
            for parameter in module.parameters():
                parameter.grad /= passes
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip).item())
            for group, part, region in zip(optimizer.param_groups, parts, regions, strict=True):
                group["lr"] = lr
                region.grad = torch.cat([p.grad.flatten() for p in part])
            optimizer.step()
            for part, region in zip(parts, regions, strict=True):
                for parameter, values in zip(part, region.split([p.numel() for p in part]), strict=True):
                    parameter.data.copy_(values.view(parameter.shape))
                    parameter.grad = None
        return norms

    def weights(self, stage):
        return torch.cat(self.optimizers[stage][2]).numpy()


def build_trainers(config, states, tokens, per_step):
    trainers = []
    for stage, cut in enumerate(cut_blocks(config)):
        trainer = StageTrainer(config, stage, cut, "cpu", config.train.dtype)
        weights, m, v, t = states[stage]
        trainer.load(weights, m, v, t, tokens, per_step)
        trainers.append(trainer)
    return trainers


def run_window(config, trainers, samples, rerouted):
    """One synchronous window: all forwards in sample order, backwards in sample order, then every stage steps.

    `rerouted` samples lost their graphs: those backwards come with the stored input, as to a miner that did not do the
    forward.
    """
    inner, last = trainers[:-1], trainers[-1]
    batches = {sample: sample_tokens(config, sample) for sample in samples}
    inputs, losses = {}, []
    for sample in samples:
        values = None
        for trainer in inner:
            inputs[sample, trainer.stage] = values
            values = trainer.forward(sample, values, batches[sample][0] if trainer.first else None)
        inputs[sample, last.stage] = values
    for sample in samples:
        ids, labels = batches[sample]
        gradient, loss = last.forward_loss(sample, inputs[sample, last.stage], ids if last.first else None, labels)
        last.accept()
        losses.append(loss)
        for trainer in reversed(inner):
            given = {}
            if sample in rerouted:
                trainer.forget(sample)
                given = {"x": inputs[sample, trainer.stage], "ids": ids if trainer.first else None}
            gradient, recomputed = trainer.backward(sample, gradient, **given)
            assert recomputed == (sample in rerouted)
            trainer.accept()
        assert gradient is None
    return losses, [trainer.step() for trainer in trainers]


CASES = [
    (1, "float32", "identity", 3),
    (3, "float32", "identity", 3),
    (1, "bfloat16", "identity", 3),
    (3, "bfloat16", "identity", 3),
    (2, "float32", "bottleneck", 3),
    (2, "bfloat16", "identity", 1),
]


@pytest.mark.parametrize(("accumulate", "dtype", "codec", "stages"), CASES)
def test_stages_equal_one_process_to_the_bit(accumulate, dtype, codec, stages):
    config = run_config(accumulate, dtype, codec, stages)
    cuts, plain = cut_blocks(config), PlainModel(config)
    per_step = accumulate * config.train.batch * config.model.sequence
    states = [(initial_state(config, stage, cut, config.seed), None, None, 0) for stage, cut in enumerate(cuts)]
    trainers = build_trainers(config, states, 0, per_step)
    clipped, losses = [], []
    for step in range(STEPS):
        if step in (20, 40):  # `assign` with one miner a stage: the merged state is the miner's own
            states = [trainer.state() for trainer in trainers]
            states = [(s.weights.copy(), s.m.copy(), s.v.copy(), s.t) for s in states]
            trainers = build_trainers(config, states, step * per_step, per_step)
        samples = range(step * accumulate, (step + 1) * accumulate)
        rerouted = {sample for sample in samples if sample % 5 == 4}
        ours, infos = run_window(config, trainers, samples, rerouted)
        theirs = [plain.accumulate(*sample_tokens(config, sample)) for sample in samples]
        norms = plain.step(accumulate, per_step)
        assert ours == theirs, step
        assert [info.norm for info in infos] == norms
        clipped += [info.clipped for info in infos]
        losses += ours
    for stage, trainer in enumerate(trainers):
        assert np.array_equal(trainer.state().weights, plain.weights(stage)), stage
        assert trainer.state().t == STEPS
    assert any(clipped) and not all(clipped)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.3
