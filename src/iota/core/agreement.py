"""What the owners' digests of a shard mean (design section 5 "Agree", "Survive"): the agreement matrix and `decide`.

`decide` is pure. D and X are two digests, - is "nothing yet", gone is "dead, or past its deadline":

| owners' reports                | third party       | outcome  | value taken          | named liars |
|--------------------------------|-------------------|----------|----------------------|-------------|
| one still may deliver, in time | none              | waiting  | none yet             | none        |
| D, D                           | none              | agreed   | D                    | none        |
| D, D                           | D                 | agreed   | D                    | none        |
| D, D                           | X                 | settled  | X                    | both        |
| D, X                           | none, in time     | dispute  | none yet: recompute  | none yet    |
| D, X                           | none, late        | zero     | zero pseudo-gradient | none known  |
| D, X                           | D                 | settled  | D                    | who said X  |
| D, X                           | yet another       | settled  | the third party's    | both        |
| D, gone; D (N = 1)             | none              | alone    | D                    | none        |
| D, gone; D (N = 1)             | D                 | agreed   | D                    | none        |
| D, gone; D (N = 1)             | X                 | settled  | X                    | who said D  |
| all gone                       | none, in time     | orphaned | none yet: reassign   | none        |
| all gone, new owner says D     | as for D, gone    |          |                      |             |
| all gone, new owner gone too   | none              | kept     | the old value        | none        |
| all gone                       | none, late        | kept     | the old value        | none        |
| all gone                       | X                 | settled  | X                    | none        |

`alone` is used at once but has no second witness: it is the first to be drawn for recomputation behind SYNC, as are all
shards at N <= 2. A verdict after the merge (D, D against X) names liars; the merged state stays (design section 5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from iota.core import seeds
from iota.core.values import Digest, Key

FINAL = frozenset({"agreed", "settled", "alone", "zero", "kept"})
"""Outcomes that give the shard a value; the others ask for something: to wait, to recompute, to reassign."""


class Outcome(msgspec.Struct, frozen=True):
    """`kind`: waiting | agreed | dispute | settled | zero | alone | orphaned | kept. `digest` of the value taken, None
    where there is none. `winners` reported it, `liars` reported another, `missing` reported nothing."""

    kind: str
    digest: Digest | None
    winners: tuple[Key, ...]
    liars: tuple[Key, ...]
    missing: tuple[Key, ...]
    why: str

    @property
    def final(self) -> bool:
        return self.kind in FINAL


def decide(
    owners: Sequence[Key],
    reports: Mapping[Key, Digest],
    *,
    gone: Collection[Key] = (),
    third: Digest | None = None,
    late: bool = False,
    replacement: Key | None = None,
) -> Outcome:
    """What one shard's reports come to (the table above).

    `owners`: one (N = 1) or two; `reports`: digest by owner, and by `replacement`, who took over an orphan; `gone`:
    owners who will not deliver (what they delivered before still counts); `third`: digest of an independent
    recomputation; `late`: the last limit (of the dispute, or of the whole phase) has passed. Reports of anyone else are
    ignored.
    """
    asked = [*owners, replacement] if replacement is not None and replacement not in owners else list(owners)
    said = {key: reports[key] for key in asked if key in reports}
    missing = tuple(key for key in asked if key not in said)
    open_ = tuple(key for key in missing if key not in gone)
    if open_ and not late and third is None and not _replaced(owners, said, gone, replacement):
        return Outcome("waiting", None, (), (), missing, f"waiting for {_names(open_)}")
    if third is not None and said:
        return _with_third(said, missing, third)
    if third is not None:
        return Outcome("settled", third, (), (), missing, "no owner delivered; a third party's value is taken")
    if not said:
        return _orphan(missing, replacement, late)
    return _without_third(said, missing, late)


def _replaced(owners: Sequence[Key], said: Mapping[Key, Digest], gone: Collection[Key], new: Key | None) -> bool:
    """An orphan's new owner delivered: nobody else is waited for."""
    return new is not None and new in said and all(key in said or key in gone for key in owners)


def _with_third(said: Mapping[Key, Digest], missing: tuple[Key, ...], third: Digest) -> Outcome:
    winners = tuple(key for key, digest in said.items() if digest == third)
    liars = tuple(key for key in said if key not in winners)
    if not liars:
        return Outcome("agreed", third, winners, (), missing, "a third party confirms it")
    told = f"{_names(winners)} agree with the third party, " if winners else "no owner agrees with the third party: "
    return Outcome("settled", third, winners, liars, missing, f"{told}{_names(liars)} reported another value")


