"""Score, emission, explain: conservation laws, every rule of the design's section 6, and texts that add up."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.config.schema import PayConfig
from iota.core import pay
from iota.core.pay import Credit, Policy

LIMITED = settings(derandomize=True, deadline=None, max_examples=80)
POLICY = Policy(1000, 0.0, 3, 0.0)


def valid(epoch: int, key: str, passes: int, scored: int | None = None) -> Credit:
    return Credit(epoch, key, 1, 0, passes, "valid", (1, 1), epoch if scored is None else scored, "audit valid")


@st.composite
def any_credits(draw: st.DrawFn) -> list[Credit]:
    """Histories as the functions of this module make them."""
    made: dict[tuple, Credit] = {}
    for _ in range(draw(st.integers(0, 15))):
        credit = Credit(draw(st.integers(1, 8)), draw(st.sampled_from("abcde")), draw(st.integers(1, 2)), 0, 0)
        credit = Credit(*credit.id[:2], credit.session, 0, draw(st.sampled_from([0, 1, 7, 10**6])))
        for verdict in draw(st.lists(st.sampled_from(["valid", "invalid", "inconclusive"]), max_size=2)):
            credit = pay.judge(credit, verdict, credit.epoch + draw(st.integers(0, 2)), "measured")
        past = draw(st.lists(st.sampled_from(["valid", "invalid"]), max_size=12))
        made[credit.id] = pay.settle(credit, draw(st.integers(1, 10)), past, 2)
    credits = list(made.values())
    if draw(st.booleans()):
        credits = pay.forfeit(credits, "a", draw(st.integers(1, 10)), 3, "confirmed")
    return credits


policies = st.builds(
    Policy,
    st.sampled_from([0, 1, 7, 1000, 10**15]),
    st.floats(0, 1),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.5, 3.0]),
)


@LIMITED
@given(any_credits(), st.integers(1, 12), policies)
def test_emissions_sum_to_the_pool(credits: list[Credit], epoch: int, policy: Policy) -> None:
    assert all(credit.problem() is None for credit in credits)
    emission = pay.emit(credits, epoch, policy)
    burned = (emission.burned_by_policy, emission.burned_unmeasured, emission.burned_unclaimed)
    assert sum(emission.paid.values()) + emission.burned == policy.pool
    assert min([*emission.paid.values(), *burned]) >= 0
    assert emission == pay.emit(credits[::-1], epoch, policy)
    rows, held = pay.standings(credits, epoch, policy)
    assert (emission.why == "") == any(rows.values())
    for key, worth in rows.items():
        if any(rows.values()):
            exact = Fraction((policy.pool - emission.burned_by_policy) * worth, sum(rows.values()) + held)
            assert abs(emission.paid[key] - exact) < 1
        assert worth > 0 or emission.paid[key] == 0


@LIMITED
@given(any_credits(), st.integers(1, 12), policies)
def test_explanations_sum_to_what_was_paid(credits: list[Credit], epoch: int, policy: Policy) -> None:
    emission = pay.emit(credits, epoch, policy)
    for key in "abcdez":
        told = pay.explain(key, epoch, credits, policy)
        assert sum(line.paid for line in told.lines) == told.total == emission.paid.get(key, 0)
        assert len(told.lines) == sum(c.key == key and c.epoch <= epoch for c in credits)
        assert all(line.reason and (line.paid or line.remedy) for line in told.lines)
        assert f"was paid {told.total:,} of {policy.pool:,}" in told.text
        assert "nan" not in told.text and "inf" not in told.text.replace("information", "")


@LIMITED
@given(st.integers(0, 10**9), st.dictionaries(st.text(max_size=3), st.integers(0, 10**12), min_size=1, max_size=30))
def test_largest_remainder(total: int, parts: dict[str, int]) -> None:
    if sum(parts.values()) == 0:
        return
    amounts = pay.divide(total, parts)
    assert sum(amounts.values()) == total
    for key, part in parts.items():
        assert abs(amounts[key] - Fraction(total * part, sum(parts.values()))) < 1
        assert part > 0 or amounts[key] == 0


def test_ties_go_in_order_of_key() -> None:
    assert pay.divide(10, {"c": 1, "a": 1, "b": 1}) == {"a": 4, "b": 3, "c": 3}


def test_pay_is_proportional_to_valid_passes() -> None:
    credits = [valid(1, "a", 30), valid(1, "b", 10), Credit(1, "c", 1, 0, 60, "invalid", (0, 1), 1, "copied")]
    assert pay.emit(credits, 1, POLICY).paid == {"a": 750, "b": 250, "c": 0}
    burned = pay.emit(credits, 1, Policy(1000, 0.2, 3, 0.0))
    assert burned.paid == {"a": 600, "b": 200, "c": 0} and burned.burned_by_policy == 200


def test_splitting_a_miner_pays_nothing() -> None:
    one = pay.emit([valid(1, "a", 50), valid(1, "x", 50)], 1, POLICY).paid["a"]
    five = pay.emit([*(valid(1, f"a{i}", 10) for i in range(5)), valid(1, "x", 50)], 1, POLICY).paid
    assert sum(v for key, v in five.items() if key != "x") == one


def test_the_window_of_gamma_epochs() -> None:
    """Counts in full at ages 0..gamma, then exactly nothing: a miner that left earns 0 at a known time."""
    credits = [valid(2, "a", 5)]
    assert [pay.emit(credits, e, POLICY).paid["a"] for e in range(1, 8)] == [0, 1000, 1000, 1000, 1000, 0, 0]
    assert [pay.weight(t, Policy(1, 0, 2, 1.0)) for t in (-1, 0, 1, 2, 3)] == [0, 10**9, 5 * 10**8, 25 * 10**7, 0]
    late = [valid(2, "a", 5, scored=4)]
    assert [pay.emit(late, e, POLICY).paid["a"] for e in (3, 4, 7, 8)] == [0, 1000, 1000, 0]


def test_withheld_work_gives_nothing_to_the_others() -> None:
    """A validator that measures one of two miners does not raise that one's pay (nor lower it)."""
    both = pay.emit([valid(1, "a", 10), valid(1, "b", 30)], 1, POLICY)
    part = pay.emit([valid(1, "a", 10), Credit(1, "b", 1, 0, 30)], 1, POLICY)
    assert part.paid == {"a": both.paid["a"], "b": 0} and part.burned_unmeasured == 750


