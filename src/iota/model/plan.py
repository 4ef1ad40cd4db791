"""Planning a run for a fleet: into how many stages to cut, who holds what, whether it fits, how fast it is, what binds.

Pure; no torch. `needs` says what a stage takes, `cost` how fast it is and under which assumptions. Placement: each
machine goes to the stage that is slowest so far, among those that fit it; machines that fit fewest stages first, then
fast ones. A running orchestrator does not know this plan: it fills the stages with fewest members first, in order of
joining.
"""

from __future__ import annotations

import msgspec

from iota.config.fleet import GB, Fleet, Machine
from iota.config.schema import RunConfig
from iota.errors import ConfigError
from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor
from iota.model.cost import (
    MEGABIT,
    MergeTraffic,
    Rate,
    Timing,
    Traffic,
    merge_traffic,
    pipeline_rate,
    timing,
    tokens_per_sample,
    traffic,
)
from iota.model.needs import DiskNeed, MemoryNeed, disk_need, memory_need
from iota.model.partition import count_parameters, cut_blocks

ALL_COUNTS = 16
"""Up to here every number of stages is tried; beyond, one for each number of blocks in the largest stage."""
Cuts = tuple[tuple[int, int], ...]


class StagePlan(msgspec.Struct, frozen=True):
    """One stage. `holders`: how many of each kind of machine, by name. `timing`: one sample on its commonest machine.
    `memory` holds for machines that compute in main memory, `separate` for those whose device has its own (None: no
    such machine holds the stage)."""

    stage: int
    blocks: tuple[int, int]
    parameters: int
    holders: dict[str, int]
    tokens_per_s: float
    timing: Timing
    memory: MemoryNeed | None
    separate: MemoryNeed | None
    disk: DiskNeed
    traffic: Traffic
    merge: MergeTraffic


class Plan(msgspec.Struct, frozen=True):
    """A cut with its machines. `training`: the pace while training; `tokens_per_s`: with merges and evidence;
    `train_seconds`, `merge_seconds`: of an epoch, the latter with what evidence takes of the uplink. `binds`: what
    binds the whole, "merge uplink" or "merge downlink" when an epoch merges longer than it trains."""

    count: int
    stages: tuple[StagePlan, ...]
    training: Rate
    tokens_per_s: float
    train_seconds: float
    merge_seconds: float
    binds: str


class Candidate(msgspec.Struct, frozen=True):
    """One number of stages: its pace, or why it cannot be. `unlimited`: its pace if memory and disk were no limit."""

    count: int
    tokens_per_s: float
    binds: str
    refused: str
    unlimited: float


class Compared(msgspec.Struct, frozen=True):
    """The same cut with another codec: bytes of a sample's boundary tensor each way, how many times fewer than float32
    both ways together, and on the same machines the pace while training, with what binds it, and with merges.
    `too_large`: for a message (`limits.inline_bytes`)."""

    codec: str
    forward: int
    backward: int
    ratio: float
    training: float
    binds: str
    tokens_per_s: float
    fits: bool
    too_large: bool


class Report(msgspec.Struct, frozen=True):
    """`configured`: as the run file says (None: `refused` says why not); `best`: the fastest number of stages. `binds`:
    what binds the best, "memory" or "disk" when fewer of them forbid a faster cut. `compared`: for the configured cut,
    or the best one."""

    configured: Plan | None
    refused: str
    best: Plan
    binds: str
    candidates: tuple[Candidate, ...]
    compared: tuple[Compared, ...]


# ----------------------------------------------------------------------------------------------------------- fitting


def shortfall(machine: Machine, config: RunConfig, stage: int, cut: tuple[int, int]) -> str:
    """Why a stage does not fit on a machine: which number of the fleet file is too small; "" when it fits."""
    need = memory_need(config, stage, cut, separate=machine.device_memory_gb > 0)
    disk = disk_need(config, stage, cut).total
    rows = (
        ("device_memory_gb", need.device, machine.device_memory_gb),
        ("memory_gb", need.host, machine.memory_gb),
        ("disk_gb", disk, machine.disk_gb),
    )
    for key, wanted, given in rows:
        if wanted > given * GB:
            return f"{key} = {given:g} is too small, it needs {wanted / GB:.4g}"
    return ""


def _refusal(fleet: Fleet, config: RunConfig, cuts: Cuts, fits: list[list[bool]]) -> str:
    """Why no placement exists: a stage that fits nowhere, else too few machines."""
    for stage, cut in enumerate(cuts):
        if not any(row[stage] for row in fits):
            whys = [f"{m.name}: {shortfall(m, config, stage, cut)}" for m in fleet.machine]
            return f"stage {stage} of {len(cuts)} fits on no machine ({'; '.join(whys)})"
    machines = sum(machine.count for machine in fleet.machine)
    if machines < len(cuts):
        return f"{len(cuts)} stages need as many machines, the fleet has {machines}"
    return f"the machines that are large enough are too few for all {len(cuts)} stages"


