"""A trained model as a folder that stands alone, and models opened again from such a folder or from a run's.

    model.safetensors   the merged float32 weights of all stages, by global name (`blocks.7.attention.q.weight`)
    config.json         what the model is and where it comes from (`Card`); written last: without it, no export
    tokenizer.json      the run's tokenizer, unless it is "bytes"

Nothing of it needs the run, its processes or its store any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from iota.config.schema import Manifest, RunConfig
from iota.errors import IotaError
from iota.model.generate import Chain
from iota.model.layout import Layout, tensor_shapes, transformers_name
from iota.nodes import checkpoint as run_folder
from iota.nodes.card import CARD, FORMAT, TOKENIZER, WEIGHTS, Card, bad_export, read_card
from iota.store.files import read_checked, write_atomic
from iota.store.tokens import ByteTokenizer, FileTokenizer, Tokenizer


@dataclass(frozen=True)
class Trained:
    """A run's newest merged weights with what is known of them. `stages[s]`: flat float32 weights of stage s."""

    manifest: Manifest
    card: Card
    tokenizer: Tokenizer
    stages: tuple[np.ndarray, ...]

    def tensors(self, stage: int) -> dict[str, np.ndarray]:
        """A stage's tensors by their global names."""
        return Layout.for_stage(self.manifest.config, stage, self.manifest.cuts[stage]).views(self.stages[stage])


@dataclass(frozen=True)
class Loaded:
    """A model ready to write, with its tokenizer and its origin."""

    chain: Chain
    tokenizer: Tokenizer
    run: str
    epoch: int


# ---------------------------------------------------------------------------------------------------------- export


def trained_model(folder: Path) -> Trained:
    """The newest merged model of the run in `folder`. Raises what reading the run raises."""
    manifest = run_folder.manifest_of(folder)
    checkpoints = run_folder.latest_checkpoints(folder, manifest)
    epoch = checkpoints[0].epoch
    tokenizer = run_folder.tokenizer_of(folder, manifest)
    shapes = [tensor_shapes(manifest.config, stage, cut) for stage, cut in enumerate(manifest.cuts)]
    names = {name: theirs for part in shapes for name in part if (theirs := transformers_name(name)) is not None}
    card = Card(
        format=FORMAT,
        run=manifest.run,
        epoch=epoch,
        tokens=run_folder.tokens_trained(run_folder.history_of(folder), epoch),
        seed=manifest.config.seed,
        model=manifest.config.model,
        stages=manifest.config.stages,
        cuts=manifest.cuts,
        tokenizer=TOKENIZER if tokenizer.file else "bytes",
        tokenizer_digest=tokenizer.digest,
        transformers_names=names,
    )
    stages = tuple(run_folder.read_part(folder, checkpoint) for checkpoint in checkpoints)
    return Trained(manifest, card, tokenizer, stages)


def need_empty(out: Path) -> None:
    """Raises IotaError `not_empty` unless `out` is a new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise IotaError(
            "not_empty", f"{out} exists and is not an empty folder", "Choose another place; nothing is lost"
        )


def export(folder: Path, out: Path) -> Card:
    """Write the newest merged weights of the run in `folder` into `out`, which must be new or empty.

    Raises IotaError `not_empty`, `disk_full`, `disk_failed`, and what reading the run raises.
    """
    need_empty(out)
    trained = trained_model(folder)
    card = trained.card
    tensors = {name: view for stage in range(len(card.cuts)) for name, view in trained.tensors(stage).items()}
    about = {"format": FORMAT, "run": card.run, "epoch": str(card.epoch)}
    write_atomic(out / WEIGHTS, [safetensors.save(tensors, about)])
    if trained.tokenizer.file:
        write_atomic(out / TOKENIZER, [trained.tokenizer.file])
    write_atomic(out / CARD, [msgspec.json.format(msgspec.json.encode(card), indent=2)])
    return card


# ----------------------------------------------------------------------------------------------------------- open


def open_model(folder: Path) -> Loaded:
    """The model in an export folder, or the newest merged one in a run's folder.

    Raises IotaError `no_checkpoint` when the folder is neither, `bad_checkpoint` (a tensor is missing, has another
    shape, or nobody knows it), and what reading a run raises.
    """
    if (folder / CARD).is_file():
        return _open_export(folder)
    if run_folder.is_run(folder):
        return open_run(folder)
    raise IotaError(
        "no_checkpoint",
        f"{folder} is neither an exported model ({CARD} and {WEIGHTS}) nor a run's folder",
        "Make one with: iota export RUN OUT",
    )


def open_run(folder: Path) -> Loaded:
    """The newest merged model of a run."""
    trained = trained_model(folder)
    chain = Chain(trained.manifest.config, trained.card.cuts, trained.stages)
    return Loaded(chain, trained.tokenizer, trained.card.run, trained.card.epoch)


def _open_export(folder: Path) -> Loaded:
    card = read_card(folder / CARD)
    config = card.config()
    try:
        tensors = safetensors.load(read_checked(folder / WEIGHTS))
    except SafetensorError as error:
        raise bad_export(f"{folder / WEIGHTS} is no whole safetensors file: {error}") from error
    if card.model.blocks > len(tensors):  # before anything is as long as it says
        raise bad_export(f"{folder / CARD} says {card.model.blocks} blocks, {WEIGHTS} has {len(tensors)} tensors")
    weights = [_stage_weights(config, stage, cut, tensors) for stage, cut in enumerate(card.cuts)]
    if tensors:
        raise bad_export(f"{folder / WEIGHTS} has tensors that this model has not: {', '.join(sorted(tensors)[:4])}")
    return Loaded(Chain(config, card.cuts, weights), _tokenizer(folder, card), card.run, card.epoch)


def _stage_weights(config: RunConfig, stage: int, cut: tuple[int, int], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Take a stage's tensors out of `tensors` into its flat order."""
    layout = Layout.build(tensor_shapes(config, stage, cut))
    found: dict[str, np.ndarray] = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):  # all, before memory is taken by what it says
        values = tensors.pop(name, None)
        if values is None:
            raise bad_export(f"tensor {name} of shape {shape} is missing in {WEIGHTS}")
        if values.shape != shape or values.dtype != np.float32:
            raise bad_export(f"tensor {name} is {values.dtype} {values.shape}, the model needs float32 {shape}")
        found[name] = values
    flat = np.empty(layout.size, dtype=np.float32)
    for name, view in layout.views(flat).items():
        view[...] = found.pop(name)
    return flat


def _tokenizer(folder: Path, card: Card) -> Tokenizer:
    if card.tokenizer == "bytes":
        return ByteTokenizer()
    path = folder / TOKENIZER
    return FileTokenizer(read_checked(path, card.tokenizer_digest), str(path))


# ---------------------------------------------------------------------------------------------------------- prompts


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A prompt's ids: a document's without the separator that ends one. Raises IotaError `bad_input` when empty."""
    end = tokenizer.encode("")
    ids = tokenizer.encode(text)
    row = [int(token) for token in ids[: ids.size - end.size]]
    if isinstance(tokenizer, ByteTokenizer):  # a document's last newlines are part of its end, a prompt's are text
        row += [ord("\n")] * (len(text.replace("\0", "")) - len(text.replace("\0", "").rstrip("\n")))
    if not row:
        raise IotaError("bad_input", "the prompt is empty", "Give at least one character of text")
    return row
