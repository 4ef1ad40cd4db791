"""A trained model as a folder that `transformers` loads.

    model.safetensors                       float32 weights
    config.json                             written last: without it, no export
    generation_config.json
    tokenizer.json, tokenizer_config.json   the run's tokenizer, unless it is "bytes"

A model without codecs is a plain LlamaForCausalLM. One with codecs needs `import iota.hf` first, which registers its
class. Where stages exchanged bfloat16 without a codec, the plain Llama does not round there: its logits differ by that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import numpy as safetensors

from iota.model.boundary import stream_width
from iota.model.layout import transformers_name
from iota.nodes.card import CARD, TOKENIZER, WEIGHTS, Card
from iota.nodes.export import Trained, need_empty, trained_model
from iota.nodes.huggingface import GENERATION, IOTA, TOKENIZER_CONFIG, llama_config
from iota.store.files import write_atomic
from iota.store.tokens import Tokenizer


def export_hf(folder: Path, out: Path) -> tuple[Card, str]:
    """Write the newest merged weights of the run in `folder` into `out`, which must be new or empty. Returns what the
    model is and its `model_type`.

    Raises IotaError `not_empty`, `disk_full`, `disk_failed`, and what reading the run raises.
    """
    need_empty(out)
    trained = trained_model(folder)
    card, tokenizer = trained.card, trained.tokenizer
    end = tokenizer.encode("")
    ids = {"bos_token_id": None, "eos_token_id": int(end[-1]) if end.size else None, "pad_token_id": None}
    if is_plain(card):
        facts = {key: getattr(card, key) for key in ("run", "epoch", "tokens", "tokenizer", "tokenizer_digest")}
        config = llama_config(card.model) | ids | {"iota": facts}
        tensors = _llama_tensors(trained)
    else:
        about = {"architectures": ["IotaForCausalLM"], "model_type": IOTA, "torch_dtype": "float32"}
        config = about | ids | {"iota": msgspec.to_builtins(card)}
        tensors = _iota_tensors(trained)
    write_atomic(out / WEIGHTS, [safetensors.save(tensors, {"format": "pt"})])
    if tokenizer.file:
        write_atomic(out / TOKENIZER, [tokenizer.file])
        write_atomic(out / TOKENIZER_CONFIG, [_json(_tokenizer_config(tokenizer, card, ids["eos_token_id"]))])
    write_atomic(out / GENERATION, [_json(ids)])
    write_atomic(out / CARD, [_json(config)])
    return card, config["model_type"]


def is_plain(card: Card) -> bool:
    """Whether the model computes what a Llama of its sizes does, but for rounding on the wire: no codec is at work, and
    stages write into the whole residual stream."""
    no_codec = card.stages.codec == "identity" or card.stages.count == 1
    return no_codec and stream_width(card.config()) == card.model.width


def _llama_tensors(trained: Trained) -> dict[str, np.ndarray]:
    tensors = {}
    for stage in range(len(trained.stages)):
        for name, view in trained.tensors(stage).items():
            theirs = transformers_name(name)
            assert theirs is not None, name
            tensors[theirs] = view
    return tensors


def _iota_tensors(trained: Trained) -> dict[str, np.ndarray]:
    """By the names of the class in `iota.hf`, which holds the stages in a row."""
    stages = range(len(trained.stages))
    return {f"stages.{stage}.{name}": view for stage in stages for name, view in trained.tensors(stage).items()}


def _tokenizer_config(tokenizer: Tokenizer, card: Card, end: int | None) -> dict[str, Any]:
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": card.model.sequence}
    added = msgspec.json.decode(tokenizer.file).get("added_tokens") or ()
    names = [token["content"] for token in added if token["id"] == end]
    return facts | ({"eos_token": names[0]} if names else {})


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)
