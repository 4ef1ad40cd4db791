"""The held-out loss of a checkpoint, stage after stage, with the memory of one stage (design section 3 "SYNC")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from iota.config.schema import Manifest
from iota.core.tasks import Heldout, Measured
from iota.core.values import CheckpointSheet
from iota.errors import IotaError
from iota.model.boundary import reads_tokens
from iota.nodes.effects import Clock
from iota.nodes.reducing import checkpoint_range
from iota.nodes.validator.jobs import Buffer, Measure, MeasuredStage, Replayer
from iota.store.remote import Objects
from iota.store.tokens import TokenReader


async def measure_heldout(
    task: Heldout,
    sheets: Sequence[CheckpointSheet],
    manifest: Manifest,
    tokens: TokenReader,
    objects: Objects,
    replayer: Replayer,
    clock: Clock,
) -> Measured:
    """Mean loss in nats per predicted token over all held-out windows. `sheets`: one a stage, in order; `tokens` reads
    the held-out shards. Raises IotaError when an object or the replayer fails, `bad_input` for sheets out of order."""
    started = clock.now()
    stages, sequence = len(manifest.cuts), manifest.config.model.sequence
    told = [(sheet.checkpoint.stage, sheet.checkpoint.epoch) for sheet in sheets]
    if told != [(stage, task.epoch) for stage in range(stages)]:
        raise IotaError("bad_input", f"expected checkpoint {task.epoch} of stages 0 to {stages - 1}, got {told}")
    row = await tokens.read(0, tokens.windows * sequence + 1)
    windows = np.lib.stride_tricks.sliding_window_view(row, sequence + 1)[::sequence].astype("<i8")
    answer = MeasuredStage(loss=0.0, tokens=0)
    for stage, sheet in enumerate(sheets):
        size = sheet.checkpoint.parameters
        weights = await checkpoint_range(sheet.checkpoint, sheet.urls, "weights", 0, size, objects)
        buffers: list[Buffer] = [memoryview(weights.data).cast("B")]
        if reads_tokens(manifest.config, stage):
            buffers.append(memoryview(windows.data).cast("B"))
        limit = max(manifest.config.audit.audit_limit - (clock.now() - started), 1.0)
        reply = await replayer.ask(Measure(stage=stage, windows=len(windows)), buffers, limit)
        assert isinstance(reply, MeasuredStage), reply
        answer = reply
    return Measured(
        task=task.task,
        epoch=task.epoch,
        loss=answer.loss / answer.tokens,
        tokens=answer.tokens,
        seconds=clock.now() - started,
    )