# --------------------------------------------------------------------------------------------------------- placement


def place(speed: list[list[float]], counts: list[int]) -> list[list[int]] | None:
    """Machines to stages. `speed[kind][stage]`: samples/s of one such machine there, 0 where it does not fit. Returns
    how many of each kind every stage gets, [stage][kind], no stage empty, or None when that cannot be."""
    stages = len(speed[0])
    held = [[0] * len(counts) for _ in range(stages)]
    pace = [0.0] * stages
    order = sorted(range(len(counts)), key=lambda kind: (sum(rate > 0 for rate in speed[kind]), -max(speed[kind])))
    for kind in order:
        fitting = [stage for stage in range(stages) if speed[kind][stage] > 0]
        for _ in range(counts[kind] if fitting else 0):
            stage = min(fitting, key=lambda s: (pace[s], s))
            held[stage][kind] += 1
            pace[stage] += speed[kind][stage]
    while any(sum(row) == 0 for row in held):
        if not _refill(held, speed):
            return None
    return held


def _refill(held: list[list[int]], speed: list[list[float]]) -> bool:
    """Give an empty stage a machine, passed on over stages that keep one, from a stage that can spare one (a
    breadth-first search for the shortest such chain). False when there is none."""
    start = next(stage for stage, row in enumerate(held) if sum(row) == 0)
    came: dict[int, tuple[int, int]] = {}  # stage -> the stage it gives to, and what kind
    queue = [start]
    for taker in queue:
        for giver, row in enumerate(held):
            kinds = [kind for kind, count in enumerate(row) if count > 0 and speed[kind][taker] > 0]
            if giver == start or giver in came or not kinds:
                continue
            came[giver] = (taker, kinds[0])
            queue.append(giver)
            if sum(row) > 1:
                while giver != start:
                    to, kind = came[giver]
                    held[giver][kind] -= 1
                    held[to][kind] += 1
                    giver = to
                return True
    return False


# -------------------------------------------------------------------------------------------------------------- plans


def with_count(config: RunConfig, count: int) -> RunConfig:
    """The same run in another number of stages."""
    return msgspec.structs.replace(config, stages=msgspec.structs.replace(config.stages, count=count))


def with_codec(config: RunConfig, codec: str, wire_dtype: str) -> RunConfig:
    """The same run with another codec."""
    stages = msgspec.structs.replace(config.stages, codec=codec, wire_dtype=wire_dtype)
    return msgspec.structs.replace(config, stages=stages)


def plan_cut(config: RunConfig, cuts: Cuts, fleet: Fleet, *, limited: bool = True) -> Plan | str:
    """The plan of one cut, or why there is none. `limited` False: memory and disk are no limit."""
    kinds = fleet.machine
    times = [[timing(config, stage, cut, machine) for stage, cut in enumerate(cuts)] for machine in kinds]
    fits = [
        [not limited or not shortfall(machine, config, stage, cut) for stage, cut in enumerate(cuts)]
        for machine in kinds
    ]
    speed = [
        [1 / one.total if fit else 0.0 for one, fit in zip(*rows, strict=True)]
        for rows in zip(times, fits, strict=True)
    ]
    held = place(speed, [machine.count for machine in kinds])
    if held is None:
        return _refusal(fleet, config, cuts, fits)
    rows = [[(times[kind][stage], count) for kind, count in enumerate(row) if count] for stage, row in enumerate(held)]
    training = pipeline_rate(config, rows, fleet.hub)
    stages = tuple(_stage(config, stage, cut, kinds, held[stage], times) for stage, cut in enumerate(cuts))
    members = max(sum(row) for row in held)
    tokens = tokens_per_sample(config)
    train_seconds = members * config.merge.min_batches * tokens / training.tokens_per_s
    up, down = max((_merge_seconds(plan, m) for plan in stages for m in kinds if plan.holders.get(m.name)), key=sum)
    binds = training.binds if up + down <= train_seconds else "merge uplink" if up >= down else "merge downlink"
    overall = training.tokens_per_s * train_seconds / (train_seconds + up + down)
    return Plan(len(cuts), stages, training, overall, train_seconds, up + down, binds)


def _merge_seconds(plan: StagePlan, machine: Machine) -> tuple[float, float]:
    """Seconds of uplink and downlink that one merge, its sync and an audit's evidence take of a member."""
    up = (plan.merge.up + plan.merge.audit_up) / (machine.up_mbits * MEGABIT)
    return up, plan.merge.down / (machine.down_mbits * MEGABIT)


