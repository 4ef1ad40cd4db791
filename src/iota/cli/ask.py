"""`iota status`, `iota explain`, `iota ledger`: reading a run from anywhere, with a key of the moment."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from iota.cli.options import URL_HELP, add_json, join_url_of
from iota.errors import IotaError

if TYPE_CHECKING:
    from iota.core.queries import Query


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "what a run does now: phase, what it waits for and until when, losses, speed, members"
    status = commands.add_parser("status", help=text, description=text)
    status.add_argument("url", metavar="URL", help=URL_HELP)
    add_json(status)
    status.set_defaults(run=run_status)

    text = "why a miner was paid what it was paid, item by item"
    explain = commands.add_parser("explain", help=text, description=text)
    explain.add_argument("url", metavar="URL", help=URL_HELP)
    explain.add_argument("miner", metavar="MINER", help="the miner's key, or its first digits")
    explain.add_argument("epoch", metavar="EPOCH", nargs="?", type=int, default=0, help="default: the last one paid")
    add_json(explain)
    explain.set_defaults(run=run_explain)

    text = "the run's books: print them, or recompute every payout"
    ledger = commands.add_parser("ledger", help=text, description=text)
    actions = ledger.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (("show", "print every closed epoch"), ("verify", "recompute every head and every payout")):
        parser = actions.add_parser(name, help=text, description=text)
        parser.add_argument("url", metavar="URL", help=URL_HELP)
        add_json(parser)
        parser.set_defaults(run=run_ledger)


def fetch(url: str, query: Query) -> tuple[str, bytes]:
    """One query: (run id, document). Raises what `Asker` raises."""
    import asyncio

    from iota.nodes.ask import Asker
    from iota.nodes.real import RealClock, entropy

    async def body() -> tuple[str, bytes]:
        async with Asker(join_url_of(url), clock=RealClock(), entropy=entropy) as asker:
            document = await asker.ask(query)
            return asker.run, document

    return asyncio.run(body())


def run_status(arguments: argparse.Namespace) -> int:
    import json

    from iota.cli.progress import status_lines
    from iota.core.queries import Status

    _, document = fetch(arguments.url, Status())
    print(document.decode() if arguments.json else "\n".join(status_lines(json.loads(document), members=True)))
    return 0


def run_explain(arguments: argparse.Namespace) -> int:
    import json

    from iota.core.queries import Explain

    if arguments.epoch < 0:
        raise IotaError("bad_epoch", f"there is no epoch {arguments.epoch}", "Epochs count from 1.")
    _, document = fetch(arguments.url, Explain(key=arguments.miner.lower(), epoch=arguments.epoch))
    if arguments.json:
        print(document.decode())
        return 0
    told: dict[str, Any] = json.loads(document)
    print(told["text"])
    for line in told["lines"]:
        print("  " + ", ".join(f"{name} {_short(value)}" for name, value in line.items()))
    return 0


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text[:12] if len(text) == 64 else text


def run_ledger(arguments: argparse.Namespace) -> int:
    from iota.core import ledger
    from iota.core.queries import LedgerFrom

    run, document = fetch(arguments.url, LedgerFrom(epoch=0))
    if arguments.action == "show" and arguments.json:
        print(document.decode(), end="")
        return 0
    try:
        entries = ledger.decode(document)
    except ValueError as error:
        raise IotaError(
            "bad_ledger", f"the ledger of {run} cannot be read: {error}", "Run the same version."
        ) from error
    if arguments.action == "show":
        for entry in entries:
            paid = ", ".join(f"{key[:8]} {units:,}" for key, units in entry.emissions) or "nobody"
            print(
                f"epoch {entry.epoch}: paid {paid}; burned {entry.burned:,} of {entry.policy.pool:,}; {entry.head[:16]}"
            )
        if not entries:
            print("no epoch is closed yet")
        return 0
    return _verify(arguments, run, entries)


def _verify(arguments: argparse.Namespace, run: str, entries: list[Any]) -> int:
    import json

    from iota.core import ledger

    problems = ledger.verify_chain(entries, run=run, policy=entries[0].policy if entries else None)
    head = entries[-1].head if entries else None
    if arguments.json:
        print(json.dumps({"run": run, "epochs": len(entries), "head": head, "problems": problems}))
        return 1 if problems else 0
    if problems:
        raise IotaError(
            "bad_ledger", f"the ledger of {run} does not verify:\n  " + "\n  ".join(problems), "Ask its operator why."
        )
    units = sum(units for entry in entries for _, units in entry.emissions)
    print(
        f"ledger of {run}: {len(entries)} epochs, {units:,} units paid, every head and every payout recomputed: right"
    )
    if head:
        print(f"head {head}")
    return 0
