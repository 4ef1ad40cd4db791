"""The command `iota`: parses the command line, runs one command, turns errors into one line and an exit code.

Exit codes: 0 done; 1 an error that a person can act on, printed as "iota: <cause>. <remedy>"; 2 wrong usage;
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from iota import __version__
from iota.cli.process import limit_threads, watch_parent
from iota.errors import IotaError

GROUPS = ("up", "nodes", "ask", "operate", "report", "export", "import_", "generate", "key", "plan", "bench", "lab")
"""Modules of this package; each `add`s its commands. None imports anything heavy before a command runs."""

EPILOG = """\
threads: a process computes with as many threads as --threads says, 1 by default, so that many processes share a
machine well; the limit is set (OMP_NUM_THREADS and its like) before torch is loaded.
exit codes: 0 done, 1 an error (one line says what and what to do), 2 wrong usage, 130 stopped by Ctrl-C.
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="iota",
        description="Pretrain one language model across machines that nobody owns together (arXiv 2507.17766).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"iota {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in GROUPS:
        importlib.import_module(f"iota.cli.{group}").add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    arguments = build_parser().parse_args(argv)
    limit_threads(getattr(arguments, "threads", None) or 1)
    watch_parent()
    try:
        return int(arguments.run(arguments) or 0)
    except IotaError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away, e.g. `iota ledger show URL | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"iota: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("iota: stopped", file=sys.stderr)
        return 130


def error_line(error: IotaError) -> str:
    """ "iota: <cause>. <remedy>"."""
    text = f"iota: {error.cause.rstrip('.')}."
    return f"{text} {error.remedy.rstrip('.')}." if error.remedy else text


if __name__ == "__main__":
    sys.exit(main())