def _without_third(said: Mapping[Key, Digest], missing: tuple[Key, ...], late: bool) -> Outcome:
    keys, digests = tuple(said), set(said.values())
    if len(digests) > 1 and late:
        return Outcome("zero", None, (), (), missing, "the owners differ and nobody recomputed the shard in time")
    if len(digests) > 1:
        return Outcome("dispute", None, (), (), missing, f"{_names(keys)} differ: a third party must recompute")
    kind, why = ("agreed", "all owners agree") if len(keys) > 1 else ("alone", f"only {_names(keys)} delivered")
    return Outcome(kind, said[keys[0]], keys, (), missing, why)


def _orphan(missing: tuple[Key, ...], replacement: Key | None, late: bool) -> Outcome:
    if replacement is None and not late:
        return Outcome("orphaned", None, (), (), missing, f"{_names(missing)} are gone: reassign the shard")
    tried = f" and {_names((replacement,))}, who took over," if replacement is not None else ""
    return Outcome("kept", None, (), (), missing, f"no owner{tried} delivered: the shard keeps its old value")


def _names(keys: Iterable[Key]) -> str:
    return ", ".join(key[:8] for key in keys)


class AgreementMatrix:
    """N x N counts of one merge, int32, by index of `members` (sorted keys). A liar stands out as a row.

    `agree[i, j]`, `disagree[i, j]`: shards of the pair on which both delivered (symmetric; the diagonal counts against
    third parties). `missing[i, j]`: shards of the pair that i did not deliver (the row is what i failed to do).
    """

    def __init__(self, members: Iterable[Key]) -> None:
        self.members = tuple(sorted(members))
        self._index = {key: i for i, key in enumerate(self.members)}
        n = len(self.members)
        self.agree: npt.NDArray[np.int32] = np.zeros((n, n), dtype=np.int32)
        self.disagree: npt.NDArray[np.int32] = np.zeros((n, n), dtype=np.int32)
        self.missing: npt.NDArray[np.int32] = np.zeros((n, n), dtype=np.int32)

    def record(self, owners: Sequence[Key], reports: Mapping[Key, Digest], third: Digest | None = None) -> None:
        """Count one closed shard, once. `owners` are the plan's (a replacement is a witness of its own)."""
        rows = [self._index[key] for key in owners]
        for key, row in zip(owners, rows, strict=True):
            if key not in reports:
                self.missing[row, rows[1] if row == rows[0] and len(rows) > 1 else rows[0]] += 1
            elif third is not None:
                (self.agree if reports[key] == third else self.disagree)[row, row] += 1
        if len(rows) == 2 and all(key in reports for key in owners):
            table = self.agree if reports[owners[0]] == reports[owners[1]] else self.disagree
            table[rows[0], rows[1]] += 1
            table[rows[1], rows[0]] += 1

    def suspects(self) -> list[tuple[Key, int, int]]:
        """(key, partners it disagrees with, shards on which a third party contradicted it), worst first, clean rows
        left out. An honest partner of one liar has one; the liar has many."""
        own = np.diagonal(self.disagree)
        partners = (self.disagree > 0).sum(axis=1) - (own > 0)
        rows = [(key, int(partners[i]), int(own[i])) for i, key in enumerate(self.members) if partners[i] or own[i]]
        return sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))

    def to_dict(self) -> dict[str, list[str] | list[list[int]]]:
        """Plain lists for events and reports."""
        tables = {"agree": self.agree, "disagree": self.disagree, "missing": self.missing}
        return {"members": list(self.members), **{name: table.tolist() for name, table in tables.items()}}


def draw_recomputed(
    shards: int, members: int, share: float, seed: int, epoch: int, stage: int, alone: Iterable[int] = ()
) -> list[int]:
    """Shards to recompute behind SYNC, ascending: ceil(share x shards), at least one; all when members <= 2. Those with
    a single witness come first. `share` 0 draws none, except at members <= 2."""
    if members <= 2:
        return list(range(shards))
    if share <= 0:
        return []
    count = min(shards, max(1, -int(-share * shards // 1)))
    first = sorted(set(alone))[:count]
    order = seeds.shuffle(seed, "recomputed shards", [s for s in range(shards) if s not in set(first)], epoch, stage)
    return sorted(first + order[: count - len(first)])
