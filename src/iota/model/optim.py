"""The inner optimizer and its learning rate (design section 3, "Numeric contract").

Fused AdamW steps two flat regions of a stage: the decayed tensors first, then the rest. Moments lie in flat buffers of
the caller, so that they can be merged, hashed and sent as slices.
"""

from __future__ import annotations

import math

import torch

from iota.config.schema import TrainConfig


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


class FlatAdamW:
    """torch.optim.AdamW(fused=True) over flat float32 buffers `weights`, `m`, `v`: region [0, decayed) with weight
    decay, [decayed, end) without. The buffers stay the caller's and are changed in place."""

    def __init__(
        self, train: TrainConfig, weights: torch.Tensor, m: torch.Tensor, v: torch.Tensor, decayed: int
    ) -> None:
        self._slices = [(0, decayed), (decayed, weights.numel())]
        self._regions = [weights[start:stop] for start, stop in self._slices]
        groups = [
            {"params": [region], "weight_decay": decay}
            for region, decay in zip(self._regions, (train.weight_decay, 0.0), strict=True)
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=True
        )
        for (start, stop), region in zip(self._slices, self._regions, strict=True):
            self._optimizer.state[region] = {
                "step": torch.zeros((), dtype=torch.float32, device=weights.device),
                "exp_avg": m[start:stop],
                "exp_avg_sq": v[start:stop],
            }

    @property
    def t(self) -> int:
        """Adam's step count, as the next step will see it before advancing."""
        return int(self._optimizer.state[self._regions[0]]["step"].item())

    @t.setter
    def t(self, value: int) -> None:
        for region in self._regions:
            self._optimizer.state[region]["step"].fill_(value)

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """One AdamW step on the flat gradient (float32, same length as the weights); advances `t`."""
        for group, (start, stop), region in zip(self._optimizer.param_groups, self._slices, self._regions, strict=True):
            group["lr"] = lr
            region.grad = gradient[start:stop]
        self._optimizer.step()
