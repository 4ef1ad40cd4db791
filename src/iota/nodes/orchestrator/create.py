"""Creating a run: text to token shards, checkpoint 0 of every stage, and the signed manifest that names them all.

Needs no torch: initial weights are drawn by numpy, tensor by tensor (design section 2), or read from the folder that
`initial` names (`iota.nodes.start`, which loads torch for it). The manifest is stored last, so a
creation that was killed half way leaves no run, and creating it again overwrites what lay there. Creating a run where
one with the same configuration exists opens it; another configuration is refused, with both values named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from iota import PROTOCOL
from iota.config.load import check
from iota.config.rules import derive
from iota.config.schema import Manifest, RunConfig, Section, TokenShard
from iota.core.values import Checkpoint, Key, Piece, sha256
from iota.errors import ConfigError
from iota.model.layout import initial_state
from iota.model.partition import count_parameters, cut_blocks
from iota.nodes.start import Start
from iota.store.blobs import Blobs
from iota.store.manifest import OBJECT, VERSION, Sign, name_run, read_manifest, seal_manifest
from iota.store.ngram import Trigram
from iota.store.split import Split
from iota.store.text import Reading, documents
from iota.store.tokens import ShardWriter, Tokenizer, open_tokenizer, token_dtype

PIECE_BYTES = 64 * 1024 * 1024
TOKENIZER_OBJECT = "data/tokenizer.json"
LOCAL = ("folder", "swarm")
"""Where a run is served from, not what it is: these may differ when it is opened again."""

Progress = Callable[[str], None]


def _quiet(_: str) -> None:
    """No progress wanted."""


async def create_run(
    config: RunConfig, blobs: Blobs, key: Key, now: float, sign: Sign, progress: Progress = _quiet
) -> Manifest:
    """Create the run in `blobs`, or open the one there. `key` and `sign` are the orchestrator's; `now` Unix time.

    When an existing run is opened, `config.stop` (a finished run can be extended), `config.folder` and `config.swarm`
    may differ from the manifest's; the manifest is returned as signed, the caller goes by its own values of these.

    Raises ConfigError (see `iota.config.load.check`, tokenizer, a corpus too small for the settings, a run of another
    configuration), IotaError from the text source, the initial weights (`iota.nodes.start`) and the store,
    `bad_manifest` when the run there is another key's.
    """
    config = check(config)
    if await blobs.size(OBJECT) is not None:
        manifest = read_manifest(await blobs.get(OBJECT), key)
        compare(manifest.config, config, manifest.run)
        progress(f"run {manifest.run} opened")
        return manifest
    weights = _initial_weights(config, progress)
    corpus = await _write_corpus(config, blobs, progress)
    cuts = cut_blocks(config)
    checkpoints = []
    for stage, cut in enumerate(cuts):
        checkpoints.append(await _write_checkpoint(weights(config, stage, cut), blobs, stage))
        progress(f"stage {stage}: blocks {cut[0]} to {cut[1] - 1}, {checkpoints[-1].parameters:,} parameters, written")
    manifest = name_run(
        Manifest(
            version=VERSION,
            protocol=PROTOCOL,
            run="",
            created=now,
            orchestrator=key,
            config=config,
            cuts=cuts,
            parameters=tuple(checkpoint.parameters for checkpoint in checkpoints),
            checkpoints=tuple(msgspec.msgpack.encode(checkpoint) for checkpoint in checkpoints),
            **corpus,
        )
    )
    await blobs.put(OBJECT, [seal_manifest(manifest, sign)])
    progress(f"run {manifest.run} created: {sum(manifest.parameters):,} parameters in {len(cuts)} stages")
    return manifest


# ---------------------------------------------------------------------------------------------------- opening again


def compare(there: RunConfig, wanted: RunConfig, run: str) -> None:
    """Refuse to open a run under another configuration. Raises ConfigError naming every difference, both values."""
    if _follows_stop(there) and _follows_stop(wanted):
        # The learning-rate horizon came from the stop rule; a new rule must not change the schedule of a run.
        wanted = _horizon(wanted, there.train.lr_tokens)
    rows = [row for row in _differences(there, wanted, "") if row[0] != "stop" and row[0].split(".")[0] not in LOCAL]
    if rows:
        text = "; ".join(f"{path} is {old!r} there, {new!r} in the run file" for path, old, new in rows)
        raise ConfigError(
            f"run {run} exists with another configuration: {text}",
            "Only stop may change in an existing run; choose another folder (or name) for another run",
        )


def _horizon(config: RunConfig, tokens: int) -> RunConfig:
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, lr_tokens=tokens))


def _follows_stop(config: RunConfig) -> bool:
    """Whether the horizon is what a run file without `lr_tokens` would get."""
    return derive(_horizon(config, 0)).train.lr_tokens == config.train.lr_tokens


def _differences(there: Section, wanted: Section, section: str) -> list[tuple[str, Any, Any]]:
    rows: list[tuple[str, Any, Any]] = []
    for field in there.__struct_fields__:
        path = f"{section}.{field}" if section else field
        old, new = getattr(there, field), getattr(wanted, field)
        if isinstance(old, Section):
            rows += _differences(old, new, path)
        elif old != new:
            rows.append((path, old, new))
    return rows


# ----------------------------------------------------------------------------------------------------- text to tokens


async def _write_corpus(config: RunConfig, blobs: Blobs, progress: Progress) -> dict[str, Any]:
    """Read the source twice (see `iota.store.split`), store the shards; the manifest's fields about the corpus."""
    tokenizer = open_tokenizer(config.data, config.model.vocabulary)
    if tokenizer.file:
        await blobs.put(TOKENIZER_OBJECT, [tokenizer.file])
    split = Split(config.seed, config.data.heldout_share, max(2**18, 64 * config.data.heldout_tokens))
    reading = Reading()
    for document in documents(config.data, reading):
        split.consider(document)
    skipped = f", {reading.skipped} bad ones skipped ({'; '.join(reading.reasons)})" if reading.skipped else ""
    progress(f"text: {reading.bytes:,} bytes in {reading.records:,} records{skipped}")

    dtype = token_dtype(tokenizer.size)
    writer = ShardWriter(blobs, "train", dtype)
    trigram = Trigram() if config.data.tokenizer == "bytes" else None
    for document in documents(config.data, Reading()):
        if split.train(document):
            ids = tokenizer.encode(document.text)
            await writer.add(ids)
            if trigram is not None:
                trigram.add(ids.astype(np.uint8))
    train = await writer.finish()
    if writer.tokens < config.model.sequence + 1:
        raise ConfigError(
            f"text source {config.data.source!r} gives {writer.tokens} training tokens beside what is held out, "
            f"less than one window of model.sequence + 1 = {config.model.sequence + 1}",
            "Give more text or a shorter sequence",
        )
    heldout, tokens, ratio = await _write_heldout(config, blobs, split, tokenizer, dtype)
    yardstick = None if trigram is None else trigram.loss(tokens.astype(np.uint8))
    progress(
        f"tokens: {writer.tokens:,} to train on, {tokens.size:,} held out ({split.dropped} near-duplicates left out)"
        + ("" if yardstick is None else f"; a byte-trigram model reaches {yardstick:.3f} nats per byte")
    )
    return {
        "train_shards": train,
        "heldout_shards": heldout,
        "tokenizer_digest": tokenizer.digest,
        "bytes_per_token": ratio,
        "trigram_loss": yardstick,
    }


