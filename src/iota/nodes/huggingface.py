"""A Llama as Hugging Face's `transformers` describes it (`config.json`) and as this project does (`ModelConfig`)."""

from __future__ import annotations

from typing import Any

from iota.config.schema import ModelConfig
from iota.errors import ConfigError
from iota.model.layout import ffn_width

LLAMA, IOTA = "llama", "iota"
"""`model_type` of a plain Llama, and of a model with codecs between its stages (`iota.hf`)."""
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


def llama3_scaling() -> dict[str, Any]:
    """Llama 3's scaling of rotary positions, by transformers' names, with the values of `iota.model.llama`."""
    from iota.model import llama

    return {
        "rope_type": "llama3",
        "factor": llama.SCALING_FACTOR,
        "low_freq_factor": llama.SCALING_LOW,
        "high_freq_factor": llama.SCALING_HIGH,
        "original_max_position_embeddings": llama.SCALING_CONTEXT,
    }


def llama_config(model: ModelConfig) -> dict[str, Any]:
    """The fields of `config.json` that make transformers build this model as a LlamaForCausalLM. Rotary settings go by
    their older names, which every version reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": LLAMA,
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": ffn_width(model),
        "num_hidden_layers": model.blocks,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.sequence,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": llama3_scaling() if model.rope_scaling else None,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def llama_model(config: dict[str, Any], place: str) -> ModelConfig:
    """The model that a Llama's `config.json` describes; `sequence` is the longest context it states. `place` names the
    file in errors.

    Raises ConfigError for what this project's Llama has not: biases, another activation, heads of a width of their own,
    other scalings of rotary positions; and for a missing or mistyped value.
    """
    if config.get("model_type") != LLAMA:
        raise ConfigError(
            f"{place} describes a model of type {config.get('model_type')!r}", "Only Llama models can begin a run"
        )
    width, heads = _count(config, "hidden_size", place), _count(config, "num_attention_heads", place)
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, plain) != plain:
            raise ConfigError(f"{place}: {key} is {config[key]!r}", f"Only models with {key} = {plain!r} can be read")
    each = config.get("head_dim")
    each = width // heads if each is None else _count(config, "head_dim", place)
    if each * heads != width:
        raise ConfigError(
            f"{place}: {heads} heads of {each} channels do not make a width of {width}",
            "Only models whose heads share the width evenly can be read",
        )
    tied = config.get("tie_word_embeddings")
    if tied not in (None, False, True):
        raise ConfigError(f"{place}: tie_word_embeddings is {tied!r}, not true or false", "Restore the file")
    theta, scaling = _rotary(config, place)
    return ModelConfig(
        width=width,
        blocks=_count(config, "num_hidden_layers", place),
        heads=heads,
        kv_heads=heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads", place),
        ffn=_count(config, "intermediate_size", place),
        vocabulary=_count(config, "vocab_size", place),
        sequence=_count(config, "max_position_embeddings", place),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(config, "rms_norm_eps", 1e-6, place),
        tie_embeddings=bool(tied),
    )


def _count(config: dict[str, Any], key: str, place: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{place}: {key} is {value!r}, not a whole number of at least 1", "Restore the file")
    return value


def _number(config: dict[str, Any], key: str, default: float, place: str) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{place}: {key} is {value!r}, not a positive number", "Restore the file")
    return float(value)


def _rotary(config: dict[str, Any], place: str) -> tuple[float, bool]:
    """Theta, and whether Llama 3's scaling is on. Newer files have both in `rope_parameters`, older ones apart."""
    new = config.get("rope_parameters") or {}
    scaling = new or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"{place}: the settings of rotary positions are {scaling!r}", "Restore the file")
    theta = _number(new if "rope_theta" in new else config, "rope_theta", 10_000.0, place)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, False
    wanted = llama3_scaling()
    found = {key: scaling.get(key) for key in wanted} | {"rope_type": kind}
    if found != wanted:
        differing = ", ".join(f"{key} = {value!r}" for key, value in found.items() if value != wanted[key])
        raise ConfigError(
            f"{place}: rotary positions are scaled with {differing}",
            f"Only models without scaling or with {wanted} can be read",
        )
    return theta, True
