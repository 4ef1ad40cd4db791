"""Everything that is journaled. A run's state is the fold of these, in order; nothing else changes it.

Members are named by `number` (order of registration) where size matters; `Registered` ties number to key. Encoded as
msgpack arrays with the class name first. Fields may be added at the end with a default; none may be removed.
"""

from __future__ import annotations

import msgspec

from iota.core.ledger import LedgerEpoch
from iota.core.values import Checkpoint, Cut, Digest, Key


class RunStarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First event: the run manifest's digest, the checkpoints of epoch 0, one a stage."""

    run: str
    at: float
    checkpoints: tuple[Checkpoint, ...]


class Restarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The orchestrator came back: leases and relayed tensors are gone. `down` seconds are added to open deadlines."""

    at: float
    down: float


class Registered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A key joined for the first time. `owner`, `block` (address block), `founder` serve the sybil policy;
    `probation`/`quarantine` have their place here."""

    number: int
    key: Key
    role: str
    at: float
    owner: str = ""
    block: str = ""
    founder: bool = False
    probation: bool = False
    stake: int = 1


class SessionOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A process start. `stage` is -1 for validators. `token` is the digest of the session token given out.
    `starts`: the first epoch it trains in."""

    number: int
    session: int
    stage: int
    token: Digest
    at: float
    starts: int
    software: str
    device: str
    dtype: str


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rebalancing: a member changes its stage at a SYNC."""

    number: int
    stage: int
    why: str


class Gone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A member left (`left`), fell silent (`dead`), was told to go (`banned`), or its session was replaced."""

    number: int
    how: str
    at: float
    why: str


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A member proved a stage's state of `epoch` by digest: it may train from it. `seq`, `body`: the turn."""

    number: int
    seq: int
    body: Digest
    epoch: int
    seconds: float


class PhaseBegan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """phase: gather | train | drain | commit | upload | reduce | sync | finishing | finished.

    `members`, at the first gather and at each SYNC: members counted in every stage for `tokens_per_step`, which is
    announced to whoever loads from then on."""

    phase: str
    epoch: int
    at: float
    until: float | None
    why: str
    members: tuple[int, ...] = ()


class EpochOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """TRAIN begins. By stage: `t` (AdamW steps), `tokens_per_step`, `segment_steps`, `members` at the opening.
    `secret_digest` commits the orchestrator to its share of the plan's seed."""

    epoch: int
    at: float
    until: float
    tokens: int
    t: tuple[int, ...]
    tokens_per_step: tuple[int, ...]
    segment_steps: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    secret_digest: Digest
    nonce_digests: dict[Key, Digest] = {}


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sample starts at a first-stage member. `again`: it had been returned to the queue."""

    sample: int
    number: int
    again: bool


class Passed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An accepted forward (f), backward (b) or last-stage forward-with-backward (l). `step`: the reply says step.

    `route`: where the sample goes next: (candidate, candidate, choice) as member numbers; -1 where there was nobody or
    nothing to draw (a backward goes to who did the forward); empty when the sample closes."""

    number: int
    seq: int
    body: Digest
    kind: str
    sample: int
    stage: int
    head: Digest
    inp: Digest
    out: Digest
    cut: Cut | None
    loss: float | None
    seconds: float
    recomputed: bool
    step: bool
    route: tuple[int, ...]


