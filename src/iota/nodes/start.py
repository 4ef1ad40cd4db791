"""The weights that a run begins with, when they come from a folder and are not drawn (`RunConfig.initial`).

The folder holds a Llama as `transformers` saves it, or a model written by `iota export`. Only safetensors are read,
never pickles. Every tensor of the run's Llama must be there, of the right shape; float32, bfloat16, float16 and float64
become float32. A codec's tensors are taken when the folder's model was trained with the same codec, cut and seed, else
drawn from the seed as in any new run. One stage is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from iota.config.load import check, save_run, with_values
from iota.config.schema import DataConfig, ModelConfig, RunConfig, StagesConfig, TrainConfig
from iota.errors import ConfigError, IotaError
from iota.model.layout import Layout, draw_tensor, ffn_width, tensor_shapes, transformers_name
from iota.model.partition import cut_blocks
from iota.nodes.card import CARD, TOKENIZER, WEIGHTS, Card, parse_card
from iota.nodes.huggingface import IOTA, llama_model
from iota.store.files import read_checked, write_atomic
from iota.store.tokens import open_tokenizer

INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16", "F64")
SIZES = "width blocks heads kv_heads vocabulary rope_theta rope_scaling norm_eps"
"""What must be the same in the run file and in the folder; the feed-forward width too."""
HEAD, EMBEDDING, BOUNDARY = "head.weight", "embedding.weight", "boundaries."
IMPORT_LR, IMPORT_SEQUENCE = 1e-4, 2048
"""Of a run file that `import_run` writes: gentler than for drawn weights, and not as long as the model could."""
TIED_HEAD, ROTARY = "lm_head.weight", "rotary_emb.inv_freq"
"""What some versions of transformers save beside, although it follows from the rest."""


class Start:
    """A folder whose model can begin a run. `model`: its sizes; `card`: of a model written by `iota export`, else None;
    `tokenizer`: "bytes", a path, or "" when the folder has none.

    Raises IotaError `no_checkpoint` when there is no model, `bad_checkpoint` for one that cannot be read, ConfigError
    for one of another kind.
    """

    model: ModelConfig
    card: Card | None
    tokenizer: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / CARD
        if not path.is_file():
            raise IotaError(
                "no_checkpoint", f"{folder} holds no model: {path} does not exist", "Give the folder of a saved model"
            )
        facts = _json(path)
        ours = facts.get("iota")
        if "format" in facts:
            self.card = parse_card(msgspec.json.encode(facts), str(path))
        elif facts.get("model_type") == IOTA:
            self.card = parse_card(msgspec.json.encode(ours), f"{path}, key iota")
        else:
            self.card = None
        self.model = llama_model(facts, str(path)) if self.card is None else self.card.model
        named = ours.get("tokenizer") if self.card is None and isinstance(ours, dict) else None
        named = named if self.card is None else self.card.tokenizer
        file = folder / TOKENIZER
        self.tokenizer = "bytes" if named == "bytes" else str(file) if file.is_file() else ""
        files = tensor_files(folder)
        if self.model.blocks > len(files):  # before anything is as long as it says
            raise _bad(f"{path} says {self.model.blocks} blocks, beside it are {len(files)} tensors")
        self._tensors = self._named(files)

    def _named(self, files: dict[str, Path]) -> dict[str, tuple[Path, str]]:
        """Where each tensor is, by our global name: its file, and its name there. An unknown tensor keeps its name."""
        if self.card is not None:  # transformers' folder of a model with codecs says `stages.N.` before
            return {re.sub(r"^stages\.\d+\.", "", name): (file, name) for name, file in files.items()}
        plain = RunConfig(name="plain", model=self.model, stages=StagesConfig(count=1, codec="identity"))
        ours = {transformers_name(name): name for name in tensor_shapes(plain, 0, (0, self.model.blocks))}
        return {ours.get(name, name): (file, name) for name, file in files.items()}

    # ------------------------------------------------------------------------------------------------------- checks

    def check(self, config: RunConfig) -> None:
        """Refuse a run that this model cannot begin, before anything is written. Reads no weights.

        Raises ConfigError naming every size that differs, or a tensor that is missing, unknown or of another shape;
        IotaError `bad_checkpoint` for values in a format that is not read.
        """
        theirs, ours = self.model, config.model
        rows = [(name, getattr(ours, name), getattr(theirs, name)) for name in SIZES.split()]
        rows.append(("ffn", ffn_width(ours), ffn_width(theirs)))
        if ours.tie_embeddings and not theirs.tie_embeddings:
            rows.append(("tie_embeddings", True, False))
        rows = [row for row in rows if row[1] != row[2]]
        if rows:
            text = ", ".join(f"model.{name} is {mine!r}, the folder's model has {its!r}" for name, mine, its in rows)
            raise ConfigError(
                f"initial = {str(self.folder)!r} does not fit the run: {text}",
                f"Write the folder's values under [model]; `iota import {self.folder} RUN.toml` writes them for you",
            )
        self._check_tensors(config)

    def _check_tensors(self, config: RunConfig) -> None:
        wanted: dict[str, tuple[int, ...]] = {}
        for stage, cut in enumerate(cut_blocks(config)):
            wanted |= {self._source(config, name): shape for name, shape in tensor_shapes(config, stage, cut).items()}
        wanted.pop("", None)
        for name, shape in wanted.items():
            if name not in self._tensors:
                raise ConfigError(f"{self.folder} has no tensor {self._both(name)}", "Restore the folder")
            found, kind = self._describe(name)
            if found != shape:
                raise ConfigError(
                    f"{self.folder}: tensor {self._both(name)} has shape {found}, the run needs {shape}",
                    "Begin from a model of the same sizes, or take another codec",
                )
            if kind not in FLOATS:
                raise _bad(
                    f"{self.folder}: tensor {self._both(name)} holds {kind}", "Save the weights in float32 or bfloat16"
                )
        known = (BOUNDARY, TIED_HEAD) if self.model.tie_embeddings else (BOUNDARY,)
        extra = [name for name in self._tensors.keys() - wanted.keys() if not name.startswith(known)]
        extra = sorted(name for name in extra if not name.endswith(ROTARY))
        if extra:
            raise ConfigError(
                f"{self.folder} has tensors that the run's model has not: {', '.join(extra[:4])}",
                "Only plain Llamas and models written by iota export can begin a run",
            )

    def notes(self, config: RunConfig) -> list[str]:
        """What a person should know about how the folder's model becomes the run's."""
        notes = []
        if self.model.tie_embeddings and not config.model.tie_embeddings:
            notes.append("its tied embedding is copied into the head; from now on the two are trained apart")
        if config.stages.count > 1 and config.stages.codec != "identity" and not self._same_codec(config):
            notes.append(f"the tensors of codec {config.stages.codec!r} are drawn from the seed")
        return notes

    # ------------------------------------------------------------------------------------------------------ weights

    def weights(self, config: RunConfig, stage: int, cut: tuple[int, int]) -> np.ndarray:
        """A stage's flat float32 weights. Call `check` first.

        Raises IotaError `bad_checkpoint` when a file is damaged, `not_finite` naming the tensor."""
        layout = Layout.for_stage(config, stage, cut)
        flat = np.empty(layout.size, dtype=np.float32)
        for name, view in layout.views(flat).items():
            source = self._source(config, name)
            view[...] = self._read(source) if source else draw_tensor(config, config.seed, name, view.shape)
        return flat

    def _source(self, config: RunConfig, name: str) -> str:
        """The folder's tensor that one of the run's begins with; "" for one that is drawn."""
        if name == HEAD and self.model.tie_embeddings:
            return EMBEDDING
        return name if not name.startswith(BOUNDARY) or self._same_codec(config) else ""

    def _same_codec(self, config: RunConfig) -> bool:
        """Codecs draw what they do not learn from the seed, so that must be the same too."""
        if self.card is None:
            return False
        here, there = config.stages, self.card.stages
        same = (here.codec, here.channels, config.seed) == (there.codec, there.channels, self.card.seed)
        return same and cut_blocks(config) == self.card.cuts

    def _describe(self, name: str) -> tuple[tuple[int, ...], str]:
        file, theirs = self._tensors[name]
        with _reading(file) as opened:
            part = opened.get_slice(theirs)
            return tuple(part.get_shape()), str(part.get_dtype())

    def _read(self, name: str) -> np.ndarray:
        file, theirs = self._tensors[name]
        with _reading(file) as opened:
            values: np.ndarray = opened.get_tensor(theirs).float().numpy()
        if not np.isfinite(values).all():
            raise IotaError(
                "not_finite",
                f"{self.folder}: tensor {self._both(name)} has values that are not finite in float32",
                "Begin from another model",
            )
        return values

    def _both(self, name: str) -> str:
        """A tensor's name here, and there where it has another."""
        theirs = self._tensors[name][1] if name in self._tensors else None
        theirs = transformers_name(name) if theirs is None and self.card is None else theirs
        return name if theirs in (None, name) else f"{theirs} ({name})"