def test_unmeasured_is_drawn_again_then_paid_by_history() -> None:
    fresh = Credit(4, "a", 1, 0, 100)
    history = ["invalid"] * 5 + ["valid"] * 9 + ["invalid", "inconclusive"]
    assert pay.settle(fresh, 4, history, 2) == fresh == pay.settle(fresh, 5, history, 2)
    paid = pay.settle(fresh, 6, history, 2)
    assert (paid.state, paid.share, paid.scored, pay.score(paid)) == ("unmeasured", (9, 10), 6, 90 * pay.UNIT)
    assert "9 of the last 10" in paid.why
    assert pay.settle(fresh, 4, history, 2, final=True).scored == 4
    newcomer = pay.settle(fresh, 6, ["inconclusive"], 2)
    assert (newcomer.share, pay.score(newcomer)) == ((0, 1), 0) and "burned" in newcomer.why
    emission = pay.emit([newcomer, valid(6, "b", 100)], 6, POLICY)
    assert emission.paid == {"a": 0, "b": 500} and emission.burned_unmeasured == 500
    assert pay.settle(paid, 9, [], 2) == paid
    assert pay.settle(valid(1, "a", 1), 9, [], 2) == valid(1, "a", 1)


def test_verdicts() -> None:
    fresh = Credit(4, "a", 1, 0, 100)
    unclear = pay.judge(fresh, "inconclusive", 4, "validator out of memory")
    assert unclear.state == "unmeasured" and unclear.scored == -1 and "out of memory" in unclear.why
    good = pay.judge(unclear, "valid", 5, "equal digests")
    assert (good.state, good.share, good.scored) == ("valid", (1, 1), 5)
    assert pay.judge(good, "valid", 7, "again").scored == 5  # a second verdict does not make work younger
    bad = pay.judge(good, "invalid", 7, "cosine 0.1")
    assert (bad.state, bad.share) == ("invalid", (0, 1))
    assert pay.judge(bad, "valid", 8, "sorry") == bad
    with pytest.raises(AssertionError):
        pay.judge(fresh, "maybe", 4, "")


