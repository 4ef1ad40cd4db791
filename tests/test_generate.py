"""Sampling: seeded, bounded by top-k, greedy at temperature 0, over the model's own window; and the key-value cache."""

import msgspec
import numpy as np
import pytest

from iota.config.schema import ModelConfig, RunConfig, StagesConfig
from iota.errors import IotaError
from iota.model.boundary import CODECS
from iota.model.cache import KeyValueCache
from iota.model.generate import Chain, Sampling, draw
from iota.model.layout import initial_state
from iota.model.llama import LlamaStage
from iota.model.partition import cut_blocks

CONFIG = RunConfig(
    name="g",
    model=ModelConfig(width=32, blocks=2, heads=2, kv_heads=1, ffn=64, vocabulary=40, sequence=8),
    stages=StagesConfig(count=2, codec="bottleneck", channels=4),
)


def chain(config: RunConfig = CONFIG, scale: float = 20.0) -> Chain:
    cuts = cut_blocks(config)
    return Chain(config, cuts, [initial_state(config, s, cut, 1) * np.float32(scale) for s, cut in enumerate(cuts)])


def test_same_seed_same_text_and_another_seed_another() -> None:
    model = chain()
    first = model.generate([1, 2], Sampling(30, 1.0, 0, seed=4))
    assert first == model.generate([1, 2], Sampling(30, 1.0, 0, seed=4))
    assert first != model.generate([1, 2], Sampling(30, 1.0, 0, seed=5))
    assert len(first) == 30 and all(0 <= token < 40 for token in first)


def test_only_the_last_window_counts() -> None:
    model = chain()
    long = [int(n) for n in np.random.default_rng(0).integers(0, 40, 50)]
    assert model.generate(long, Sampling(5)) == model.generate(long[-8:], Sampling(5))


def test_temperature_zero_and_top_one_take_the_likeliest() -> None:
    model = chain()
    greedy = model.generate([3], Sampling(12, temperature=0.0))
    assert greedy == model.generate([3], Sampling(12, top_k=1, seed=9))
    assert greedy == model.generate([3], Sampling(12, temperature=1e-300, seed=2))
    assert greedy[0] == int(model.logits(np.array([[3]]))[0, -1].argmax())


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn() -> None:
    assert max(chain().generate([1], Sampling(60, temperature=50.0, top_k=0), known=7)) < 7


def test_draws_follow_the_distribution_and_ties_the_lower_id() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    draws = np.random.Generator(np.random.Philox(key=0))
    counts = np.bincount([draw(logits, Sampling(temperature=1.0, top_k=0), draws) for _ in range(4000)], minlength=3)
    np.testing.assert_allclose(counts / 4000, [0.1, 0.6, 0.3], atol=0.03)
    assert {draw(logits, Sampling(temperature=5.0, top_k=2), draws) for _ in range(200)} == {1, 2}
    assert draw(np.zeros(5, np.float32), Sampling(temperature=0.0), draws) == 0


def test_impossible_requests_are_refused() -> None:
    model = chain()
    for prompt in ([], [40], [-1]):
        with pytest.raises(IotaError) as refused:
            model.generate(prompt, Sampling(1))
        assert refused.value.code == "bad_input"
    for wrong in ({"tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"seed": -1}):
        with pytest.raises(IotaError):
            Sampling(**wrong)
    with pytest.raises(IotaError, match="weights"):
        Chain(CONFIG, cut_blocks(CONFIG), [np.zeros(3, np.float32)] * 2)
    with pytest.raises(IotaError, match="not finite"):
        chain(scale=float("inf")).generate([1], Sampling(1))


def test_one_stage_with_tied_embeddings_works() -> None:
    model = msgspec.structs.replace(CONFIG.model, tie_embeddings=True)
    config = msgspec.structs.replace(CONFIG, model=model, stages=StagesConfig(count=1))
    assert len(chain(config).generate([5], Sampling(4))) == 4


# ------------------------------------------------------------------------------------------------- key-value cache

SPLITS = ((1,) * 8, (5, 1, 1, 1), (3, 4, 1), (8,))


def with_stages(**stages: object) -> RunConfig:
    return msgspec.structs.replace(CONFIG, stages=msgspec.structs.replace(CONFIG.stages, **stages))


def in_parts(model: Chain, ids: np.ndarray, parts: tuple[int, ...]) -> np.ndarray:
    cache, rows, place = KeyValueCache(model.config.model), [], 0
    for part in parts:
        rows.append(model.cached_logits(ids[:, place : place + part], cache))
        place += part
        assert cache.length == place
    return np.concatenate(rows, axis=1)


@pytest.mark.parametrize("codec", CODECS)
def test_logits_with_a_cache_are_those_without(codec: str) -> None:
    """Wire formats work token by token, but a value on the edge between two of their steps may fall on either side when
    it differs in its last bit: where the format is coarse, nearly all values must agree."""
    model = chain(with_stages(codec=codec, wire_dtype="float32"), 3.0)
    ids = np.random.default_rng(3).integers(0, 40, (3, 8))
    want = model.logits(ids)
    assert want.std() > 0.3
    for parts in SPLITS:
        off = np.abs(in_parts(model, ids, parts) - want)
        if CODECS[codec].forward:
            assert np.quantile(off, 0.9) < 1e-5 and off.max() < 0.1, parts
        else:
            assert off.max() < 1e-5, parts


def test_a_token_costs_one_position_until_the_window_slides(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    real = LlamaStage.forward

    def spy(stage: LlamaStage, x, *rest, **more):  # type: ignore[no-untyped-def]
        lengths.append(x.shape[1])
        return real(stage, x, *rest, **more)

    model = chain()
    monkeypatch.setattr(LlamaStage, "forward", spy)
    model.generate([1, 2, 3], Sampling(8))
    assert lengths[::2] == lengths[1::2] == [3, 1, 1, 1, 1, 1, 8, 8]


def test_generated_text_is_that_of_whole_forward_passes() -> None:
    model = chain(with_stages(wire_dtype="float32"))
    ids = [5, 6]
    for _ in range(12):
        ids.append(int(model.logits(np.array([ids[-8:]]))[0, -1].argmax()))
    assert model.generate([5, 6], Sampling(12, temperature=0.0)) == ids[2:]


def test_a_cache_is_not_filled_beyond_the_sequence() -> None:
    model, cache = chain(), KeyValueCache(CONFIG.model)
    model.cached_logits(np.zeros((1, 8), int), cache)
    with pytest.raises(AssertionError):
        model.cached_logits(np.zeros((1, 1), int), cache)
