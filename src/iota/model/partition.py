"""How a model is cut into stages of even cost, and how many parameters each has. No torch.

Cost is floating-point operations per token of a forward pass: a stage's pace is its compute, and the slowest stage sets
the pace of the swarm. Embedding, head and codec projections count (design section 1).
"""

from __future__ import annotations

import math
from functools import cache

from iota.config.schema import RunConfig
from iota.model.boundary import DECODER, ENCODER, codec_cost, codec_shapes, stream_width
from iota.model.layout import check_model, ffn_width


def block_cost(config: RunConfig) -> int:
    """Operations per token of one block: projections, feed-forward, and causal attention over half the sequence."""
    model = config.model
    kv = model.kv_heads * (model.width // model.heads)
    written = stream_width(config) * (model.width + ffn_width(model))
    projections = 2 * (model.width * (model.width + 2 * kv + 2 * ffn_width(model)) + written)
    return projections + 2 * model.sequence * model.width


def stage_cost(config: RunConfig, stage: int, cut: tuple[int, int]) -> int:
    """Operations per token of a stage: its blocks, the embedding's look-up and sum, the head, its codec projections."""
    model, last = config.model, config.stages.count - 1
    cost = (cut[1] - cut[0]) * block_cost(config)
    if stage == 0:
        cost += 2 * model.width
    if stage == last:
        cost += 2 * model.width * model.vocabulary
    cost += codec_cost(config, DECODER) * (stage > 0) + codec_cost(config, ENCODER) * (stage < last)
    return cost


def cut_blocks(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(first, last) block of each stage, half open: the cut whose largest stage cost is smallest, every stage holding
    at least one block. Among those, the most even one (smallest sum of squared costs), then the one with the earliest
    cuts.

    Raises ConfigError when the model cannot be built.
    """
    check_model(config)
    blocks, count = config.model.blocks, config.stages.count

    @cache
    def largest(stage: int, first: int) -> int:
        """Smallest possible largest cost of stages `stage`.. over blocks `first`.."""
        if stage == count - 1:
            return stage_cost(config, stage, (first, blocks))
        return min(
            max(stage_cost(config, stage, (first, stop)), largest(stage + 1, stop))
            for stop in range(first + 1, blocks - (count - 1 - stage) + 1)
        )

    limit = largest(0, 0)

    @cache
    def evenest(stage: int, first: int) -> tuple[float, tuple[tuple[int, int], ...]]:
        """Smallest sum of squares under the limit, with its cut."""
        if stage == count - 1:
            cost = stage_cost(config, stage, (first, blocks))
            return (cost**2 if cost <= limit else float("inf")), ((first, blocks),)
        best: tuple[float, tuple[tuple[int, int], ...]] = (float("inf"), ())
        for stop in range(first + 1, blocks - (count - 1 - stage) + 1):
            cost = stage_cost(config, stage, (first, stop))
            rest, cuts = evenest(stage + 1, stop)
            if cost <= limit and cost**2 + rest < best[0]:
                best = (cost**2 + rest, ((first, stop), *cuts))
        return best

    return evenest(0, 0)[1]


def count_parameters(config: RunConfig, stage: int, cut: tuple[int, int]) -> int:
    """Parameters of a stage in closed form: embedding, blocks, its halves of the codecs, final norm and head."""
    model, last = config.model, config.stages.count - 1
    width, kv, stream = model.width, model.kv_heads * (model.width // model.heads), stream_width(config)
    written = stream * (width + ffn_width(model))
    block = width * width + 2 * kv * width + 2 * width * ffn_width(model) + written + 2 * width
    total = (cut[1] - cut[0]) * block
    if stage == 0:
        total += model.vocabulary * stream
    if stage == last:
        total += width + (0 if model.tie_embeddings else model.vocabulary * width)
    for side, present in ((DECODER, stage > 0), (ENCODER, stage < last)):
        total += sum(math.prod(shape) for shape in codec_shapes(config, 0, side).values()) if present else 0
    return total