class Declined(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A result was refused; kept so that the same request gets the same answer."""

    number: int
    seq: int
    body: Digest
    code: str
    text: str


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A member is told to step outside of an accepting reply: the incomplete rest at the drain, or a window's end
    (synchronous). `seq`, `body`: the turn whose answer carries it."""

    number: int
    seq: int
    passes: int
    body: Digest = ""


class Rerouted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task of a sample goes to a neighbour: its holder died, lost its lease, or gave it up. kind f or b."""

    sample: int
    stage: int
    kind: str
    lost: int
    route: tuple[int, ...]
    why: str


class SampleClosed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """how: partial (credited, never re-run) or returned (to the head of the queue). A full sample closes by its last
    `Passed`."""

    sample: int
    how: str
    why: str


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    seq: int
    body: Digest
    root: Digest
    commitment: Digest
    length: int
    digest: Digest
    manifest_length: int
    manifest_digest: Digest
    cuts: tuple[Cut, ...]
    steps: int
    head: Digest


class Uploaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    seq: int
    body: Digest


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The merge plan of one stage; without `members` there is nothing to merge. `missed`: committed, did not upload.
    `secret`/`nonces` open what `EpochOpened` committed to; anyone can derive the plan again from them and the roots.
    `weights`: accepted passes of each member (the cap is applied to them when coefficients are made)."""

    epoch: int
    stage: int
    members: tuple[int, ...]
    weights: tuple[int, ...]
    qualified: int
    effective_batch: int
    chunks: int
    secret: str
    nonces: dict[Key, str]
    seed: Digest
    plan: Digest
    missed: tuple[int, ...] = ()


class ShardReported(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An owner (or a third party, `third` True, number -1 for the orchestrator) reduced shards. Each row: shard, parts
    ((name, digest), ...), length, object digest. `bad`: (shard, member, why) of contributions that broke it."""

    number: int
    seq: int
    body: Digest
    epoch: int
    stage: int
    third: bool
    shards: tuple[tuple[int, tuple[tuple[str, Digest], ...], int, Digest, str], ...]
    bad: tuple[tuple[int, int, str], ...]


class ShardReassigned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    epoch: int
    stage: int
    shard: int
    owner: int
    why: str


class ShardSettled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """how: agreed | alone | settled | kept | zero. `winner`: whose object counts (-2: a third party's, also the old
    value that the orchestrator wrote again); `liars`: owners whose digest lost."""

    epoch: int
    stage: int
    shard: int
    how: str
    winner: int
    liars: tuple[int, ...]
    why: str


class StageMerged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The checkpoint of a stage after this epoch. `merged` False: no qualifying miner, the stage keeps its state."""

    epoch: int
    stage: int
    merged: bool
    checkpoint: Checkpoint


class AuditDrawn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """kind: segment. Steps [start, stop) of the member's epoch are to be shown and replayed."""

    audit: int
    epoch: int
    number: int
    session: int
    stage: int
    segment: int
    start: int
    stop: int
    until: float
    kind: str = "segment"


class EvidenceShown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    audit: int
    problem: str
    until: float


class VerdictGiven(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """verdict: valid | invalid | inconclusive. `validator` -1: given by the orchestrator (nothing shown in time, no
    validator). `worst`: (kind, sample, cosine, norm ratio). `replays` holds second opinions' place."""

    audit: int
    validator: int
    seq: int
    body: Digest
    verdict: str
    why: str
    operations: int
    worst: tuple[tuple[str, int, float, float], ...]
    seconds: float
    final: bool
    replays: tuple[int, ...] = ()
    until: float = 0.0


class HeldoutMeasured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    epoch: int
    validator: int
    seq: int
    body: Digest
    loss: float
    tokens: int
    seconds: float


class EpochPaid(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The books of an epoch are closed: one hash-chained ledger entry."""

    ledger: LedgerEpoch


class Operated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An operator's command: pause | resume | stop | ban | allow. `target` is a key or "". `down`: seconds paused."""

    command: str
    target: Key
    by: Key
    at: float
    down: float = 0.0


class Extended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A finished run was given a new stop rule."""

    at: float
    stop: str


Event = (
    RunStarted
    | Restarted
    | Registered
    | SessionOpened
    | Moved
    | Gone
    | Loaded
    | PhaseBegan
    | EpochOpened
    | Opened
    | Passed
    | Declined
    | Stepped
    | Rerouted
    | SampleClosed
    | Committed
    | Uploaded
    | Planned
    | ShardReported
    | ShardReassigned
    | ShardSettled
    | StageMerged
    | AuditDrawn
    | EvidenceShown
    | VerdictGiven
    | HeldoutMeasured
    | EpochPaid
    | Operated
    | Extended
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(data: bytes) -> Event:
    """Raises `msgspec.ValidationError` on bytes that are no event."""
    return _decoder.decode(data)
