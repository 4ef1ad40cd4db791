"""The ledger: append-only, hash-chained, one entry a closed epoch (design section 6 "Books"; format final, version 1).

An entry states the credits that are new or changed since the entry before, the policy, and what was paid. Folding the
entries (the last statement of a credit wins) gives the credits known at each close, and from them anyone recomputes
every emission with `pay.emit`. `head` is SHA-256 over the msgpack of the entry without `head` and `cosignatures`;
`previous` is the head before it, the first one binds the run. Changing one unit anywhere breaks a head or a
recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from iota.core import pay
from iota.core.pay import Credit, Policy
from iota.core.values import Digest, Key, sha256

VERSION = 1

_CHANGES = {
    "unmeasured": ("unmeasured", "valid", "invalid", "forfeited"),
    "valid": ("invalid", "forfeited"),
    "invalid": ("forfeited",),
}
"""How the state of a credit may be restated by a later entry."""


class Statement(msgspec.Struct, frozen=True, array_like=True):
    """A credit as stated by an entry; `score` in units of 1/1,000,000 pass, for readers (`pay.score(credit)`)."""

    credit: Credit
    score: int


class LedgerEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """One closed epoch. `statements` in order of (epoch, key, session); `emissions` (key, units) in order of key, zeros
    left out; sum(emissions) + burned == policy.pool. `cosignatures` (validator key, signature hex) are outside the head
    (empty for now).
    """

    version: int
    run: str
    epoch: int
    previous: Digest
    statements: tuple[Statement, ...]
    policy: Policy
    emissions: tuple[tuple[Key, int], ...]
    burned: int
    head: Digest = ""
    cosignatures: tuple[tuple[Key, str], ...] = ()

    def digest(self) -> Digest:
        """What `head` must be."""
        fields = (self.version, self.run, self.epoch, self.previous, self.statements, self.policy)
        return sha256(msgspec.msgpack.encode(("iota ledger", *fields, self.emissions, self.burned)))

    def paid(self, key: Key) -> int:
        return dict(self.emissions).get(key, 0)


class Receipt(msgspec.Struct, frozen=True):
    """What a miner's signed receipt proves: at least `passes` of it were accepted (wire checks its signature)."""

    epoch: int
    key: Key
    session: int
    passes: int


def genesis(run: str) -> Digest:
    """The `previous` of the first entry."""
    return sha256(msgspec.msgpack.encode(("iota ledger", run)))


class Books:
    """The fold of a ledger: credits by id as last stated."""

    def __init__(self) -> None:
        self.credits: dict[tuple[int, Key, int], Credit] = {}

    def take(self, entry: LedgerEpoch) -> None:
        for statement in entry.statements:
            self.credits[statement.credit.id] = statement.credit

    def live(self, epoch: int, policy: Policy) -> list[Credit]:
        """Credits that can still weigh in an emission of `epoch` or later, in order of (epoch, key, session)."""
        oldest = epoch - policy.gamma
        live = [c for c in self.credits.values() if c.scored < 0 or c.scored >= oldest]
        return sorted(live, key=lambda c: c.id)


def credits_at(entries: Sequence[LedgerEpoch], epoch: int) -> list[Credit]:
    """All credits as known at the close of `epoch`: what `pay.explain` of that epoch needs."""
    books = Books()
    for entry in entries:
        if entry.epoch <= epoch:
            books.take(entry)
    return sorted(books.credits.values(), key=lambda c: c.id)


def append(
    entries: Sequence[LedgerEpoch], run: str, epoch: int, credits: Iterable[Credit], policy: Policy
) -> LedgerEpoch:
    """The next entry, closing `epoch`, from ALL credits known now (or those of interest: new, changed, still counting).

    States only what is new or changed since the entries before. Raises ValueError when the result would not verify (an
    epoch out of order, a credit restated in a way the rules forbid)."""
    books = Books()
    for entry in entries:
        books.take(entry)
    previous = entries[-1] if entries else None
    changed = sorted((c for c in credits if books.credits.get(c.id) != c), key=lambda c: c.id)
    draft = LedgerEpoch(
        version=VERSION,
        run=run,
        epoch=epoch,
        previous=previous.head if previous else genesis(run),
        statements=tuple(Statement(credit, pay.score(credit)) for credit in changed),
        policy=policy,
        emissions=(),
        burned=0,
    )
    problems = _check_place(draft, previous, run) + _check_statements(draft, books)
    if problems:
        raise ValueError("; ".join(problems))
    books.take(draft)
    emission = pay.emit(books.live(epoch, policy), epoch, policy)
    emissions = tuple((key, units) for key, units in emission.paid.items() if units)
    entry = msgspec.structs.replace(draft, emissions=emissions, burned=emission.burned)
    return msgspec.structs.replace(entry, head=entry.digest())


