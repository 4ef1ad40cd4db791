"""Plain PyTorch that reads a run's event log and trains the same model: the reference the swarm is held against.

Nothing of the swarm's compute code is used: no stages, no trainer, no flat buffers. Every miner is a dict of named
tensors; a pass is ordinary autograd through the miner's own blocks; the merge is ten lines. Only the event types, the
names and shapes of tensors, and the data order come from the package. Codec `identity` in float32.
"""

import math

import torch
import torch.nn.functional as F

from iota.core.machine import events as ev
from iota.model.data import sample_windows
from iota.model.layout import Layout


def rope(x, theta):
    """x [B, H, T, E]: rotate channel pairs (i, i + E/2)."""
    length, width = x.shape[-2:]
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def block(p, n, x, model):
    """One Llama layer with the tensors of `p` named blocks.n.*."""
    b, t, d = x.shape
    e = d // model.heads
    w = {k: p[f"blocks.{n}.{k}.weight"] for k in ("attention_norm", "ffn_norm")}
    a = {k: p[f"blocks.{n}.attention.{k}.weight"] for k in "qkvo"}
    f = {k: p[f"blocks.{n}.ffn.{k}.weight"] for k in ("gate", "up", "down")}
    h = rms(x, w["attention_norm"], model.norm_eps)
    q = rope((h @ a["q"].T).view(b, t, model.heads, e).transpose(1, 2), model.rope_theta)
    k = rope((h @ a["k"].T).view(b, t, model.kv_heads, e).transpose(1, 2), model.rope_theta)
    v = (h @ a["v"].T).view(b, t, model.kv_heads, e).transpose(1, 2)
    k, v = (y.repeat_interleave(model.heads // model.kv_heads, 1) for y in (k, v))
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(e) + torch.full((t, t), -math.inf).triu(1)
    x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d) @ a["o"].T
    h = rms(x, w["ffn_norm"], model.norm_eps)
    return x + (F.silu(h @ f["gate"].T) * (h @ f["up"].T)) @ f["down"].T


class Miner:
    """One member's stage: parameters by name, gradients, Adam moments."""

    def __init__(self, run, stage, base, epoch):
        self.run, self.stage, self.names = run, stage, Layout.for_stage(run.config, stage, run.cuts[stage])
        self.p = {k: v.clone().requires_grad_(True) for k, v in self.names.views(base["weights"]).items()}
        self.m = {k: v.clone() for k, v in self.names.views(base["m"]).items()}
        self.v = {k: v.clone() for k, v in self.names.views(base["v"]).items()}
        self.t, self.steps, self.passes, self.epoch = base["t"], 0, 0, epoch
        self.grads = {k: torch.zeros_like(v) for k, v in self.p.items()}

    def forward(self, x):
        model, stages = self.run.config.model, len(self.run.cuts)
        if self.stage == 0:
            x = self.p["embedding.weight"][x]
        for n in range(*self.run.cuts[self.stage]):
            x = block(self.p, n, x, model)
        if self.stage == stages - 1:
            x = rms(x, self.p["norm.weight"], model.norm_eps) @ self.p["head.weight"].T
        return x

    def backward(self, x, gradient=None, labels=None):
        """Accumulate the gradient of one pass at today's weights; returns the gradient of x, and the loss if last."""
        x = x.detach().requires_grad_(x.is_floating_point())
        out, loss = self.forward(x), None
        if labels is not None:
            loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), labels.reshape(-1))
        wanted = [*self.p.values()] + ([x] if x.requires_grad else [])
        grads = torch.autograd.grad(loss if loss is not None else out, wanted, gradient)
        for name, g in zip(self.p, grads, strict=False):
            self.grads[name] += g
        self.passes += 1
        return (grads[-1] if x.requires_grad else None), (loss.item() if loss is not None else None)

    def step(self, opened):
        c = self.run.config.train
        g = {k: v / self.passes for k, v in self.grads.items()}
        norm = math.sqrt(sum(float(v.double().pow(2).sum()) for v in g.values()))
        scale = min(1.0, c.clip / (norm + 1e-6))
        self.t, self.steps, self.passes = self.t + 1, self.steps + 1, 0
        lr = schedule(c, opened.tokens + self.steps * opened.tokens_per_step[self.stage])
        with torch.no_grad():
            for k, p in self.p.items():
                grad = g[k] * scale
                p.mul_(1 - lr * (c.weight_decay if p.dim() >= 2 else 0.0))
                self.m[k].mul_(c.beta1).add_(grad, alpha=1 - c.beta1)
                self.v[k].mul_(c.beta2).addcmul_(grad, grad, value=1 - c.beta2)
                denominator = (self.v[k] / (1 - c.beta2**self.t)).sqrt() + c.eps
                p.sub_(lr / (1 - c.beta1**self.t) * self.m[k] / denominator)
                self.grads[k].zero_()

    def flat(self, values):
        return torch.cat([values[name].detach().reshape(-1) for name in self.names.names])