def test_a_confirmed_invalid_forfeits_what_still_counts() -> None:
    credits = [valid(1, "a", 5), valid(4, "a", 5), Credit(5, "a", 1, 0, 9), valid(4, "b", 5)]
    after = pay.forfeit(credits, "a", 5, 3, "scaled gradients")
    assert [c.state for c in after] == ["valid", "forfeited", "forfeited", "valid"]  # epoch 1 had expired
    assert pay.emit(after, 5, POLICY).paid == {"a": 0, "b": 1000}
    line = pay.explain("a", 5, after, POLICY).lines[1]
    assert "forfeited in epoch 5: scaled gradients" in line.reason and "later epochs count again" in line.remedy


def test_nobody_to_pay_is_explicit() -> None:
    nothing = pay.emit([], 3, POLICY)
    assert (nothing.paid, nothing.burned, nothing.burned_unclaimed) == ({}, 1000, 1000) and "burned" in nothing.why
    held = pay.emit([Credit(3, "a", 1, 0, 5)], 3, POLICY)
    assert (held.paid, held.burned_unmeasured, held.burned_unclaimed) == ({"a": 0}, 1000, 0)
    zero = pay.emit([valid(3, "a", 0)], 3, POLICY)
    assert zero.paid == {"a": 0} and zero.burned == 1000


@pytest.mark.parametrize(
    "policy",
    [
        Policy(-1, 0.0, 3, 0.0),
        Policy(1, -0.1, 3, 0.0),
        Policy(1, 1.1, 3, 0.0),
        Policy(1, float("nan"), 3, 0.0),
        Policy(1, 0.0, -1, 0.0),
        Policy(1, 0.0, 3, float("inf")),
        Policy(1, 0.0, 3, float("nan")),
        Policy(1, 0.0, 3, -1.0),
    ],
)
def test_impossible_policies(policy: Policy) -> None:
    with pytest.raises(ValueError):
        pay.emit([valid(1, "a", 1)], 1, policy)


@pytest.mark.parametrize(
    "credit",
    [
        Credit(1, "a", 1, 0, -1),
        Credit(1, "a", 1, 0, 1, "great", (1, 1), 1),
        Credit(1, "a", 1, 0, 1, "valid", (1, 2), 1),
        Credit(1, "a", 1, 0, 1, "invalid", (1, 1), 1),
        Credit(1, "a", 1, 0, 1, "valid", (1, 1), -1),
        Credit(2, "a", 1, 0, 1, "valid", (1, 1), 1),
        Credit(1, "a", 1, 0, 1, "unmeasured", (2, 1), 1),
        Credit(1, "a", 1, 0, 1, "unmeasured", (0, 0), 1),
        Credit(1, "a", 1, 0, 1, "unmeasured", (1, 2), -1),
    ],
)
def test_contradictory_credits(credit: Credit) -> None:
    with pytest.raises(ValueError):
        pay.emit([credit], 3, POLICY)


def test_explain_tells_the_reason_of_each_zero() -> None:
    credits = [
        valid(1, "a", 10),
        Credit(3, "a", 1, 0, 10, "invalid", (0, 1), 3, "cosine 0.2"),
        valid(4, "a", 0),
        Credit(5, "a", 1, 0, 4),
        valid(5, "a", 10**3, 5),
        valid(5, "b", 10**9),
    ]
    credits[4] = Credit(5, "a", 2, 0, 1, "valid", (1, 1), 5, "audit valid")
    reasons = [line.reason for line in pay.explain("a", 5, credits, POLICY).lines]
    words = ("older than gamma", "cosine 0.2", "no backward pass", "withheld", "rounds to zero")
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))
    text = pay.explain("a", 5, credits, POLICY).text
    assert "what would change it" in text and len(text.splitlines()) == 6
    assert "no backward pass of it was accepted" in pay.explain("nobody", 5, credits, POLICY).text
    rich = pay.explain("b", 5, credits, POLICY)
    assert rich.total == 1000 and rich.lines[0].remedy == ""


def test_policy_of_a_run_file() -> None:
    assert pay.policy_of(PayConfig(pool=5, burn=0.5, gamma=2, half_life=1.0)) == Policy(5, 0.5, 2, 1.0)