def verify_chain(
    entries: Sequence[LedgerEpoch],
    *,
    run: str | None = None,
    policy: Policy | None = None,
    receipts: Iterable[Receipt] = (),
) -> list[str]:
    """Problems found by recomputing every head and every emission; empty when all is right.

    `run` and `policy`, when given, are the signed manifest's. `receipts` prove credits that must not be missing: each
    is held against the ledger once its epoch is closed. Entries are judged one by one, so one bad entry is named once.
    """
    problems: list[str] = []
    books, previous = Books(), None
    run = run if run is not None or not entries else entries[0].run
    for entry in entries:
        found = _check_place(entry, previous, run or "") + _check_statements(entry, books)
        if entry.head != entry.digest():
            found.append("the head is not the digest of the entry: something in it was changed")
        if policy is not None and entry.policy != policy:
            found.append(f"policy {entry.policy} is not the run manifest's {policy}")
        books.take(entry)
        found += _check_emissions(entry, books)
        problems += [f"epoch {entry.epoch}: {problem}" for problem in found]
        previous = entry
    closed = entries[-1].epoch if entries else 0
    return problems + _check_receipts(receipts, books.credits, closed)


def _check_place(entry: LedgerEpoch, previous: LedgerEpoch | None, run: str) -> list[str]:
    problems = []
    if entry.version != VERSION or entry.run != run:
        problems.append(f"version {entry.version} of run {entry.run!r}, expected version {VERSION} of run {run!r}")
    expected = previous.epoch + 1 if previous else 1
    if entry.epoch != expected:
        problems.append(f"follows epoch {expected - 1}: an epoch is missing, repeated or out of order")
    if entry.previous != (previous.head if previous else genesis(run)):
        problems.append("does not continue the head before it: an entry was removed, inserted or changed")
    return problems


def _check_statements(entry: LedgerEpoch, books: Books) -> list[str]:
    problems = []
    ids = [statement.credit.id for statement in entry.statements]
    if ids != sorted(set(ids)):
        problems.append("credits are not in order, or one is stated twice")
    for statement in entry.statements:
        problem = _statement_problem(statement, entry.epoch, books.credits.get(statement.credit.id))
        if problem:
            credit = statement.credit
            problems.append(f"credit of {credit.key[:8]} for epoch {credit.epoch}: {problem}")
    return problems


def _statement_problem(statement: Statement, epoch: int, before: Credit | None) -> str | None:
    credit = statement.credit
    problem = credit.problem()
    if problem:
        return problem
    if statement.score != pay.score(credit):
        return f"score {statement.score} stated, {pay.score(credit)} computed"
    if credit.epoch > epoch or credit.scored > epoch:
        return f"lies after epoch {epoch}"
    if before is None:
        return None
    if (credit.passes, credit.stage) != (before.passes, before.stage):
        return f"{credit.passes} passes at stage {credit.stage}, stated before as {before.passes} at {before.stage}"
    if credit.state not in _CHANGES.get(before.state, ()):
        return f"was {before.state} and cannot become {credit.state}"
    if credit.state == before.state and before.scored >= 0:
        return "was settled before and cannot be settled again"
    if credit.state == "valid" and before.scored >= 0 and credit.scored != before.scored:
        return f"was scored in epoch {before.scored}, its age cannot start again in {credit.scored}"
    return None


def _check_emissions(entry: LedgerEpoch, books: Books) -> list[str]:
    try:
        emission = pay.emit(books.live(entry.epoch, entry.policy), entry.epoch, entry.policy)
    except ValueError as error:
        return [f"emissions cannot be recomputed: {error}"]
    problems = []
    stated, computed = dict(entry.emissions), {key: units for key, units in emission.paid.items() if units}
    if len(stated) != len(entry.emissions) or list(stated) != sorted(stated):
        problems.append("emissions are not in order of key, or a key is paid twice")
    for key in sorted(stated.keys() | computed.keys()):
        if stated.get(key, 0) != computed.get(key, 0):
            problems.append(f"{key[:8]} was paid {stated.get(key, 0)}, its credits give {computed.get(key, 0)}")
    if entry.burned != emission.burned:
        problems.append(f"{entry.burned} burned, {emission.burned} computed")
    if sum(stated.values()) + entry.burned != entry.policy.pool:
        problems.append(
            f"{sum(stated.values())} paid and {entry.burned} burned are not the pool of {entry.policy.pool}"
        )
    return problems


def _check_receipts(
    receipts: Iterable[Receipt], credits: Mapping[tuple[int, Key, int], Credit], closed: int
) -> list[str]:
    problems = []
    for receipt in receipts:
        credit = credits.get((receipt.epoch, receipt.key, receipt.session))
        passes = credit.passes if credit else 0
        if receipt.epoch <= closed and passes < receipt.passes:
            text = f"epoch {receipt.epoch}: {receipt.key[:8]} holds a receipt for {receipt.passes} accepted passes"
            problems.append(f"{text}, the ledger credits {passes}")
    return problems


def encode(entries: Sequence[LedgerEpoch]) -> bytes:
    """JSON lines: one entry a line, for files and other people's tools."""
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)


def decode(data: bytes) -> list[LedgerEpoch]:
    """Read what `encode` wrote. Raises ValueError with the line."""
    entries = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            entries.append(msgspec.json.decode(line, type=LedgerEpoch))
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number} is not a ledger entry: {error}") from error
    return entries
