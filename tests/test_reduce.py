"""The reduction of a shard: bit-equal to a ten-line reference; contributions that cannot be used are left out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.core import reduce as rd

LIMITED = settings(derandomize=True, deadline=None, max_examples=40)
NESTEROV = rd.Outer("nesterov", 0.7, 0.5)
ASSIGN = rd.Outer("assign")
F = np.float32


def shard(size: int, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((4, size), dtype=F)
    return {"weights": x[0], "momentum": x[1], "m": x[2], "v": np.square(x[3])}


def given_by(count: int, size: int, part: str) -> dict[str, dict[str, np.ndarray]]:
    made = {f"key{i}": shard(size, i + 1) for i in range(count)}
    return {key: {part: p["weights"], "m": p["m"], "v": p["v"]} for key, p in made.items()}


def reference(contributions: dict, passes: dict, old: dict, outer: rd.Outer) -> dict[str, list[np.float32]]:
    """Element by element in np.float32 scalars, as the design writes it."""
    total = sum(passes.values())
    c = {key: F(passes[key] / total) for key in sorted(passes)}
    result: dict[str, list[np.float32]] = {name: [] for name in outer.result_parts(True)}
    for j in range(len(old["weights"])):
        acc = {}
        for part in outer.upload_parts(True):
            terms = [c[key] * contributions[key][part][j] for key in sorted(passes)]
            acc[part] = terms[0]
            for term in terms[1:]:
                acc[part] = acc[part] + term
        if outer.kind == "assign":
            result["weights"].append(acc["weights"])
        else:
            mu, lr = F(outer.momentum), F(outer.lr)
            m = mu * old["momentum"][j] + acc["delta"]
            result["momentum"].append(m)
            result["weights"].append(old["weights"][j] - lr * (acc["delta"] + mu * m))
        result["m"].append(acc["m"])
        result["v"].append(acc["v"])
    return result


@LIMITED
@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([NESTEROV, ASSIGN]), st.data())
def test_bit_equal_to_the_reference(count: int, size: int, outer: rd.Outer, data: st.DataObject) -> None:
    passes = {f"key{i}": data.draw(st.integers(1, 1000)) for i in range(count)}
    contributions = given_by(count, size, outer.upload_part)
    old = shard(size, 99)
    reduced = rd.reduce_shard(contributions, rd.coefficients(passes, 1e9), old, outer)
    expected = reference(contributions, passes, old, outer)
    assert tuple(reduced.parts) == outer.result_parts(True) and not reduced.dropped and not reduced.kept
    for name, values in expected.items():
        assert reduced.parts[name].dtype == F
        assert reduced.parts[name].tobytes() == np.array(values, F).tobytes()


@LIMITED
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_one_contribution_under_assign_is_itself(values: list[float]) -> None:
    """Negative zeros, denormals and the largest floats included."""
    x = np.array(values, F)
    old = {"weights": np.ones_like(x)}
    coefficient = rd.coefficients({"a": 13}, 2.0)
    assert coefficient == {"a": 1.0}
    assert rd.reduce_shard({"a": {"weights": x}}, coefficient, old, ASSIGN).parts["weights"].tobytes() == x.tobytes()


@LIMITED
@given(st.integers(1, 30), st.integers(2, 6))
def test_cutting_into_shards_changes_nothing(cut: int, count: int) -> None:
    contributions, old = given_by(count, 32, "delta"), shard(32, 50)
    coefficient = rd.coefficients({key: i + 1 for i, key in enumerate(contributions)}, 2.0)
    whole = rd.reduce_shard(contributions, coefficient, old, NESTEROV).parts
    for piece in (slice(0, cut), slice(cut, 32)):
        parts = {key: {name: a[piece] for name, a in given.items()} for key, given in contributions.items()}
        part = rd.reduce_shard(parts, coefficient, {name: a[piece] for name, a in old.items()}, NESTEROV).parts
        assert all(part[name].tobytes() == whole[name][piece].tobytes() for name in whole)


def test_inputs_are_not_written_to() -> None:
    contributions, old = given_by(3, 20, "delta"), shard(20, 9)
    for array in [*old.values(), *(a for parts in contributions.values() for a in parts.values())]:
        array.flags.writeable = False
    rd.reduce_shard(contributions, {key: 1 / 3 for key in contributions}, old, NESTEROV)


def test_coefficients_are_capped_at_the_median() -> None:
    assert rd.coefficients({"b": 1, "a": 3}, 2.0) == {"a": 0.75, "b": 0.25}
    capped = rd.coefficients({"a": 10, "b": 10, "c": 1000}, 2.0)
    assert capped == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert rd.coefficients({"a": 0, "b": 5}, 2.0) == {"b": 1.0}
    assert rd.coefficients({"a": 0}, 2.0) == {} == rd.coefficients({}, 2.0)
    assert list(rd.coefficients({"z": 1, "y": 2, "x": 3}, 2.0)) == ["x", "y", "z"]
    assert rd.coefficients({"a": 1, "b": 2}, 2.0)["a"] == float(F(1 / 3))
    for bad in (({"a": -1}, 2.0), ({"a": 1}, 0.0), ({"a": 1}, float("nan"))):
        with pytest.raises(ValueError, match="passes"):
            rd.coefficients(*bad)


@LIMITED
@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 10**9), max_size=20), st.floats(1, 5))
def test_coefficients_are_shares(passes: dict[str, int], cap: float) -> None:
    result = rd.coefficients(passes, cap)
    assert set(result) == {key for key, count in passes.items() if count}
    assert all(0 < c <= 1 and float(F(c)) == c for c in result.values())
    if result:
        assert sum(result.values()) == pytest.approx(1, abs=1e-5)


def test_bad_contributions_are_left_out_and_the_rest_renormalised() -> None:
    size = 8
    contributions: dict = given_by(7, size, "delta")
    old = shard(size, 70)
    coefficient = rd.coefficients({key: 10 for key in contributions}, 2.0)
    contributions["key0"] = "chunk 3 of delta: digest differs from the manifest"
    contributions["key1"]["v"] = np.full(size, -1e-30, F)
    contributions["key2"]["delta"] = np.full(size, np.nan, F)
    contributions["key3"]["m"] = np.ones(size + 1, F)
    del contributions["key4"]["v"]
    del contributions["key5"]
    reduced = rd.reduce_shard(contributions, coefficient, old, NESTEROV)
    assert [key for key, _ in reduced.dropped] == [f"key{i}" for i in range(6)]
    words = [why for _, why in reduced.dropped]
    for word, why in zip(("digest", "negative", "not finite", "expected", "missing", "no contr"), words, strict=True):
        assert word in why
    alone = rd.reduce_shard({"key6": contributions["key6"]}, {"key6": 1.0}, old, NESTEROV)
    assert all(np.array_equal(reduced.parts[name], alone.parts[name]) for name in alone.parts)
    assert all(np.isfinite(array).all() for array in reduced.parts.values()) and not reduced.kept


def test_renormalise_leaves_whole_sets_alone() -> None:
    third = rd.coefficients({"a": 1, "b": 1, "c": 1}, 2.0)
    assert rd.renormalise(third, {"a", "b", "c"}) == third
    assert rd.renormalise(third, {"a", "b"}) == {"a": 0.5, "b": 0.5}
    assert rd.renormalise(third, {"c"}) == {"c": 1.0} and rd.renormalise(third, ()) == {}


@pytest.mark.parametrize("outer", [ASSIGN, NESTEROV])
def test_a_shard_without_contributions_keeps_its_value_and_momentum(outer: rd.Outer) -> None:
    old = shard(5, 3)
    for reduced in (rd.reduce_shard({}, {}, old, outer), rd.reduce_shard({"a": "gone"}, {"a": 1.0}, old, outer)):
        assert reduced.kept and tuple(reduced.parts) == outer.result_parts(True)
        assert all(np.array_equal(reduced.parts[name], old[name]) for name in reduced.parts)


def test_a_result_that_overflows_keeps_the_old_value() -> None:
    old = {"weights": np.array([-3e38], F), "momentum": np.zeros(1, F)}
    reduced = rd.reduce_shard({"a": {"delta": np.array([3e38], F)}}, {"a": 1.0}, old, NESTEROV)
    assert reduced.kept and reduced.parts["weights"][0] == F(-3e38)


def test_zero_pseudo_gradient_moves_by_momentum_only() -> None:
    old = shard(5, 3)
    zero = rd.zero_gradient(old, NESTEROV)
    contribution = {"delta": np.zeros(5, F), "m": old["m"], "v": old["v"]}
    same = rd.reduce_shard({"a": contribution}, {"a": 1.0}, old, NESTEROV).parts
    assert tuple(zero) == tuple(same) and all(np.array_equal(zero[name], same[name]) for name in same)
    assert not np.array_equal(zero["weights"], old["weights"])
    assert all(np.array_equal(array, old[name]) for name, array in rd.zero_gradient(old, ASSIGN).items())


def test_first_merge_without_momentum() -> None:
    old = {"weights": np.array([1, 2], F)}
    reduced = rd.reduce_shard({"a": {"delta": np.array([1, 1], F)}}, {"a": 1.0}, old, rd.Outer("nesterov", 1.0, 0.0))
    assert reduced.parts["weights"].tolist() == [0, 1] and reduced.parts["momentum"].tolist() == [1, 1]


def test_a_half_step_is_rounded_by_the_weights_and_not_by_their_rounding():
    passes, steps = {"a": 14, "b": 15, "c": 23}, {"a": 7, "b": 8, "c": 12}
    assert sum(passes[k] * steps[k] for k in steps) / 52 == 9.5
    assert rd.mean_steps(passes, 2.0, steps) == 10
    assert rd.mean_steps({"a": 1, "b": 3}, 2.0, {"a": 1, "b": 2}) == round(7 / 4) == 2
    assert rd.mean_steps({"a": 1, "b": 1, "c": 100}, 2.0, {"a": 0, "b": 0, "c": 8}) == 4, "capped at twice the median"
    assert rd.mean_steps({"a": 0}, 2.0, {"a": 5}) == 0
