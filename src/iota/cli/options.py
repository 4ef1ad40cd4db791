"""Options that several commands share, and reading run files with values set on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from iota.errors import IotaError

if TYPE_CHECKING:
    from iota.config.schema import RunConfig

RUN_HELP = "run file (TOML), e.g. recipes/demo.toml"
URL_HELP = "join URL of the run (http://HOST:PORT/#KEY), or the run's folder on this machine"


def positive(text: str) -> int:
    """argparse type: a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def seconds(text: str) -> float:
    """argparse type: a duration, 0 or more."""
    number = float(text)
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no duration in seconds")
    return number


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def add_run_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", metavar="RUN.toml", help=RUN_HELP)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='use another value than the run file, e.g. --set swarm.port=9000 --set "stop=epochs >= 2"; repeatable',
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="compute threads (default 1)")


def read_run(arguments: argparse.Namespace) -> RunConfig:
    """The run file with the values of --set, checked. Raises ConfigError before anything is built."""
    from iota.config.load import check, load_run, with_values

    config = with_values(load_run(arguments.run_file), arguments.set)
    check(config, arguments.run_file)
    return config


def join_url_of(text: str) -> str:
    """A join URL given as such or by the run's folder on this machine. Raises IotaError `no_run`."""
    if "://" in text:
        return text
    path = Path(text) / "join.url"
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise IotaError(
            "no_run",
            f"{text!r} is neither a join URL nor a run's folder ({path} cannot be read)",
            "Give the URL that the orchestrator prints, http://HOST:PORT/#KEY, or the folder, e.g. runs/demo.",
        ) from None
