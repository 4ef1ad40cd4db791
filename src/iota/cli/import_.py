"""`iota import FOLDER RUN.toml`: a run file for a run that begins with the weights of a saved model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("import", help="write a run file that begins with a saved model's weights")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a Hugging Face Llama, or written by iota export")
    parser.add_argument("run_file", metavar="RUN.toml", type=Path, help="the run file to write; it must not exist")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a value of the run file, e.g. --set stages.count=4 --set data.source=texts; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises IotaError; see `iota.nodes.start.import_run`."""
    from iota.nodes.start import import_run

    config, notes = import_run(args.folder, args.run_file, args.set)
    if args.json:
        facts = {"run_file": str(args.run_file), "config": config, "notes": notes}
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
        return 0
    model = config.model
    print(
        f"{args.run_file} begins with {args.folder}: width {model.width}, {model.blocks} blocks, vocabulary "
        f"{model.vocabulary:,}, in {config.stages.count} stages."
    )
    for note in notes:
        print(f"Note: {note}.")
    print(
        f"Text: {config.data.source}, learning rate {config.train.lr}; change the file as you like, but for the sizes."
    )
    print(f"Start it: iota up {args.run_file}")
    return 0
