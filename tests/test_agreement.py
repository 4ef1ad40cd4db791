"""Every row of the table of decisions, the matrix, and: whoever dies or lies, a shard with an honest owner is right."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.core import agreement as ag
from iota.core import butterfly as bf
from iota.core import reduce as rd

D, X, Y = "d" * 64, "e" * 64, "f" * 64
LIMITED = settings(derandomize=True, deadline=None, max_examples=60)

# owners, reports, gone, third, late, replacement -> kind, digest, winners, liars, missing
ROWS = [
    ("ab", {"a": D}, "", None, False, None, "waiting", None, "", "", "b"),
    ("ab", {}, "", None, False, None, "waiting", None, "", "", "ab"),
    ("ab", {}, "a", None, False, None, "waiting", None, "", "", "ab"),
    ("a", {}, "", None, False, None, "waiting", None, "", "", "a"),
    ("ab", {"a": D, "b": D}, "", None, False, None, "agreed", D, "ab", "", ""),
    ("ab", {"a": D, "b": D}, "ab", None, True, None, "agreed", D, "ab", "", ""),
    ("ab", {"a": D, "b": D}, "", D, False, None, "agreed", D, "ab", "", ""),
    ("ab", {"a": D, "b": D}, "", X, False, None, "settled", X, "", "ab", ""),
    ("ab", {"a": D, "b": X}, "", None, False, None, "dispute", None, "", "", ""),
    ("ab", {"a": D, "b": X}, "", None, True, None, "zero", None, "", "", ""),
    ("ab", {"a": D, "b": X}, "", D, False, None, "settled", D, "a", "b", ""),
    ("ab", {"a": D, "b": X}, "", X, True, None, "settled", X, "b", "a", ""),
    ("ab", {"a": D, "b": X}, "", Y, False, None, "settled", Y, "", "ab", ""),
    ("ab", {"a": D}, "b", None, False, None, "alone", D, "a", "", "b"),
    ("ab", {"a": D}, "", None, True, None, "alone", D, "a", "", "b"),
    ("a", {"a": D}, "", None, False, None, "alone", D, "a", "", ""),
    ("ab", {"a": D}, "b", D, False, None, "agreed", D, "a", "", "b"),
    ("a", {"a": D}, "", D, False, None, "agreed", D, "a", "", ""),
    ("ab", {"a": D}, "b", X, False, None, "settled", X, "", "a", "b"),
    ("a", {"a": D}, "", X, False, None, "settled", X, "", "a", ""),
    ("ab", {}, "ab", None, False, None, "orphaned", None, "", "", "ab"),
    ("a", {}, "a", None, False, None, "orphaned", None, "", "", "a"),
    ("ab", {}, "ab", None, False, "c", "waiting", None, "", "", "abc"),
    ("ab", {"c": D}, "ab", None, False, "c", "alone", D, "c", "", "ab"),
    ("ab", {"c": D}, "ab", X, False, "c", "settled", X, "", "c", "ab"),
    ("ab", {"c": D, "a": D}, "ab", None, False, "c", "agreed", D, "ac", "", "b"),
    ("ab", {"c": D, "a": X}, "ab", None, False, "c", "dispute", None, "", "", "b"),
    ("ab", {}, "abc", None, False, "c", "kept", None, "", "", "abc"),
    ("ab", {}, "ab", None, True, "c", "kept", None, "", "", "abc"),
    ("ab", {}, "ab", None, True, None, "kept", None, "", "", "ab"),
    ("ab", {}, "", None, True, None, "kept", None, "", "", "ab"),
    ("ab", {}, "ab", X, False, None, "settled", X, "", "", "ab"),
    ("ab", {"a": D, "b": D, "z": X}, "", None, False, None, "agreed", D, "ab", "", ""),
]


@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{row[6]}" for i, row in enumerate(ROWS)])
def test_every_row_of_the_table(row: tuple) -> None:
    owners, reports, gone, third, late, new, kind, digest, winners, liars, missing = row
    found = ag.decide(list(owners), reports, gone=list(gone), third=third, late=late, replacement=new)
    assert (found.kind, found.digest) == (kind, digest)
    assert ("".join(found.winners), "".join(found.liars), "".join(found.missing)) == (winners, liars, missing)
    assert found.final == (kind in ("agreed", "settled", "alone", "zero", "kept")) and found.why


@LIMITED
@given(
    st.integers(1, 2),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([D, X, Y])),
    st.sets(st.sampled_from("abc")),
    st.sampled_from([None, D, X]),
    st.sampled_from([None, "c"]),
)
def test_the_limit_always_closes_a_shard(
    count: int, reports: dict, gone: set, third: str | None, new: str | None
) -> None:
    """At the last limit every case has a final outcome; nobody who was silent, or agrees, is called a liar."""
    found = ag.decide(list("ab"[:count]), reports, gone=gone, third=third, late=True, replacement=new)
    assert found.final
    assert not set(found.liars) & (set(found.winners) | set(found.missing))
    assert all(reports[key] != found.digest for key in found.liars)
    assert found.digest is None or found.digest in {*reports.values(), third}


def values_of_a_merge(plan: bf.Plan) -> list[dict]:
    """Each shard's true result for three contributors, from the real reduction."""
    rng = np.random.default_rng(4)
    size, outer = plan.chunks, rd.Outer("nesterov", 0.7, 0.5)
    uploads = {k: {"delta": rng.standard_normal(size, dtype=np.float32)} for k in "xyz"}
    old = {"weights": np.ones(size, np.float32), "momentum": np.ones(size, np.float32)}
    weight = rd.coefficients({"x": 3, "y": 1, "z": 2}, 2.0)
    results = []
    for s in range(plan.shards):
        a, b = plan.range(s)
        cut = {k: {"delta": p["delta"][a:b]} for k, p in uploads.items()}
        results.append(rd.reduce_shard(cut, weight, {n: v[a:b] for n, v in old.items()}, outer).parts)
    return results


