"""Text sources: where a run's documents come from, in an order that does not change (issue: "Text sources").

`documents(data, reading)` yields `Document`s from one of
* "python": English and code that every CPython carries: the help topics of `pydoc_data`, each standard library module's
  docstrings as running text, and the code (docstrings taken out, so that no text comes twice) of every third module, so
  that English makes about half of the bytes. Tests, tables of encodings and bundled applications are left out.
* a folder (searched through) or a glob of .txt, .jsonl, .jsonl.gz, .parquet; of the last three `data.column` is read.
  A .txt file of more than `LONG` bytes is read as several documents, cut at blank lines where there are any.

A bad record (not UTF-8, not JSON, an empty or missing text, a damaged file) is skipped and counted in `reading`; above
10% of all records the source is refused. Nothing here needs a network.
"""

from __future__ import annotations

import ast
import glob
import gzip
import hashlib
import importlib
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from iota.config.schema import DataConfig
from iota.errors import IotaError

ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
LONG = 8 * 1024
BUDGET = 0.10
"""Share of bad records above which a source is refused rather than read around."""

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
    | {"idlelib", "lib2to3", "turtledemo", "ensurepip", "__phello__", "distutils"}
)
CODE_EVERY = 3


class Document(NamedTuple):
    """One document. `kind` names its sort (topic, docstrings, code, or the file's ending): the held-out text takes from
    every kind in proportion."""

    name: str
    kind: str
    text: str


class Reading(msgspec.Struct):
    """Counters of one pass over a source: records met, records skipped, and the first reasons why."""

    records: int = 0
    skipped: int = 0
    bytes: int = 0
    reasons: list[str] = []

    def skip(self, reason: str) -> None:
        self.skipped += 1
        if len(self.reasons) < 3:
            self.reasons.append(reason)


def documents(data: DataConfig, reading: Reading) -> Iterator[Document]:
    """Every document of the source up to `data.max_bytes` of UTF-8 (the last one is cut there; 0: no limit).

    Raises `IotaError`: `no_source` (nothing at that place), `no_column` (no record has the column), `bad_source` (more
    than 10% bad records), `no_text` (nothing readable in it), `missing_extra` (.parquet without pyarrow).
    """
    source = _python(reading) if data.source == "python" else _files(data, reading)
    left = data.max_bytes or None
    for document in source:
        size = len(document.text.encode("utf-8"))
        if left is not None and size > left:
            document = document._replace(text=document.text.encode("utf-8")[:left].decode("utf-8", "ignore"))
            size = left
        if document.text:
            reading.bytes += size
            yield document
        if left is not None:
            left -= size
            if left <= 0:
                break
    _judge(data, reading)


def _judge(data: DataConfig, reading: Reading) -> None:
    """The error budget, at the end of a pass."""
    if reading.skipped > BUDGET * reading.records:
        share = f"{reading.skipped} of {reading.records} records"
        raise IotaError(
            "bad_source",
            f"text source {data.source!r}: {share} cannot be used ({'; '.join(reading.reasons)})",
            f"Repair or remove them; up to {BUDGET:.0%} are skipped",
        )
    if reading.bytes == 0:
        raise IotaError(
            "no_text",
            f"text source {data.source!r} holds no text ({reading.records} records read)",
            "Point data.source at text, or leave it out for the text that Python carries",
        )


# ------------------------------------------------------------------------------------------------ what Python has


def _python(reading: Reading) -> Iterator[Document]:
    """Topics, docstrings and code, shuffled by a hash of their names so that a capped corpus keeps the mix."""
    root = Path(sysconfig.get_paths()["stdlib"])
    entries: list[tuple[bytes, str, str | Path]] = [
        (_rank(f"topic:{name}"), f"topic:{name}", text) for name, text in _topics().items()
    ]
    for path in _modules(root):
        name = path.relative_to(root).as_posix()
        entries.append((_rank(name), name, path))
    for _, name, what in sorted(entries, key=lambda entry: entry[:2]):
        reading.records += 1
        if isinstance(what, str):
            yield Document(name, "topic", what)
        else:
            yield from _module(name, what, reading)


def _topics() -> dict[str, str]:
    """The help topics, or none where a distribution leaves them out."""
    try:
        found: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        return {}
    return found


