"""`iota orchestrator`, `iota blobs`, `iota miner`, `iota validator`: one long-running process each."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from iota.cli.options import URL_HELP, add_run_file, add_threads, join_url_of, read_run, seconds
from iota.cli.process import limit_torch, run_process, say

if TYPE_CHECKING:
    import asyncio

    from iota.nodes.peer_process import Effects, PeerOptions

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def byte_count(text: str) -> int:
    """argparse type: 500M, 8G, or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 500M or 8G")
    return int(float(match[1]) * UNITS[match[2]])


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "create or open a run and serve it; a finished run goes on when its stop rule was changed"
    orchestrator = commands.add_parser("orchestrator", help=text, description=text)
    add_run_file(orchestrator)
    add_threads(orchestrator)
    orchestrator.set_defaults(run=run_orchestrator)

    text = "serve a run's blob store; needs the orchestrator's public key only"
    blobs = commands.add_parser("blobs", help=text, description=text)
    add_run_file(blobs)
    blobs.set_defaults(run=run_blobs)

    miner = commands.add_parser("miner", help="lend this machine to a run", description="Train one stage of a run.")
    _add_peer(miner, "miner")
    miner.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype (default: the run's)")
    miner.add_argument(
        "--max-disk", type=byte_count, default=0, metavar="SIZE", help="most disk, e.g. 20G (default: no limit)"
    )
    miner.set_defaults(run=run_miner)

    text = "replay miners' work and measure checkpoints"
    validator = commands.add_parser("validator", help=text, description=text)
    _add_peer(validator, "validator")
    validator.set_defaults(run=run_validator)


def _add_peer(parser: argparse.ArgumentParser, role: str) -> None:
    parser.add_argument("url", metavar="URL", help=URL_HELP)
    parser.add_argument("--folder", metavar="DIR", default=role, help=f"key, session and data (default ./{role})")
    parser.add_argument("--key", metavar="FILE", help="key file (default: key in the folder, made when missing)")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="auto: the best there is (default)"
    )
    parser.add_argument(
        "--max-memory", type=byte_count, default=0, metavar="SIZE", help="most memory, e.g. 8G (default: no limit)"
    )
    parser.add_argument(
        "--give-up",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="end when the orchestrator was unreachable this long (default 0: never)",
    )
    parser.add_argument("--owner", default="", metavar="NAME", help="who owns this machine (the operator sees it)")
    add_threads(parser)


def run_orchestrator(arguments: argparse.Namespace) -> int:
    from iota.nodes.folder import folder_of
    from iota.nodes.orchestrator.process import serve
    from iota.nodes.real import RealClock, entropy

    config = read_run(arguments)
    folder = folder_of(config)
    say(f"run folder {folder.path}")

    async def work(stop: asyncio.Event) -> bool:
        finished = await serve(config, folder, clock=RealClock(), entropy=entropy, say=say, stop=stop)
        say("the run is finished" if finished else "stopped; start again to go on from here")
        return finished

    return run_process(work)


def run_blobs(arguments: argparse.Namespace) -> int:
    import asyncio

    from iota.nodes.folder import folder_of, read_public_key
    from iota.nodes.real import RealClock
    from iota.store.remote import MAX_OBJECT
    from iota.store.service import run_service

    config = read_run(arguments)
    folder, swarm = folder_of(config), config.swarm

    async def work(stop: asyncio.Event) -> bool:
        told = False
        while (key := read_public_key(folder)) is None and not stop.is_set():
            if not told:
                say(f"waiting for {folder.public_key}, which `iota orchestrator {arguments.run_file}` writes")
                told = True
            await asyncio.sleep(0.2)
        if key is not None:
            await run_service(
                folder.blobs,
                key,
                swarm.host,
                swarm.blob_port,
                now=RealClock().now,
                max_object=MAX_OBJECT,
                stop=stop,
                ready=lambda host, port: say(f"blobs of {folder.blobs} served at http://{host}:{port}"),
            )
        return False

    return run_process(work)


def run_miner(arguments: argparse.Namespace) -> int:
    from iota.nodes.miner.process import serve

    limit_torch(arguments.threads)
    return run_process(lambda stop: serve(_options(arguments), _effects(stop)))


def run_validator(arguments: argparse.Namespace) -> int:
    from iota.nodes.validator.process import serve

    return run_process(lambda stop: serve(_options(arguments), _effects(stop)))


def _options(arguments: argparse.Namespace) -> PeerOptions:
    from pathlib import Path

    from iota.nodes.peer_process import PeerOptions

    return PeerOptions(
        url=join_url_of(arguments.url),
        folder=Path(arguments.folder),
        key=Path(arguments.key) if arguments.key else None,
        device=arguments.device,
        dtype=getattr(arguments, "dtype", None) or "",
        max_memory=arguments.max_memory,
        max_disk=getattr(arguments, "max_disk", 0),
        owner=arguments.owner,
        threads=arguments.threads,
        give_up=arguments.give_up,
    )


def _effects(stop: asyncio.Event) -> Effects:
    from iota.nodes.peer_process import Effects
    from iota.nodes.real import RealClock, entropy

    return Effects(RealClock(), entropy, say, stop)
