"""Which device computes, and whether a stage fits into what its owner allows and what the machine has.

The needs are those that `iota plan` prints (`iota.model.needs`); they are checked before anything is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import msgspec
import torch

from iota.config.schema import RunConfig
from iota.errors import IotaError
from iota.model.needs import MemoryNeed, disk_need, memory_need

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""A container's own limit, as Linux tells it."""


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


class Room(msgspec.Struct, frozen=True):
    """What this machine has, in bytes; 0: not known, so not checked. `device`: memory of a device that has its own."""

    memory: int = 0
    device: int = 0
    disk: int = 0


def room_here(device: str, folder: Path) -> Room:
    """Main memory (or the container's share of it), the device's own memory, and free disk where `folder` lies or would
    be made. `device` as `pick_device` returned it; unified memory (mps) is main memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(Path(path).read_text(encoding="ascii")))
    own = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return Room(memory=memory, device=own, disk=shutil.disk_usage(place).free)


def check_memory(
    config: RunConfig, stage: int, cut: tuple[int, int], max_memory: int, *, device: str = "cpu", dtype: str = "",
    room: Room | None = None,
) -> MemoryNeed:  # fmt: skip
    """What the stage needs. Raises IotaError `no_memory` with the numbers when that is more than the owner's
    `max_memory` bytes (0: no limit), or than the machine has."""
    need, here = memory_need(config, stage, cut, dtype=dtype, separate=device == "cuda"), room or Room()
    for wanted, allowed, who in (
        (need.total, max_memory, "--max-memory allows"),
        (need.host, here.memory, "this machine's main memory is"),
        (need.device, here.device, f"{device} has"),
    ):
        if allowed and wanted > allowed:
            passes = need.activations + need.casts
            parts = (
                f"{need.resident:,} for weights, gradients and moments, {passes:,} for passes under way, "
                f"{need.base:,} for the epoch's base, {need.merging:,} more at a merge"
            )
            raise IotaError(
                "no_memory",
                f"stage {stage} of this run needs about {wanted:,} bytes ({parts}), {who} {allowed:,}",
                "Allow more, use a larger machine, or ask the operator for a run with more stages (`iota plan`).",
            )
    return need


def check_disk(
    config: RunConfig, stage: int, cut: tuple[int, int], max_disk: int, *, room: Room | None = None
) -> int:  # fmt: skip
    """Bytes of evidence that the stage keeps for audits in an epoch of B_min passes. Raises IotaError `no_disk` when
    the owner's `max_disk` (0: no limit) is below it, or the free disk below what even the shortest epoch takes."""
    need, here = disk_need(config, stage, cut), room or Room()
    for wanted, allowed, who in (
        (need.total, max_disk, "--max-disk allows"),
        (need.least, here.disk, "free on this disk are"),
    ):
        if allowed and wanted > allowed:
            raise IotaError(
                "no_disk",
                f"stage {stage} of this run keeps about {wanted:,} bytes of evidence for audits, {who} {allowed:,}",
                "Allow more with --max-disk, or use a folder on a larger disk.",
            )
    return need.total
