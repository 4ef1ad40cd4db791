"""Trains one stage: the numeric contract of design section 3, to the bit.

* Weights, moments and gradients are views into flat float32 buffers in the order of `iota.model.layout`.
* A pass goes into a scratch gradient. `accept` adds it to the accumulator, `drop` discards it: a refused result leaves
  no trace. At most one pass is pending.
* `step`: accumulator / passes, clipped by `torch.nn.utils.clip_grad_norm_` over the stage's tensors in the order of
  `parameters()`, then stepped by `iota.model.optim`, at lr = f(tokens + local_step * tokens_per_step), where
  local_step counts this load's steps from 1 and t is the loaded Adam step count plus local_step.
* A graph is kept only while no step came between a sample's forward and its backward; after a step the forward runs
  again from the stored input with the weights of the moment.
* bfloat16 is autocast; parameters, gradients and moments stay float32.

Not thread-safe: one operation at a time. Every operation checks its inputs before it changes anything and raises
IotaError("bad_input" | "not_finite") with what was expected and what came.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from iota.config.schema import RunConfig
from iota.core.values import Digest, Tensor, sha256
from iota.errors import IotaError
from iota.model.boundary import BACKWARD, FORWARD, Payload, boundary_tensor, reads_ids
from iota.model.layout import Layout
from iota.model.llama import LlamaStage
from iota.model.optim import FlatOptimizer, learning_rate
from iota.model.wires import noise_key, pack, pack_floats, unpack


@dataclass(frozen=True)
class StepInfo:
    """What an inner step did: rate, gradient norm before clipping, whether it was clipped, passes averaged."""

    lr: float
    norm: float
    clipped: bool
    passes: int


@dataclass(frozen=True)
class StageState:
    """A stage's state, float32 arrays of its parameter count. On the CPU they are live views, changed by the next
    `step` or `load`: copy what must last. `t` is Adam's step count."""

    weights: np.ndarray
    m: np.ndarray
    v: np.ndarray
    t: int


@dataclass
class _Held:
    """A sample between its forward and its backward: the input, and the graph while no step came between."""

    x: torch.Tensor
    ids: torch.Tensor | None
    output: torch.Tensor | None


