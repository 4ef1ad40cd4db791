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

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.errors import IotaError
from iota.model.generate import Chain
from iota.model.layout import Layout, check_model, tensor_shapes, transformers_name
from iota.nodes import checkpoint as run_folder
from iota.store.files import read_checked, write_atomic
from iota.store.tokens import ByteTokenizer, FileTokenizer, Tokenizer

FORMAT = "iota export 1"
WEIGHTS, CARD, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config.json. `tokens`: training tokens behind these weights, null when the run's history does not say.
    `tokenizer`: "bytes" or the file beside. `transformers_names`: what `transformers`' LlamaForCausalLM calls each
    tensor that it has too (a codec's it has not: with a bottleneck the model is no plain Llama)."""

    format: str
    run: str
    epoch: int
    tokens: int | None
    model: ModelConfig
    stages: StagesConfig
    cuts: tuple[tuple[int, int], ...]
    tokenizer: str
    tokenizer_digest: str
    transformers_names: dict[str, str]

    def config(self) -> RunConfig:
        """As much of the run's configuration as the model needs."""
        return RunConfig(name=self.run, model=self.model, stages=self.stages)


@dataclass(frozen=True)
class Loaded:
    """A model ready to write, with its tokenizer and its origin."""

    chain: Chain
    tokenizer: Tokenizer
    run: str
    epoch: int


# ---------------------------------------------------------------------------------------------------------- export


def export(folder: Path, out: Path) -> Card:
    """Write the newest merged weights of the run in `folder` into `out`, which must be new or empty.

    Raises IotaError `not_empty`, `disk_full`, `disk_failed`, and what reading the run raises.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise IotaError(
            "not_empty", f"{out} exists and is not an empty folder", "Choose another place; nothing is lost"
        )
    manifest = run_folder.manifest_of(folder)
    checkpoints = run_folder.latest_checkpoints(folder, manifest)
    epoch = checkpoints[0].epoch
    tokens = run_folder.tokens_trained(run_folder.history_of(folder), epoch)
    tokenizer = run_folder.tokenizer_of(folder, manifest)
    tensors: dict[str, np.ndarray] = {}
    for stage, cut in enumerate(manifest.cuts):
        flat = run_folder.read_part(folder, checkpoints[stage])
        tensors |= Layout.for_stage(manifest.config, stage, cut).views(flat)
    names = {name: theirs for name in tensors if (theirs := transformers_name(name)) is not None}
    card = Card(
        format=FORMAT,
        run=manifest.run,
        epoch=epoch,
        tokens=tokens,
        model=manifest.config.model,
        stages=manifest.config.stages,
        cuts=manifest.cuts,
        tokenizer=TOKENIZER if tokenizer.file else "bytes",
        tokenizer_digest=tokenizer.digest,
        transformers_names=names,
    )
    about = {"format": FORMAT, "run": manifest.run, "epoch": str(epoch)}
    write_atomic(out / WEIGHTS, [safetensors.save(tensors, about)])
    if tokenizer.file:
        write_atomic(out / TOKENIZER, [tokenizer.file])
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
    manifest = run_folder.manifest_of(folder)
    checkpoints = run_folder.latest_checkpoints(folder, manifest)
    weights = [run_folder.read_part(folder, checkpoint) for checkpoint in checkpoints]
    chain = Chain(manifest.config, manifest.cuts, weights)
    return Loaded(chain, run_folder.tokenizer_of(folder, manifest), manifest.run, checkpoints[0].epoch)


def _open_export(folder: Path) -> Loaded:
    path = folder / CARD
    try:
        card = msgspec.json.decode(read_checked(path), type=Card)
    except msgspec.DecodeError as error:
        raise _bad(f"{path} is not the description of an exported model: {error}") from error
    if card.format != FORMAT:
        raise _bad(f"{path} has format {card.format!r}, this software reads {FORMAT!r}")
    config = card.config()
    check_model(config)
    edges = [first for first, _ in card.cuts] + [config.model.blocks]
    if len(card.cuts) != config.stages.count or edges != [0] + [last for _, last in card.cuts]:
        raise _bad(f"{path}: cuts {card.cuts} do not divide {config.model.blocks} blocks into {config.stages.count}")
    try:
        tensors = safetensors.load(read_checked(folder / WEIGHTS))
    except SafetensorError as error:
        raise _bad(f"{folder / WEIGHTS} is no whole safetensors file: {error}") from error
    weights = [_stage_weights(config, stage, cut, tensors) for stage, cut in enumerate(card.cuts)]
    if tensors:
        raise _bad(f"{folder / WEIGHTS} has tensors that this model has not: {', '.join(sorted(tensors)[:4])}")
    return Loaded(Chain(config, card.cuts, weights), _tokenizer(folder, card), card.run, card.epoch)


def _stage_weights(config: RunConfig, stage: int, cut: tuple[int, int], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Take a stage's tensors out of `tensors` into its flat order."""
    layout = Layout.build(tensor_shapes(config, stage, cut))
    flat = np.empty(layout.size, dtype=np.float32)
    for name, view in layout.views(flat).items():
        values = tensors.pop(name, None)
        if values is None:
            raise _bad(f"tensor {name} of shape {view.shape} is missing in {WEIGHTS}")
        if values.shape != view.shape or values.dtype != np.float32:
            raise _bad(f"tensor {name} is {values.dtype} {values.shape}, the model needs float32 {view.shape}")
        view[...] = values
    return flat


def _tokenizer(folder: Path, card: Card) -> Tokenizer:
    if card.tokenizer == "bytes":
        return ByteTokenizer()
    path = folder / TOKENIZER
    return FileTokenizer(read_checked(path, card.tokenizer_digest), str(path))


def _bad(cause: str) -> IotaError:
    return IotaError("bad_checkpoint", cause, "Export the model again: iota export RUN OUT")


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