def _stage(
    config: RunConfig, stage: int, cut: tuple[int, int], kinds: tuple[Machine, ...], row: list[int],
    times: list[list[Timing]],
) -> StagePlan:  # fmt: skip
    used = [kind for kind, count in enumerate(row) if count]
    common = max(used, key=lambda kind: row[kind])
    separate = {kinds[kind].device_memory_gb > 0 for kind in used}
    rate = sum(row[kind] / times[kind][stage].total for kind in used)
    return StagePlan(
        stage=stage,
        blocks=cut,
        parameters=count_parameters(config, stage, cut),
        holders={kinds[kind].name: row[kind] for kind in used},
        tokens_per_s=rate * tokens_per_sample(config),
        timing=times[common][stage],
        memory=memory_need(config, stage, cut) if False in separate else None,
        separate=memory_need(config, stage, cut, separate=True) if True in separate else None,
        disk=disk_need(config, stage, cut),
        traffic=traffic(config, stage),
        merge=merge_traffic(config, stage, cut, sum(row)),
    )


def counts_to_try(config: RunConfig, machines: int) -> list[int]:
    """Numbers of stages, ascending: every one up to `ALL_COUNTS`, then those that make the largest stage smaller; never
    more than blocks or machines; the configured one always."""
    blocks = config.model.blocks
    some = {-(-blocks // most) for most in range(1, blocks + 1)}
    most = 1 if config.model.tie_embeddings else min(blocks, machines)
    return sorted({n for n in range(1, most + 1) if n <= ALL_COUNTS or n in some} | {config.stages.count})


def make_plan(config: RunConfig, fleet: Fleet) -> Report:
    """The whole report for a run, as written (`max_in_flight` 0 follows the number of stages) and a fleet.

    Raises ConfigError when the model cannot be cut, a machine does not state the compute dtype, or nothing fits.
    """
    configured, refused, best = None, "", None
    candidates: list[Candidate] = []
    for count in counts_to_try(config, sum(machine.count for machine in fleet.machine)):
        tried = with_count(config, count)
        cuts = cut_blocks(tried)
        plan = plan_cut(tried, cuts, fleet)
        free = plan if isinstance(plan, Plan) else plan_cut(tried, cuts, fleet, limited=False)
        unlimited = free.tokens_per_s if isinstance(free, Plan) else 0.0
        if isinstance(plan, Plan):
            candidates.append(Candidate(count, plan.tokens_per_s, plan.binds, "", unlimited))
            best = plan if best is None or plan.tokens_per_s > best.tokens_per_s else best
        else:
            candidates.append(Candidate(count, 0.0, "", plan, unlimited))
        if count == config.stages.count:
            configured, refused = (plan, "") if isinstance(plan, Plan) else (None, plan)
    if best is None:
        raise ConfigError(
            f"no number of stages fits this fleet; as configured: {refused}",
            "Add machines or larger ones, or plan a smaller model, train.batch or train.max_in_flight",
        )
    bound = next((c for c in candidates if c.refused and c.unlimited > best.tokens_per_s), None)
    binds = best.binds if bound is None else ("disk" if "disk_gb" in bound.refused else "memory")
    compared = compare(with_count(config, (configured or best).count), fleet)
    return Report(configured, refused, best, binds, tuple(candidates), compared)


def compare(config: RunConfig, fleet: Fleet) -> tuple[Compared, ...]:
    """The configured codec beside none at all, in float32 and in bfloat16, each with the machines placed anew (what
    does not fit is planned as if it did, and says so). Empty in a one-stage run: nothing crosses."""
    if config.stages.count == 1:
        return ()
    out: list[Compared] = []
    wanted = (config.stages.codec, config.stages.wire_dtype)
    for codec, wire in dict.fromkeys((("identity", "float32"), ("identity", "bfloat16"), wanted)):
        tried = with_codec(config, codec, wire)
        cuts = cut_blocks(tried)
        found = plan_cut(tried, cuts, fleet)
        plan = found if isinstance(found, Plan) else plan_cut(tried, cuts, fleet, limited=False)
        assert isinstance(plan, Plan), "without limits only too few machines refuse, and then there is no plan at all"
        forward, backward = (boundary_tensor(tried, way).nbytes for way in (FORWARD, BACKWARD))
        whole = 2 * tokens_per_sample(tried) * tried.model.width * 4
        out.append(
            Compared(
                codec=f"{codec}, {boundary_tensor(tried, FORWARD).format}",
                forward=forward,
                backward=backward,
                ratio=whole / (forward + backward),
                training=plan.training.tokens_per_s,
                binds=plan.training.binds,
                tokens_per_s=plan.tokens_per_s,
                fits=plan is found,
                too_large=max(forward, backward) > tried.limits.inline_bytes,
            )
        )
    return tuple(out)
