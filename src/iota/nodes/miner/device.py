"""Which device computes, and whether a stage fits into the memory that its owner allows."""

from __future__ import annotations

import msgspec
import torch

from iota.config.schema import RunConfig
from iota.errors import IotaError
from iota.model.layout import boundary_channels, ffn_width
from iota.model.partition import count_parameters

TRAINER_BUFFERS = 5
"""Weights, two gradient buffers, two moments: float32 each (`StageTrainer`)."""
HOST_COPIES = 12
"""At the peak of a merge between two members: base, outer momentum and base moments (4), the upload's delta (1), the
other member's upload (3), the results (4)."""


def pick_device(wanted: str) -> str:
    """ "auto": the first of cuda, mps, cpu that is there. Raises IotaError `no_device` when the wanted one is not."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, present in there.items() if present)
    if not there.get(wanted, False):
        raise IotaError(
            "no_device",
            f"device {wanted!r} is not available here",
            f"Use auto or one of: {', '.join(name for name, present in there.items() if present)}.",
        )
    return wanted


class Need(msgspec.Struct, frozen=True):
    """Bytes that a stage takes. `training`: weights, gradients, moments; `merging`: what is kept for the merge;
    `activations`: of `in_flight` passes."""

    training: int
    merging: int
    activations: int

    @property
    def total(self) -> int:
        return self.training + self.merging + self.activations


def memory_need(config: RunConfig, stage: int, cut: tuple[int, int]) -> Need:
    """An estimate, on the safe side of what a pass keeps for its backward (float32, no recomputation)."""
    model, parameters = config.model, count_parameters(config, stage, cut)
    tokens = config.train.batch * model.sequence
    scores = 2 * model.heads * model.sequence
    block = 12 * model.width + 4 * ffn_width(model) + scores
    floats = (cut[1] - cut[0]) * block + 2 * boundary_channels(config)
    if stage == config.stages.count - 1:
        floats += 3 * model.vocabulary
    in_flight = 1 if stage == config.stages.count - 1 else (config.train.max_in_flight or config.stages.count + 1)
    return Need(TRAINER_BUFFERS * 4 * parameters, HOST_COPIES * 4 * parameters, in_flight * tokens * floats * 4)


def check_memory(config: RunConfig, stage: int, cut: tuple[int, int], max_memory: int) -> Need:
    """Raises IotaError `no_memory` with the numbers when the stage needs more than `max_memory` bytes (0: no limit)."""
    need = memory_need(config, stage, cut)
    if max_memory and need.total > max_memory:
        parts = f"{need.training:,} for training, {need.merging:,} for merging, {need.activations:,} for activations"
        raise IotaError(
            "no_memory",
            f"stage {stage} of this run needs about {need.total:,} bytes ({parts}), --max-memory allows {max_memory:,}",
            "Allow more, or ask the operator for a run with more stages.",
        )
    return need


def check_disk(config: RunConfig, stage: int, cut: tuple[int, int], max_disk: int) -> int:
    """Bytes of evidence that one epoch at B_min takes, and that much again for drawn segments of earlier ones. Raises
    IotaError `no_disk` when `max_disk` (0: no limit) is below it."""
    model, audit = config.model, config.audit
    parameters = count_parameters(config, stage, cut)
    wire = 4 if config.stages.wire_dtype == "float32" else 2
    tensors = 4 * config.merge.min_batches * config.train.batch * model.sequence * boundary_channels(config) * wire
    need = 2 * (tensors + 12 * parameters * (audit.segments_per_epoch + 1))
    if max_disk and need > max_disk:
        raise IotaError(
            "no_disk",
            f"stage {stage} of this run keeps about {need:,} bytes of evidence for audits, --max-disk allows "
            f"{max_disk:,}",
            "Allow more with --max-disk.",
        )
    return need
