"""`iota plan RUN.toml --fleet FLEET.toml`: how to cut a run for given machines, what fits, how fast, what binds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from iota.cli.options import add_json, add_run_file, read_run
from iota.errors import ConfigError

if TYPE_CHECKING:
    from iota.config.fleet import Fleet
    from iota.model.needs import MemoryNeed
    from iota.model.plan import Plan, Report

EPILOG = """\
fleet file: TOML, one [[machine]] for each kind of machine; recipes/fleet.toml is an example.
  name, count (1)               what it is called, how many there are
  memory_gb, disk_gb            main memory and disk, 10^9 bytes
  device_memory_gb (0)          memory of an accelerator that has its own; 0: it computes in main memory
  flops_float32, flops_bfloat16 operations/s of a training step; at least the one of the run's train.dtype
  step_parameters (0)           parameters/s of an inner step and its digest; 0: not counted
  up_mbits, down_mbits          Mbit/s to and from the orchestrator
  round_trip_ms                 milliseconds to the orchestrator and back
and optionally [hub] with up_mbits, down_mbits of the orchestrator's own line (0: not counted).
`iota bench device --out FLEET.toml` measures a machine and appends its entry.
"""
ASSUMED = """\
assumed: a pass takes 3 x the forward's operations, plus the forwards that run again because a step came between;
attention is fused; a miner computes, sends and receives in turns, one round trip a task; tensors go through the
orchestrator, exact payloads; members share a stage's samples by speed; memory for a merge of two members; evidence of
a miner twice as fast as the slowest; links keep their rate; no queues, no losses, snapshots take no time. The placement
is what would be best: the orchestrator itself fills the stages with fewest members first, in order of joining."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "plan a run for a fleet of machines: stages, memory, disk, bytes, tokens/s and what binds"
    parser = commands.add_parser(
        "plan", help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_file(parser)
    parser.add_argument("--fleet", required=True, metavar="FLEET.toml", help="the machines (format below)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for a run or fleet file that cannot be, or when nothing fits."""
    import msgspec

    from iota.model.plan import make_plan

    config, fleet = read_run(arguments), read_fleet(arguments.fleet)
    report = make_plan(config, fleet)
    if arguments.json:
        print(msgspec.json.encode(report).decode())
        return 0
    print("\n".join(lines(report)))
    return 0


def read_fleet(path: str) -> Fleet:
    """A fleet file. Raises ConfigError."""
    from pathlib import Path

    from iota.config.fleet import parse_fleet

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"fleet file {path} cannot be read: {error}", "Give a fleet file, e.g. recipes/fleet.toml"
        ) from None
    return parse_fleet(text, path)


# -------------------------------------------------------------------------------------------------------------- text


def lines(report: Report) -> Iterator[str]:
    """The report as text."""
    configured, best = report.configured, report.best
    if configured is None:
        yield f"as configured it does not fit: {report.refused}"
    else:
        yield f"as configured: {_pace(configured)}, {_where(configured)} binds"
    limit = "" if report.binds == best.binds else f" (more {report.binds} would allow a faster cut)"
    if configured is not None and configured.count == best.count:
        yield f"no other number of stages is faster on this fleet{limit}"
    else:
        yield f"best: {_pace(best)}, {_where(best)} binds{limit}"
    yield ""
    yield f"{'stages':>6}{'tokens/s':>12}  binds"
    for tried in report.candidates:
        yield f"{tried.count:>6}{tried.tokens_per_s:>12,.0f}  {tried.binds or tried.refused}"
    for plan in (configured, best):
        if plan is not None and (plan is best or plan.count != best.count):
            yield ""
            yield from _plan(plan)
    if report.compared:
        yield ""
        yield from _compared(report)
    yield ""
    yield ASSUMED


def _pace(plan: Plan) -> str:
    stages = "1 stage" if plan.count == 1 else f"{plan.count} stages"
    return f"{stages}, {plan.training.tokens_per_s:,.0f} tokens/s while training, {plan.tokens_per_s:,.0f} with merges"


def _where(plan: Plan) -> str:
    rate = plan.training
    if plan.binds != rate.binds:
        return f"the {plan.binds}"
    if rate.stage < 0:
        return f"the {rate.binds}" if "hub" in rate.binds else f"the {rate.binds} of a sample's way (few in flight)"
    return f"{rate.binds} of stage {rate.stage}"


def _plan(plan: Plan) -> Iterator[str]:
    """One cut: who holds what, what a sample takes, memory, disk, bytes."""
    yield f"cut into {plan.count}: an epoch trains {plan.train_seconds:,.0f} s and merges {plan.merge_seconds:,.0f} s"
    yield f"{'stage':>5}{'blocks':>9}{'parameters':>16}{'tokens/s':>11}  held by"
    for row in plan.stages:
        holders = ", ".join(f"{count} x {name}" for name, count in row.holders.items())
        blocks = f"{row.blocks[0]}-{row.blocks[1] - 1}"
        yield f"{row.stage:>5}{blocks:>9}{row.parameters:>16,}{row.tokens_per_s:>11,.0f}  {holders}"
    yield "one sample on the stage's commonest machine, ms:"
    yield f"{'stage':>5}" + "".join(f"{name:>10}" for name in ("compute", "step", "uplink", "downlink", "latency"))
    for row in plan.stages:
        one = row.timing
        parts = (one.compute, one.step, one.uplink, one.downlink, one.latency)
        yield f"{row.stage:>5}" + "".join(f"{1000 * part:>10,.1f}" for part in parts)
    yield "bytes of a miner: one sample, one merge and sync, the evidence of its audit; disk for evidence:"
    names = ("sample up", "down", "merge up", "down", "evidence", "disk", "snapshots")
    yield f"{'stage':>5}" + "".join(f"{name:>12}" for name in names)
    for row in plan.stages:
        disk, merge = row.disk, row.merge
        sizes = (row.traffic.up, row.traffic.down, merge.up, merge.down, merge.audit_up, disk.total, disk.snapshots)
        yield f"{row.stage:>5}" + "".join(f"{_size(size):>12}" for size in sizes)
    yield from _memory(plan)


def _memory(plan: Plan) -> Iterator[str]:
    """Memory of each stage, by purpose."""
    purposes = ("parameters", "gradients", "moments", "tables", "workspace", "activations", "casts", "program", "base",
                "upload", "others", "results", "scratch", "copies")  # fmt: skip
    columns: list[tuple[str, MemoryNeed]] = []
    for row in plan.stages:
        columns += [(f"stage {row.stage}", row.memory)] if row.memory else []
        columns += [(f"stage {row.stage}*", row.separate)] if row.separate else []
    yield "memory of a miner, by purpose (*: the device has its own):"
    for at in range(0, len(columns), 8):
        part = columns[at : at + 8]
        yield f"{'':12}" + "".join(f"{name:>12}" for name, _ in part)
        for purpose in purposes:
            if any(getattr(need, purpose) for _, need in part):
                yield f"{purpose:12}" + "".join(f"{_size(getattr(need, purpose)):>12}" for _, need in part)
        for label, name in (("peak device", "device"), ("peak main", "host")):
            yield f"{label:12}" + "".join(f"{_size(getattr(need, name)):>12}" for _, need in part)


def _compared(report: Report) -> Iterator[str]:
    yield "with and without compression, tokens/s:"
    names = f"{'forward':>12}{'backward':>12}{'less':>9}{'training':>12}{'merging too':>13}"
    yield f"{'boundary of one sample':24}{names}  training binds"
    for row in report.compared:
        note = " (too large for a message: limits.inline_bytes)" if row.too_large else ""
        note += "" if row.fits else " (does not fit)"
        yield (
            f"{row.codec:24}{_size(row.forward):>12}{_size(row.backward):>12}{row.ratio:>8.1f}x"
            f"{row.training:>12,.0f}{row.tokens_per_s:>13,.0f}  {row.binds}{note}"
        )


def _size(count: int) -> str:
    """Bytes for people: decimal units, as in the fleet file."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"
