"""`iota key new|show`: key files."""

from __future__ import annotations

import argparse

from iota.cli.options import add_json


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    key = commands.add_parser("key", help="make or show a key", description="A key is an identity: keep its file.")
    actions = key.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (("new", "make a key file (never replaces one)"), ("show", "print a key file's public key")):
        parser = actions.add_parser(name, help=text, description=text)
        parser.add_argument("file", metavar="FILE")
        add_json(parser)
        parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import json
    import os

    from iota.wire.keys import Identity, fingerprint

    if arguments.action == "new":
        identity = Identity.new(os.urandom(32))
        identity.save(arguments.file)
    else:
        identity = Identity.load(arguments.file)
    if arguments.json:
        print(json.dumps({"key": identity.key, "fingerprint": fingerprint(identity.key), "file": arguments.file}))
    else:
        print(identity.key)
    return 0
