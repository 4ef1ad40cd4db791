"""Text from a trained model: the stages in a row in one process, codecs included, and sampling.

What crosses a boundary goes through its wire format, as in training, so the logits equal those of the stages evaluated
one after another (`StageTrainer.evaluate`). Float32. With a key-value cache a token costs one position, until the text
is longer than `model.sequence`: then the window slides, every token's position in it changes, and rotary positions are
absolute, so each further token costs a whole forward pass over the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from iota.config.schema import RunConfig
from iota.errors import IotaError
from iota.model.boundary import FORWARD, boundary_tensor
from iota.model.cache import KeyValueCache, Past
from iota.model.layout import Layout
from iota.model.llama import LlamaStage
from iota.model.wires import round_trip


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token; `top_k` keeps that many tokens (0: all). Same seed, same text on one
    kind of machine. Raises IotaError("bad_input") for impossible values."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.top_k < 0 or self.seed < 0 or not 0 <= self.temperature < float("inf"):
            raise IotaError(
                "bad_input",
                f"tokens {self.tokens}, temperature {self.temperature}, top-k {self.top_k}, seed {self.seed}",
                "Use tokens >= 1, temperature >= 0, top-k >= 0 (0: all), seed >= 0",
            )


def stages_in_a_row(
    config: RunConfig, stages: Sequence[LlamaStage], ids: torch.Tensor, past: Past | None = None
) -> torch.Tensor:
    """Logits [B, T, V] of token ids int64 [B, T]; `past` as in `LlamaStage.forward`.

    Raises IotaError("not_finite") when a boundary's values are."""
    payload = boundary_tensor(config, FORWARD)
    values = ids
    for stage in stages[:-1]:
        values = round_trip(stage(values, ids if stage.reads_ids else None, past), payload)
    last = stages[-1]
    logits: torch.Tensor = last(values, ids if last.reads_ids else None, past)
    return logits


class Chain:
    """All stages of a model in a row, forward only."""

    def __init__(self, config: RunConfig, cuts: Sequence[tuple[int, int]], weights: Sequence[np.ndarray]) -> None:
        """`weights[s]`: stage s's flat float32 weights in the order of `Layout`; copied.

        Raises ConfigError when the model cannot be built, IotaError("bad_input") when a stage's weights do not fit.
        """
        self.config = config
        self._stages: list[LlamaStage] = []
        for stage, (cut, flat) in enumerate(zip(cuts, weights, strict=True)):
            module = LlamaStage(config, stage, cut).requires_grad_(False)
            layout = Layout.of(module)
            if flat.shape != (layout.size,):
                raise IotaError("bad_input", f"stage {stage} has {layout.size} weights, {flat.shape} were given")
            for name, view in layout.views(torch.tensor(flat)).items():
                module.get_parameter(name).data = view
            self._stages.append(module)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Float32 logits [B, T, V] of token ids [B, T], T at most the model's sequence.

        Raises IotaError("not_finite") when the model gives NaN or infinity."""
        assert ids.ndim == 2 and 0 < ids.shape[1] <= self.config.model.sequence, ids.shape
        return self._logits(ids, None)

    def cached_logits(self, ids: np.ndarray, cache: KeyValueCache) -> np.ndarray:
        """Float32 logits [B, T, V] of ids [B, T] that follow those in `cache`, which takes them in. Equal to the last T
        of `logits` of all ids but for float32 rounding (which a coarse wire format can make larger).

        Raises IotaError("not_finite"): throw the cache away then."""
        cache.begin(ids.shape[1])
        return self._logits(ids, cache)

    def _logits(self, ids: np.ndarray, past: Past | None) -> np.ndarray:
        with torch.no_grad():
            tokens = torch.tensor(ids, dtype=torch.int64)
            out: np.ndarray = stages_in_a_row(self.config, self._stages, tokens, past).float().numpy()
        if not np.isfinite(out).all():
            raise IotaError("not_finite", "the model's logits are not finite", "Use an earlier checkpoint")
        return out

    def generate(self, prompt: Sequence[int], sampling: Sampling, known: int = 0) -> list[int]:
        """`sampling.tokens` ids that continue `prompt`, each drawn from the last `model.sequence` ids before it.
        Ids from `known` on (0: the model's vocabulary) are never drawn: the tokenizer has no text for them.

        Raises IotaError("bad_input") for an empty prompt or an id outside the vocabulary."""
        vocabulary = self.config.model.vocabulary
        if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
            raise IotaError(
                "bad_input",
                "the prompt is empty" if not prompt else f"the prompt has ids outside [0, {vocabulary})",
                "Give at least one character of text, in the run's tokenizer",
            )
        draws = np.random.Generator(np.random.Philox(key=sampling.seed))
        ids = list(prompt)
        window, cache = self.config.model.sequence, KeyValueCache(self.config.model)
        for _ in range(sampling.tokens):
            if len(ids) > window:
                logits = self.logits(np.asarray([ids[-window:]], dtype=np.int64))
            else:
                logits = self.cached_logits(np.asarray([ids[cache.length :]], dtype=np.int64), cache)
            ids.append(draw(logits[0, -1, : known or vocabulary], sampling, draws))
        return ids[len(prompt) :]


def draw(logits: np.ndarray, sampling: Sampling, draws: np.random.Generator) -> int:
    """One token id from logits [V]. Equal logits are ordered by id, so `top_k` cuts the same way everywhere."""
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    if sampling.temperature == 0:
        return int(order[0])
    kept = logits[order].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: all but the likeliest go to exp(-inf) = 0
        chances = np.exp((kept - kept[0]) / sampling.temperature)
    total = np.cumsum(chances)
    place = int(np.searchsorted(total, draws.random() * total[-1], side="right"))
    return int(order[min(place, order.size - 1)])
