"""What an exported model says of itself: the files of its folder and the description in its `config.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.errors import IotaError
from iota.model.layout import check_model
from iota.store.files import read_checked

FORMAT = "iota export 2"
WEIGHTS, CARD, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config.json. `tokens`: training tokens behind these weights, null when the run's history does not say. `seed`:
    the run's, from which codecs draw what they do not learn. `tokenizer`: "bytes" or the file beside.
    `transformers_names`: what `transformers`' LlamaForCausalLM calls each tensor that it has too (a codec's it has not:
    with a codec between stages the model is no plain Llama)."""

    format: str
    run: str
    epoch: int
    tokens: int | None
    seed: int
    model: ModelConfig
    stages: StagesConfig
    cuts: tuple[tuple[int, int], ...]
    tokenizer: str
    tokenizer_digest: str
    transformers_names: dict[str, str]

    def config(self) -> RunConfig:
        """As much of the run's configuration as the model needs."""
        return RunConfig(name=self.run, seed=self.seed, model=self.model, stages=self.stages)


class _Format(msgspec.Struct):
    format: str


def read_card(path: Path) -> Card:
    """The card in a file. Raises what `parse_card` does, and `no_object`."""
    return parse_card(read_checked(path), str(path))


def parse_card(data: bytes, place: str) -> Card:
    """A card from JSON, checked; `place` names it in errors.

    Raises IotaError `bad_checkpoint` when it is none, of another format, or contradicts itself, ConfigError when its
    model cannot be built.
    """
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise bad_export(f"{place} has format {found!r}, this software reads {FORMAT!r}")
        card = msgspec.json.decode(data, type=Card)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_export(f"{place} is not the description of an exported model: {error}") from error
    config = card.config()
    check_model(config)
    edges = [first for first, _ in card.cuts] + [config.model.blocks]
    whole = edges == [0] + [last for _, last in card.cuts] and all(first < last for first, last in card.cuts)
    if len(card.cuts) != config.stages.count or not whole:
        raise bad_export(f"{place}: cuts {card.cuts} do not divide {config.model.blocks} blocks into {len(card.cuts)}")
    return card


def bad_export(cause: str) -> IotaError:
    """An exported model that cannot be used."""
    return IotaError("bad_checkpoint", cause, "Export the model again: iota export RUN OUT")
