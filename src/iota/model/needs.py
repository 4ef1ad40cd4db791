"""What a stage takes of a machine: memory and disk, in bytes. The one source of these numbers: `iota plan` prints them
and `iota miner` refuses by them, before it downloads anything of the stage. No torch.

P: parameters of the stage. Everything that is trained, merged or hashed is float32, whatever the compute dtype.
"""

from __future__ import annotations

import msgspec

from iota.config.schema import RunConfig
from iota.core.reduce import Outer
from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor, stream_width
from iota.model.layout import ffn_width
from iota.model.partition import count_parameters

FLOAT = 4
PROGRAM = 300 * 10**6
"""A miner's process with torch and nothing loaded: 240 MB resident, measured, rounded up."""
KEEP_EPOCHS = 3
"""Earlier epochs of which drawn evidence is kept; `nodes.miner.retain` keeps as many."""
FASTER = 2
"""A miner this many times faster than the slowest of its stage keeps this many times B_min passes an epoch."""
SNAPSHOT_PARTS = 3
"""Weights and two moments."""


class MemoryNeed(msgspec.Struct, frozen=True):
    """Bytes by purpose. `separate`: the device that computes has memory of its own; else all lie in main memory.

    On the device: `parameters`, `gradients` (scratch and accumulator), `moments`, `tables` (of `subspace`: the fixed
    channels of every token's embedding, in every stage), `workspace` (of the optimizer),
    `activations` (of the passes between forward and backward), `casts` (bfloat16 copies of weights that these keep).
    In main memory: `program`; `base` (the epoch's common state: weights, outer momentum, moments); at the merge
    `upload` (the own one), `others` (what is read of other members for one shard), `results` (own shards' new state),
    `scratch` (of one shard's sum and outer step); with a separate device `copies` of its state.
    Training and merging do not overlap: the peak is the larger of both.
    """

    separate: bool
    parameters: int
    gradients: int
    moments: int
    tables: int
    workspace: int
    activations: int
    casts: int
    program: int
    base: int
    upload: int
    others: int
    results: int
    scratch: int
    copies: int

    @property
    def resident(self) -> int:
        """On the device all the time."""
        return self.parameters + self.gradients + self.moments + self.tables

    @property
    def passes(self) -> int:
        """On the device while training."""
        return self.workspace + self.activations + self.casts

    @property
    def merging(self) -> int:
        """In main memory at a merge, beside program and base."""
        return self.upload + self.others + self.results + self.scratch

    @property
    def device(self) -> int:
        """Peak in a separate device's own memory; 0 without one."""
        return self.resident + self.passes if self.separate else 0

    @property
    def host(self) -> int:
        """Peak in main memory."""
        if self.separate:
            return self.program + self.base + max(self.copies, self.merging)
        return self.program + self.base + self.resident + max(self.passes, self.merging)

    @property
    def total(self) -> int:
        """Peak of both together."""
        return self.device + self.host


class DiskNeed(msgspec.Struct, frozen=True):
    """Bytes of evidence. `tensors`: boundary tensors of one epoch; `snapshots`: of one epoch; `drawn`: what audits of
    earlier epochs still need. Token shards that a stage reads come on top: as many bytes as they have."""

    tensors: int
    snapshots: int
    drawn: int

    least: int
    """Of an epoch however short: the two snapshots of one segment, and the final one."""

    @property
    def total(self) -> int:
        return self.tensors + self.snapshots + self.drawn


def merge_parts(config: RunConfig) -> tuple[int, int]:
    """How many float32 arrays of P a member uploads, and how many a merged state has."""
    outer, moments = Outer(config.merge.outer), config.merge.inner_state == "merge"
    return len(outer.upload_parts(moments)), len(outer.result_parts(moments))


def in_flight(config: RunConfig, stage: int) -> int:
    """Passes that a miner of a stage holds between forward and backward, at most: `max_in_flight` (0: stages + 1), as
    many miners in each stage assumed; one at the last stage, whose pass is forward, loss and backward at once."""
    if stage == config.stages.count - 1:
        return 1
    return config.train.max_in_flight or config.stages.count + 1


