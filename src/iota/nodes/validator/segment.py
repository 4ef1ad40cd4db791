"""From a transcript and the tensors shown to a `Replay` command: which operation runs on which buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from iota.core.tasks import Load
from iota.core.values import Digest, Tensor
from iota.nodes import evidence
from iota.nodes.validator.jobs import NONE, Buffer, Operation, Replay, Shape

Tokens = Mapping[int, tuple[np.ndarray, np.ndarray]]
"""Sample to its ids and labels, int64 [batch, T]."""


def samples_of(operations: list[evidence.Operation]) -> list[int]:
    """Samples that pass in these operations."""
    return sorted({op.entry.sample for op in operations if op.entry.op in evidence.PASSES})


@dataclass
class _Buffers:
    """Buffers with equal bytes stored once: a sample's input serves its forward and its backward."""

    shapes: list[Shape] = field(default_factory=list)
    data: list[Buffer] = field(default_factory=list)
    places: dict[object, int] = field(default_factory=dict)

    def tensor(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return NONE
        key = id(tensor.data)  # records are held by the caller, so a tensor keeps its identity
        if key not in self.places:
            self.places[key] = self._add(tensor.dtype, tensor.shape, tensor.data)
        return self.places[key]

    def tokens(self, sample: int, ids: np.ndarray, labels: np.ndarray) -> int:
        key = ("tokens", sample)
        if key not in self.places:
            rows = [np.ascontiguousarray(part, dtype="<i8") for part in (ids, labels)]
            self.places[key] = self._add("int64", rows[0].shape, rows[0].data.cast("B"))
            self._add("int64", rows[1].shape, rows[1].data.cast("B"))
        return self.places[key]

    def _add(self, dtype: str, shape: tuple[int, ...], data: Buffer) -> int:
        self.shapes.append(Shape(dtype, shape))
        self.data.append(data)
        return len(self.data) - 1


def build_replay(
    operations: list[evidence.Operation],
    tokens: Tokens,
    *,
    stage: int,
    load: Load,
    t: int,
    start_step: int,
    stop_digest: Digest,
) -> tuple[Replay, list[Buffer]]:
    """The command without its six state buffers, and the buffers of its tensors. `tokens`: of every sample that passes,
    or empty when the stage reads none. `t` is Adam's step count at the start.

    The learning rate goes by local step: the rate of the segment's first step is that of step `start_step` + 1 of the
    epoch, so the tokens of the steps before are added.
    """
    buffers = _Buffers()
    rows = []
    for op in operations:
        entry = op.entry
        x = grad = ids = NONE
        if entry.op in evidence.PASSES:
            x, grad = buffers.tensor(op.x), buffers.tensor(op.gradient)
            if tokens:
                ids = buffers.tokens(entry.sample, *tokens[entry.sample])
        rows.append(Operation(entry.op, entry.sample, not op.dropped, x, ids, grad, entry.out, entry.loss))
    command = Replay(
        stage=stage,
        t=t,
        tokens=load.tokens + start_step * load.tokens_per_step,
        tokens_per_step=load.tokens_per_step,
        operations=tuple(rows),
        tensors=tuple(buffers.shapes),
        stop_digest=stop_digest,
    )
    return command, buffers.data
