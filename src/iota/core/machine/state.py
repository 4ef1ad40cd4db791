"""What the events fold into: the run's compared state. Plain mutable records; only `fold` changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from iota.config.schema import RunConfig
from iota.core.ledger import LedgerEpoch
from iota.core.values import Checkpoint, Cut, Digest, Key

TRAINING = ("train", "drain")
MERGING = ("commit", "upload", "reduce")
ENDED = ("finishing", "finished")
KEPT_EPOCHS = 100
"""How long single audits and shard reports stay for reports; sums of them stay for good."""


@dataclass(slots=True)
class Facts:
    """What the books say of one member's session in one epoch: the reference that its evidence must match. One row of
    `heads` (plus the commitment's), `kinds`, `samples`, `given`, `outs` and `losses` for each accepted result;
    `averaged`: passes that each inner step was told to average (`tasks.MinerFacts`)."""

    number: int
    session: int
    stage: int
    epoch: int
    heads: list[Digest] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    given: list[tuple[Digest, Digest]] = field(default_factory=list)
    averaged: list[int] = field(default_factory=list)
    outs: list[Digest] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    root: Digest | None = None
    committed: bool = False


@dataclass(slots=True)
class Member:
    """A registered key and its current session. `alive` from session start until `Gone`; `loaded` is the epoch of the
    state it holds (-1: none); `starts` the first epoch it may train in. `passes` counts this session's accepted
    backward passes of the epoch (B_m); `booked` those of earlier sessions too.
    `history`: its last verdicts, oldest first."""

    number: int
    key: Key
    role: str
    owner: str
    founder: bool
    stake: int
    registered: float
    stage: int = -1
    session: int = 0
    token: Digest = ""
    alive: bool = False
    why_gone: str = ""
    banned: bool = False
    loaded: int = -1
    starts: int = 0
    software: str = ""
    device: str = ""
    dtype: str = ""
    passes: int = 0
    booked: int = 0
    pending: int = 0
    total: int = 0
    last_seq: int = 0
    last_body: Digest = ""
    last_code: str | None = None
    last_text: str = ""
    last_step: bool = False
    facts: Facts | None = None
    last_verdict: str = "none yet"
    history: list[str] = field(default_factory=list)
    paid: int = 0

    def answered(self, seq: int, body: str, code: str | None = None, text: str = "", step: bool = False) -> None:
        """Remember what turn `seq` was told, so that the same turn is told the same again."""
        self.last_seq, self.last_body, self.last_code, self.last_text, self.last_step = seq, body, code, text, step


@dataclass(slots=True)
class Sample:
    """An open sample. `path[s]` = (number, session) of who did the forward at stage s; `kind` and `stage` say which
    task is next, `holder` who has it (-1: nobody). `backwards` counts accepted backward passes. `inputs[s]`: digest of
    the activation that stage s works on, `gradient` of the last gradient sent back: what the hub hands on."""

    id: int
    first: int
    kind: str = "f"
    stage: int = 0
    holder: int = -1
    path: list[tuple[int, int]] = field(default_factory=list)
    inputs: list[Digest] = field(default_factory=list)
    gradient: Digest = ""
    backwards: int = 0
    attempt: int = 0
    loss: float | None = None


@dataclass(slots=True)
class Commitment:
    number: int
    root: Digest
    length: int
    digest: Digest
    manifest_length: int
    manifest_digest: Digest
    steps: int
    uploaded: bool = False


@dataclass(slots=True)
class StageMerge:
    """One stage's merge. `reports[shard][number]` = (parts, length, object digest, object key); `settled[shard]` =
    (how, winner, liars); winner -2: a third party's object. `owners` holds reassignments on top of the plan."""

    stage: int
    members: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    seed: Digest = ""
    chunks: int = 0
    shards: int = 0
    extra_owners: dict[int, list[int]] = field(default_factory=dict)
    reports: dict[int, dict[int, tuple[tuple[tuple[str, Digest], ...], int, Digest, str]]] = field(default_factory=dict)
    third: dict[int, tuple[tuple[tuple[str, Digest], ...], int, Digest, str, int]] = field(default_factory=dict)
    settled: dict[int, tuple[str, int, tuple[int, ...]]] = field(default_factory=dict)
    bad: list[tuple[int, int, int, str]] = field(default_factory=list)
    done: bool = False


@dataclass(slots=True)
class MergeSummary:
    """What stays of a stage's merge for good: how many shards settled which way, and who was caught how often."""

    members: tuple[int, ...]
    weights: tuple[int, ...]
    settled: dict[str, int] = field(default_factory=dict)
    liars: dict[int, int] = field(default_factory=dict)
    bad: int = 0


@dataclass(slots=True)
class AuditRecord:
    """state: show (waiting for evidence) | ready | closed."""

    audit: int
    epoch: int
    number: int
    session: int
    stage: int
    segment: int
    start: int
    stop: int
    until: float
    state: str = "show"
    verdict: str = ""
    why: str = ""
    worst: tuple[tuple[str, int, float, float], ...] = ()
    validator: int = -1
    seconds: float = 0.0


@dataclass(slots=True)
class EpochRecord:
    """History of one epoch that reports, pay and deadlines need.

    `held`: seconds that each phase stood still (pauses, the orchestrator's downtime). `heldout`: loss by validator; of
    checkpoint 0, which belongs to no epoch, under -1 - number in epoch 1's record. `missed`: committed without upload.
    `matrix` keeps the shard reports of the last epochs, `summary` stays; `verdicts` counts the closed audits."""

    epoch: int
    opened: float
    tokens: int
    t: tuple[int, ...]
    tokens_per_step: tuple[int, ...]
    segment_steps: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    began: dict[str, float] = field(default_factory=dict)
    until: dict[str, float | None] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    samples_full: int = 0
    samples_partial: int = 0
    samples_returned: int = 0
    losses: int = 0
    loss_sum: float = 0.0
    passes: dict[int, int] = field(default_factory=dict)
    stages: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    effective_batch: dict[int, int] = field(default_factory=dict)
    merged: dict[int, bool] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set)
    verdicts: dict[str, int] = field(default_factory=dict)
    summary: dict[int, MergeSummary] = field(default_factory=dict)
    matrix: dict[int, StageMerge] = field(default_factory=dict)
    paid: bool = False
    closed: float | None = None

    def heldout_loss(self, checkpoint_zero: bool = False) -> float | None:
        """Median over validators of the held-out loss of this epoch's checkpoint (or, in epoch 1's record, of the
        untrained model's), None while nobody measured it."""
        losses = [loss for key, loss in self.heldout.items() if (key < 0) == checkpoint_zero]
        return median(losses) if losses else None


