"""Tasks that the orchestrator hands out and the results that come back: the whole life of a peer is this loop.

One request, `Turn`, brings the result of the last task; its reply, `Answer`, returns the verdict on that result,
whether to step, and the next task. Tensors ride beside them in the same message, in the order each docstring gives
("attached").
Big lists (URLs) ride as an attached uint8 tensor that holds a msgpack-encoded sheet.

`deadline`, `since` and `until` are seconds of the orchestrator's clock (Unix time); durations are seconds.
"""

from __future__ import annotations

import msgspec

from iota.core.values import Checkpoint, Cut, Digest, Key

# ---------------------------------------------------------------------------------------------- tasks for miners


class Wait(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to do. `code` is a stable word, `text` says for what; ask again (the poll is held up to 10 s)."""

    code: str
    text: str
    since: float
    until: float | None


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Load a stage from a checkpoint. Attached: CheckpointSheet. Result: `Loaded`.

    `tokens`, `tokens_per_step` and `t` fix the learning rate: lr = f(tokens + local_step * tokens_per_step).
    `segment_steps`: a snapshot is cut after every so many inner steps.
    """

    task: int
    epoch: int
    stage: int
    tokens: int
    tokens_per_step: int
    t: int
    segment_steps: int
    deadline: float
    why: str


class Prove(Load, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The same at SYNC: take the merged state, and prove it by digest. Result: `Loaded`."""


class Forward(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Run the stage forward on one sample. Attached: the boundary tensor of the stage before (none at the first stage).

    `origin` is the producer's signed control part (signature + control bytes), b"" at the first stage.
    At the last stage this is forward, loss and backward in one. Result: `Passed`, attached: the output, or at the last
    stage the gradient towards the stage before (nothing in a one-stage run).
    """

    task: int
    epoch: int
    sample: int
    attempt: int
    deadline: float
    origin: bytes


class Backward(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Run one sample backward. Attached: the gradient from the stage after, then, when `with_input`, the stored input
    tensor (the pathway broke and this miner did not do the forward; nothing at the first stage).

    Result: `Passed`, attached: the gradient towards the stage before (nothing at the first stage).
    """

    task: int
    epoch: int
    sample: int
    attempt: int
    deadline: float
    origin: bytes
    with_input: bool
    input_origin: bytes


class Commit(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """TRAIN is over: build the upload, commit to it. Result: `Committed`."""

    task: int
    epoch: int
    deadline: float


class Upload(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Put the committed bytes at `url` and the chunk manifest at `manifest_url` (signed PUT URLs that pin length and
    digest). Result: `Done`."""

    task: int
    epoch: int
    url: str
    manifest_url: str
    deadline: float


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One member's upload as an owner reads it. `coefficient` is float32(B_i / sum B) as a Python float."""

    key: Key
    root: Digest
    coefficient: float
    url: str
    manifest_url: str


class ShardWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard to reduce: chunk range [start, stop) applied to every part; put the result at `url`."""

    shard: int
    start: int
    stop: int
    url: str


class ReduceSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attached to `Reduce` and `Recompute`. Contributions in order of key. `base` is set for a recomputing third party,
    who does not hold the stage's base and momentum: where to read them."""

    contributions: tuple[Contribution, ...]
    shards: tuple[ShardWork, ...]
    base: Checkpoint | None
    urls: dict[str, str]


class Reduce(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Reduce the shards on the attached ReduceSheet, apply the outer step, put the results. Result: `Reduced`."""

    task: int
    epoch: int
    stage: int
    deadline: float


class Show(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Put evidence of one segment. Comes beside a task (`Answer.shows`); answered in `Turn.shown` when uploaded.

    Objects: transcript (the epoch's entries), snapshot at the segment's start and at its end, the boundary tensors
    received (with origins) and sent in it. A snapshot URL is "" when it need not be shown.
    """

    audit: int
    epoch: int
    session: int
    start_step: int
    stop_step: int
    transcript_url: str
    start_url: str
    stop_url: str
    final_url: str
    inputs_url: str
    outputs_url: str
    deadline: float


class ShowSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Many `Show`s at once, attached (`Answer.shows_attached`): they would not fit into a control part."""

    shows: tuple[Show, ...]


class Leave(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The run ended, or this peer is not wanted: stop. `code`: finished | drained | banned | replaced."""

    code: str
    text: str


# ------------------------------------------------------------------------------------------ tasks for validators


class MinerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the orchestrator's books say of the audited miner-epoch: the reference that evidence must match.

    `heads[i]`: the transcript head reported with accepted result i, in order; `passes`: samples whose backward was
    accepted, in order; `cuts`: committed snapshots in order, the last one being the final state.

    `outs[i]`, `losses[i]`: output digest and loss that came with accepted result i (the commitment's head has none);
    empty when the books do not say.

    `kinds[i]`, `samples[i]`: what accepted result i is (f | b | l) and of which sample; `given[i]`: digests of the
    tensor that the hub handed on for it (a gradient for b) and of the stage's input ("" where there is none);
    `averaged[k]`: passes that inner step k + 1 was told to average.
    """

    key: Key
    session: int
    stage: int
    heads: tuple[Digest, ...]
    accepted: tuple[int, ...]
    cuts: tuple[Cut, ...]
    upload_root: Digest | None
    outs: tuple[Digest, ...] = ()
    losses: tuple[float | None, ...] = ()
    kinds: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    given: tuple[tuple[Digest, Digest], ...] = ()
    averaged: tuple[int, ...] = ()


class AuditSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attached to `Audit`: signed GET URLs of the shown objects (see `Show`) and of the checkpoint's objects."""

    facts: MinerFacts
    load: Load
    checkpoint: Checkpoint
    urls: dict[str, str]
    transcript_url: str
    start_url: str
    stop_url: str
    final_url: str
    inputs_url: str
    outputs_url: str


class Audit(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Replay one segment [start_step, stop_step) of a miner's epoch. Attached: AuditSheet. Result: `Audited`."""

    task: int
    audit: int
    epoch: int
    stage: int
    start_step: int
    stop_step: int
    deadline: float


class Recompute(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Reduce disputed or drawn shards as a third party. Attached: ReduceSheet (with base). Result: `Reduced`."""

    task: int
    epoch: int
    stage: int
    deadline: float


class Heldout(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Measure the held-out loss of a checkpoint, stage after stage. Attached: one CheckpointSheet a stage, in order.
    Result: `Measured`."""

    task: int
    epoch: int
    deadline: float


Task = Wait | Load | Prove | Forward | Backward | Commit | Upload | Reduce | Leave | Audit | Recompute | Heldout


# ------------------------------------------------------------------------------------------------------- results


class Loaded(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The stage's state is in place; `root` is recomputed from the bytes in memory (`Checkpoint.root`)."""

    task: int
    root: Digest
    seconds: float


class Passed(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A forward or backward is done. `head` is the transcript head after it; `cut` the snapshot taken since the last
    result, if any. `inp`/`out` are the transcript entry's digests. `loss`: mean nats per token, last stage only.
    `seconds` is compute time; `recomputed`: the backward had to run the forward again."""

    task: int
    sample: int
    head: Digest
    inp: Digest
    out: Digest
    cut: Cut | None
    loss: float | None
    seconds: float
    recomputed: bool


class Committed(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """`root`, `length`, `digest` of the upload (see `Commit`), `commitment` = H(root, key, run, epoch, stage); `final`
    the last snapshot; `steps` the inner steps done this epoch; `head` the transcript head."""

    task: int
    root: Digest
    commitment: Digest
    length: int
    digest: Digest
    manifest_length: int
    manifest_digest: Digest
    cuts: tuple[Cut, ...]
    steps: int
    head: Digest


class ShardResult(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Digest of every part's reduced bytes in order (weights, momentum, m, v; absent parts left out), total length, and
    the digest of the object that holds them one after another."""

    shard: int
    parts: tuple[tuple[str, Digest], ...]
    length: int
    digest: Digest


class Reduced(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """`bad`: (shard, key, why) of contributions that contradict their manifest; they were left out of that shard."""

    task: int
    shards: tuple[ShardResult, ...]
    bad: tuple[tuple[int, Key, str], ...]


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The task is done; nothing to say about it."""

    task: int


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The task was not done. `code`: bad_input | not_finite | no_memory | no_disk | no_object | too_late | stale."""

    task: int
    code: str
    text: str


class Comparison(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One compared thing: `kind` forward | backward | change | m | v | direction | loss | upload, cosine and norm ratio
    (theirs / ours; both always finite)."""

    kind: str
    sample: int
    cosine: float
    norm_ratio: float
    equal: bool


class Audited(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """`verdict`: valid | invalid | inconclusive. `why` in plain words; `worst` the numbers that decided it."""

    task: int
    audit: int
    verdict: str
    why: str
    operations: int
    worst: tuple[Comparison, ...]
    seconds: float


class Measured(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out loss of checkpoint `epoch` in nats per token over `tokens` predicted tokens."""

    task: int
    epoch: int
    loss: float
    tokens: int
    seconds: float


Result = Loaded | Passed | Committed | Reduced | Done | Failed | Audited | Measured


class Shown(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer to a `Show`: uploaded (`problem` empty) or why not."""

    audit: int
    problem: str


# ------------------------------------------------------------------------------------------------- the exchange


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A process start. Answered by `Welcome`. `token`: the last session's, from the peer's own locked folder, or ""."""

    role: str
    token: str
    software: str
    device: str
    dtype: str
    memory: int
    disk: int
    owner: str


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """`manifest` is the signed run manifest as msgpack bytes attached (uint8); `token` opens the next session."""

    session: int
    token: str
    stage: int
    time: float


class Turn(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """`seq` counts the session's turns from 1 and is the idempotency id: the same seq with the same body gets the same
    verdict; with another body it is refused. `draining`: finish what you hold, give me nothing new."""

    session: int
    seq: int
    result: Result | None
    shown: tuple[Shown, ...]
    draining: bool


class Verdict(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """On the result that came with the turn. Not accepted: the code and the cause; the gradient must be dropped."""

    accepted: bool
    code: str
    text: str


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a miner may want to show its owner; updated with every answer."""

    epoch: int
    phase: str
    phase_since: float
    phase_until: float | None
    passes_epoch: int
    passes_total: int
    last_verdict: str
    paid_total: int


class Answer(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """`step`: do an inner step now, averaging the passes accepted since the last (decided with the verdict).
    `shows_attached`: `shows` is empty, they are on the ShowSheet that is attached last."""

    seq: int
    verdict: Verdict | None
    step: bool
    task: Task
    shows: tuple[Show, ...]
    standing: Standing
    time: float
    shows_attached: bool = False
