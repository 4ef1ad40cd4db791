"""A run's merged weights and history read from its folder alone, without a running orchestrator.

    <run folder>/blobs/            the objects: manifest.msgpack, checkpoints/, merge/, data/
    <run folder>/checkpoint.json   newest complete checkpoint of every stage: a JSON list of `Checkpoint`
    <run folder>/history.json      what the orchestrator tells of the run (`orchestrator.views.history`)

Only reads (except `write_checkpoints`): it is safe beside a running swarm. Objects are believed only when their SHA-256
is the checkpoint's; the manifest only when it is signed by the orchestrator that it names, which proves that it is
whole, not who made it: the folder's owner vouches for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from iota.config.load import load_run
from iota.config.schema import Manifest
from iota.core.values import Checkpoint, Piece, sha256
from iota.errors import IotaError
from iota.nodes.orchestrator.create import TOKENIZER_OBJECT
from iota.store.blobs import check_key
from iota.store.files import read_checked, write_atomic
from iota.store.manifest import OBJECT, checkpoint_zero, read_manifest
from iota.store.tokens import ByteTokenizer, FileTokenizer, Tokenizer
from iota.wire.keys import SIGNATURE_BYTES

BLOBS = "blobs"
CHECKPOINTS = "checkpoint.json"
HISTORY = "history.json"
RUNS = Path("runs")
"""Where runs lie when the run file names no folder."""


class _Signer(msgspec.Struct):
    """The one manifest field that says whose signature to check."""

    orchestrator: str


def run_folder(text: str) -> Path:
    """The run folder that a person means: a folder, a run file (.toml), or a name under runs/.

    Raises IotaError `no_run` when there is no such folder or no run in it, ConfigError for a bad run file.
    """
    path = Path(text)
    if path.suffix == ".toml" and path.is_file():
        config = load_run(path)
        path = Path(config.folder) if config.folder else RUNS / config.name
    elif not path.is_dir() and (RUNS / text).is_dir():
        path = RUNS / text
    if not is_run(path):
        raise IotaError(
            "no_run",
            f"{text} is no run: {path / BLOBS / OBJECT} does not exist",
            "Give a run's folder, its run file, or its name under runs/",
        )
    return path


def is_run(folder: Path) -> bool:
    """Whether a run was created in this folder."""
    return (folder / BLOBS / OBJECT).is_file()


def manifest_of(folder: Path) -> Manifest:
    """The run manifest. Raises IotaError `no_object`, `bad_manifest`."""
    data = read_checked(folder / BLOBS / OBJECT)
    try:
        key = msgspec.msgpack.decode(data[SIGNATURE_BYTES:], type=_Signer).orchestrator
    except msgspec.DecodeError as error:
        raise IotaError(
            "bad_manifest", f"{folder / BLOBS / OBJECT} is damaged: {error}", "Restore it from a copy"
        ) from error
    return read_manifest(data, key)


def history_of(folder: Path) -> dict[str, Any] | None:
    """The history that the orchestrator wrote last, or None when there is none yet. Raises IotaError `corrupt`."""
    path = folder / HISTORY
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_checked(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise IotaError("corrupt", f"{path} is damaged: {error}", "Let the orchestrator write it again") from error


# -------------------------------------------------------------------------------------------------- checkpoint.json


def write_checkpoints(folder: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Write the newest complete checkpoints, one a stage of one epoch: the old file stays, or the new one is whole.

    Blocks (called through `Compute`). Raises IotaError `disk_full`, `disk_failed`.
    """
    rows = sorted(checkpoints, key=lambda checkpoint: checkpoint.stage)
    assert rows and [row.stage for row in rows] == list(range(len(rows))), "one checkpoint of every stage"
    assert len({(row.run, row.epoch) for row in rows}) == 1, "of one run and one epoch"
    write_atomic(folder / CHECKPOINTS, [msgspec.json.encode(rows)])


def read_checkpoints(folder: Path, run: str) -> list[Checkpoint]:
    """The checkpoints of the last SYNC, in order of stage. That the pieces hold what they say is checked when they are
    read (`read_part`).

    Raises IotaError `no_object` before the first SYNC, `corrupt` for a damaged file, `other_run` when they are of
    another run than `run`.
    """
    path = folder / CHECKPOINTS
    try:
        rows = msgspec.json.decode(read_checked(path), type=list[Checkpoint])
    except msgspec.DecodeError as error:
        raise IotaError("corrupt", f"{path} is damaged: {error}", "It is written again at the next SYNC") from error
    stranger = next((row.run for row in rows if row.run != run), None)
    if stranger is not None:
        raise IotaError(
            "other_run", f"{path} holds checkpoints of run {stranger}, this is run {run}", "Use that run's own folder"
        )
    if not rows or [row.stage for row in rows] != list(range(len(rows))) or len({row.epoch for row in rows}) != 1:
        raise IotaError("corrupt", f"{path} does not name every stage once, at one epoch", "Let the run go on to SYNC")
    for row in rows:
        _check_cover(row, path)
    return rows


