"""How fast a stage works on a machine, and a pipeline of them: pure functions of the run's configuration. No torch.

Assumptions, all of them:
* Compute: a pass is 3 x the forward's operations (`partition.stage_cost`: forward, and backward at twice that), plus
  the forwards that run again because a step came between (`recomputed`). An inner step, with the digest of the weights
  that follows it, costs its parameters / `step_parameters`, if the machine states that. Snapshots are not counted.
* A miner does one thing at a time: it sends a result, hears the next task, computes. So the times of its passes, its
  uplink, its downlink and its round trips (one a task: two a sample, one at the last stage) add up.
* Every boundary tensor goes through the orchestrator, with exact payload bytes and what a message takes around them.
* Members of a stage share its samples by their speed; the slowest stage sets the pace, unless samples in flight
  (`max_in_flight` for each first-stage miner) or the orchestrator's line run out before. No queueing, no loss, no
  broken pathways; the link rates are what TCP really reaches.
"""

from __future__ import annotations

import msgspec

from iota.config.fleet import Hub, Machine
from iota.config.schema import RunConfig
from iota.core.manifest import chunk_count
from iota.core.values import CHUNK_BYTES
from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor, reads_tokens
from iota.model.needs import FLOAT, SNAPSHOT_PARTS, in_flight, merge_parts, tensor_bytes
from iota.model.partition import count_parameters, stage_cost

REQUEST_BYTES = 1_000
REPLY_BYTES = 1_900
"""Around the tensors of a task: signature and control part of a result (at most 842 bytes in a two-stage run) and of an
answer with its task and the tensor's signed origin (at most 1,658), with HTTP's own headers."""
MEGABIT = 10**6 / 8
"""Bytes."""


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of one sample at one stage: sent and received by the miner that has it, and its tasks."""

    up: int
    down: int
    tasks: int


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one sample at one miner, by what takes them. `compute`: passes; `step`: its share of an inner step."""

    compute: float
    step: float
    uplink: float
    downlink: float
    latency: float

    @property
    def total(self) -> float:
        return self.compute + self.step + self.uplink + self.downlink + self.latency

    @property
    def parts(self) -> dict[str, float]:
        """The same, with steps as part of compute."""
        return {
            "compute": self.compute + self.step,
            "uplink": self.uplink,
            "downlink": self.downlink,
            "latency": self.latency,
        }


class Rate(msgspec.Struct, frozen=True):
    """A pipeline's pace while training. `binds`: compute | uplink | downlink | latency | hub uplink | hub downlink,
    what takes most of the time of the `stage` that sets the pace. `stage` -1: the orchestrator's line does, or the
    samples in flight are too few to keep every stage busy: `binds` is then what takes most of a sample's whole way."""

    tokens_per_s: float
    binds: str
    stage: int


class MergeTraffic(msgspec.Struct, frozen=True):
    """Bytes that a member of a stage sends and receives at one merge and sync, and for one audit of the epoch."""

    up: int
    down: int
    audit_up: int


def tokens_per_sample(config: RunConfig) -> int:
    return config.train.batch * config.model.sequence


def recomputed(config: RunConfig, stage: int) -> float:
    """Share of a stage's forwards that run again at the backward, because an inner step came between.

    Asynchronous: while a sample is away, its first-stage miner accepts max_in_flight - 1 other passes, and a later
    stage fewer, in proportion to the way that is left; one in `accumulate` is followed by a step. (`iota bench swarm`,
    two in flight and four passes a step, measured 17%; this gives 25, 12 and 0% for its three stages.)
    """
    last = config.stages.count - 1
    if config.train.pipeline == "synchronous" or stage == last:
        return 0.0
    others = (in_flight(config, stage) - 1) * (last - stage) / last
    return min(1.0, others / config.train.accumulate)


def traffic(config: RunConfig, stage: int) -> Traffic:
    """Bytes of one sample: boundary tensors both ways, the messages around them, token ids where they are read (the
    inputs' and labels' window once, as the corpus's dtype)."""
    forward, backward = (boundary_tensor(config, way).nbytes for way in (FORWARD, BACKWARD))
    first, last = stage == 0, stage == config.stages.count - 1
    tasks = 1 if last else 2
    vocabulary = config.model.vocabulary
    token = 1 if vocabulary <= 2**8 else 2 if vocabulary <= 2**16 else 4
    ids = config.train.batch * (config.model.sequence + 1) * token if reads_tokens(config, stage) else 0
    return Traffic(
        up=forward * (not last) + backward * (not first) + tasks * REQUEST_BYTES,
        down=forward * (not first) + backward * (not last) + tasks * REPLY_BYTES + ids,
        tasks=tasks,
    )


