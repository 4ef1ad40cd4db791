"""`iota report RUN`: the end report of a run, as text, JSON and pictures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("report", help="what a run learned, how fast, and who was paid why")
    parser.add_argument("source", metavar="RUN", help="the run's folder, its run file, or its name under runs/")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises IotaError: no such run, no history yet, a damaged one, a full disk."""
    from iota.nodes.checkpoint import run_folder

    write_report(run_folder(args.source), as_json=args.json)
    return 0


def write_report(folder: Path, *, as_json: bool = False) -> dict[str, Any]:
    """Write the report into the run's folder, print it, and return what report.json holds. Also for `iota up`."""
    from iota.lab import report

    facts = report.write_report(folder)
    text = facts.pop("text")
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n" if as_json else text)
    return facts
