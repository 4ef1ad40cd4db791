"""Evidence against the books, before anything is replayed: hashes, signatures and counting only, no torch.

Whatever is found here is a `Contradiction`: between what the miner committed to with its results and what it shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from iota.core.tasks import AuditSheet, Comparison, MinerFacts
from iota.core.values import Cut, Digest, Entry, Key
from iota.errors import Refused
from iota.nodes.evidence import ACTIVATION, GRADIENT, PASSES, Record, Transcript, check_record_origin, snapshot_parts
from iota.wire.message import check_origin

OPS = (*PASSES, "load", "step", "drop", "eval")
"""`share` has its place in the format; this version has no such operation to replay."""


class Contradiction(Exception):
    """Evidence that contradicts a commitment or a replay: the verdict is invalid. `worst`: the numbers, if any."""

    def __init__(self, why: str, worst: tuple[Comparison, ...] = ()) -> None:
        super().__init__(why)
        self.why = why
        self.worst = worst


def state_digest(t: int, weights: np.ndarray, m: np.ndarray, v: np.ndarray) -> Digest:
    """A snapshot's digest (`Cut`)."""
    whole = hashlib.sha256()
    for part in snapshot_parts(t, weights, m, v):
        whole.update(part)
    return whole.hexdigest()


def check_books(sheet: AuditSheet, transcript: Transcript, run: str, epoch: int, last_stage: bool) -> None:
    """The whole epoch's transcript against the books. Raises `Contradiction`."""
    facts, entries = sheet.facts, transcript.entries
    named = (transcript.run, transcript.key, transcript.session, transcript.epoch)
    if named != (run, facts.key, facts.session, epoch):
        raise Contradiction("the transcript shown is of another run, key, session or epoch")
    places = _places(transcript.heads(), facts.heads)
    if not places or places[-1] != len(entries) - 1:
        raise Contradiction("the transcript does not end with the committed head")
    _check_shape(entries, sheet.checkpoint.root(), last_stage)
    _check_reported(entries, places[:-1], facts)
    _check_given(entries, places[:-1], facts)
    counted = _counted(entries, last_stage)
    if tuple(entries[place].sample for place in counted) != facts.accepted:
        raise Contradiction(
            f"the transcript counts {len(counted)} passes, the books {len(facts.accepted)}, or in another order"
        )
    if not set(counted) <= set(places[:-1]):
        raise Contradiction("the transcript counts a pass whose result was never accepted")
    _check_steps(entries, set(counted), facts)


def _places(heads: list[Digest], reported: tuple[Digest, ...]) -> list[int]:
    """Where in the chain each reported head stands; they must come in order (equal ones share a place)."""
    places: list[int] = []
    at = 0
    for number, head in enumerate(reported):
        while at < len(heads) and heads[at] != head:
            at += 1
        if at == len(heads):
            raise Contradiction(
                f"the transcript shown does not lead to the head reported with result {number}: an entry was changed, "
                "dropped, added or moved"
            )
        places.append(at)
    return places


def _check_shape(entries: tuple[Entry, ...], root: Digest, last_stage: bool) -> None:
    first = entries[0]
    if first.op != "load" or first.inp != root:
        raise Contradiction("the transcript does not begin by loading the epoch's checkpoint")
    for number, entry in enumerate(entries):
        if entry.op not in OPS or (entry.op == "load" and number > 0):
            raise Contradiction(f"entry {number} is a {entry.op[:16]!r} operation, which has no place there")
        if last_stage and (entry.op == "backward" or (entry.op == "forward" and entry.loss is None)):
            raise Contradiction(f"entry {number}: at the last stage every pass is a forward with its loss")
        if not last_stage and entry.loss is not None:
            raise Contradiction(f"entry {number} has a loss, which only the last stage computes")
        if entry.op in PASSES and entry.sample < 0:
            raise Contradiction(f"entry {number} is a pass of no sample")
        if entry.op == "drop" and entries[number - 1].op not in PASSES:
            raise Contradiction(f"entry {number} drops what is no pass")


def _check_reported(entries: tuple[Entry, ...], places: list[int], facts: MinerFacts) -> None:
    """Each accepted result must be the operation that its head ends with."""
    for number, place in enumerate(places):
        entry = entries[place]
        if entry.op not in PASSES or (entry.op == "forward" and entry.out == "" and entry.loss is None):
            raise Contradiction(f"accepted result {number} is no pass in the transcript but a {entry.op}")
        if number < len(facts.outs) and facts.outs[number] != entry.out:
            raise Contradiction(f"result {number} (sample {entry.sample}) sent another output than its transcript says")
        if number < len(facts.losses) and facts.losses[number] != entry.loss:
            raise Contradiction(
                f"result {number} (sample {entry.sample}) reported the loss {facts.losses[number]}, "
                f"its transcript says {entry.loss}"
            )