def timing(config: RunConfig, stage: int, cut: tuple[int, int], machine: Machine) -> Timing:
    """One sample of a stage on a machine. Raises ConfigError when the machine does not state the compute dtype."""
    cost = (3 + recomputed(config, stage)) * stage_cost(config, stage, cut) * tokens_per_sample(config)
    bytes_ = traffic(config, stage)
    step = count_parameters(config, stage, cut) / machine.step_parameters if machine.step_parameters else 0.0
    return Timing(
        compute=cost / machine.flops(config.train.dtype),
        step=step / config.train.accumulate,
        uplink=bytes_.up / (machine.up_mbits * MEGABIT),
        downlink=bytes_.down / (machine.down_mbits * MEGABIT),
        latency=bytes_.tasks * machine.round_trip_ms / 1000,
    )


def pipeline_rate(config: RunConfig, held: list[list[tuple[Timing, int]]], hub: Hub) -> Rate:
    """The pace of a swarm. `held[s]`: for each kind of machine in stage s, one sample's timing and how many there are;
    no stage is empty."""
    tokens = tokens_per_sample(config)
    rates = [sum(count / one.total for one, count in stage) for stage in held]
    slowest = min(range(len(rates)), key=lambda stage: rates[stage])
    averages = [_average(stage) for stage in held]
    found = [(rates[slowest], _largest([averages[slowest]]), slowest)]
    # One sample's whole way, at each stage on its average member; at most so many are under way at once.
    way = sum(sum(parts.values()) for parts in averages)
    first = sum(count for _, count in held[0])
    allowed = config.train.max_in_flight or config.stages.count + 1
    if config.stages.count > 1:
        found.append((allowed * first / way, _largest(averages), -1))
    rows = [traffic(config, stage) for stage in range(len(held))]
    for limit, sent, name in ((hub.down_mbits, "up", "hub downlink"), (hub.up_mbits, "down", "hub uplink")):
        if limit > 0:
            found.append((limit * MEGABIT / sum(getattr(row, sent) for row in rows), name, -1))
    rate, binds, stage = min(found)
    return Rate(rate * tokens, binds, stage)


def _average(stage: list[tuple[Timing, int]]) -> dict[str, float]:
    """Seconds of one sample by part, over a stage's members, each weighted by how many samples it takes."""
    weights = [count / one.total for one, count in stage]
    rows = [one.parts for one, _ in stage]
    return {
        name: sum(weight * row[name] for weight, row in zip(weights, rows, strict=True)) / sum(weights)
        for name in rows[0]
    }


def _largest(rows: list[dict[str, float]]) -> str:
    """The part that takes most, summed over rows."""
    return max(rows[0], key=lambda name: sum(row[name] for row in rows))


def tokens_per_second(
    config: RunConfig, cuts: tuple[tuple[int, int], ...], *, flops: float, mbits: float, round_trip_ms: float = 50.0,
    members: int = 1,
) -> Rate:  # fmt: skip
    """The pace of `members` equal machines in each stage of a cut, with `flops` operations/s in the run's compute dtype
    and `mbits` Mbit/s both ways: for tables of codecs against bandwidths. Merges and steps are not counted."""
    machine = Machine(
        name="any", memory_gb=1, disk_gb=1, flops_float32=flops, flops_bfloat16=flops, up_mbits=mbits,
        down_mbits=mbits, round_trip_ms=round_trip_ms,
    )  # fmt: skip
    held = [[(timing(config, stage, cut, machine), members)] for stage, cut in enumerate(cuts)]
    return pipeline_rate(config, held, Hub())


def merge_traffic(config: RunConfig, stage: int, cut: tuple[int, int], members: int) -> MergeTraffic:
    """Bytes of a member at one merge among `members` (paper 5.3): upload W, read 2W(N-1)/N of the others' for its N-1
    shards, write 2R/N of new state, load the rest of R. Beside it, what an audit of it is shown: a transcript is small,
    two snapshots and the final one are not, and the drawn segments' tensors."""
    parameters = count_parameters(config, stage, cut)
    part = chunk_count(parameters) * CHUNK_BYTES
    uploaded, merged = merge_parts(config)
    w, r = uploaded * part, merged * part
    audit, train = config.audit, config.train
    segment = audit.segment_steps * train.accumulate * tensor_bytes(config, stage)
    evidence = 3 * SNAPSHOT_PARTS * FLOAT * parameters + segment
    shown = int(audit.share * max(1, audit.segments or audit.segments_per_epoch) * evidence)
    if members == 1:
        return MergeTraffic(w + r, 0, shown)
    return MergeTraffic(w + 2 * r // members, 2 * w * (members - 1) // members + r * (members - 2) // members, shown)
