"""The inner optimizer and its learning rate (design section 3, "Numeric contract").

`train.optimizer`:
* "adamw": fused AdamW on two flat regions of a stage, the decayed tensors first, then the rest.
* "muon": the blocks' matrices (attention q, k, v, o and feed-forward gate, up, down) by Muon, each as a matrix; what
  lies between them (embedding, head, codecs, norms) by the same AdamW, on the maximal runs of it. In bfloat16 it equals
  torch.optim.Muon to the bit; that one knows no float32, in which a step is many times cheaper on processors without
  bfloat16 products and in which two machines' steps agree closer.

Moments lie in flat buffers of the caller, so that they can be merged, hashed and sent as slices. Muon's momentum is a
running mean of gradients, as AdamW's first moment is, and lies in `m`; it has no second moment: `v` is neither read nor
written there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim.adamw import adamw

from iota.config.schema import TrainConfig
from iota.model.layout import Layout

MATRIX = re.compile(r"blocks\.\d+\.(attention\.[qkvo]|ffn\.(gate|up|down))\.weight")
"""What Muon steps. A codec's matrices are not among these: they map between spaces of very different width."""
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST = 1e-7
"""Muon's usual iteration: coefficients chosen for a steep start, and the least norm that is divided by."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def learning_rate(train: TrainConfig, tokens: int) -> float:
    """lr = f(tokens): linear warm-up over `warmup_tokens`, then a cosine down to `min_lr_share` * `lr` at `lr_tokens`,
    then constant. `tokens` counts the run's tokens up to and including the step (so the first step's rate is not zero).

    `lr_tokens` 0 means ten times the warm-up (a loader that knows the stop rule's tokens fills it in before).
    """
    if tokens < train.warmup_tokens:
        return train.lr * tokens / train.warmup_tokens
    horizon = train.lr_tokens or 10 * train.warmup_tokens
    if tokens >= horizon:
        return train.lr * train.min_lr_share
    progress = (tokens - train.warmup_tokens) / (horizon - train.warmup_tokens)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return train.lr * (train.min_lr_share + (1.0 - train.min_lr_share) * cosine)


def muon_tensors(train: TrainConfig, layout: Layout) -> tuple[str, ...]:
    """Names of a stage's tensors that Muon steps, in flat order; none under AdamW."""
    if train.optimizer != "muon":
        return ()
    return tuple(name for name in layout.names if MATRIX.fullmatch(name))


def adamw_runs(layout: Layout, muon: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """The maximal runs (start, stop, decayed) of tensors that are not in `muon`, in flat order."""
    runs: list[tuple[int, int, bool]] = []
    for name, shape, start in zip(layout.names, layout.shapes, layout.offsets, strict=True):
        stop, decayed = start + math.prod(shape), start < layout.decayed
        if name in muon:
            continue
        if runs and runs[-1][1:] == (start, decayed):
            start = runs.pop()[0]
        runs.append((start, stop, decayed))
    return runs


def orthogonalised(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Roughly the nearest matrix with orthonormal rows (columns, if they are fewer): singular values come to lie
    between about 0.7 and 1.2, those far below a hundredth of the norm stay smaller. Newton-Schulz in `dtype`."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T.to(dtype) if tall else matrix.to(dtype)
    x = x / x.norm().clamp(min=SMALLEST)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def muon_scale(shape: tuple[int, ...]) -> float:
    """What an orthogonalised matrix is multiplied by, so that its root mean square is 0.2, about that of AdamW's update
    (arXiv 2502.16982): one learning rate and one weight decay then serve both."""
    return 0.2 * math.sqrt(max(shape))


@dataclass(frozen=True)
class _Run:
    """A stretch of the flat order that AdamW steps: views, and Adam's count as torch keeps it."""

    weights: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    step: torch.Tensor
    part: slice
    decayed: bool


class FlatOptimizer:
    """AdamW, or Muon beside AdamW, over flat float32 buffers `weights`, `m`, `v` in the order of `layout`. The buffers
    stay the caller's and are changed in place. Weight decay is decoupled and spares what `layout` does not decay.

    By torch's functional AdamW: the optimizer class loads the compiler at its first use, seconds in every process."""

    def __init__(
        self, train: TrainConfig, layout: Layout, weights: torch.Tensor, m: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._train, self._layout = train, layout
        names = muon_tensors(train, layout)
        values, momenta = layout.views(weights), layout.views(m)
        self._matrices = [(name, values[name], momenta[name]) for name in names]
        runs = adamw_runs(layout, names)
        assert runs, "every stage has norms, and they are AdamW's"
        parts = [(slice(start, stop), decayed) for start, stop, decayed in runs]
        self._runs = [
            _Run(weights[part], m[part], v[part], torch.zeros((), device=weights.device), part, decayed)
            for part, decayed in parts
        ]

    @property
    def t(self) -> int:
        """Adam's step count, as the next step will see it before advancing. Muon has none."""
        return int(self._runs[0].step.item())

    @t.setter
    def t(self, value: int) -> None:
        for run in self._runs:
            run.step.fill_(value)

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """One step on the flat gradient (float32, same length as the weights); advances `t`."""
        train = self._train
        for decayed in (True, False):
            runs = [run for run in self._runs if run.decayed == decayed]
            adamw(
                [run.weights for run in runs],
                [gradient[run.part] for run in runs],
                [run.m for run in runs],
                [run.v for run in runs],
                [],
                [run.step for run in runs],
                fused=True,
                amsgrad=False,
                beta1=train.beta1,
                beta2=train.beta2,
                lr=lr,
                weight_decay=train.weight_decay if decayed else 0.0,
                eps=train.eps,
                maximize=False,
            )
        gradients = self._layout.views(gradient)
        for name, weight, momentum in self._matrices:
            self._step_matrix(weight, momentum, gradients[name], lr)

    def _step_matrix(self, weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
        """Muon with Nesterov's look ahead. It orthogonalises in the run's dtype, not the machine's: all do it alike."""
        train = self._train
        momentum.lerp_(gradient, 1 - train.muon_momentum)
        update = orthogonalised(gradient.lerp(momentum, train.muon_momentum), DTYPES[train.dtype])
        weight.mul_(1 - lr * train.weight_decay).add_(update, alpha=-lr * muon_scale(weight.shape))


def direction(
    train: TrainConfig, layout: Layout, m: np.ndarray, v: np.ndarray, device: torch.device | str
) -> np.ndarray:
    """What the next step would do to the weights by the moments alone, per unit of learning rate, flat float32:
    m / (sqrt(v) + eps) where AdamW steps; the orthogonalised m at AdamW's scale where Muon steps, whatever v is there.

    Forged moments that hardly show in m's and v's own norms show here: a few tiny v, or a little m added where its
    singular values are small. Overflow gives non-finite values, not an error.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        out: np.ndarray = np.sqrt(v)
        out += np.float32(train.eps)
        np.divide(m, out, out=out)
    momenta, directions = layout.views(m), layout.views(out)
    for name in muon_tensors(train, layout):
        momentum = torch.tensor(momenta[name], device=device)
        update = orthogonalised(momentum, DTYPES[train.dtype]).float() * muon_scale(momentum.shape)
        directions[name][...] = update.cpu().numpy()
    return out
