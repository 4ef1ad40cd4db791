"""Presets: models of the Llama 3 family from about 1M to 100B parameters, ready to be cut into stages.

A run file names one at its top, `preset = "1.5b"`; what it writes in [model] or [stages] stands over the preset's. A
preset is a shorthand of run files only: a run's configuration and manifest hold the values.

All have RMSNorm, rotary positions, grouped-query attention, SwiGLU and untied embeddings (tied ones exist in one-stage
runs only). From 1.5b on: the family's vocabulary of 128,256 and its scaling of rotary positions, as Llama 3.1 has it;
below, smaller vocabularies, else the embeddings would outweigh the blocks (1m: bytes). `channels` is width / 64, that
is 128 times fewer bytes than float32 in bfloat16, but at least 16.
"""

from __future__ import annotations

from iota.config.schema import ModelConfig, StagesConfig

CODEC = "bottleneck"
"""The paper's codec; `stages.codec` in the run file takes another."""
LLAMA_VOCABULARY = 128_256


def _preset(
    width: int, blocks: int, heads: int, kv_heads: int, ffn: int, sequence: int, stages: int,
    vocabulary: int = LLAMA_VOCABULARY,
) -> tuple[ModelConfig, StagesConfig]:  # fmt: skip
    model = ModelConfig(
        width=width,
        blocks=blocks,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=vocabulary,
        sequence=sequence,
        rope_scaling=vocabulary == LLAMA_VOCABULARY,
    )
    return model, StagesConfig(count=stages, codec=CODEC, channels=max(16, width // 64), wire_dtype="bfloat16")


def presets() -> dict[str, tuple[ModelConfig, StagesConfig]]:
    """Every preset by name, smallest first. The paper's cases (its section 4): 1.5b with three bottlenecks, 15b in five
    stages, 70b with eight bottlenecks; 8b and 70b have the family's own sizes."""
    return {
        "1m": _preset(128, 6, 4, 2, 320, 256, 3, vocabulary=256),
        "10m": _preset(384, 4, 6, 2, 1024, 256, 4, vocabulary=4096),
        "50m": _preset(512, 12, 8, 2, 1408, 1024, 4, vocabulary=16_384),
        "150m": _preset(768, 16, 12, 4, 2048, 1024, 4, vocabulary=32_768),
        "400m": _preset(1024, 28, 16, 4, 3072, 2048, 4, vocabulary=32_768),
        "1.5b": _preset(2048, 16, 32, 8, 8192, 2048, 4),
        "8b": _preset(4096, 32, 32, 8, 14_336, 4096, 4),
        "15b": _preset(5120, 50, 40, 8, 13_824, 4096, 5),
        "70b": _preset(8192, 80, 64, 8, 28_672, 4096, 9),
        "100b": _preset(10_240, 88, 80, 8, 28_672, 4096, 11),
    }
