"""Trains one job of `iota lab fig5`: steps, merges, held-out losses, checkpoints. One process, deterministic.

A job resumed from its checkpoint goes on as if it had not been interrupted, to the bit on one kind of machine: data
order, initial values and rounding follow from the seed, and everything else is in the checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from iota.core.reduce import MOMENTS, Outer, coefficients, reduce_shard
from iota.core.values import sha256
from iota.errors import IotaError
from iota.lab.fig5_data import Tokens
from iota.lab.fig5_spec import Spec
from iota.lab.fig5_stages import Line

WEIGHT_CAP = 2.0
FORMAT = "iota fig5 1"


class Progress(msgspec.Struct):
    """What a checkpoint holds beside the tensors. `rows`: lines of the job's results that belong to it; `train_loss`
    and `train_samples` since the last held-out row; `seconds` of computing."""

    step: int = 0
    rows: int = 0
    train_loss: float = 0.0
    train_samples: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    crossings: int = 0
    seconds: float = 0.0
    due: bool = False


class Trainer:
    """One job from checkpoint 0. Raises ConfigError when it cannot be built; `advance` raises IotaError `not_finite`
    when the job diverges."""

    def __init__(self, spec: Spec, tokens: Tokens, device: str) -> None:
        self.spec, self.tokens = spec, tokens
        self.progress = Progress()
        self.lines = [Line(spec, device) for _ in range(spec.replicas)]
        self._outer = Outer("nesterov", spec.outer_lr, spec.outer_momentum)
        self._base = [stage.initial(spec.seed) for stage in self.lines[0].stages]
        self._momentum = [np.zeros_like(base) for base in self._base]
        for line in self.lines:
            self._load(line, [(base, None, None, 0) for base in self._base])

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.spec.steps

    @property
    def parameters(self) -> int:
        """Of one whole model, codecs included."""
        return self.lines[0].parameters

    def advance(self) -> bool:
        """One inner step of every replica, and the merge when it is due. Returns whether held-out loss is to be
        measured now (with local steps only on merged weights)."""
        spec, progress = self.spec, self.progress
        for replica, line in enumerate(self.lines):
            number = progress.step * spec.replicas + replica
            loss = line.pass_through(number, *self.tokens.sample(spec.seed, spec.batch, number))
            progress.train_loss += loss
            progress.train_samples += 1
            line.step()
        progress.step += 1
        progress.due = progress.due or progress.step % spec.every == 0 or self.finished
        merged = spec.inner_steps == 0
        if not merged and (progress.step % spec.inner_steps == 0 or self.finished):
            self._merge()
            merged = True
        return merged and progress.due

    def _load(self, line: Line, states: list[tuple[Any, Any, Any, int]]) -> None:
        done = self.progress.step * self.spec.tokens_per_step
        for stage, (weights, m, v, t) in zip(line.stages, states, strict=True):
            stage.load(weights, m, v, t, done, self.spec.tokens_per_step)

    def _merge(self) -> None:
        """Every stage's replicas become one by the product's reduction and outer step, moments averaged."""
        merged: list[tuple[Any, Any, Any, int]] = []
        weight = coefficients({f"{number}": self.spec.inner_steps for number in range(len(self.lines))}, WEIGHT_CAP)
        for number, base in enumerate(self._base):
            states = [line.stages[number].state() for line in self.lines]
            given = {
                f"{index}": {"delta": np.subtract(base, state.weights), "m": state.m, "v": state.v}
                for index, state in enumerate(states)
            }
            old = {"weights": base, "momentum": self._momentum[number], "m": states[0].m, "v": states[0].v}
            result = reduce_shard(given, weight, old, self._outer)
            if result.kept or result.dropped:
                raise IotaError("not_finite", f"stage {number} cannot be merged", "Lower the learning rate.")
            self._base[number], self._momentum[number] = result.parts["weights"], result.parts["momentum"]
            m, v = (result.parts[name] for name in MOMENTS)
            merged.append((result.parts["weights"], m, v, states[0].t))
        for line in self.lines:
            self._load(line, merged)

    def measure(self) -> dict[str, Any]:
        """The held-out loss of the weights as they are, by block, and the mean training loss since the last time."""
        self.progress.due = False
        blocks = [self.lines[0].heldout(ids, labels) for ids, labels in self.tokens.blocks()]
        row = {
            "step": self.progress.step,
            "tokens": self.progress.step * self.spec.tokens_per_step,
            "heldout_loss": float(np.mean(blocks)),
            "train_loss": self.progress.train_loss / max(1, self.progress.train_samples),
            "blocks": [round(loss, 6) for loss in blocks],
        }
        self.progress.train_loss, self.progress.train_samples = 0.0, 0
        return row

    def crossed(self) -> dict[str, float]:
        """Payload bytes a token of one boundary that really crossed so far, by direction."""
        self._count()
        count = max(1, self.progress.crossings)
        return {
            "bytes_forward": self.progress.forward_bytes / count,
            "bytes_backward": self.progress.backward_bytes / count,
        }

    def _count(self) -> None:
        for line in self.lines:
            self.progress.forward_bytes += line.forward_bytes
            self.progress.backward_bytes += line.backward_bytes
            self.progress.crossings += line.crossings
            line.forward_bytes = line.backward_bytes = line.crossings = 0

    def digest(self) -> str:
        """Names all weights of the first replica."""
        return sha256("".join(stage.weights_digest() for stage in self.lines[0].stages).encode())

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save(self, path: Path, data: str) -> None:
        """Write everything: the old file or the whole new one."""
        self._count()
        arrays, counts = {}, []
        for number, line in enumerate(self.lines):
            for index, stage in enumerate(line.stages):
                state = stage.state()
                counts.append(state.t)
                for name in ("weights", "m", "v"):
                    arrays[f"{number}.{index}.{name}"] = getattr(state, name)
        if self.spec.inner_steps:
            for index, (base, momentum) in enumerate(zip(self._base, self._momentum, strict=True)):
                arrays[f"base.{index}"], arrays[f"momentum.{index}"] = base, momentum
        facts = {
            "format": FORMAT,
            "spec": self.spec.digest(),
            "data": data,
            "t": msgspec.json.encode(counts).decode(),
            "progress": msgspec.json.encode(self.progress).decode(),
        }
        part = path.with_name(path.name + "~tmp")
        save_file(arrays, part, facts)
        os.replace(part, path)

    def restore(self, path: Path, data: str) -> None:
        """Go on from a checkpoint of the same job. Raises IotaError `corrupt` when it is another one's or damaged."""
        try:
            with safe_open(path, framework="np") as file:
                facts = file.metadata()
                if (facts["format"], facts["spec"], facts["data"]) != (FORMAT, self.spec.digest(), data):
                    raise IotaError("corrupt", f"{path} is a checkpoint of another job", "Remove it.")
                counts = msgspec.json.decode(facts["t"], type=list[int])
                self.progress = msgspec.json.decode(facts["progress"], type=Progress)
                if self.spec.inner_steps:
                    self._base = [file.get_tensor(f"base.{index}") for index in range(len(self._base))]
                    self._momentum = [file.get_tensor(f"momentum.{index}") for index in range(len(self._base))]
                for number, line in enumerate(self.lines):
                    parts = [
                        [file.get_tensor(f"{number}.{index}.{name}") for name in ("weights", "m", "v")]
                        for index in range(len(line.stages))
                    ]
                    own = counts[number * len(parts) : (number + 1) * len(parts)]
                    self._load(line, [(w, m, v, t) for (w, m, v), t in zip(parts, own, strict=True)])
        except (OSError, KeyError, ValueError, SafetensorError, msgspec.DecodeError) as error:
            raise IotaError("corrupt", f"the checkpoint {path} cannot be read: {error}", "Remove it.") from None
