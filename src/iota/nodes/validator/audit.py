"""One audit from evidence to verdict (design section 6 "Audit").

First the books: everything that hashing, signatures and counting can tell. Then the segment is replayed from its
snapshot on the recorded inputs, in the transcript's order, and outputs, gradients, losses, the segment's change of
weights and both moments are compared. Last the upload: it must be what was trained.

    invalid       the evidence contradicts a commitment, or the replay, or was not shown
    inconclusive  we could not tell: the store, our memory, our time, our process
    valid         everything else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from iota.config.schema import AuditConfig, Manifest
from iota.core import manifest as chunks
from iota.core.tasks import Audit, Audited, AuditSheet, Comparison
from iota.core.values import Digest, sha256
from iota.errors import IotaError
from iota.model.boundary import reads_tokens
from iota.nodes import evidence
from iota.nodes.effects import Clock, Compute
from iota.nodes.reducing import checkpoint_range, moments_merged, outer_of
from iota.nodes.validator import books
from iota.nodes.validator.books import Contradiction
from iota.nodes.validator.compare import badness, holds
from iota.nodes.validator.jobs import Buffer, Compare, Compared, Replay, Replayed, Replayer, Shape
from iota.nodes.validator.segment import build_replay, samples_of
from iota.store.remote import Objects
from iota.store.tokens import TokenReader

T = TypeVar("T")

WORST = 8
"""Comparisons that a verdict carries."""


@dataclass(frozen=True)
class State:
    """A stage's state, float32 [parameters] each."""

    t: int
    weights: np.ndarray
    m: np.ndarray
    v: np.ndarray

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.weights, self.m, self.v


class Auditor:
    """`tokens` reads the run's training tokens from the signed manifest's shards: ids and labels never come from a
    peer. Hashing runs in `compute`, torch behind `replayer`."""

    def __init__(
        self,
        manifest: Manifest,
        objects: Objects,
        tokens: TokenReader,
        replayer: Replayer,
        compute: Compute,
        clock: Clock,
    ) -> None:
        self._manifest, self._objects, self._tokens = manifest, objects, tokens
        self._replayer, self._compute, self._clock = replayer, compute, clock
        self._stages = len(manifest.cuts)

    async def audit(self, task: Audit, sheet: AuditSheet) -> Audited:
        """The verdict. Raises only what is neither evidence nor a known failure of ours: a bug."""
        started = self._clock.now()
        case = _Case(self, task, sheet, started)
        try:
            verdict, why = "valid", await case.judge()
        except Contradiction as found:
            verdict, why, case.comparisons = "invalid", found.why, found.worst
        except IotaError as error:
            if error.code == "bad_evidence":
                verdict, why = "invalid", error.cause
            else:
                verdict, why = "inconclusive", f"the validator could not tell ({error.code}): {error.cause}"
        return Audited(
            task=task.task,
            audit=task.audit,
            verdict=verdict,
            why=why,
            operations=case.operations,
            worst=tuple(sorted(case.comparisons, key=badness, reverse=True)[:WORST]),
            seconds=self._clock.now() - started,
        )