def _rank(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8")).digest()[:8]


def _modules(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.name.startswith(("config-", ".")):
                yield from _modules(path)
        elif path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path


def _module(name: str, path: Path, reading: Reading) -> Iterator[Document]:
    """One module's docstrings as a document, and for every third module its code as another."""
    try:
        source = path.read_bytes().decode("utf-8")
        tree = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        reading.skip(f"{name}: {type(error).__name__}")
        return
    found = list(_docstrings(tree, name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")))
    if found:
        yield Document(
            f"{name}:docstrings", "docstrings", "\n\n".join(f"{title}\n\n{text}" for title, text, _, _ in found)
        )
    if int.from_bytes(_rank(f"code:{name}"), "big") % CODE_EVERY == 0:
        lines = source.splitlines()
        taken = {line for _, _, first, last in found for line in range(first, last + 1)}
        code = "\n".join(line.rstrip() for number, line in enumerate(lines, 1) if number not in taken).strip()
        if code:
            yield Document(name, "code", code)


def _docstrings(node: ast.AST, title: str) -> Iterator[tuple[str, str, int, int]]:
    """(dotted name, docstring, first line, last line) of a module, its classes and their functions, in order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield title, text, node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _docstrings(child, f"{title}.{child.name}")


# ---------------------------------------------------------------------------------------------- folders and globs


def find_files(source: str) -> list[Path]:
    """The files of a folder or glob, sorted. Raises `no_source` when nothing is there, `no_text` when no file fits."""
    place = Path(source)
    if place.is_dir():
        found = [path for path in place.rglob("*") if path.is_file()]
    elif glob.has_magic(source):
        found = [Path(path) for path in glob.glob(source, recursive=True) if Path(path).is_file()]
    elif place.is_file():
        found = [place]
    else:
        raise IotaError(
            "no_source", f"text source {source!r} does not exist", "Correct data.source: a folder, a file or a glob"
        )
    fitting = sorted(path for path in found if path.name.lower().endswith(ENDINGS))
    if not fitting:
        raise IotaError(
            "no_text", f"text source {source!r} matches no file of {', '.join(ENDINGS)}", "Correct data.source"
        )
    return fitting


def _files(data: DataConfig, reading: Reading) -> Iterator[Document]:
    columns = _Columns(data.column)
    for path in find_files(data.source):
        name = path.name.lower()
        try:
            if name.endswith(".txt"):
                yield from _plain(path, reading)
            elif name.endswith(".parquet"):
                yield from _parquet(path, reading, columns)
            else:
                yield from _lines(path, reading, columns)
        except (OSError, EOFError, zlib.error) as error:
            reading.records += 1
            reading.skip(f"{path}: {error}")
    columns.judge(data.source)


class _Columns:
    """Whether any record had the column: none at all is a wrong setting, a few without it are bad records."""

    def __init__(self, column: str) -> None:
        self.column = column
        self.hits = 0
        self.seen: dict[str, None] = {}

    def take(self, record: object) -> str | None:
        if not isinstance(record, dict):
            return None
        value = record.get(self.column)
        self.hits += self.column in record
        if len(self.seen) < 20:
            self.seen.update(dict.fromkeys(str(key)[:40] for key in record))
        return value if isinstance(value, str) and value.strip() else None

    def judge(self, source: str) -> None:
        if self.hits == 0 and self.seen:
            raise IotaError(
                "no_column",
                f"no record of text source {source!r} has the column {self.column!r}",
                f"Set data.column to one of: {', '.join(list(self.seen)[:20])}",
            )


def _plain(path: Path, reading: Reading) -> Iterator[Document]:
    """A text file, read piece by piece so that one of many gigabytes never lies in memory."""
    with path.open("rb") as file:
        rest, number = b"", 0
        while True:
            block = file.read(LONG)
            rest += block
            while len(rest) > LONG or (rest and not block):
                cut = _cut(rest) if len(rest) > LONG else len(rest)
                piece, rest = rest[:cut], rest[cut:]
                reading.records += 1
                try:
                    text = piece.decode("utf-8")
                except UnicodeDecodeError as error:
                    reading.skip(f"{path}: {error.reason}")
                    continue
                if text.strip():
                    yield Document(f"{path}#{number}", "txt", text)
                    number += 1
            if not block:
                return


def _cut(data: bytes) -> int:
    """Where to cut text longer than LONG: after its last blank line, else last newline, else last whole character."""
    for mark in (b"\n\n", b"\n", b" "):
        place = data.rfind(mark, LONG // 4, LONG)
        if place >= 0:
            return place + len(mark)
    place = LONG
    while place > LONG - 4 and data[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _lines(path: Path, reading: Reading, columns: _Columns) -> Iterator[Document]:
    """JSON lines, gzipped when the name says so."""
    opener: Any = gzip.open if path.name.lower().endswith(".gz") else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            reading.records += 1
            try:
                text = columns.take(msgspec.json.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                reading.skip(f"{path}:{number}: not JSON")
                continue
            if text is None:
                reading.skip(f"{path}:{number}: no text in column {columns.column!r}")
            else:
                yield Document(f"{path}:{number}", "jsonl", text)


def _parquet(path: Path, reading: Reading, columns: _Columns) -> Iterator[Document]:
    """A parquet file, one batch of rows at a time; only the text column is read."""
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise IotaError(
            "missing_extra",
            f"{path} needs pyarrow, which is not installed",
            "Install it: pip install 'iota-train[parquet]'",
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            if columns.column not in file.schema_arrow.names:
                columns.seen.update(dict.fromkeys(file.schema_arrow.names))
                reading.records += 1
                reading.skip(f"{path}: no column {columns.column!r}")
                return
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=[columns.column]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    reading.records += 1
                    good = columns.take({columns.column: text})
                    if good is None:
                        reading.skip(f"{path}:{number}: no text in column {columns.column!r}")
                    else:
                        yield Document(f"{path}:{number}", "parquet", good)
    except arrow.ArrowInvalid as error:
        reading.records += 1
        reading.skip(f"{path}: {error}")