def schedule(c, tokens):
    if tokens < c.warmup_tokens:
        return c.lr * tokens / c.warmup_tokens
    share = min(1.0, (tokens - c.warmup_tokens) / ((c.lr_tokens or 10 * c.warmup_tokens) - c.warmup_tokens))
    return c.lr * (c.min_lr_share + (1 - c.min_lr_share) * 0.5 * (1 + math.cos(math.pi * share)))


class Run:
    """Fold the events. `initial[s]`: stage s's checkpoint 0 as a flat tensor; `tokens`: the training tokens.

    After `fold`: `merged[(epoch, stage)]` flat weights, `losses[sample]`."""

    def __init__(self, config, cuts, initial, tokens):
        self.config, self.cuts, self.tokens = config, cuts, tokens
        self.base = [
            {"weights": w, "m": torch.zeros_like(w), "v": torch.zeros_like(w), "u": torch.zeros_like(w), "t": 0}
            for w in initial
        ]
        self.miners, self.stage_of, self.inputs, self.gradients = {}, {}, {}, {}
        self.merged, self.losses, self.opened, self.plans, self.seen = {}, {}, None, {}, set()

    def data(self, sample):
        c, length = self.config, self.config.model.sequence
        windows = sample_windows(c.seed, c.train.batch, (len(self.tokens) - 1) // length, sample)
        rows = torch.stack([self.tokens[w * length : w * length + length + 1] for w in windows]).long()
        return rows[:, :-1], rows[:, 1:]

    def fold(self, events):
        for e in events:
            self.seen.add(type(e).__name__)
            if isinstance(e, ev.SessionOpened):
                self.stage_of[e.number] = e.stage
            elif isinstance(e, ev.Loaded):
                stage = self.stage_of[e.number]
                self.miners[e.number] = Miner(self, stage, self.base[stage], e.epoch)
            elif isinstance(e, ev.EpochOpened):
                self.opened = e
            elif isinstance(e, ev.Passed):
                self.passed(e)
            elif isinstance(e, ev.Stepped):
                self.miners[e.number].step(self.opened)
            elif isinstance(e, ev.Planned):
                self.plans[e.stage] = e
            elif isinstance(e, ev.StageMerged):
                self.merge(e)
        return self

    def passed(self, e):
        miner, ids = self.miners[e.number], self.data(e.sample)
        x = ids[0] if e.stage == 0 else self.inputs[e.sample, e.stage]
        if e.kind == "f":
            self.inputs[e.sample, e.stage + 1] = miner.forward(x).detach()
            return
        gradient = None if e.kind == "l" else self.gradients[e.sample, e.stage]
        back, loss = miner.backward(x, gradient, ids[1] if e.kind == "l" else None)
        self.gradients[e.sample, e.stage - 1] = back
        if loss is not None:
            self.losses[e.sample] = (loss, e.loss)
        if e.step:
            miner.step(self.opened)

    def merge(self, e):
        base, plan, c = self.base[e.stage], self.plans.pop(e.stage, None), self.config.merge
        if plan is not None and e.merged:
            cap = c.weight_cap * float(torch.tensor(plan.weights, dtype=torch.float64).quantile(0.5))
            weights = [min(w, cap) for w in plan.weights]
            share = [w / sum(weights) for w in weights]
            rows = [(s, self.miners[n]) for s, n in zip(share, plan.members, strict=True)]
            mean = sum(s * r.flat(r.p) for s, r in rows)
            if c.outer == "nesterov":
                delta = base["weights"] - mean
                base["u"] = c.outer_momentum * base["u"] + delta
                mean = base["weights"] - c.outer_lr * (delta + c.outer_momentum * base["u"])
            base["weights"] = mean
            base["m"] = sum(s * r.flat(r.m) for s, r in rows)
            base["v"] = sum(s * r.flat(r.v) for s, r in rows)
            base["t"] += round(sum(w * r.steps for w, (_, r) in zip(weights, rows, strict=True)) / sum(weights))
        self.merged[e.epoch, e.stage] = base["weights"].clone()
