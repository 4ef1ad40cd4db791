"""`iota generate CHECKPOINT PROMPT`: text from an exported model or straight from a run's folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from iota.errors import IotaError


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("generate", help="continue a prompt with a trained model")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder made by iota export, or a run")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="draw among so many likeliest; 0: all (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument("--json", action="store_true", help="print prompt, text and settings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises IotaError: no checkpoint there, a damaged one, an empty prompt, impossible settings."""
    from iota.model.generate import Sampling
    from iota.nodes.export import open_model, prompt_ids

    sampling = Sampling(args.tokens, args.temperature, args.top_k, args.seed)
    model = open_model(_folder(args.checkpoint))
    ids = prompt_ids(model.tokenizer, args.prompt)
    limit = model.chain.config.model.sequence
    notices = []
    if len(ids) > limit:
        notices.append(f"the prompt has {len(ids)} tokens, the model sees the last {limit} of them")
        sys.stderr.write(f"iota generate: {notices[0]}\n")
    text = model.tokenizer.decode(model.chain.generate(ids, sampling, model.tokenizer.size))
    if args.json:
        facts = {
            "run": model.run,
            "epoch": model.epoch,
            "prompt": args.prompt,
            "text": text,
            "tokens": sampling.tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "notices": notices,
        }
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    else:
        print(args.prompt + text)
    return 0


def _folder(text: str) -> Path:
    """An existing folder as it is; else a run file or a run's name. Raises IotaError `no_checkpoint`."""
    from iota.nodes.checkpoint import run_folder

    if Path(text).is_dir():
        return Path(text)
    try:
        return run_folder(text)
    except IotaError as error:
        if error.code != "no_run":
            raise
        raise IotaError(
            "no_checkpoint", f"{text} is no folder and no run", "Make one with: iota export RUN OUT"
        ) from None
