"""The command line is a promise: names and options change only together with this list. And it starts light."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from iota.cli.main import build_parser

SRC = Path(__file__).resolve().parents[1] / "src"

RUN_FILE = ["RUN.toml", "--set"]
PEER = ["URL", "--folder", "--key", "--device", "--max-memory", "--give-up", "--owner", "--threads"]
FROZEN = {
    "up": [*RUN_FILE, "--no-report", "--device", "--threads", "--json"],
    "orchestrator": [*RUN_FILE, "--threads"],
    "blobs": RUN_FILE,
    "miner": [*PEER, "--dtype", "--max-disk"],
    "validator": PEER,
    "status": ["URL", "--json"],
    "explain": ["URL", "MINER", "EPOCH", "--json"],
    "ledger show": ["URL", "--json"],
    "ledger verify": ["URL", "--json"],
    "pause": ["URL", "--key", "--json"],
    "resume": ["URL", "--key", "--json"],
    "stop": ["URL", "--key", "--json"],
    "ban": ["URL", "KEY", "--key", "--json"],
    "allow": ["URL", "KEY", "--key", "--json"],
    "report": ["RUN", "--json"],
    "export": ["RUN", "OUT", "--format", "--json"],
    "import": ["FOLDER", "RUN.toml", "--set", "--json"],
    "generate": ["CHECKPOINT", "PROMPT", "--tokens", "--temperature", "--top-k", "--seed", "--json"],
    "key new": ["FILE", "--json"],
    "key show": ["FILE", "--json"],
    "bench control": ["--keys", "--seconds", "--json"],
    "bench swarm": ["--recipe", "--dtype", "--seconds", "--json"],
    "plan": [*RUN_FILE, "--fleet", "--json"],
    "bench device": [
        *["--out", "--name", "--seconds", "--recipe", "--device", "--folder", "--threads", "--json"],
        *["--up", "--down", "--round-trip", "--url", "--serve"],
    ],
    "bench curve": ["RUN.toml", "--set", "--tokens", "--miners", "--json"],
    "lab fig5": [
        *["--cells", "--seeds", "--jobs", "--minutes", "--text", "--device", "--dtype", "--results", "--work"],
        *["--quick", "--list", "--report", "--overhead", "--json"],
    ],
}


def commands(parser, name=""):
    """{command: its positionals and options} of the whole tree."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if inner:
        return {k: v for n, sub in inner[0].choices.items() for k, v in commands(sub, f"{name} {n}".strip()).items()}
    shown = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return {name: sorted(a.option_strings[-1] if a.option_strings else str(a.metavar) for a in shown)}


def test_commands_and_options_are_frozen():
    assert commands(build_parser()) == {name: sorted(words) for name, words in FROZEN.items()}


def test_every_command_says_what_it_does(capsys):
    for name in FROZEN:
        with pytest.raises(SystemExit) as end:
            build_parser().parse_args([*name.split(), "--help"])
        assert end.value.code == 0
        assert "usage: iota " + name in capsys.readouterr().out


def test_help_loads_no_torch():
    script = """
import sys, io, contextlib, json
from iota.cli.main import main
for argv in (["--help"], ["up", "--help"], ["miner", "--help"], ["report", "--help"]):
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(argv)
    except SystemExit as end:
        assert end.code == 0
        assert "usage" in out.getvalue()
print(json.dumps([m for m in ("torch", "numpy", "aiohttp", "sqlite3", "nacl") if m in sys.modules]))
"""
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_threads_are_set_before_anything_heavy():
    script = """
import os, sys
from iota.cli.main import main
import iota.cli.nodes as nodes
def seen(arguments):
    print(sorted({os.environ[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}),
          "torch" in sys.modules, "numpy" in sys.modules)
nodes.run_miner = seen
main(["miner", "http://h:1/#" + "0" * 64, "--threads", "3"])
main(["miner", "http://h:1/#" + "0" * 64])
"""
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "7"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["['3'] False False", "['1'] False False"], done.stderr


@pytest.mark.parametrize("argv", [[], ["fly"], ["up"], ["miner", "http://h:1", "--threads", "0"], ["key"]])
def test_wrong_usage_is_2(argv, capsys):
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args(argv)
    assert end.value.code == 2
    assert "usage: iota" in capsys.readouterr().err