def latest_checkpoints(folder: Path, manifest: Manifest) -> list[Checkpoint]:
    """Those of the last SYNC; checkpoint 0 (the untrained model) before the first. Raises what `read_checkpoints` does,
    and `corrupt` when their shape is not the manifest's."""
    if not (folder / CHECKPOINTS).is_file():
        return [checkpoint_zero(manifest, stage) for stage in range(len(manifest.cuts))]
    rows = read_checkpoints(folder, manifest.run)
    if tuple(row.parameters for row in rows) != manifest.parameters:
        sizes = [row.parameters for row in rows]
        raise IotaError(
            "corrupt", f"{folder / CHECKPOINTS} has stages of {sizes} parameters, the manifest {manifest.parameters}"
        )
    return rows


def _check_cover(checkpoint: Checkpoint, path: Path) -> None:
    """Each part that has pieces is covered from 0 to the end, without gap or overlap."""
    ends: dict[str, int] = {}
    for piece in checkpoint.pieces:
        if piece.start != ends.get(piece.part, 0) or piece.stop <= piece.start or piece.offset < 0:
            raise IotaError(
                "corrupt", f"{path}: stage {checkpoint.stage}, part {piece.part} has a gap at {piece.start}"
            )
        ends[piece.part] = piece.stop
    short = [part for part, end in ends.items() if end != checkpoint.parameters]
    if short:
        raise IotaError("corrupt", f"{path}: stage {checkpoint.stage}, part {short[0]} is not whole")


def read_part(folder: Path, checkpoint: Checkpoint, part: str = "weights") -> np.ndarray:
    """One part ("weights", "momentum", "m", "v") of a stage, float32 [parameters]; zeros when it has no pieces.

    Raises IotaError `no_object` when a piece is gone (a running orchestrator clears old ones away: ask again),
    `corrupt` when its bytes are not those that were merged.
    """
    flat = np.zeros(checkpoint.parameters, dtype=np.float32)
    for piece in checkpoint.pieces:
        if piece.part == part:
            flat[piece.start : piece.stop] = np.frombuffer(_piece_bytes(folder, checkpoint, piece), dtype="<f4")
    return flat


def _piece_bytes(folder: Path, checkpoint: Checkpoint, piece: Piece) -> bytes:
    path = folder / BLOBS / check_key(piece.object)
    length = 4 * (piece.stop - piece.start)
    try:
        with path.open("rb") as file:
            file.seek(piece.offset)
            data = file.read(length)
    except FileNotFoundError:
        raise IotaError(
            "no_object",
            f"epoch {checkpoint.epoch}, stage {checkpoint.stage}: object {piece.object} is gone",
            "If the run is going on, try again: a newer checkpoint took its place",
        ) from None
    except OSError as error:
        raise IotaError("disk_failed", f"cannot read {path}: {error.strerror or error}", "Check the disk") from error
    found = sha256(data)
    if len(data) != length or found != piece.digest:
        raise IotaError(
            "corrupt",
            f"epoch {checkpoint.epoch}, stage {checkpoint.stage}, {piece.part} [{piece.start}, {piece.stop}): "
            f"{len(data)} bytes of {piece.object} have digest {found[:12]}, expected {length} with {piece.digest[:12]}",
            "Restore the object from a copy of the store",
        )
    return data


# ------------------------------------------------------------------------------------------------- tokens and text


def tokenizer_of(folder: Path, manifest: Manifest) -> Tokenizer:
    """The run's tokenizer, from the run's own store. Raises IotaError `corrupt`, `no_object`, `missing_extra`."""
    if manifest.tokenizer_digest == ByteTokenizer.digest:
        return ByteTokenizer()
    path = folder / BLOBS / TOKENIZER_OBJECT
    return FileTokenizer(read_checked(path, manifest.tokenizer_digest), str(path))


def tokens_trained(history: dict[str, Any] | None, epoch: int) -> int | None:
    """Training tokens behind the checkpoint of `epoch`, from the history; None when it does not say."""
    if epoch == 0:
        return 0
    epochs = {row["epoch"]: row for row in (history or {}).get("epochs", ())}
    if epoch + 1 in epochs:
        return int(epochs[epoch + 1]["tokens_at_start"])
    if history is not None and epoch in epochs and math.isfinite(history.get("tokens", math.nan)):
        return int(history["tokens"])
    return None
