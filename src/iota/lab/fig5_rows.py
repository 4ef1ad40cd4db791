"""A job's results on disk: one JSON line each in `<results>/<job>.jsonl`, committed with the repository.

{"row": "job", "name", "spec", "digest", "data", "parameters", ...}       first; what the numbers are of
{"row": "session", "step", "machine", "code", ...}                        where and with which code it went on
{"row": "heldout", "step", "tokens", "heldout_loss", "blocks", ...}       the curve
{"row": "end", "outcome": "done" | "diverged", ...}                       last; without it a job is not finished
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from iota.errors import ConfigError
from iota.lab.fig5_spec import Spec, differences
from iota.store.files import write_atomic

Row = dict[str, Any]


class Results:
    """The rows of one job as they are on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path)

    @cached_property
    def spec(self) -> Spec:
        """Of the first row. Raises ConfigError when it is none of ours."""
        try:
            return msgspec.convert(self.rows[0]["spec"], Spec)
        except (IndexError, KeyError, msgspec.ValidationError) as error:
            raise ConfigError(f"{self.path} holds no job of this lab: {error}", "Remove it.") from None

    @property
    def end(self) -> Row | None:
        return self.rows[-1] if self.rows and self.rows[-1].get("row") == "end" else None

    @property
    def curve(self) -> list[Row]:
        return [row for row in self.rows if row.get("row") == "heldout"]

    def check(self, spec: Spec, data: str) -> None:
        """Refuse rows of another job. Raises ConfigError naming what differs."""
        if not self.rows:
            return
        changed = differences(self.spec, spec)
        if self.rows[0]["data"] != data:
            changed.append("the text or its tokens are others")
        if changed:
            raise ConfigError(
                f"{self.path} was run as another job: {'; '.join(changed)}",
                "Give another --results folder, or remove the file to run the job anew.",
            )


def read_rows(path: Path) -> list[Row]:
    """All whole lines; none when there is no file. A last line without its end was being written: left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]
    try:
        return [msgspec.json.decode(line, type=Row) for line in lines if line.strip()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}", "Remove it to run the job anew.") from None


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file."""
    write_atomic(path, [msgspec.json.encode(row) + b"\n" for row in rows], durable=False)


def add_row(path: Path, row: Row) -> None:
    """Append one line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def machine() -> str:
    """What computes, in words: processor and number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def code_digest() -> str:
    """Names the sources that a job's numbers depend on: the package's model."""
    folder = Path(__file__).resolve().parents[1] / "model"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
