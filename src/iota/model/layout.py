"""Which tensors a stage has, their flat order, and their initial values. Needs numpy only: torch is never imported
here.

A stage's parameters, gradients and moments each lie in ONE flat float32 array, so that pseudo-gradient, chunk, digest
and upload are slices (design section 7). The flat order: the decayed tensors (2-D and above) first, then the rest, each
in the order of `tensor_shapes`, without padding.

Names are global (`blocks.7.attention.q.weight`, `boundaries.1.up.weight`), so they say the same in every cut.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from iota.config.schema import ModelConfig, RunConfig
from iota.errors import ConfigError
from iota.model.boundary import (
    CODECS,
    DECODER,
    ENCODER,
    FLOATS,
    TOPK_WIDTH,
    channels_fit,
    codec_shapes,
    codec_spec,
    indices_fit,
    stream_width,
)

INIT_STD = 0.02
FIXED_NAME = "fixed_embedding"
"""The drawn, never trained token embedding of codec `subspace`."""
FIXED_STD = 0.1
"""About as large as a trained embedding becomes within some hundred steps: beside it what blocks write stays small."""


def ffn_width(model: ModelConfig) -> int:
    """Inner width of the feed-forward part: as configured, else 8/3 of the width rounded up to a multiple of 32."""
    return model.ffn or -(-8 * model.width // (3 * 32)) * 32


def check_model(config: RunConfig) -> None:
    """Refuse a model that cannot be built. Raises ConfigError naming the key and the remedy."""
    model, stages = config.model, config.stages
    problems = (
        (model.heads < 1 or model.width % (2 * model.heads) != 0, "model.width must be a multiple of 2 * model.heads"),
        (model.kv_heads < 1 or model.heads % model.kv_heads != 0, "model.heads must be a multiple of model.kv_heads"),
        (model.blocks < 1, "model.blocks must be at least 1"),
        (model.vocabulary < 2, "model.vocabulary must be at least 2"),
        (model.ffn < 0, "model.ffn must be at least 0"),
        (not (model.rope_theta > 0 and model.norm_eps > 0), "model.rope_theta and model.norm_eps must be more than 0"),
        (model.sequence < 1, "model.sequence must be at least 1"),
        (not 1 <= stages.count <= model.blocks, "stages.count must lie between 1 and model.blocks"),
        (model.tie_embeddings and stages.count > 1, "model.tie_embeddings needs stages.count = 1"),
        (
            model.tie_embeddings and stream_width(config) < model.width,
            "codec subspace needs model.tie_embeddings = false",
        ),
        (stages.codec not in CODECS, f"stages.codec must be one of {', '.join(CODECS)}"),
        (stages.wire_dtype not in FLOATS, f"stages.wire_dtype must be one of {', '.join(FLOATS)}"),
        (not channels_fit(config), "stages.channels must lie between 1 and model.width"),
        (not indices_fit(config), f"codec topk needs model.width of at most {TOPK_WIDTH}"),
    )
    for wrong, remedy in problems:
        if wrong:
            raise ConfigError("this model cannot be built", remedy)


def tensor_shapes(config: RunConfig, stage: int, cut: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of `stage`, which holds blocks [cut[0], cut[1]); the order is the module's own."""
    model, last = config.model, config.stages.count - 1
    width, ffn, kv = model.width, ffn_width(model), model.kv_heads * (model.width // model.heads)
    stream = stream_width(config)
    shapes: dict[str, tuple[int, ...]] = {}
    if stage == 0:
        shapes["embedding.weight"] = (model.vocabulary, stream)
    if stage > 0:
        shapes |= codec_shapes(config, stage - 1, DECODER)
    if stage < last:
        shapes |= codec_shapes(config, stage, ENCODER)
    for number in range(*cut):
        block = f"blocks.{number}"
        shapes[f"{block}.attention_norm.weight"] = (width,)
        shapes[f"{block}.attention.q.weight"] = (width, width)
        shapes[f"{block}.attention.k.weight"] = (kv, width)
        shapes[f"{block}.attention.v.weight"] = (kv, width)
        shapes[f"{block}.attention.o.weight"] = (stream, width)
        shapes[f"{block}.ffn_norm.weight"] = (width,)
        shapes[f"{block}.ffn.gate.weight"] = (ffn, width)
        shapes[f"{block}.ffn.up.weight"] = (ffn, width)
        shapes[f"{block}.ffn.down.weight"] = (stream, ffn)
    if stage == last:
        shapes["norm.weight"] = (width,)
        if not model.tie_embeddings:
            shapes["head.weight"] = (model.vocabulary, width)
    return shapes


@dataclass(frozen=True)
class Layout:
    """The flat order of a stage's tensors. Tensor i is `flat[offsets[i] : offsets[i] + prod(shapes[i])]`.

    `decayed` is the length of the first region (tensors with weight decay), `size` the whole length in floats.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    decayed: int
    size: int

    @classmethod
    def build(cls, shapes: dict[str, tuple[int, ...]]) -> Layout:
        """Order tensors: 2-D and above first, then the rest; the given order within each."""
        ordered = [item for item in shapes.items() if len(item[1]) >= 2]
        decayed = sum(math.prod(shape) for _, shape in ordered)
        ordered += [item for item in shapes.items() if len(item[1]) < 2]
        offsets, size = [], 0
        for _, shape in ordered:
            offsets.append(size)
            size += math.prod(shape)
        return cls(tuple(n for n, _ in ordered), tuple(s for _, s in ordered), tuple(offsets), decayed, size)

    @classmethod
    def of(cls, module: Any) -> Layout:
        """The layout of a built stage (`LlamaStage`); equal to `for_stage` of the same arguments."""
        return cls.build({name: tuple(tensor.shape) for name, tensor in module.named_parameters()})

    @classmethod
    def for_stage(cls, config: RunConfig, stage: int, cut: tuple[int, int]) -> Layout:
        """The layout without building the stage."""
        return cls.build(tensor_shapes(config, stage, cut))

    def views(self, flat: Any) -> dict[str, Any]:
        """Every tensor by name as a view into `flat`, a contiguous numpy array or torch tensor of `size` elements."""
        rows = zip(self.names, self.shapes, self.offsets, strict=True)
        return {name: flat[start : start + math.prod(shape)].reshape(shape) for name, shape, start in rows}


def init_std(config: RunConfig, name: str) -> float:
    """Standard deviation of a tensor's initial normal distribution.

    0.02; projections that write into the residual stream are scaled by 1/sqrt(2 * blocks). The head is bounded so that
    logits start small at any width (the untrained loss is then ln(vocabulary) within 3%): 0.32/sqrt(width), or 2/width
    when it is the embedding too, because a token's own logit is then not random.
    """
    model = config.model
    if name == "head.weight":
        return min(INIT_STD, 0.32 / math.sqrt(model.width))
    if name == "embedding.weight" and model.tie_embeddings:
        return min(INIT_STD, 2.0 / model.width)
    if name.endswith((".attention.o.weight", ".ffn.down.weight")):
        return INIT_STD / math.sqrt(2 * model.blocks)
    if name == FIXED_NAME:
        return FIXED_STD
    if name.startswith("boundaries."):
        return _codec_std(config, name)
    return INIT_STD


def _codec_std(config: RunConfig, name: str) -> float:
    """Of a codec's tensor: its output projections begin small, its inner ones keep the size of what they read, an id
    embedding begins as large as the embedding, with small numbers a token and a large lift: a step of the optimizer on
    a token's numbers then moves its embedding most."""
    part = name.split(".", 2)[2]
    if part in ("encoder_out.weight", "decoder_out.weight"):
        return INIT_STD / math.sqrt(2 * config.model.blocks)
    if part == "decoder_in.weight":
        return 1 / math.sqrt(config.stages.channels)
    if part == "ids.tokens.weight":
        return INIT_STD / math.sqrt(codec_spec(config).rank)
    return 1.0 if part == "ids.lift.weight" else INIT_STD


def draw_tensor(config: RunConfig, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The initial values of one tensor, float32: ones for norms, else normal from Philox keyed by (seed, name)."""
    if len(shape) < 2:
        return np.ones(shape, dtype=np.float32)
    digest = hashlib.sha256(f"iota initial {seed} {name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(init_std(config, name))


def initial_state(config: RunConfig, stage: int, cut: tuple[int, int], seed: int) -> np.ndarray:
    """Checkpoint 0 of a stage: its flat float32 weights. A tensor's values depend on the seed and its name alone, not
    on the cut (design section 2)."""
    layout = Layout.for_stage(config, stage, cut)
    flat = np.empty(layout.size, dtype=np.float32)
    for name, view in layout.views(flat).items():
        view[...] = draw_tensor(config, seed, name, view.shape)
    return flat


_TRANSFORMERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


def transformers_name(name: str) -> str | None:
    """The name that `transformers`' LlamaForCausalLM gives a tensor, or None for a codec's tensor, which it has not."""
    if name.startswith("boundaries."):
        return None
    if not name.startswith("blocks."):
        return _TRANSFORMERS[name]
    _, number, rest = name.split(".", 2)
    if rest in _TRANSFORMERS:
        return f"model.layers.{number}.{_TRANSFORMERS[rest]}"
    part, projection, _ = rest.split(".")
    return f"model.layers.{number}.{'self_attn' if part == 'attention' else 'mlp'}.{projection}_proj.weight"
