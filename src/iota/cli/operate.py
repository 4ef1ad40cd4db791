"""`iota pause|resume|stop|ban|allow`: an operator's orders, signed by the operator's key."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from iota.cli.options import URL_HELP, add_json, join_url_of
from iota.errors import IotaError

if TYPE_CHECKING:
    from iota.nodes.ask import Asker
    from iota.wire.keys import Identity

ORDERS = {
    "pause": "hold the run: nothing new is handed out, deadlines stand still",
    "resume": "go on after a pause; deadlines move by its length",
    "stop": "end the run at the next full merge",
    "ban": "throw a key out and keep it out",
    "allow": "put a miner's key on the allow-list (and lift a ban)",
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text in ORDERS.items():
        parser = commands.add_parser(name, help=text, description=text)
        parser.add_argument("url", metavar="URL", help=URL_HELP)
        if name in ("ban", "allow"):
            parser.add_argument("target", metavar="KEY", help="the miner's or validator's public key")
        parser.add_argument(
            "--key", metavar="FILE", help="the operator's key file (default: operator.key of the run's folder)"
        )
        add_json(parser)
        parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import json

    from iota.core.queries import Operate
    from iota.nodes.ask import Asker
    from iota.nodes.real import RealClock, entropy

    url = join_url_of(arguments.url)
    identity = _operator(arguments.key, arguments.url, url)

    async def body() -> str:
        async with Asker(url, clock=RealClock(), entropy=entropy, identity=identity) as asker:
            target = await _target(asker, arguments)
            answer = await asker.json(Operate(command=arguments.command, target=target))
            return str(answer["done"])

    done = asyncio.run(body())
    print(json.dumps({"done": done}) if arguments.json else done)
    return 0


def _operator(file: str | None, given: str, url: str) -> Identity:
    """The operator's key: the file named, else that of the run's folder."""
    from iota.wire.keys import Identity

    if file is not None:
        return Identity.load(file)
    folders = [Path(given)] if "://" not in given else [p.parent for p in sorted(Path("runs").glob("*/join.url"))]
    for folder in folders:
        if (folder / "operator.key").exists() and (folder / "join.url").read_text().strip() == url:
            return Identity.load(folder / "operator.key")
    raise IotaError(
        "no_key",
        f"no operator's key for {url} was found here",
        "Give it with --key FILE; it was written to the run's folder as operator.key.",
    )


async def _target(asker: Asker, arguments: argparse.Namespace) -> str:
    """The whole key meant; for `ban`, the first digits of a member's key will do. Raises IotaError `unknown_key`."""
    from iota.core.queries import Status
    from iota.wire.keys import is_key

    text = str(getattr(arguments, "target", "")).lower()
    if not text or is_key(text):
        return text
    keys: list[str] = []
    if arguments.command == "ban":
        status = await asker.json(Status())
        members = [*status["validators"], *(m for stage in status["stages"] for m in stage["miners"])]
        keys = [m["key"] for m in members if m["key"].startswith(text)]
    if len(keys) != 1:
        raise IotaError(
            "unknown_key",
            f"{text[:70]!r} names {len(keys)} keys",
            "Give the whole key: 64 hex digits, see iota status.",
        )
    return keys[0]
