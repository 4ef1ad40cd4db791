"""`iota bench control` and `iota bench swarm`: what the orchestrator can carry, and what the protocol costs."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec

from iota.errors import ConfigError

RECIPE = Path("recipes/bench.toml")


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("bench", help="measure the orchestrator's capacity or the swarm's speed")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="control|swarm")
    control = kinds.add_parser("control", help="requests per CPU-second of the server, commands/s of the core")
    control.add_argument("--keys", type=int, default=1000, help="miners that the load process plays (1000)")
    swarm = kinds.add_parser("swarm", help="tokens/s of six miners against plain PyTorch, in turns")
    swarm.add_argument("--recipe", type=Path, default=RECIPE, help=f"the run file to train ({RECIPE})")
    swarm.add_argument("--dtype", choices=("float32", "bfloat16"), default="", help="instead of the recipe's")
    for kind, seconds in ((control, 20.0), (swarm, 60.0)):
        kind.add_argument("--seconds", type=float, default=seconds, help=f"length of each window ({seconds:g})")
        kind.add_argument("--json", action="store_true", help="print one line of JSON")
    control.set_defaults(run=run_control)
    swarm.set_defaults(run=run_swarm)


def run_control(args: argparse.Namespace) -> int:
    """Raises IotaError `bench_failed`, ConfigError for a value that cannot be."""
    from iota.lab import bench_control

    _positive(args.seconds)
    if args.keys < 3:
        raise ConfigError(f"--keys = {args.keys} does not fill three stages", "Give at least 3")
    return _print(bench_control.measure(seconds=args.seconds, miners=args.keys), args.json)


def run_swarm(args: argparse.Namespace) -> int:
    """Raises IotaError `bench_failed`, ConfigError for a recipe or a value that cannot be."""
    from iota.config.load import load_run
    from iota.lab import bench_swarm

    _positive(args.seconds)
    config = load_run(args.recipe)
    return _print(asyncio.run(bench_swarm.measure(config, seconds=args.seconds, dtype=args.dtype)), args.json)


def _positive(seconds: float) -> None:
    if not 0.5 <= seconds <= 3600:
        raise ConfigError(f"--seconds = {seconds:g} is no length of a window", "Give 0.5 to 3600")


def _print(figures: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(figures).decode())
        return 0
    for name, value in figures.items():
        if name not in ("sentence", "bench"):
            print(f"{name:32} {value}")
    print(figures["sentence"])
    return 0