class _Case:
    """One audit in progress. `operations`: how many were replayed; `comparisons`: the numbers found."""

    def __init__(self, auditor: Auditor, task: Audit, sheet: AuditSheet, started: float) -> None:
        self._a, self._task, self._sheet, self._started = auditor, task, sheet, started
        self._config = auditor._manifest.config
        self._stage = sheet.facts.stage
        self._parameters = sheet.checkpoint.parameters
        self._last = self._stage == auditor._stages - 1
        self._base: np.ndarray | None = None
        self.operations = 0
        self.comparisons: tuple[Comparison, ...] = ()

    async def judge(self) -> str:
        run, sheet, task = self._a._manifest.run, self._sheet, self._task
        shown = await self._fetch(sheet.transcript_url, "the transcript")
        transcript = await self._a._compute.run(evidence.decode_transcript, shown)
        await self._a._compute.run(books.check_books, sheet, transcript, run, task.epoch, self._last)
        start, stop = await self._start(), await self._snapshot(sheet.stop_url, task.stop_step)
        await self._check_weights(transcript, start, stop)
        await self._check_upload(stop)
        replay, buffers = await self._command(transcript, start.t)
        arrays: list[Buffer] = [_raw(array) for state in (start, stop) for array in state.arrays()]
        replayed = await self._ask(replay, [*arrays, *buffers], Replayed)
        if replayed.problem:
            raise Contradiction(f"it cannot be what the miner computed: {replayed.problem}")
        rows = list(replayed.comparisons)
        if replayed.differ:
            rows += await self._compare_outputs(replay, replayed.differ)
        self.operations = len(replay.operations)
        return self._decide(replayed, stop, rows)

    # ---------------------------------------------------------------------------------------------------- fetching

    async def _fetch(self, url: str, what: str) -> bytes:
        """A shown object. The orchestrator saw it in the store when it was shown, so any trouble with it is ours."""
        if not url:
            raise Contradiction(f"{what} was not shown")
        return await self._a._objects.get(url)

    async def _ask(self, command: Replay | Compare, buffers: Sequence[Buffer], kind: type[T]) -> T:
        left = self._config.audit.audit_limit - (self._a._clock.now() - self._started)
        answer = await self._a._replayer.ask(command, buffers, max(left, 1.0))
        assert isinstance(answer, kind), answer
        return answer

    async def _snapshot(self, url: str, step: int) -> State:
        cut = books.cut_at(self._sheet.facts.cuts, step)
        data = await self._fetch(url, f"the snapshot after inner step {step}")
        state = State(*await self._a._compute.run(evidence.read_snapshot, data, self._parameters, cut))
        if not self._sheet.load.t <= state.t <= self._sheet.load.t + step:
            raise Contradiction(f"the snapshot after inner step {step} has t = {state.t}, which cannot be")
        if not all(bool(np.isfinite(array).all()) for array in state.arrays()):
            raise Contradiction(f"the snapshot after inner step {step} has values that are not finite")
        if bool((state.v < 0).any()):
            raise Contradiction(f"the snapshot after inner step {step} has a negative second moment")
        return state

    async def _part(self, name: str) -> np.ndarray:
        sheet = self._sheet
        return await checkpoint_range(sheet.checkpoint, sheet.urls, name, 0, self._parameters, self._a._objects)

    async def _base_weights(self) -> np.ndarray:
        """The checkpoint's weights: what the epoch began from."""
        if self._base is None:
            self._base = await self._part("weights")
        return self._base

    async def _start(self) -> State:
        """The state before the segment: a committed snapshot, or the checkpoint itself at the epoch's begin."""
        sheet, step = self._sheet, self._task.start_step
        if step > 0 or sheet.start_url:
            return await self._snapshot(sheet.start_url, step)
        state = State(sheet.load.t, await self._base_weights(), await self._part("m"), await self._part("v"))
        digest = await self._a._compute.run(books.state_digest, state.t, *state.arrays())
        if digest != books.cut_at(sheet.facts.cuts, 0).digest:
            raise Contradiction("the committed first snapshot is not the epoch's checkpoint")
        return state

    # -------------------------------------------------------------------------------------------- books with bytes

    async def _check_weights(self, transcript: evidence.Transcript, start: State, stop: State) -> None:
        """Snapshots must hold the weights that the transcript's inner steps name."""
        for state, step in ((start, self._task.start_step), (stop, self._task.stop_step)):
            digest = await self._a._compute.run(sha256, _raw(state.weights))
            if step > 0 and digest != books.weights_after(transcript.entries, step):
                raise Contradiction(
                    f"the snapshot after inner step {step} holds other weights than its transcript names"
                )
        if self._task.start_step == 0 and not np.array_equal(start.weights, await self._base_weights()):
            raise Contradiction("its epoch did not begin with the checkpoint's weights")

    async def _check_upload(self, stop: State) -> None:
        """The upload, built again from the committed final snapshot, must have the committed root."""
        facts = self._sheet.facts
        if facts.upload_root is None:
            return
        step = facts.cuts[-1].step
        final = stop if step == self._task.stop_step else await self._snapshot(self._sheet.final_url, step)
        outer = outer_of(self._config)
        first = final.weights if outer.upload_part == "weights" else await self._base_weights() - final.weights
        parts = {outer.upload_part: first, "m": final.m, "v": final.v}
        names = outer.upload_parts(moments_merged(self._config))
        if await self._a._compute.run(_root, [(name, parts[name]) for name in names]) != facts.upload_root:
            raise Contradiction("the upload is not what was trained: it does not follow from the final snapshot")

    # ---------------------------------------------------------------------------------------------------- replaying

    async def _command(self, transcript: evidence.Transcript, t: int) -> tuple[Replay, list[Buffer]]:
        task, sheet = self._task, self._sheet
        begin, end = evidence.segment(transcript.entries, task.start_step, task.stop_step)
        wanted, _ = evidence.tensors_wanted(transcript.entries, begin, end)
        shown: dict[Digest, list[evidence.Record]] = {}
        if wanted:
            data = await self._fetch(sheet.inputs_url, "what it received")
            shown = await self._a._compute.run(_records, data, wanted)
        inputs = await self._a._compute.run(
            books.check_inputs, transcript, begin, end, self._stage, shown, self._a._manifest.run, sheet.facts
        )
        operations = evidence.operations(transcript, task.start_step, task.stop_step, stage=self._stage, inputs=inputs)
        samples = samples_of(operations) if reads_tokens(self._a._manifest.config, self._stage) else []
        tokens = {sample: await self._a._tokens.batch_windows(sample) for sample in samples}
        return build_replay(
            operations,
            tokens,
            stage=self._stage,
            load=sheet.load,
            t=t,
            start_step=task.start_step,
            stop_digest=books.cut_at(sheet.facts.cuts, task.stop_step).digest,
        )

    async def _compare_outputs(self, replay: Replay, differ: tuple[int, ...]) -> list[Comparison]:
        """Outputs whose digests differ are compared as numbers; only now are they fetched."""
        rows = [replay.operations[place] for place in differ]
        data = await self._fetch(self._sheet.outputs_url, "what it sent")
        shown = await self._a._compute.run(_records, data, {row.out for row in rows})
        tensors = []
        for row in rows:
            if not row.out or row.out not in shown:
                raise Contradiction(f"the output of the {row.op} of sample {row.sample} was not shown")
            tensors.append(shown[row.out][0].tensor)
        command = Compare(places=differ, tensors=tuple(Shape(t.dtype, t.shape) for t in tensors))
        return list((await self._ask(command, [t.data for t in tensors], Compared)).comparisons)

    def _decide(self, replayed: Replayed, stop: State, rows: list[Comparison]) -> str:
        """Why it is valid. Raises `Contradiction`."""
        audit, count = self._config.audit, self.operations
        failed = sorted((row for row in rows if not holds(row, audit)), key=badness, reverse=True)
        if failed:
            raise Contradiction(
                f"{len(failed)} of {count} replayed operations differ: {_say(failed[0], audit)}", tuple(failed)
            )
        if replayed.t != stop.t:
            raise Contradiction(f"its last snapshot has t = {stop.t}, the replay comes to {replayed.t}")
        self.comparisons = tuple(rows)
        if not rows:
            return f"{count} operations replayed, everything equal to the bit"
        return f"{count} operations replayed within tolerance; worst: {_numbers(max(rows, key=badness))}"


