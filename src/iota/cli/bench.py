"""`iota bench control|swarm|curve`: what the orchestrator carries, what the protocol costs, how settings learn."""

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
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="control|swarm|curve")
    control = kinds.add_parser("control", help="requests per CPU-second of the server, commands/s of the core")
    control.add_argument("--keys", type=int, default=1000, help="miners that the load process plays (1000)")
    swarm = kinds.add_parser("swarm", help="tokens/s of six miners against plain PyTorch, in turns")
    swarm.add_argument("--recipe", type=Path, default=RECIPE, help=f"the run file to train ({RECIPE})")
    swarm.add_argument("--dtype", choices=("float32", "bfloat16"), default="", help="instead of the recipe's")
    for kind, seconds in ((control, 20.0), (swarm, 60.0)):
        kind.add_argument("--seconds", type=float, default=seconds, help=f"length of each window ({seconds:g})")
        kind.add_argument("--json", action="store_true", help="print one line of JSON")
    curve = kinds.add_parser("curve", help="held-out loss against tokens of a run file, in a simulated swarm")
    curve.add_argument("run_file", type=Path, metavar="RUN.toml", help="the run to train")
    curve.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="instead of the file's value")
    curve.add_argument("--tokens", type=int, default=300_000, help="train this many (300000)")
    curve.add_argument("--miners", type=int, default=0, help="instead of the run file's swarm.miners")
    curve.add_argument("--json", action="store_true", help="print one line of JSON an epoch")
    curve.set_defaults(run=run_curve)
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


def run_curve(args: argparse.Namespace) -> int:
    """Raises ConfigError for a run file or a value that cannot be."""
    from iota.config.load import check, load_run, with_values
    from iota.lab import curve

    config = check(with_values(load_run(args.run_file), args.set))
    if args.tokens < 1:
        raise ConfigError(f"--tokens = {args.tokens} trains nothing", "Give at least 1")

    def show(row: dict[str, Any]) -> None:
        if args.json:
            print(msgspec.json.encode(row).decode(), flush=True)
        else:
            print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    curve.measure(config, args.tokens, args.miners or config.swarm.miners, show)
    return 0


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
