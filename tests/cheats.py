"""Cheats, each a small class with its aim stated. They replace a miner's `StageWorker`; the product knows none."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from iota.core.values import Tensor
from iota.nodes.miner.stage import StageWorker


def as_float(tensor: Tensor) -> np.ndarray:
    """Values of a float32 or bfloat16 boundary tensor."""
    if tensor.dtype == "float32":
        return np.frombuffer(tensor.data, "<f4").copy()
    return (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)


def like(tensor: Tensor, values: np.ndarray) -> Tensor:
    """The values in the tensor's own dtype and shape (bfloat16 by truncation)."""
    values = np.ascontiguousarray(values, "<f4")
    if tensor.dtype == "float32":
        return Tensor(tensor.dtype, tensor.shape, values.tobytes())
    return Tensor(tensor.dtype, tensor.shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes())


class FreeRider(StageWorker):
    """Saves the work of training: answers every pass, never changes its weights."""

    def train_step(self) -> None:
        self.trainer.passes = 0
        self.trainer._sum.zero_()


class Noise(StageWorker):
    """Saves all work: sends random numbers of the right size."""

    def output_of(self, task, out):
        if out is None:
            return None
        values = np.random.default_rng(task.sample).normal(0, 0.1, int(np.prod(out.shape)))
        return like(out, values)


class Scaled(StageWorker):
    """Poisons quietly: the right direction (cosine 1) at 1.25 times the size."""

    def output_of(self, task, out):
        return None if out is None else like(out, as_float(out) * 1.25)


class Honest(StageWorker):
    """Does its work; the neighbour that a copier copies from."""

    last: ClassVar[dict[tuple[int, str], Tensor]] = {}

    def output_of(self, task, out):
        if out is not None:
            Honest.last[self.stage, type(task).__name__] = out
        return out


class Copier(StageWorker):
    """Saves the work: sends what a neighbour of its stage sent last, as its own."""

    def output_of(self, task, out):
        if out is None:
            return None
        return Honest.last.get((self.stage, type(task).__name__), out)


class ForgedMoment(StageWorker):
    """Poisons the merge: trains honestly but uploads a tiny second moment, so that the next steps explode."""

    def upload_arrays(self, state):
        arrays = super().upload_arrays(state)
        if "v" in arrays:
            arrays["v"] = arrays["v"] * np.float32(1e-6)
        return arrays


class StaleUpload(StageWorker):
    """Trains, but uploads the state it started from."""

    def upload_arrays(self, state):
        arrays = super().upload_arrays(state)
        name = next(iter(arrays))
        arrays[name] = self.base["weights"] if name == "weights" else np.zeros_like(arrays[name])
        return arrays
