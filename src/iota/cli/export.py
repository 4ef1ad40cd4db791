"""`iota export RUN OUT`: a run's merged weights as a folder that stands alone, or that transformers loads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("export", help="write a run's merged weights as safetensors plus config")
    parser.add_argument("source", metavar="RUN", help="the run's folder, its run file, or its name under runs/")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--format",
        choices=("iota", "hf"),
        default="iota",
        help="iota (default): for iota generate and new runs; hf: for transformers",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises IotaError; see `iota.nodes.export.export` and `iota.nodes.export_hf.export_hf`."""
    from iota.nodes.card import WEIGHTS
    from iota.nodes.checkpoint import run_folder
    from iota.nodes.export import export
    from iota.nodes.export_hf import export_hf

    kind = args.format
    if kind == "hf":
        card, kind = export_hf(run_folder(args.source), args.out)
    else:
        card = export(run_folder(args.source), args.out)
    if args.json:
        facts = {"out": str(args.out), "run": card.run, "epoch": card.epoch, "tokens": card.tokens, "model": kind}
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
        return 0
    trained = "an unknown number of" if card.tokens is None else f"{card.tokens:,}"
    size = (args.out / WEIGHTS).stat().st_size
    print(f"{card.run} after epoch {card.epoch} ({trained} tokens) written to {args.out}: {size:,} bytes of weights.")
    if args.format == "iota":
        print(f'Try it: iota generate {args.out} "The "')
        return 0
    if kind == "llama":
        print("A plain Llama: transformers and what reads its format load it as it is.")
        if card.stages.count > 1 and card.stages.wire_dtype != "float32":
            print(
                f"The run rounded to {card.stages.wire_dtype} between stages, a plain Llama does not: logits differ so."
            )
    else:
        print(f"It has codec {card.stages.codec!r} between stages: `import iota.hf` before transformers loads it.")
    return 0