# ---------------------------------------------------------------------------------------------------- a run file of it


def import_run(folder: Path, run_file: Path, settings: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Write a run file whose run begins with the model in `folder`, with `settings` (KEY=VALUE) over what follows from
    the model. Everything that creating the run would refuse is refused here, the weights are read through once. Returns
    the configuration and what a person should know (`Start.notes`).

    Raises IotaError `exists` when `run_file` does, ConfigError for what does not fit, and what `Start` does.
    """
    if run_file.exists():
        raise IotaError("exists", f"{run_file} exists", "Choose another name; nothing was changed")
    start = Start(folder.resolve())
    keys = {setting.partition("=")[0].strip() for setting in settings}
    if not start.tokenizer and "data.tokenizer" not in keys:
        raise ConfigError(
            f"{folder} has no {TOKENIZER}",
            "Save the model's tokenizer there with transformers (a fast one), or give --set data.tokenizer=PATH",
        )
    config = with_values(_first_draft(start, run_file), settings)
    if config.stages.count == 1 and "model.tie_embeddings" not in keys:
        model = msgspec.structs.replace(config.model, tie_embeddings=start.model.tie_embeddings)
        config = msgspec.structs.replace(config, model=model)
    checked = check(config, str(run_file))
    start.check(checked)
    open_tokenizer(checked.data, checked.model.vocabulary)
    for stage, cut in enumerate(cut_blocks(checked)):
        start.weights(checked, stage, cut)
    head = f"# A run that begins with the weights in {str(folder)!r}. Written by `iota import`.\n\n"
    write_atomic(run_file, [(head + save_run(config)).encode()])
    return config, start.notes(checked)


def _first_draft(start: Start, run_file: Path) -> RunConfig:
    """What follows from the model; everything else as in any run, but for a gentler learning rate."""
    name = re.sub("[^a-z0-9]+", "-", run_file.stem.lower()).strip("-")[:40] or "imported"
    config = RunConfig(
        name=name,
        initial=str(start.folder),
        model=msgspec.structs.replace(start.model, tie_embeddings=False),
        data=DataConfig(tokenizer=start.tokenizer or "bytes"),
        train=TrainConfig(lr=IMPORT_LR),
    )
    if start.card is not None:
        return msgspec.structs.replace(config, seed=start.card.seed, stages=start.card.stages)
    model = msgspec.structs.replace(config.model, sequence=min(start.model.sequence, IMPORT_SEQUENCE))
    stages = StagesConfig(count=min(StagesConfig().count, model.blocks), codec="identity")
    return msgspec.structs.replace(config, model=model, stages=stages)


# -------------------------------------------------------------------------------------------------- files and tensors


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor, by the tensor's name there.

    Raises IotaError `bad_checkpoint` when there are no safetensors, or an index that names other than files beside it.
    """
    if (folder / INDEX).is_file():
        files = _json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise _bad(f"{folder / INDEX} does not say in which file each tensor is")
        for file in set(files.values()):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise _bad(f"{folder / INDEX} names {file!r}, no safetensors file beside it")
        return {name: folder / file for name, file in files.items()}
    if not (folder / WEIGHTS).is_file():
        pickled = sorted(path.name for end in ("*.bin", "*.pt", "*.pth") for path in folder.glob(end))
        if pickled:
            raise _bad(
                f"{folder} has only pickled weights ({pickled[0]}); reading them could run anybody's code",
                "Save the model as safetensors: load it in transformers and call save_pretrained",
            )
        raise _bad(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    with _reading(folder / WEIGHTS) as opened:
        return {name: folder / WEIGHTS for name in opened.keys()}  # noqa: SIM118 (no mapping)


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    """An open safetensors file, mapped into memory; tensors come as torch's, because numpy has no bfloat16."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise _bad(f"{file} is no whole safetensors file, or lacks a tensor that it should have: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_checked(path), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"{path} is no JSON object: {error}") from error


def _bad(cause: str, remedy: str = "Copy or save the model again") -> IotaError:
    return IotaError("bad_checkpoint", cause, remedy)
