"""From verified work to pay (paper section 3, design section 6 "Score", "Emission"). All in integers, so that anyone's
recomputation gives the same units on any machine.

A `Credit` is what one miner's session did in one epoch. Its score S is its accepted backward passes when the audit is
valid, 0 when invalid or forfeited; without a verdict it is withheld, re-drawn for `redraws` epochs, then paid at the
miner's share of valid audits over its last ten (a newcomer has none: 0). The standing of a miner is

    I_m = sum over its credits of S * w(t),   w(t) = 1 while t <= gamma, else 0,   t = epochs since the score was given

and an epoch's pool, after the burn share, is divided in proportion to I_m by the largest remainder. The part of a
credit that nobody measured is neither paid nor given to the others: it takes its place in the proportion and is burned,
so nobody gains when a neighbour goes unmeasured. Everything follows a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from iota.config.schema import PayConfig
from iota.core.values import Key

UNIT = 1_000_000
"""Score units of one valid pass."""
FULL = 1_000_000_000
"""The weight w = 1."""
STATES = ("valid", "invalid", "unmeasured", "forfeited")
HISTORY = 10
"""Audits of a miner that decide what an unmeasured epoch is paid."""
ABSENT = "absent"
"""In a miner's history: work that nobody could audit for want of the miner: its session did not commit, or ended before
it showed its evidence. Counts as an audit that was not valid, so that nobody lives on old verdicts by slipping away."""


class Policy(msgspec.Struct, frozen=True, array_like=True):
    """`pool` units an epoch, of which the share `burn` is burned; `gamma` epochs a score counts in full; `half_life` in
    epochs replaces the step by a decay that ends at gamma (0: the paper's step)."""

    pool: int
    burn: float
    gamma: int
    half_life: float

    def problem(self) -> str | None:
        """Why this policy cannot be used, or None."""
        if self.pool < 0 or self.gamma < 0:
            return f"pool and gamma must not be negative: {self.pool}, {self.gamma}"
        if not 0.0 <= self.burn <= 1.0:
            return f"burn is a share between 0 and 1, not {self.burn}"
        if not (math.isfinite(self.half_life) and self.half_life >= 0):
            return f"half_life is a number of epochs, 0 or more, not {self.half_life}"
        return None


def policy_of(config: PayConfig) -> Policy:
    """The policy that a run file's [pay] section states."""
    return Policy(config.pool, config.burn, config.gamma, config.half_life)


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Accepted passes of one (epoch, key, session), and what became of them.

    `state`: valid | invalid | unmeasured | forfeited. `share` (part, of): what of the passes is paid; (1, 1) if valid.
    `scored`: the epoch at which the score was given, -1 while it is withheld; its age counts from there. `why`: the
    verdict's words.
    """

    epoch: int
    key: Key
    session: int
    stage: int
    passes: int
    state: str = "unmeasured"
    share: tuple[int, int] = (0, 1)
    scored: int = -1
    why: str = "not audited yet"

    @property
    def id(self) -> tuple[int, Key, int]:
        return self.epoch, self.key, self.session

    def problem(self) -> str | None:
        """Why the numbers contradict each other, or None."""
        part, of = self.share
        if self.state not in STATES or self.passes < 0 or not 0 <= part <= of or of < 1:
            return f"state {self.state!r}, {self.passes} passes, share {part}/{of}"
        whole = {"valid": (1, 1), "invalid": (0, 1), "forfeited": (0, 1)}
        if self.share != whole.get(self.state, self.share):
            return f"share {part}/{of} of a credit that is {self.state}"
        withheld = self.scored < 0
        if (withheld and (part > 0 or self.state != "unmeasured")) or (not withheld and self.scored < self.epoch):
            return f"{self.state} and scored in epoch {self.scored}"
        return None


def judge(credit: Credit, verdict: str, epoch: int, why: str) -> Credit:
    """The credit after a verdict given in `epoch`. `verdict`: valid | invalid | inconclusive (changes only the words).
    A forfeited credit stays so, an invalid one stays invalid, and a score once given keeps its age."""
    if credit.state in ("forfeited", "invalid"):
        return credit
    change = msgspec.structs.replace
    scored = credit.scored if credit.scored >= 0 else max(epoch, credit.epoch)
    if verdict == "valid":
        return change(credit, state="valid", share=(1, 1), scored=scored, why=why)
    if verdict == "invalid":
        return change(credit, state="invalid", share=(0, 1), scored=scored, why=why)
    assert verdict == "inconclusive", verdict
    return credit if credit.scored >= 0 else change(credit, why=f"inconclusive: {why}")


def settle(credit: Credit, epoch: int, verdicts: Sequence[str], redraws: int, *, final: bool = False) -> Credit:
    """At the close of `epoch`: a credit without a verdict stays withheld while it can be drawn again, then is paid at
    the share of valid ones among the miner's last ten `verdicts` (valid | invalid | absent, oldest first; others are
    left out).
    `final`: the run ends here, nothing will be drawn again."""
    if credit.state != "unmeasured" or credit.scored >= 0 or (epoch - credit.epoch < redraws and not final):
        return credit
    judged = [verdict for verdict in verdicts if verdict in ("valid", "invalid", ABSENT)][-HISTORY:]
    valid, of = judged.count("valid"), max(1, len(judged))
    if judged:
        why = f"no verdict in time ({credit.why}): paid at the share of valid audits, {valid} of the last {of}"
    else:
        why = f"no verdict in time ({credit.why}) and no audit before: burned"
    return msgspec.structs.replace(credit, share=(valid, of), scored=max(epoch, credit.epoch), why=why)


def forfeit(credits: Iterable[Credit], key: Key, epoch: int, gamma: int, why: str) -> list[Credit]:
    """The credits with every withheld or unexpired score of `key` taken away, after an invalid verdict was confirmed in
    `epoch`. What was paid before stays paid."""
    words = f"forfeited in epoch {epoch}: {why}"
    return [
        msgspec.structs.replace(c, state="forfeited", share=(0, 1), scored=max(c.scored, epoch, c.epoch), why=words)
        if c.key == key and c.state in ("valid", "unmeasured") and (c.scored < 0 or epoch - c.scored <= gamma)
        else c
        for c in credits
    ]


def score(credit: Credit) -> int:
    """S in units of 1/1,000,000 pass, rounded down."""
    part, of = credit.share
    return credit.passes * UNIT * part // of


def unmeasured(credit: Credit) -> int:
    """What of the credit nobody measured, in the same units: it holds its place in the proportion and is burned."""
    return credit.passes * UNIT - score(credit) if credit.state == "unmeasured" else 0


def weight(age: int, policy: Policy) -> int:
    """w(t) in units of 1e-9; 0 for a score not yet given (negative age). With a half-life: 2**(-t/half_life), rounded,
    until gamma."""
    if not 0 <= age <= policy.gamma:
        return 0
    return FULL if policy.half_life == 0 else round(FULL * 2.0 ** (-age / policy.half_life))


def _weighed(credit: Credit, epoch: int, policy: Policy) -> tuple[int, int]:
    """(S * w, unmeasured * w) of one credit at `epoch`; withheld work weighs in full from its own epoch on."""
    if credit.epoch > epoch or credit.scored > epoch:
        return 0, 0
    if credit.scored < 0:
        return 0, unmeasured(credit) * weight(epoch - credit.epoch, policy)
    w = weight(epoch - credit.scored, policy)
    return score(credit) * w, unmeasured(credit) * w


def standings(credits: Iterable[Credit], epoch: int, policy: Policy) -> tuple[dict[Key, int], int]:
    """I_m by key (in order of key, zeros included) and the unmeasured total, in units of 1e-15 pass."""
    rows, held = dict[Key, int](), 0
    for credit in credits:
        worth, open_ = _weighed(credit, epoch, policy)
        rows[credit.key] = rows.get(credit.key, 0) + worth
        held += open_
    return dict(sorted(rows.items())), held


class Emission(msgspec.Struct, frozen=True):
    """One epoch's pool: `paid` by key (in order of key, zeros included), and what was burned, by reason. Always
    sum(paid) + burned == pool. `why` says so when nobody is paid."""

    epoch: int
    paid: dict[Key, int]
    burned_by_policy: int
    burned_unmeasured: int
    burned_unclaimed: int
    why: str

    @property
    def burned(self) -> int:
        return self.burned_by_policy + self.burned_unmeasured + self.burned_unclaimed


def emit(credits: Iterable[Credit], epoch: int, policy: Policy) -> Emission:
    """Divide the pool of `epoch` over all credits known at its close. Raises ValueError for an impossible policy or
    credit (nothing that is not finite or is negative ever enters)."""
    credits = list(credits)
    problem = policy.problem() or next(filter(None, (credit.problem() for credit in credits)), None)
    if problem:
        raise ValueError(problem)
    by_policy = min(policy.pool, math.floor(policy.pool * policy.burn + 0.5))
    rows, held = standings(credits, epoch, policy)
    left = policy.pool - by_policy
    if not any(rows.values()):
        why = "no miner has a verified pass that still counts: the whole pool is burned"
        unclaimed = 0 if held else left
        return Emission(epoch, dict.fromkeys(rows, 0), by_policy, left - unclaimed, unclaimed, why)
    amounts = divide(left, {**rows, "": held})  # "" is nobody's key
    nobody = amounts.pop("")
    return Emission(epoch, amounts, by_policy, nobody, 0, "")


def divide(total: int, parts: Mapping[Key, int]) -> dict[Key, int]:
    """`total` in integers proportional to `parts` (>= 0, not all 0) by the largest remainder; ties go in order of key.
    The sum is exact and each is within one unit of its exact share."""
    whole = sum(parts.values())
    assert whole > 0 and total >= 0 and min(parts.values()) >= 0
    amounts, rests = dict[Key, int](), list[tuple[int, Key]]()
    for key, part in parts.items():
        amounts[key], rest = divmod(total * part, whole)
        rests.append((-rest, key))
    for _, key in sorted(rests)[: total - sum(amounts.values())]:
        amounts[key] += 1
    return amounts


# ------------------------------------------------------------------------------------------------------- explain


class Line(msgspec.Struct, frozen=True):
    """One credited item of a miner in an epoch's pay. `counted`: S * w in passes; `paid` integer units of the pool;
    `reason` in plain words; `remedy`: what would have changed a zero."""

    epoch: int
    stage: int
    passes: int
    state: str
    age: int
    weight: float
    counted: float
    paid: int
    reason: str
    remedy: str


class Explanation(msgspec.Struct, frozen=True):
    """Why a miner got `total` in `epoch`. `total == sum(line.paid for line in lines)` is the number paid."""

    key: Key
    epoch: int
    lines: tuple[Line, ...]
    total: int
    counted: float
    counted_all: float
    pool: int
    burned: int
    text: str


def explain(key: Key, epoch: int, credits: Iterable[Credit], policy: Policy) -> Explanation:
    """Every credited item of `key` up to `epoch`, its verdict, penalty, decay and share (the credits as known at the
    epoch's close, of all miners). Items of one payment are split by the largest remainder."""
    credits = [credit for credit in credits if credit.epoch <= epoch]
    emission = emit(credits, epoch, policy)
    rows, held = standings(credits, epoch, policy)
    total = emission.paid.get(key, 0)
    own = sorted((c for c in credits if c.key == key), key=lambda c: c.id)
    worth = {f"{i:09d}": _weighed(credit, epoch, policy)[0] for i, credit in enumerate(own)}
    split = divide(total, worth) if any(worth.values()) else dict.fromkeys(worth, 0)
    lines = tuple(_line(c, epoch, policy, worth[i], split[i]) for c, i in zip(own, worth, strict=True))
    scale = UNIT * FULL
    counted, counted_all = rows.get(key, 0) / scale, (sum(rows.values()) + held) / scale
    text = _summary(key, epoch, counted, counted_all, total, emission, policy, bool(own))
    return Explanation(
        key,
        epoch,
        lines,
        total,
        counted,
        counted_all,
        policy.pool,
        emission.burned,
        "\n".join([text, *map(_text, lines)]),
    )


def _line(credit: Credit, epoch: int, policy: Policy, worth: int, paid: int) -> Line:
    given = credit.scored if 0 <= credit.scored <= epoch else -1
    age = epoch - given if given >= 0 else -1
    w = weight(age, policy)
    reason, remedy = _reason(credit, age, policy, worth, paid)
    return Line(
        credit.epoch,
        credit.stage,
        credit.passes,
        credit.state,
        age,
        w / FULL,
        worth / (UNIT * FULL),
        paid,
        reason,
        remedy,
    )


def _reason(credit: Credit, age: int, policy: Policy, worth: int, paid: int) -> tuple[str, str]:
    """(reason, what would have changed a zero) of one item."""
    if credit.state == "forfeited":
        return credit.why, "Only an epoch without an invalid verdict keeps its score; later epochs count again."
    if credit.state == "invalid":
        return f"the audit was invalid: {credit.why}", "Results that a replay on the same inputs reproduces."
    if credit.passes == 0:
        return "no backward pass was accepted", "At least one accepted backward pass in the epoch."
    if age < 0:
        return f"withheld, no verdict yet: {credit.why}", "Nothing to do: it is drawn again, then paid by past audits."
    if age > policy.gamma:
        return f"older than gamma = {policy.gamma} epochs (age {age})", "Newer work: a score counts until that age."
    if worth == 0:
        return credit.why, "A valid audit, of this epoch or of one of the ten before it."
    if paid == 0:
        return "its share of the pool rounds to zero", "More passes, or a larger pool."
    return credit.why, ""


def _summary(
    key: Key,
    epoch: int,
    counted: float,
    counted_all: float,
    total: int,
    emission: Emission,
    policy: Policy,
    known: bool,
) -> str:
    left = policy.pool - emission.burned_by_policy
    head = f"{key[:8]} was paid {total:,} of {policy.pool:,} in epoch {epoch}"
    if not known:
        return f"{head}: no backward pass of it was accepted up to this epoch. One accepted, audited pass would count."
    if emission.why:
        return f"{head}: {emission.why}."
    share = f"{counted:,.2f} of {counted_all:,.2f} counted passes, a share of {left:,} left after the burn share"
    if emission.burned_unmeasured:
        share += f"; {emission.burned_unmeasured:,} were burned for passes that nobody measured"
    return f"{head}: {share}."


def _text(line: Line) -> str:
    aged = f", age {line.age}, weight {line.weight:.3g}" if line.age >= 0 else ""
    told = f"  epoch {line.epoch} stage {line.stage}: {line.passes} passes, {line.state}{aged}: {line.paid:,} paid"
    return f"{told}; {line.reason}" + (f" (what would change it: {line.remedy})" if line.remedy else "")