@LIMITED
@given(st.integers(1, 9), st.data())
def test_whoever_dies_or_lies_a_shard_with_an_honest_owner_is_right(n: int, data: st.DataObject) -> None:
    """The third party is honest; liars are alive and each lies in its own way. Orphans are reassigned once."""
    plan = bf.make_plan([f"{i:02d}" for i in range(n)], 50, b"seed")
    dead = data.draw(st.sets(st.sampled_from(plan.members)))
    liars = data.draw(st.sets(st.sampled_from(plan.members))) - dead
    matrix = ag.AgreementMatrix(plan.members)
    living = [key for key in plan.members if key not in dead]
    for s, truth in enumerate(values_of_a_merge(plan)):
        true = truth["weights"].tobytes().hex()

        def says(key: str, true: str = true) -> str:
            return f"lie of {key}" if key in liars else true

        owners, third, new = plan.owners(s), None, None
        reports = {key: says(key) for key in owners if key not in dead}
        outcome = ag.decide(owners, reports, gone=dead)
        if outcome.kind == "orphaned" and (new := bf.reassign(s, dead, living, plan.seed)) is not None:
            outcome = ag.decide(owners, {**reports, new: says(new)}, gone=dead, replacement=new)
        if outcome.kind == "dispute":
            third = true
            outcome = ag.decide(owners, reports, gone=dead, third=third)
        if outcome.kind == "orphaned":
            outcome = ag.decide(owners, reports, gone=dead, late=True)
        matrix.record(owners, reports, third)
        honest = [key for key in (*owners, new) if key is not None and key not in dead | liars]
        if honest:
            assert outcome.digest == true and not set(outcome.liars) & set(honest)
        assert outcome.final and (outcome.kind == "kept") == (not living)
    assert {key for key, _, proven in matrix.suspects() if proven} <= liars
    delivered = int(np.triu(matrix.agree, 1).sum() + np.triu(matrix.disagree, 1).sum())
    assert delivered == len(living) * (len(living) - 1) // 2


def test_a_liar_stands_out_as_a_row() -> None:
    plan = bf.make_plan(list("abcdef"), 60, b"m")
    matrix = ag.AgreementMatrix(plan.members)
    for s in range(plan.shards):
        owners = plan.owners(s)
        reports = {key: X if key == "c" else D for key in owners if key != "f"}
        matrix.record(owners, reports, D if "c" in reports and len(reports) == 2 else None)
    assert matrix.disagree[2].tolist() == [1, 1, 4, 1, 1, 0]
    assert matrix.suspects()[0] == ("c", 4, 4)
    assert [row[1:] for row in matrix.suspects()[1:]] == [(1, 0)] * 4
    assert matrix.missing[5].tolist() == [1, 1, 1, 1, 1, 0] and matrix.missing[:5].sum() == 0
    assert np.array_equal(matrix.agree, matrix.agree.T)
    assert matrix.to_dict()["members"] == list("abcdef")


def test_matrix_of_one_member() -> None:
    matrix = ag.AgreementMatrix(["a"])
    matrix.record(("a",), {"a": D})
    matrix.record(("a",), {"a": D}, D)
    matrix.record(("a",), {"a": D}, X)
    matrix.record(("a",), {})
    assert (matrix.agree.item(), matrix.disagree.item(), matrix.missing.item()) == (1, 1, 1)
    assert matrix.suspects() == [("a", 0, 1)]


def test_drawn_shards() -> None:
    draw = ag.draw_recomputed
    assert draw(1, 1, 0.05, 0, 1, 0) == [0] == draw(1, 2, 0.0, 0, 1, 0)
    assert len(draw(10, 5, 0.05, 0, 1, 0)) == 1 and len(draw(100, 15, 0.051, 0, 1, 0)) == 6
    assert draw(10, 5, 0.0, 0, 1, 0) == [] and draw(10, 5, 1.0, 0, 1, 0) == list(range(10))
    assert set(draw(100, 15, 0.05, 0, 1, 0, alone=[7, 8])) >= {7, 8}
    assert draw(100, 15, 0.05, 0, 1, 0) == draw(100, 15, 0.05, 0, 1, 0) != draw(100, 15, 0.05, 0, 2, 0)
    firsts = {draw(10, 5, 0.1, seed, 1, 0)[0] for seed in range(200)}
    assert firsts == set(range(10))