def pass_floats(config: RunConfig, stage: int, cut: tuple[int, int]) -> int:
    """Float32 values a token that one pass keeps for its backward, with fused attention (no T x T scores) and nothing
    recomputed. A block keeps 8 times the width (norms, queries, attention, residual sums), keys and values twice, the
    feed-forward four times. The last stage adds logits, their softmax and its gradient; all add the boundary's values
    and gradients. In bfloat16 somewhat less is kept: these numbers are an upper bound then."""
    model = config.model
    kv = model.kv_heads * (model.width // model.heads)
    block = 8 * model.width + 2 * kv + 4 * ffn_width(model) + model.heads + 2
    channels = boundary_tensor(config, FORWARD).channels
    floats = (cut[1] - cut[0]) * block + 2 * model.width + 4 * channels
    return floats + (3 * model.vocabulary + 2 * model.width if stage == config.stages.count - 1 else 0)


def memory_need(
    config: RunConfig, stage: int, cut: tuple[int, int], *, dtype: str = "", separate: bool = False
) -> MemoryNeed:
    """Memory of a stage that holds blocks [cut[0], cut[1]). `dtype`: compute dtype ("": the run's).

    Assumptions: two members a stage merge, the worst case (with more, each reads and reduces smaller shards; one alone
    reads none); the backward's own temporaries are those of one block.
    """
    model, p = config.model, FLOAT * count_parameters(config, stage, cut)
    up, out = merge_parts(config)
    tokens, held = config.train.batch * model.sequence, in_flight(config, stage)
    backward = 4 * model.width + 3 * ffn_width(model)
    cast = (dtype or config.train.dtype) == "bfloat16"
    embedding = FLOAT * model.vocabulary * stream_width(config) if stage == 0 else 0
    delta = 1 if config.merge.outer != "assign" else 0
    return MemoryNeed(
        separate=separate,
        parameters=p,
        gradients=2 * p,
        moments=2 * p,
        tables=FLOAT * model.vocabulary * (model.width - stream_width(config)),
        workspace=4 * FLOAT * model.width * ffn_width(model) if config.train.optimizer == "muon" else 0,
        activations=FLOAT * tokens * (held * pass_floats(config, stage, cut) + backward),
        casts=held * (p - embedding) // 2 if cast else 0,
        program=PROGRAM,
        base=out * p,
        upload=up * p if separate else delta * p,  # without a device of its own, moments and weights are views
        others=up * p,
        results=out * p,
        scratch=p,
        copies=SNAPSHOT_PARTS * p if separate else 0,
    )


def tensor_bytes(config: RunConfig, stage: int) -> int:
    """Boundary tensors of one sample that a stage receives or sends, in bytes: each is kept as evidence."""
    forward, backward = (boundary_tensor(config, way).nbytes for way in (FORWARD, BACKWARD))
    sides = (stage > 0) + (stage < config.stages.count - 1)
    return sides * (forward + backward)


def disk_need(config: RunConfig, stage: int, cut: tuple[int, int]) -> DiskNeed:
    """Disk of a stage. Assumptions: a miner `FASTER` times as fast as the slowest of its stage (B_min passes); the
    epoch's cuts are the more of `audit.segments_per_epoch` and what `audit.segment_steps` gives in epoch 1; everything
    of an epoch is kept until its audits are drawn, then the drawn segments' tensors, their two snapshots and the final
    one, for three epochs."""
    audit, merge = config.audit, config.merge
    passes = FASTER * merge.min_batches
    steps = -(-passes // config.train.accumulate)
    segments = max(FASTER * audit.segments_per_epoch, -(-steps // audit.segment_steps))
    segments = min(segments, steps)
    drawn = min(audit.segments or segments, segments)
    snapshot = SNAPSHOT_PARTS * FLOAT * count_parameters(config, stage, cut)
    tensors = passes * tensor_bytes(config, stage)
    kept = min(2 * drawn + 1, segments + 1) * snapshot + -(-tensors * drawn // segments)
    return DiskNeed(tensors=tensors, snapshots=(segments + 1) * snapshot, drawn=KEEP_EPOCHS * kept, least=3 * snapshot)