def _raw(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array, dtype="<f4").data).cast("B")


def _root(parts: list[tuple[str, np.ndarray]]) -> Digest:
    try:
        return chunks.build_manifest([(name, np.ascontiguousarray(array, dtype="<f4")) for name, array in parts])[
            0
        ].root()
    except ValueError as error:
        raise Contradiction(f"no upload can be built from the final snapshot: {error}") from None


def _records(data: bytes, wanted: set[Digest]) -> dict[Digest, list[evidence.Record]]:
    found: dict[Digest, list[evidence.Record]] = {}
    for record in evidence.read_records(data):
        if record.digest in wanted:
            found.setdefault(record.digest, []).append(record)
    return found


_NAMES = {
    "change": "the segment's change of weights",
    "m": "the first moment",
    "v": "the second moment",
    "direction": "the direction of the moments (what the next step would do)",
}


def _numbers(c: Comparison) -> str:
    name = _NAMES.get(c.kind, f"the {c.kind} of sample {c.sample}")
    return f"{name}: norm ratio {c.norm_ratio:.4g}" + ("" if c.kind == "loss" else f", cosine {c.cosine:.4f}")


def _say(c: Comparison, audit: AuditConfig) -> str:
    if c.kind == "change" and c.norm_ratio == 0.0:
        return "the weights did not change although it reports inner steps"
    wanted = "1% of the replayed one" if c.kind == "loss" else (
        f"cosine at least {audit.cosine:g}, ratio {audit.ratio_low:g} to {audit.ratio_high:g}"
    )  # fmt: skip
    return f"{_numbers(c)} (wanted: {wanted})"