async def _write_heldout(
    config: RunConfig, blobs: Blobs, split: Split, tokenizer: Tokenizer, dtype: str
) -> tuple[tuple[TokenShard, ...], np.ndarray, float]:
    """Exactly `heldout_tokens` held-out tokens: shards, the tokens themselves, UTF-8 bytes per token."""
    wanted = config.data.heldout_tokens
    parts: list[np.ndarray] = []
    found = size = 0
    for piece in split.heldout():
        parts.append(tokenizer.encode(piece))
        found += parts[-1].size
        size += len(piece.encode("utf-8"))
        if found >= wanted:
            break
    if found < wanted:
        raise ConfigError(
            f"the corpus gives {found} held-out tokens, data.heldout_tokens = {wanted} ({sum(split.bytes.values())} "
            f"bytes of text, {split.dropped} held-out documents left out as near-duplicates)",
            "Raise data.heldout_share, lower data.heldout_tokens, or give more and shorter documents",
        )
    tokens = np.concatenate(parts)[:wanted]
    writer = ShardWriter(blobs, "heldout", dtype)
    await writer.add(tokens)
    return await writer.finish(), tokens, 1.0 if config.data.tokenizer == "bytes" else size / found


# ------------------------------------------------------------------------------------------------------ checkpoint 0


InitialWeights = Callable[[RunConfig, int, tuple[int, int]], np.ndarray]
"""The flat float32 weights that a stage with a cut begins with."""


def _initial_weights(config: RunConfig, progress: Progress) -> InitialWeights:
    """Drawn from the seed, or read from the folder `initial`, which is checked against the run here."""
    if not config.initial:
        return _drawn
    start = Start(Path(config.initial))
    start.check(config)
    progress(f"initial weights: {'; '.join([config.initial, *start.notes(config)])}")
    return start.weights


def _drawn(config: RunConfig, stage: int, cut: tuple[int, int]) -> np.ndarray:
    weights = initial_state(config, stage, cut, config.seed)
    assert weights.size == count_parameters(config, stage, cut)
    return weights


async def _write_checkpoint(weights: np.ndarray, blobs: Blobs, stage: int) -> Checkpoint:
    """Store a stage's initial weights. Outer momentum and inner moments begin as zeros: parts left out."""
    assert weights.dtype == np.float32
    raw = weights.astype("<f4", copy=False).view(np.uint8).data
    pieces = []
    for number, start in enumerate(range(0, len(raw), PIECE_BYTES)):
        part = raw[start : start + PIECE_BYTES]
        key = f"checkpoints/0/{stage}/weights-{number:04d}.bin"
        await blobs.put(key, [part])
        pieces.append(Piece("weights", start // 4, (start + len(part)) // 4, key, 0, sha256(part)))
    return Checkpoint(run="", epoch=0, stage=stage, parameters=int(weights.size), t=0, pieces=tuple(pieces))