_OPERATION = {"f": "forward", "l": "forward", "b": "backward"}


def _check_given(entries: tuple[Entry, ...], places: list[int], facts: MinerFacts) -> None:
    """Each accepted result is an operation of its own, of its very sample, on the very tensors that the hub handed on
    for it: else a miner could answer many tasks with one output, or compute on inputs of its own making."""
    if len(set(places)) != len(places):
        raise Contradiction("two accepted results end with the same operation: one of them was never computed")
    inputs: dict[int, Digest] = {}
    rows = zip(places, facts.kinds, facts.samples, facts.given, strict=False)
    at = 0
    for number, (place, kind, sample, (received, x)) in enumerate(rows):
        for entry in entries[at : place + 1]:
            if entry.op == "forward":
                inputs[entry.sample] = entry.inp
        at = place + 1
        entry = entries[place]
        if (entry.op, entry.sample) != (_OPERATION[kind], sample):
            raise Contradiction(
                f"result {number} was accepted as the {_OPERATION[kind]} of sample {sample}, its transcript has the "
                f"{entry.op} of sample {entry.sample}"
            )
        if (entry.inp, inputs.get(sample, "")) != (received, x):
            raise Contradiction(f"result {number} (sample {sample}) was not computed on the tensors handed on for it")


def _counted(entries: tuple[Entry, ...], last_stage: bool) -> list[int]:
    """Places of the passes whose gradient counts: not dropped right after."""
    op = "forward" if last_stage else "backward"
    following = [entry.op for entry in entries[1:]] + [""]
    return [i for i, entry in enumerate(entries) if entry.op == op and following[i] != "drop"]


def _check_steps(entries: tuple[Entry, ...], counted: set[int], facts: MinerFacts) -> None:
    cuts, told = facts.cuts, facts.averaged
    steps = pending = 0
    for number, entry in enumerate(entries):
        pending += number in counted
        if entry.op != "step":
            continue
        steps += 1
        if entry.number != pending:
            raise Contradiction(f"inner step {steps} claims to average {entry.number} passes, there are {pending}")
        if steps <= len(told) and told[steps - 1] != pending:
            raise Contradiction(f"inner step {steps} averages {pending} passes, it was told to after {told[steps - 1]}")
        pending = 0
    if pending:
        raise Contradiction(f"{pending} counted passes never entered a step")
    if cuts[0].step != 0 or cuts[-1].step != steps:
        raise Contradiction(f"the transcript has {steps} inner steps, the committed snapshots {cuts[-1].step}")


def weights_after(entries: tuple[Entry, ...], step: int) -> Digest:
    """The weights digest that the transcript's `step`-th inner step names (step >= 1)."""
    return [entry.out for entry in entries if entry.op == "step"][step - 1]


def cut_at(cuts: tuple[Cut, ...], step: int) -> Cut:
    """The commitment to the snapshot after `step` inner steps. Raises `Contradiction` when there is none."""
    for cut in cuts:
        if cut.step == step:
            return cut
    raise Contradiction(f"no snapshot was committed after {step} inner steps")


def check_inputs(
    transcript: Transcript,
    start: int,
    stop: int,
    stage: int,
    shown: Mapping[Digest, list[Record]],
    run: str,
    facts: MinerFacts,
) -> dict[Digest, Record]:
    """The tensors that entries [start, stop) were computed on, by digest: each shown for its very sample and in its
    direction, and signed, for this run and sample, by whoever produced it. Raises `Contradiction`."""
    found: dict[Digest, Record] = {}
    latest: dict[int, Digest] = {}
    for index, entry in enumerate(transcript.entries[:stop]):
        if entry.op == "forward":
            latest[entry.sample] = entry.inp
        if index < start or entry.op not in PASSES:
            continue
        wanted = [(ACTIVATION, latest.get(entry.sample, ""))] if stage > 0 else []
        if entry.op == "backward":
            wanted.append((GRADIENT, entry.inp))
        for kind, digest in wanted:
            what = f"the {kind} received for sample {entry.sample}"
            fits = [r for r in shown.get(digest, []) if r.kind == kind and r.sample == entry.sample]
            if not fits:
                raise Contradiction(f"{what} was not shown")
            _check_origin(fits[0], what, run, facts)
            found[digest] = fits[0]
    return found


def _check_origin(record: Record, what: str, run: str, facts: MinerFacts) -> None:
    try:
        signer: Key = check_record_origin(record, run)
        own = signer == facts.key and check_origin(record.origin, run=run).session == facts.session
    except Refused as error:
        raise Contradiction(f"{what} has no valid signed origin: {error.cause}") from None
    if own:
        raise Contradiction(f"{what} is signed by the miner itself")
