"""Carries out the validator's commands with torch: replays segments, compares outputs, measures held-out losses.

Synchronous and without I/O; the child process and the injected compute both drive this class. Only one stage is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from iota.config.schema import RunConfig
from iota.core.tasks import Comparison
from iota.core.values import Tensor, sha256
from iota.errors import IotaError
from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor, reads_tokens
from iota.model.layout import Layout
from iota.model.llama import LlamaStage
from iota.model.optim import direction
from iota.model.trainer import StageTrainer
from iota.model.wires import pack, unpack
from iota.nodes.validator.books import state_digest
from iota.nodes.validator.compare import compare, compare_loss
from iota.nodes.validator.jobs import (
    NONE,
    Answer,
    Buffer,
    Command,
    Compare,
    Compared,
    Measure,
    MeasuredStage,
    Operation,
    Replay,
    Replayed,
    Shape,
)

STATES = 6
"""Buffers of a `Replay` before its tensors: three at its start, three at its end."""


class Engine:
    """`cuts`: blocks of each stage; `device` and `dtype` as `StageTrainer` takes them."""

    def __init__(self, config: RunConfig, cuts: Sequence[tuple[int, int]], device: str, dtype: str) -> None:
        self.config, self.cuts, self.device, self.dtype = config, tuple(cuts), device, dtype
        self._forward, self._backward = (boundary_tensor(config, way) for way in (FORWARD, BACKWARD))
        self._trainer: StageTrainer | None = None
        self._kept: dict[int, tuple[Operation, Tensor | None]] = {}
        self._boundary: list[Tensor] = []

    def handle(self, command: Command, buffers: Sequence[Buffer]) -> Answer:
        """Carry out one command. Errors that the miner caused are part of the answer; others are raised."""
        if isinstance(command, Compare):
            return self._compare(command, buffers)
        self._kept.clear()
        if isinstance(command, Replay):
            self._boundary.clear()
            return self._replay(command, buffers)
        assert isinstance(command, Measure), command
        self._trainer = None
        return self._measure(command, buffers)

    # ----------------------------------------------------------------------------------------------------- replays

    def _stage(self, stage: int) -> StageTrainer:
        if self._trainer is None or self._trainer.stage != stage:
            self._trainer = None  # freed before the next is built
            self._trainer = StageTrainer(self.config, stage, self.cuts[stage], self.device, self.dtype)
        return self._trainer

    def _replay(self, command: Replay, buffers: Sequence[Buffer]) -> Replayed:
        start, stop = (
            [np.frombuffer(b, dtype="<f4") for b in buffers[:3]],
            [np.frombuffer(b, dtype="<f4") for b in buffers[3:STATES]],
        )
        trainer = self._stage(command.stage)
        losses: list[Comparison] = []
        held: dict[int, tuple[int, int]] = {}
        number, what = 0, "the start state"
        try:
            trainer.load(start[0], start[1], start[2], command.t, command.tokens, command.tokens_per_step)
            for number, operation in enumerate(command.operations):
                what = f"{operation.op} of sample {operation.sample}"
                out, loss = _perform(trainer, operation, held, command.tensors, buffers[STATES:])
                if loss is not None and loss != operation.loss:
                    theirs = float("nan") if operation.loss is None else operation.loss
                    losses.append(compare_loss(operation.sample, theirs, loss))
                if operation.op != "step" and ("" if out is None else sha256(out.data)) != operation.out:
                    self._kept[number] = (operation, out)
        except IotaError as error:
            if error.code not in ("bad_input", "not_finite"):
                raise
            problem = f"{what} (operation {number}): {error.cause}"
            return Replayed(differ=(), equal=False, t=0, comparisons=(), problem=problem)
        finally:
            for sample in trainer.held():
                trainer.forget(sample)
        state = trainer.state()
        ours = (state.weights, state.m, state.v)
        equal = state_digest(state.t, *ours) == command.stop_digest
        rows = losses
        if not equal:
            rows = [
                *losses,
                compare("change", NONE, stop[0], ours[0], start[0]),
                compare("m", NONE, stop[1], ours[1]),
                compare("v", NONE, stop[2], ours[2]),
                compare("direction", NONE, self._direction(trainer, *stop[1:]), self._direction(trainer, *ours[1:])),
            ]
        return Replayed(differ=tuple(self._kept), equal=equal, t=state.t, comparisons=tuple(rows), problem="")

    def _direction(self, trainer: StageTrainer, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """What the next step would do: a few forged tiny v poison every later step and hardly show in v's own norm;
        here they stand out."""
        return direction(self.config.train, trainer.layout, m, v, trainer.device)

    def _compare(self, command: Compare, buffers: Sequence[Buffer]) -> Compared:
        rows = []
        for place, shape, data in zip(command.places, command.tensors, buffers, strict=True):
            operation, ours = self._kept[place]
            theirs = Tensor(shape.dtype, shape.shape, data)
            rows.append(self._compared(operation, theirs, ours))
        return Compared(comparisons=tuple(rows))

    def _compared(self, operation: Operation, theirs: Tensor, ours: Tensor | None) -> Comparison:
        """By what a receiver computes with: packed formats are compared by their values, not by their bits."""
        assert self._trainer is not None
        activation = operation.op == "forward" and not self._trainer.last
        wire = self._forward if activation else self._backward
        if ours is not None:
            try:
                values = [unpack(t, wire, torch.device("cpu"), "output").numpy().reshape(-1) for t in (theirs, ours)]
                return compare(operation.op, operation.sample, *values)
            except IotaError:  # no receiver could have used it
                pass
        return Comparison(operation.op, operation.sample, 0.0, 0.0, False)

    # ---------------------------------------------------------------------------------------------------- held out

    def _measure(self, command: Measure, buffers: Sequence[Buffer]) -> MeasuredStage:
        stage, first, last = command.stage, command.stage == 0, command.stage == len(self.cuts) - 1
        module = self._forward_only(stage, buffers[0])
        sequence, batch = self.config.model.sequence, self.config.train.batch
        tokens = None
        if reads_tokens(self.config, stage):
            tokens = torch.tensor(np.frombuffer(buffers[1], dtype="<i8").reshape(command.windows, sequence + 1))
        before, self._boundary = self._boundary, []
        total = 0.0
        for number, at in enumerate(range(0, command.windows, batch)):
            window = None if tokens is None else tokens[at : at + batch].to(self.device)
            with torch.no_grad():
                ids = None if window is None else window[:, :-1].contiguous()
                hidden = module(ids if first else self._received(before, number), ids)
                if last:
                    assert window is not None
                    losses = F.cross_entropy(hidden.float().flatten(0, 1), window[:, 1:].reshape(-1), reduction="none")
                    total += losses.double().sum().item()
                else:
                    self._boundary.append(pack(hidden, self._forward))
        return MeasuredStage(loss=total, tokens=command.windows * sequence if last else 0)

    def _received(self, before: list[Tensor], number: int) -> torch.Tensor:
        tensor = before[number]
        before[number] = Tensor(tensor.dtype, (0,), b"")  # freed as it is consumed
        wire = self._forward.at(tensor.shape[0], tensor.shape[1])
        return unpack(tensor, wire, torch.device(self.device), "boundary")

    def _forward_only(self, stage: int, weights: Buffer) -> LlamaStage:
        """The stage without gradients, moments or optimizer, in float32: measured losses do not depend on who
        measures."""
        module = LlamaStage(self.config, stage, self.cuts[stage])
        module.requires_grad_(False)
        layout = Layout.of(module)
        flat = torch.tensor(np.frombuffer(weights, dtype="<f4"))
        for name, view in layout.views(flat).items():
            module.get_parameter(name).data = view
        return module.to(self.device)


def _perform(
    trainer: StageTrainer,
    operation: Operation,
    held: dict[int, tuple[int, int]],
    shapes: Sequence[Shape],
    buffers: Sequence[Buffer],
) -> tuple[Tensor | None, float | None]:
    """One operation of the transcript: its output, and at the last stage its loss. `held`: the inputs of samples whose
    forward was replayed; a backward on another input, or without a forward, runs the forward again."""

    def tensor(index: int) -> Tensor | None:
        return None if index == NONE else Tensor(shapes[index].dtype, shapes[index].shape, buffers[index])

    def tokens(index: int) -> np.ndarray:
        return np.frombuffer(buffers[index], dtype="<i8").reshape(shapes[index].shape)

    loss, out = None, None
    if operation.op == "step":
        _step(trainer)
        return None, None
    ids = None if operation.ids == NONE else tokens(operation.ids)
    x = tensor(operation.x)
    if operation.op == "forward" and not trainer.last:
        held[operation.sample] = (operation.x, operation.ids)
        return trainer.forward(operation.sample, x, ids), None
    if operation.op == "forward":
        assert ids is not None, "the last stage's labels are the validator's own"
        labels = tokens(operation.ids + 1)
        out, loss = trainer.forward_loss(operation.sample, x, ids if trainer.reads_ids else None, labels)
    else:
        gradient = tensor(operation.grad)
        assert operation.op == "backward" and gradient is not None, operation
        same = operation.sample in trainer.held() and held.get(operation.sample) == (operation.x, operation.ids)
        out, _ = trainer.backward(operation.sample, gradient, *((None, None) if same else (x, ids)))
    if operation.accepted:
        trainer.accept()
    else:
        trainer.drop()
    return out, loss


def _step(trainer: StageTrainer) -> None:
    """An inner step as a miner does it: one whose gradient is not finite (or that averages nothing) leaves the weights
    as they are, but counts for the learning rate."""
    steps = trainer.steps
    try:
        trainer.step()
    except IotaError as error:
        if error.code not in ("not_finite", "bad_input"):
            raise
    trainer.steps = steps + 1
