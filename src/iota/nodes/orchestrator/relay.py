"""Boundary tensors on their way from one stage to the next: held until their sample closes, relayed with the producer's
signed control part, never decoded here (design section 6 "Transcript")."""

from __future__ import annotations

from dataclasses import dataclass

from iota.config.schema import RunConfig
from iota.core import tasks
from iota.core.machine.soft import Lease
from iota.core.values import Tensor, TensorHead
from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor

MAX_ORIGIN = 16 * 1024
"""A relayed control part rides inside the control part of the task (two of them when a pathway broke), which has 64
KiB: a producer must not be able to make a task that cannot be told to anybody."""


@dataclass(slots=True, frozen=True)
class Held:
    """A tensor, its checked head, and the signed control part of who made it."""

    tensor: Tensor
    head: TensorHead
    origin: bytes


class Relay:
    """Tensors by (what, sample, stage of the receiver). `largest`: bytes of the larger one of the two directions'
    boundary tensors, `uncompressed`: of one as float32 at d_model."""

    def __init__(self, config: RunConfig, stages: int) -> None:
        model, train = config.model, config.train
        self.stages = stages
        self._forward, self._backward = (boundary_tensor(config, way) for way in (FORWARD, BACKWARD))
        self.largest = max(self._forward.nbytes, self._backward.nbytes)
        self.uncompressed = train.batch * model.sequence * model.width * 4
        self._held: dict[tuple[str, int, int], Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def problem(
        self,
        result: tasks.Passed,
        tensors: tuple[Tensor, ...],
        heads: tuple[TensorHead, ...],
        origin: bytes,
        lease: Lease | None,
        stage: int,
    ) -> tuple[str, str]:
        """Why the tensors of a pass cannot be right: (code, text), or ("", "")."""
        if lease is None or lease.task != result.task:
            return "", ""  # the machine answers lease_lost
        wanted = 1 if lease.kind == "f" or stage > 0 else 0
        if len(tensors) != wanted:
            return "bad_input", f"a {lease.kind} pass of stage {stage} carries {wanted} tensors, got {len(tensors)}"
        sent = heads[0].digest if heads else ""
        if result.out != sent:
            return "bad_input", "the result's digest of its output is not that of the tensor sent with it"
        if len(origin) > MAX_ORIGIN:
            return "bad_input", f"a result's control part has at most {MAX_ORIGIN} bytes, not {len(origin)}"
        wire = self._forward if lease.kind == "f" else self._backward
        for tensor in tensors:
            if (tensor.dtype, tensor.shape) != (wire.dtype, wire.shape):
                return (
                    "bad_input",
                    f"expected {wire.dtype} of shape {wire.shape}, got {tensor.dtype} of shape {tensor.shape}",
                )
        return "", ""

    def keep(self, sample: int, kind: str, stage: int, tensor: Tensor, head: TensorHead, origin: bytes) -> None:
        """Hold the output of an accepted pass for the stage that needs it next."""
        key = ("activation", sample, stage + 1) if kind == "f" else ("gradient", sample, stage - 1)
        self._held[key] = Held(tensor, head, origin)

    def find(self, what: str, sample: int, stage: int) -> Held:
        return self._held[(what, sample, stage)]

    def release(self, sample: int) -> None:
        """A sample closed: nothing of it is needed again."""
        for stage in range(self.stages):
            self._held.pop(("activation", sample, stage), None)
            self._held.pop(("gradient", sample, stage), None)

    def clear(self) -> None:
        self._held.clear()
