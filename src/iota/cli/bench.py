"""`iota bench control|swarm|curve|device`: what the orchestrator carries, what the protocol costs, how settings learn,
what a machine brings."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec

from iota.cli.options import add_threads
from iota.errors import ConfigError

RECIPE = Path("recipes/bench.toml")


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("bench", help="measure the orchestrator's capacity or the swarm's speed")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="control|swarm|curve|device")
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
    _add_device(kinds)


def _add_device(kinds: Any) -> None:
    text = "measure this machine and write its entry of a fleet file (see iota plan --help)"
    device = kinds.add_parser("device", help=text, description=text)
    device.add_argument("--out", type=Path, metavar="FLEET.toml", help="append the entry to this file")
    device.add_argument("--name", default="", help="what to call the machine (its host name)")
    device.add_argument("--seconds", type=float, default=10.0, help="length of the measurement of compute (10)")
    device.add_argument("--recipe", type=Path, metavar="RUN.toml", help="measure a middle stage of this run")
    device.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="as for iota miner")
    device.add_argument("--folder", type=Path, default=Path("miner"), help="the miner's folder: whose disk (./miner)")
    device.add_argument("--up", type=float, metavar="MBITS", help="Mbit/s to the orchestrator")
    device.add_argument("--down", type=float, metavar="MBITS", help="Mbit/s from the orchestrator")
    device.add_argument("--round-trip", type=float, metavar="MS", help="milliseconds to the orchestrator and back")
    device.add_argument("--url", default="", help="measure the line against an iota bench device --serve there")
    device.add_argument("--serve", default="", metavar="HOST:PORT", help="be the other side for --url, until Ctrl-C")
    device.add_argument("--json", action="store_true", help="print one line of JSON")
    add_threads(device)
    device.set_defaults(run=run_device)


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


def run_device(args: argparse.Namespace) -> int:
    """Raises ConfigError for a recipe, fleet file or value that cannot be, IotaError `no_device`, `unreachable`."""
    if args.serve:
        return _serve_line(args.serve)
    from iota.cli.process import limit_torch
    from iota.config.load import check, load_run

    _positive(args.seconds, 0.01)
    config = check(load_run(args.recipe), str(args.recipe)) if args.recipe else None
    limit_torch(args.threads)
    from iota.lab import bench_device
    from iota.nodes.miner.device import pick_device

    name, device = args.name or bench_device.default_name(), pick_device(args.device)
    if args.out:
        bench_device.check_free(args.out, name)
    line = _line(args)
    machine = bench_device.measure(name, device, args.folder, args.seconds, line, config)
    if args.out:
        bench_device.append(args.out, machine)
    if args.json:
        print(msgspec.json.encode(machine).decode())
        return 0
    print(bench_device.entry_text(machine), end="")
    if line is None:
        print("# the line was neither measured (--url) nor stated (--up, --down, --round-trip): fill it in")
    return 0


def _line(args: argparse.Namespace) -> Any:
    """What was measured at --url, with what was stated in place of it; None when neither says anything and no file is
    to be written. Raises ConfigError when something is missing."""
    from iota.lab.bench_device import Line
    from iota.lab.bench_line import measure_line

    stated = {"up_mbits": args.up, "down_mbits": args.down, "round_trip_ms": args.round_trip}
    given = {key: value for key, value in stated.items() if value is not None}
    for key, value in given.items():
        if not (0 if key == "round_trip_ms" else 1e-6) <= value < 1e9:
            raise ConfigError(f"{key} = {value:g} cannot be", "Give a number above 0")
    if args.url and len(given) < len(stated):
        return msgspec.structs.replace(measure_line(args.url), **given)
    if len(given) == len(stated):
        return Line(**given)
    if given or args.out:
        missing = ", ".join(key for key in stated if key not in given)
        raise ConfigError(
            f"the line to the orchestrator is not known: {missing}",
            "State --up, --down and --round-trip, or measure it with --url",
        )
    return None


def _serve_line(place: str) -> int:
    from iota.lab.bench_line import line_server

    host, colon, port = place.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--serve = {place!r} is no address", "Give HOST:PORT, e.g. 0.0.0.0:8402")
    with line_server(host, int(port)) as server:
        print(f"measure with: iota bench device --url http://{place}", flush=True)
        server.serve_forever()
    return 0


def _positive(seconds: float, least: float = 0.5) -> None:
    if not least <= seconds <= 3600:
        raise ConfigError(f"--seconds = {seconds:g} is no length of a window", f"Give {least:g} to 3600")


def _print(figures: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(figures).decode())
        return 0
    for name, value in figures.items():
        if name not in ("sentence", "bench"):
            print(f"{name:32} {value}")
    print(figures["sentence"])
    return 0
