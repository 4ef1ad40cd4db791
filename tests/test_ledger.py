"""The ledger: anyone recomputes every head and payout; one changed unit or an omitted credit is found."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.core import ledger, pay, seeds
from iota.core.ledger import LedgerEpoch, Receipt
from iota.core.pay import Credit, Policy

LIMITED = settings(derandomize=True, deadline=None, max_examples=40)
POLICY = Policy(1_000_003, 0.1, 4, 0.0)
KEYS = [f"{i:064x}" for i in range(6)]
replace = msgspec.structs.replace


def run_of(epochs: int, keys: list[str]) -> list[LedgerEpoch]:
    """A run in which verdicts come at once, late, never, or against the miner."""
    entries: list[LedgerEpoch] = []
    credits: dict[tuple, Credit] = {}
    history: dict[str, list[str]] = {key: [] for key in keys}
    for epoch in range(1, epochs + 1):
        for i, key in enumerate(keys):
            credit = Credit(epoch, key, 1, i % 3, 1 + seeds.pick(1, "passes", 40, epoch, i))
            credits[credit.id] = credit
        for credit in sorted(credits.values(), key=lambda c: c.id):
            luck = seeds.pick(1, "luck", 10, credit.epoch, credit.key, epoch)
            if credit.scored < 0 and luck < 8:
                verdict = "invalid" if luck == 0 else "valid"
                history[credit.key].append(verdict)
                credits[credit.id] = pay.judge(credit, verdict, epoch, "replayed")
            else:
                credits[credit.id] = pay.settle(credit, epoch, history[credit.key], 2)
        if epoch % 5 == 0:
            for credit in pay.forfeit(credits.values(), keys[epoch % len(keys)], epoch, POLICY.gamma, "confirmed"):
                credits[credit.id] = credit
        entries.append(ledger.append(entries, "run-1", epoch, credits.values(), POLICY))
    return entries


RUN = run_of(12, KEYS)


def reseal(entries: list[LedgerEpoch], at: int) -> list[LedgerEpoch]:
    """A forger who recomputes every head from entry `at` on."""
    forged, previous = entries[:at], entries[at - 1].head if at else ledger.genesis("run-1")
    for entry in entries[at:]:
        entry = replace(entry, previous=previous)
        forged.append(replace(entry, head=entry.digest()))
        previous = forged[-1].head
    return forged


def test_an_honest_ledger_verifies() -> None:
    assert ledger.verify_chain(RUN, run="run-1", policy=POLICY) == []
    assert ledger.verify_chain([], run="run-1") == []
    for entry in RUN:
        assert sum(units for _, units in entry.emissions) + entry.burned == POLICY.pool
    states = {s.credit.state for entry in RUN for s in entry.statements}
    assert states == {"valid", "invalid", "unmeasured", "forfeited"}


def test_unchanged_credits_are_not_stated_again() -> None:
    seen: dict = {}
    for entry in RUN:
        for statement in entry.statements:
            assert seen.get(statement.credit.id) != statement.credit
            seen[statement.credit.id] = statement.credit


def test_entries_survive_encoding_and_cosigning() -> None:
    assert ledger.decode(ledger.encode(RUN)) == RUN
    signed = [replace(entry, cosignatures=((KEYS[0], "ab" * 64),)) for entry in RUN]
    assert ledger.verify_chain(ledger.decode(ledger.encode(signed)), policy=POLICY) == []
    with pytest.raises(ValueError, match="line 2"):
        ledger.decode(ledger.encode(RUN[:1]) + b"{}\n")


@LIMITED
@given(st.integers(0, 11), st.integers(0, 5), st.sampled_from([1, -1]), st.booleans())
def test_one_changed_unit_is_found(at: int, who: int, by: int, resealed: bool) -> None:
    entry = RUN[at]
    paid = list(entry.emissions)
    who %= len(paid)
    paid[who] = (paid[who][0], paid[who][1] + by)
    changed = [*RUN[:at], replace(entry, emissions=tuple(paid), burned=entry.burned - by), *RUN[at + 1 :]]
    problems = ledger.verify_chain(reseal(changed, at) if resealed else changed)
    assert any(f"epoch {entry.epoch}" in p and "its credits give" in p for p in problems)
    assert any("burned" in p for p in problems)
    assert any("the head is not" in p for p in problems) != resealed


@LIMITED
@given(st.integers(0, 11), st.integers(0, 30), st.sampled_from(["passes", "score", "why", "state", "dropped", "twice"]))
def test_a_changed_credit_is_found(at: int, which: int, what: str) -> None:
    entry = RUN[at]
    rows = list(entry.statements)
    which %= len(rows)
    credit = rows[which].credit
    if what == "dropped":
        del rows[which]
    elif what == "twice":
        rows.insert(which, rows[which])
    elif what == "score":
        rows[which] = replace(rows[which], score=rows[which].score + 1)
    else:
        new = {
            "passes": credit.passes + 1,
            "why": "x",
            "state": "unmeasured" if credit.state != "unmeasured" else "valid",
        }
        rows[which] = replace(rows[which], credit=replace(credit, **{what: new[what]}))
    changed = [*RUN[:at], replace(entry, statements=tuple(rows)), *RUN[at + 1 :]]
    assert ledger.verify_chain(changed)
    if what in ("score", "twice"):
        assert ledger.verify_chain(reseal(changed, at))


def test_an_omitted_credit_is_found_by_its_receipt() -> None:
    """The orchestrator leaves a credit out and seals a ledger that is consistent in itself: only the receipt tells."""
    all_credits = [Credit(1, key, 1, 0, 10, "valid", (1, 1), 1, "replayed") for key in KEYS]
    cheated = [ledger.append([], "run-1", 1, all_credits[1:], POLICY)]
    assert ledger.verify_chain(cheated) == []
    receipts = [Receipt(1, key, 1, 10) for key in KEYS] + [Receipt(2, KEYS[0], 1, 3)]  # epoch 2 is still open
    problems = ledger.verify_chain(cheated, receipts=receipts)
    assert len(problems) == 1 and KEYS[0][:8] in problems[0] and "the ledger credits 0" in problems[0]
    honest = [ledger.append([], "run-1", 1, all_credits, POLICY)]
    assert ledger.verify_chain(honest, receipts=receipts) == []


def test_removed_reordered_and_foreign_entries_are_found() -> None:
    for broken in (RUN[1:], RUN[:4] + RUN[5:], [*RUN[:3], RUN[4], RUN[3], *RUN[5:]], [*RUN[:2], RUN[1], *RUN[2:]]):
        assert ledger.verify_chain(broken, run="run-1")
    assert ledger.verify_chain(RUN, run="run-2")
    assert ledger.verify_chain(RUN, run="run-1", policy=Policy(1_000_003, 0.2, 4, 0.0))
    problems = ledger.verify_chain([replace(RUN[0], policy=Policy(-5, 2.0, 1, 0.0)), *RUN[1:]])
    assert any("cannot be recomputed" in p for p in problems)


@pytest.mark.parametrize(
    "before, after, words",
    [
        (("valid", (1, 1), 1), ("valid", (1, 1), 2), "cannot become valid"),
        (("invalid", (0, 1), 1), ("valid", (1, 1), 1), "cannot become valid"),
        (("forfeited", (0, 1), 1), ("valid", (1, 1), 1), "cannot become valid"),
        (("unmeasured", (1, 2), 1), ("unmeasured", (2, 2), 2), "settled before"),
        (("unmeasured", (1, 2), 1), ("valid", (1, 1), 2), "start again"),
        (("unmeasured", (0, 1), -1), ("valid", (1, 1), 3), "lies after"),
    ],
)
def test_credits_cannot_be_restated_at_will(before: tuple, after: tuple, words: str) -> None:
    first = ledger.append([], "run-1", 1, [Credit(1, "a", 1, 0, 5, *before)], POLICY)
    with pytest.raises(ValueError, match=words):
        ledger.append([first], "run-1", 2, [Credit(1, "a", 1, 0, 5, *after)], POLICY)
    with pytest.raises(ValueError, match="passes"):
        ledger.append([first], "run-1", 2, [Credit(1, "a", 1, 0, 6, "forfeited", (0, 1), 2)], POLICY)


def test_epochs_close_in_order() -> None:
    for entries, epoch in (([], 2), (RUN, 12), (RUN, 14)):
        with pytest.raises(ValueError, match="out of order"):
            ledger.append(entries, "run-1", epoch, [], POLICY)
    empty = ledger.append([], "run-1", 1, [], POLICY)
    assert empty.burned == POLICY.pool and ledger.verify_chain([empty]) == []


def test_explain_from_the_ledger_gives_the_number_paid() -> None:
    for entry in RUN:
        credits = ledger.credits_at(RUN, entry.epoch)
        for key in KEYS:
            told = pay.explain(key, entry.epoch, credits, POLICY)
            assert told.total == entry.paid(key) and told.burned == entry.burned


def test_a_hundred_epochs_of_a_hundred_miners() -> None:
    keys = [f"{i:064x}" for i in range(100)]
    entries: list[LedgerEpoch] = []
    for epoch in range(1, 101):
        credits = [Credit(epoch, key, 1, 0, 10 + i, "valid", (1, 1), epoch, "ok") for i, key in enumerate(keys)]
        entries.append(ledger.append(entries, "run-1", epoch, credits, POLICY))
    assert ledger.verify_chain(entries, policy=POLICY) == []
