"""`iota lab fig5`: can boundaries be compressed 128x? Loss against tokens, paired seeds, controls (paper, Figure 5)."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from iota.cli.options import add_json, positive
from iota.errors import ConfigError, IotaError

if TYPE_CHECKING:
    from iota.lab.fig5_queue import Outcome, Place

RESULTS, WORK = Path("lab/results/fig5"), Path("runs/fig5")
QUICK_RESULTS, QUICK_WORK = Path("runs/fig5-quick/results"), Path("runs/fig5-quick")
CELLS = "minimum"
SHOW_EVERY = 30.0
EPILOG = """\
Every job (a cell's codec, size and seed) is trained in a child process and keeps its results in one file of its own.
Ctrl-C, or --minutes, ends with checkpoints; the same command goes on from there, days later or, with both folders
carried along, on another machine. --report assembles what is finished and trains nothing.
"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("lab", help="the paper's figures, measured anew")
    kinds = parser.add_subparsers(dest="figure", required=True, metavar="fig5")
    fig5 = kinds.add_parser(
        "fig5",
        help="loss against tokens for every codec, with controls and error bars",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fig5.add_argument(
        "--cells",
        default=CELLS,
        metavar="NAMES",
        help=f"comma-separated: minimum, dtype, sweep, local, boundaries, widths, long, muon, or all ({CELLS})",
    )
    fig5.add_argument("--seeds", type=positive, default=3, metavar="N", help="paired seeds 0 to N-1 (3)")
    fig5.add_argument("--jobs", type=positive, default=1, metavar="N", help="jobs at a time, one thread each (1)")
    fig5.add_argument("--minutes", type=float, default=0.0, metavar="M", help="stop after so long (0: no limit)")
    fig5.add_argument("--text", default="", metavar="FOLDER", help="train on the text there (what Python carries)")
    fig5.add_argument("--device", default="cpu", help="cpu, cuda or mps (cpu)")
    fig5.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="all jobs compute in it")
    fig5.add_argument(
        "--results", type=Path, metavar="FOLDER", help=f"one file a job ({RESULTS}); the report is beside"
    )
    fig5.add_argument("--work", type=Path, metavar="FOLDER", help=f"checkpoints, logs, tokens ({WORK})")
    fig5.add_argument("--quick", action="store_true", help="a tiny grid that only shows that the machinery works")
    fig5.add_argument("--list", action="store_true", help="show the jobs and how they stand; train nothing")
    fig5.add_argument("--report", action="store_true", help="only assemble what is finished")
    fig5.add_argument("--overhead", action="store_true", help="only measure each codec's share of a stage's time")
    add_json(fig5)
    fig5.set_defaults(run=run_fig5)


def run_fig5(args: argparse.Namespace) -> int:
    """Raises ConfigError for a cell or value that cannot be, IotaError `lab_failed` when a job failed."""
    from iota.lab import fig5_data, fig5_grid, fig5_queue, fig5_spec

    if args.minutes < 0:
        raise ConfigError(f"--minutes = {args.minutes:g} is no time", "Give 0 or more")
    names = _cells(args)
    results = args.results or (QUICK_RESULTS if args.quick else RESULTS)
    work = args.work or (QUICK_WORK if args.quick else WORK)
    jobs = fig5_grid.jobs(names, range(min(args.seeds, 2) if args.quick else args.seeds), args.dtype)
    for spec in jobs:
        fig5_spec.check_spec(spec)
    corpus = fig5_grid.QUICK_CORPUS if args.quick else fig5_spec.Corpus()
    if args.text:
        corpus = msgspec.structs.replace(corpus, source=args.text)
    place = fig5_queue.Place(work, results, corpus, args.device, _command())
    if args.overhead:
        return _overhead(args, place)
    if args.list:
        return _list(place, jobs, args.json)
    if args.report:
        return _report(args, place)
    tokens = fig5_data.prepare(corpus, place.tokens, _tell)
    _tell(f"{tokens.train.size:,} tokens to train on, {tokens.heldout.size:,} held out")
    queue = fig5_queue.Queue(place, jobs, args.jobs, 60 * args.minutes if args.minutes else None)
    try:
        outcome = queue.run(_Shown())
    except KeyboardInterrupt:
        _tell(f"stopped with checkpoints; the same command goes on: {place.command}")
        raise
    _report(args, place)
    return _close(outcome)


def _cells(args: argparse.Namespace) -> list[str]:
    from iota.lab.fig5_grid import CELLS as GRID
    from iota.lab.fig5_grid import QUICK

    if args.quick:
        return [QUICK]
    return list(GRID) if args.cells == "all" else [name.strip() for name in args.cells.split(",")]


def _command() -> str:
    """What was typed, to be typed again."""
    return shlex.join(["iota", *sys.argv[1:]])


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Shown:
    """The progress line: rewritten in place on a terminal, elsewhere a line when a job ended or from time to time."""

    def __init__(self) -> None:
        self._last, self._done, self._width = 0.0, "", 0

    def __call__(self, line: str) -> None:
        import time

        if sys.stderr.isatty():
            print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(line)
            return
        done = line.split(";")[0]
        if done != self._done or time.monotonic() - self._last >= SHOW_EVERY:
            self._last, self._done = time.monotonic(), done
            _tell(line)


def _close(outcome: Outcome) -> int:
    """The last words of a run of the queue."""
    _tell(f"{len(outcome.done)} jobs are done, {len(outcome.left)} are left, {len(outcome.failed)} failed")
    if outcome.failed:
        name, why = next(iter(outcome.failed.items()))
        raise IotaError("lab_failed", f"{len(outcome.failed)} jobs failed; {name}: {why}", "Its log lies in --work.")
    return 0


def _list(place: Place, jobs: list[Any], as_json: bool) -> int:
    from iota.lab.fig5_rows import Results

    rows = []
    for spec in jobs:
        kept = Results(place.rows(spec))
        step = kept.curve[-1]["step"] if kept.curve else 0
        rows.append({"job": spec.name, "state": kept.end["outcome"] if kept.end else f"{step}/{spec.steps}"})
    if as_json:
        print(msgspec.json.encode(rows).decode())
    else:
        for row in rows:
            print(f"{row['state']:>10}  {row['job']}")
    return 0


def _overheads(place: Place) -> Path:
    return place.results.with_name(f"{place.results.name}_overhead.json")


def _overhead(args: argparse.Namespace, place: Place) -> int:
    """Measure, keep beside the results (the report includes it), print."""
    from iota.cli.process import limit_torch
    from iota.lab.fig5_overhead import overhead_rows
    from iota.lab.fig5_rows import machine
    from iota.store.files import write_atomic

    limit_torch(1)
    facts = {"command": place.command, "machine": machine(), "rows": overhead_rows(_tell)}
    write_atomic(_overheads(place), [msgspec.json.format(msgspec.json.encode(facts), indent=1), b"\n"])
    return _report(args, place)


def _report(args: argparse.Namespace, place: Place) -> int:
    from iota.lab.fig5_text import text, write

    path = _overheads(place)
    rows = msgspec.json.decode(path.read_bytes())["rows"] if path.exists() else []
    facts, files = write(place.results, place.command, rows)
    print(msgspec.json.encode(facts).decode() if args.json else text(facts))
    _tell("written: " + ", ".join(str(file) for file in files))
    return 0