class StageTrainer:
    """Blocks `cut` of stage `stage` with optimizer, on `device` ("cpu", "cuda", "mps"), computing in `dtype`
    ("float32" | "bfloat16"). Holds undefined weights until `load`."""

    def __init__(self, config: RunConfig, stage: int, cut: tuple[int, int], device: str, dtype: str) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise IotaError("bad_config", f"unknown compute dtype {dtype!r}", "Use float32 or bfloat16.")
        self.config, self.stage, self.cut, self.dtype = config, stage, cut, dtype
        self.first, self.last = stage == 0, stage == config.stages.count - 1
        self.reads_ids = reads_ids(config, stage)
        self._forward_wire, self._backward_wire = (boundary_tensor(config, way) for way in (FORWARD, BACKWARD))
        self.device = torch.device(device)
        self.module = LlamaStage(config, stage, cut).to(self.device)
        self.layout = Layout.of(self.module)
        self.loaded = False
        self.steps = 0
        self.tokens = self.tokens_per_step = 0
        self.passes = 0
        self._pending: int | None = None
        self._held: dict[int, _Held] = {}
        self._build_buffers()

    def _build_buffers(self) -> None:
        """Lay parameters, two gradient buffers (scratch and accumulator, swapped on a step's first pass) and moments
        out flat."""

        def flat() -> torch.Tensor:
            return torch.zeros(self.layout.size, dtype=torch.float32, device=self.device)

        self._weights, self._m, self._v, self._scratch, self._sum = (flat() for _ in range(5))
        names = [name for name, _ in self.module.named_parameters()]
        self._parameters = list(self.module.parameters())
        for name, view in self.layout.views(self._weights).items():
            self.module.get_parameter(name).data = view
        scratch, total = self.layout.views(self._scratch), self.layout.views(self._sum)
        self._scratch_views = [scratch[name] for name in names]
        self._sum_views = [total[name] for name in names]
        self._optimizer = FlatOptimizer(self.config.train, self.layout, self._weights, self._m, self._v)

    # ------------------------------------------------------------------------------------------------------ state

    def load(
        self,
        weights: np.ndarray,
        m: np.ndarray | None,
        v: np.ndarray | None,
        t: int,
        tokens: int,
        tokens_per_step: int,
    ) -> None:
        """Take a state (arrays are copied; None moments are zeros) and forget everything else: held samples, pending
        and accepted passes. `tokens` and `tokens_per_step` fix the learning rate until the next load."""
        self._check_state(weights, m, v)
        if min(t, tokens, tokens_per_step) < 0:
            raise IotaError("bad_input", f"negative counts: t {t}, tokens {tokens}, tokens_per_step {tokens_per_step}")
        for buffer, values in ((self._weights, weights), (self._m, m), (self._v, v)):
            if values is None:
                buffer.zero_()
            elif self.device.type == "cpu":
                np.copyto(buffer.numpy(), values)
            else:
                buffer.copy_(torch.tensor(values))
        self._optimizer.t = t
        self.tokens, self.tokens_per_step = tokens, tokens_per_step
        self.steps = self.passes = 0
        self._pending = None
        self._held.clear()
        self.loaded = True

    def _check_state(self, weights: np.ndarray, m: np.ndarray | None, v: np.ndarray | None) -> None:
        """A merged state must be whole and finite; a negative second moment would poison every later step."""
        for name, values in (("weights", weights), ("m", m), ("v", v)):
            if values is None:
                continue
            if values.dtype != np.float32 or values.shape != (self.layout.size,):
                raise IotaError(
                    "bad_input",
                    f"{name} of stage {self.stage}: expected float32 ({self.layout.size},), "
                    f"got {values.dtype} {values.shape}",
                    "Load a checkpoint of this run and stage.",
                )
            if not np.isfinite(values).all() or (name == "v" and bool((values < 0).any())):
                raise IotaError("not_finite", f"{name} of stage {self.stage} has impossible values", "Do not load it.")

    def state(self) -> StageState:
        """Weights, moments and t as they are now; see `StageState` for how long the arrays hold."""
        weights, m, v = (buffer.cpu().numpy() for buffer in (self._weights, self._m, self._v))
        return StageState(weights, m, v, self._optimizer.t)

    def weights_digest(self) -> Digest:
        """SHA-256 of the flat weights' float32 bytes."""
        return sha256(self._weights.cpu().numpy().data.cast("B"))

    def held(self) -> tuple[int, ...]:
        """Samples whose input is kept for their backward."""
        return tuple(self._held)

    # ---------------------------------------------------------------------------------------------------- compute

    def forward(self, sample: int, x: Tensor | None, ids: np.ndarray | None = None) -> Tensor:
        """Run the stage on a sample and keep what its backward needs. `x` is the boundary tensor before (None at the
        first stage), `ids` [batch, T] the sample's token ids where the stage reads them (`reads_ids`). Returns the
        boundary tensor after. Again for a held sample: replaces it."""
        assert not self.last, "the last stage computes its loss at once: forward_loss"
        held = self._hold(x, ids)
        output = self._run(held)
        packed = pack(output, self._forward_wire)
        held.output = output
        self._held[sample] = held
        return packed

    def forward_loss(
        self, sample: int, x: Tensor | None, ids: np.ndarray | None, labels: np.ndarray
    ) -> tuple[Tensor | None, float]:
        """The last stage's pass: forward, mean cross-entropy in nats per token, backward into the scratch gradient.
        Returns the gradient to the stage before (None in a one-stage run) and the loss. Follow with `accept` or
        `drop`."""
        assert self.last, "only the last stage has a loss"
        held = self._hold(x, ids)
        target = self._token_array(labels, "labels", exact=True)
        loss = self._loss(self._run(held), target)
        value = loss.item()
        if not math.isfinite(value):
            raise IotaError("not_finite", f"the loss of sample {sample} is {value}", "Lower the learning rate.")
        self._begin_pass()
        torch.autograd.backward((loss,))
        gradient = self._gradient_out(sample, held.x)
        self._pending = sample
        return gradient, value

    def backward(
        self, sample: int, grad: Tensor, x: Tensor | None = None, ids: np.ndarray | None = None
    ) -> tuple[Tensor | None, bool]:
        """Backward of a sample into the scratch gradient. `grad` is the gradient from the stage after. With `x` (at the
        first stage `ids`) the forward runs again from that input, whatever is held: this miner did not do it. A stage
        that reads ids then needs them too.

        Returns the gradient to the stage before (None at the first stage) and whether the forward was recomputed.
        Raises IotaError("bad_input") when the sample is neither held nor given. Follow with `accept` or `drop`.
        """
        assert not self.last, "the last stage's backward is part of forward_loss"
        given = x is not None or (self.first and ids is not None)
        held = self._hold(x, ids) if given else self._held.get(sample)
        if held is None:
            raise IotaError("bad_input", f"sample {sample} is not held here", "Send its input with the gradient.")
        gradient = self._receive(grad, self._backward_wire, f"gradient of sample {sample}")
        recomputed = held.output is None
        output = self._run(held) if held.output is None else held.output
        held.output = None  # a graph serves one backward
        self._begin_pass()
        torch.autograd.backward((output,), (gradient,))
        back = self._gradient_out(sample, held.x)
        self._pending = sample
        return back, recomputed

    def accept(self) -> None:
        """The pending pass counts: its scratch gradient enters the accumulator and its sample is forgotten."""
        assert self._pending is not None, "no pass is pending"
        if self.passes == 0:  # 0 + g = g: the buffers swap roles instead
            self._scratch, self._sum = self._sum, self._scratch
            self._scratch_views, self._sum_views = self._sum_views, self._scratch_views
        else:
            self._sum.add_(self._scratch)
        self.passes += 1
        self._held.pop(self._pending, None)
        self._pending = None

    def drop(self) -> None:
        """The pending pass does not count: its gradient is discarded. The sample's input stays held until `forget`, so
        that its backward may be asked for again."""
        assert self._pending is not None, "no pass is pending"
        self._pending = None

    def forget(self, sample: int) -> None:
        """Free a sample's input and graph; nothing happens when it is not held."""
        self._held.pop(sample, None)

    def step(self) -> StepInfo:
        """One inner step over the passes accepted since the last. Raises IotaError("bad_input") without any, and
        IotaError("not_finite") when the gradient is not finite: the weights stay and those passes are discarded."""
        if self.passes == 0:
            raise IotaError("bad_input", "told to step without an accepted pass", "Step after an accepted backward.")
        passes, self.passes = self.passes, 0
        if passes > 1:
            self._sum.div_(passes)
        self._set_gradients(self._sum_views)
        clip = self.config.train.clip if self.config.train.clip > 0 else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, clip).item()
        if not math.isfinite(norm):
            raise IotaError(
                "not_finite", f"the gradient norm over {passes} passes is {norm}", "Lower the learning rate."
            )
        lr = learning_rate(self.config.train, self.tokens + (self.steps + 1) * self.tokens_per_step)
        self._optimizer.step(self._sum, lr)
        self.steps += 1
        for held in self._held.values():
            held.output = None
        return StepInfo(lr, norm, norm > clip, passes)

    def evaluate(self, x: Tensor | None, ids: np.ndarray | None = None) -> Tensor:
        """Forward only, without trace: the boundary tensor after, or float32 logits [batch, T, V] at the last stage.
        Any batch and any sequence up to the model's is taken."""
        with torch.no_grad():
            output = self._run(self._hold(x, ids, exact=False))
        return pack_floats(output, "float32") if self.last else pack(output, self._forward_wire)

    def evaluate_loss(self, x: Tensor | None, ids: np.ndarray | None, labels: np.ndarray) -> float:
        """The last stage's mean cross-entropy in nats per token, forward only, without trace."""
        assert self.last, "only the last stage has a loss"
        held = self._hold(x, ids, exact=False)
        target = self._token_array(labels, "labels", exact=False)
        with torch.no_grad():
            return self._loss(self._run(held), target).item()

    # ----------------------------------------------------------------------------------------------------- inside

    def _autocast(self) -> AbstractContextManager[None]:
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _run(self, held: _Held) -> torch.Tensor:
        with self._autocast():
            output: torch.Tensor = self.module(held.x, held.ids)
        return output

    def _loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), target.view(-1))

    def _hold(self, x: Tensor | None, ids: np.ndarray | None, exact: bool = True) -> _Held:
        """Check a pass's input and bring it onto the device, as a leaf that collects its gradient."""
        assert self.loaded, "load a state first"
        if self.reads_ids and ids is None:
            raise IotaError("bad_input", f"stage {self.stage} reads the sample's token ids", "Send them.")
        tokens = None if ids is None else self._token_array(ids, "ids", exact)
        if self.first:
            if x is not None:
                raise IotaError("bad_input", "the first stage takes token ids and no tensor", "Send the ids alone.")
            assert tokens is not None
            return _Held(tokens, None, None)
        if x is None:
            raise IotaError(
                "bad_input", f"stage {self.stage} needs the boundary tensor of the stage before", "Send it."
            )
        wire = self._forward_wire
        if not exact and len(x.shape) == 3 and x.shape[0] > 0 and 0 < x.shape[1] <= self.config.model.sequence:
            wire = wire.at(x.shape[0], x.shape[1])
        values = self._receive(x, wire, f"input of stage {self.stage}").requires_grad_(True)
        if tokens is not None and tokens.shape != values.shape[:2]:
            raise IotaError("bad_input", f"ids {tuple(tokens.shape)} are not those of a tensor {tuple(x.shape)}")
        return _Held(values, tokens, None)

    def _receive(self, tensor: Tensor, wire: Payload, name: str) -> torch.Tensor:
        return unpack(tensor, wire, self.device, name)

    def _token_array(self, tokens: np.ndarray, name: str, exact: bool) -> torch.Tensor:
        """Token ids or labels, int64 [batch, T], each within the vocabulary."""
        model = self.config.model
        shape = (self.config.train.batch, model.sequence)
        fits = tokens.shape == shape if exact else tokens.ndim == 2 and 0 < tokens.shape[1] <= model.sequence
        if not fits or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise IotaError(
                "bad_input", f"{name}: expected integers {shape}, got {tokens.dtype} {tokens.shape}", "Read them again."
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= model.vocabulary:
            raise IotaError(
                "bad_input",
                f"{name}: expected tokens below {model.vocabulary}, got {int(tokens.min())} to {int(tokens.max())}",
                "Use the run's tokenizer and vocabulary.",
            )
        return torch.tensor(tokens.astype(np.int64, copy=False), device=self.device)

    def _set_gradients(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view

    def _begin_pass(self) -> None:
        """Autograd adds into the zeroed scratch gradient."""
        assert self._pending is None, "the last pass was neither accepted nor dropped"
        self._scratch.zero_()
        self._set_gradients(self._scratch_views)

    def _gradient_out(self, sample: int, x: torch.Tensor) -> Tensor | None:
        """The gradient towards the stage before, taken off the input."""
        if self.first:
            return None
        assert x.grad is not None
        gradient, x.grad = x.grad, None
        return pack(gradient, self._backward_wire, noise_key(self.config.seed, sample, self.stage - 1, BACKWARD))