@dataclass(slots=True)
class RunState:
    """The whole compared state of a run. `window` counts the samples opened in the current synchronous window;
    `announced`: members by stage as counted for the learning-rate schedule; `extended`: a finished run is to go on."""

    config: RunConfig
    stages: int
    run: str = ""
    started: float = 0.0
    boots: int = 0
    phase: str = "gather"
    phase_at: float = 0.0
    phase_until: float | None = None
    phase_why: str = ""
    epoch: int = 0
    announced: tuple[int, ...] = ()
    paused: float | None = None
    paused_total: float = 0.0
    stop_requested: str = ""
    stop: str = ""
    extended: bool = False
    members: list[Member] = field(default_factory=list)
    by_key: dict[Key, int] = field(default_factory=dict)
    allowed: set[Key] = field(default_factory=set)
    banned: set[Key] = field(default_factory=set)
    queue: list[int] = field(default_factory=list)
    next_sample: int = 0
    samples: dict[int, Sample] = field(default_factory=dict)
    opened_total: int = 0
    window: int = 0
    tokens: int = 0
    t: list[int] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    complete: dict[int, tuple[Checkpoint, ...]] = field(default_factory=dict)
    commitments: dict[int, Commitment] = field(default_factory=dict)
    merges: dict[int, StageMerge] = field(default_factory=dict)
    facts: dict[tuple[int, int, int], Facts] = field(default_factory=dict)
    audits: dict[int, AuditRecord] = field(default_factory=dict)
    next_audit: int = 0
    epochs: dict[int, EpochRecord] = field(default_factory=dict)
    secret_digest: Digest = ""
    ledger: list[LedgerEpoch] = field(default_factory=list)

    def member(self, key: Key) -> Member | None:
        number = self.by_key.get(key)
        return None if number is None else self.members[number]

    def trainers(self, stage: int) -> list[Member]:
        """Members that may take work of a stage now: alive, loaded with the current state, due to train."""
        return [
            m
            for m in self.members
            if m.stage == stage and m.alive and m.loaded == self.epoch - 1 and m.starts <= self.epoch
        ]

    def record(self) -> EpochRecord:
        return self.epochs[self.epoch]

    def facts_of(self, m: Member) -> Facts:
        """The record of a member's session in this epoch, begun at its first accepted result."""
        if m.facts is None:
            m.facts = Facts(m.number, m.session, m.stage, self.epoch)
            self.facts[(self.epoch, m.number, m.session)] = m.facts
        return m.facts
