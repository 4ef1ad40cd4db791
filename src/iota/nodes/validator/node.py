"""The validator: joins, loops turns like a miner, and judges. Tasks: Audit, Recompute, Heldout, Wait, Leave.

No torch here: replays and measurements run behind a `Replayer`. What fails on this side is `Failed` or inconclusive,
never a verdict against a miner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import iota
from iota.config.schema import Manifest
from iota.core import tasks
from iota.core.values import CheckpointSheet, Tensor
from iota.errors import IotaError, Unreachable
from iota.net.peer import Caller
from iota.nodes.data_source import data_fetch
from iota.nodes.effects import Clock, Compute, Entropy
from iota.nodes.link import Backoff, Heard, Link, Peer, Session, SessionOver
from iota.nodes.reducing import old_from_checkpoint, reduce_shards
from iota.nodes.validator.audit import Auditor
from iota.nodes.validator.heldout import measure_heldout
from iota.nodes.validator.jobs import Replayer
from iota.store.remote import Objects
from iota.store.tokens import TokenReader
from iota.wire.message import open_sheet

ENDS = ("banned", "finished", "not_allowed")
"""Refusals of a turn after which there is nothing to come back for."""
FAILURES = ("bad_input", "not_finite", "no_memory", "no_disk", "no_object", "too_late", "stale")
OURS = {"replay_failed": "no_memory", "corrupt": "no_object", "unreachable": "no_object", "disk_full": "no_disk"}


@dataclass(frozen=True)
class ValidatorSettings:
    """What a validator's owner decides. `folder` holds session token and tokens. `give_up`: seconds of an unreachable
    orchestrator after which to stop (None: never)."""

    folder: Path
    device: str = "cpu"
    dtype: str = ""
    memory: int = 0
    owner: str = ""
    give_up: float | None = None


class Validator:
    """One validator process. `replayer` makes what holds torch, once the run is known; it is kept over sessions.
    `report` gets each notice for the owner once; `verdicts` counts them by kind."""

    def __init__(
        self,
        settings: ValidatorSettings,
        caller: Caller,
        objects: Objects,
        replayer: Callable[[Manifest], Replayer],
        *,
        clock: Clock,
        compute: Compute,
        entropy: Entropy,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.verdicts = {"valid": 0, "invalid": 0, "inconclusive": 0}
        self._settings, self._caller, self._objects = settings, caller, objects
        self._make_replayer = replayer
        self._replayer: Replayer | None = None
        self._clock, self._compute, self._entropy, self._report = clock, compute, entropy, report
        self._manifest: Manifest | None = None
        self._auditor: Auditor | None = None
        self._heldout: TokenReader | None = None
        self._failures, self._failed_before = Backoff(entropy), False
        self._task, self._since, self._waiting = "starting", clock.now(), ""
        peer = Peer(
            role="validator",
            software=f"iota {iota.__version__}",
            device=settings.device,
            dtype=settings.dtype or "as the run",
            memory=settings.memory,
            owner=settings.owner,
        )
        self.link = Link(
            caller,
            peer,
            settings.folder,
            clock=clock,
            compute=compute,
            entropy=entropy,
            report=report,
            give_up=settings.give_up,
        )

    def drain(self) -> None:
        """Finish the task in hand, then leave."""
        self._report("draining: the task in hand is finished, nothing new is taken; again to leave at once")
        self.link.drain()

    def line(self, now: float) -> str:
        """For example: audit for 3 s | verdicts: 12 valid, 1 invalid, 0 inconclusive."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.verdicts.items())
        return f"{self.link.waiting or self._task} for {max(0.0, now - self._since):.0f} s | verdicts: {counts}"

    async def run(self) -> str:
        """Judge until the run ends or `drain`; says why in plain words. Raises IotaError when this validator cannot
        take part: refused, or the orchestrator unreachable for longer than allowed."""
        try:
            while True:
                session = await self.link.join()
                self._begin(session)
                try:
                    return await self._work()
                except SessionOver as over:
                    self._report(f"this session is over ({over}); joining again")
        finally:
            if self._replayer is not None:
                await self._replayer.close()

    def _begin(self, session: Session) -> None:
        manifest = session.manifest
        if self._manifest is None:
            fetch = data_fetch(self._caller, self._objects, lambda: self.link.fresh_id("data"))
            folder = self._settings.folder / "tokens"
            replayer = self._replayer = self._make_replayer(manifest)
            train = TokenReader.train(manifest, fetch, folder)
            self._auditor = Auditor(manifest, self._objects, train, replayer, self._compute, self._clock)
            self._heldout = TokenReader.heldout(manifest, fetch, folder)
        self._manifest = manifest
        self._report(f"joined run {manifest.run} as validator, session {session.number}")

    # --------------------------------------------------------------------------------------------------------- loop

    async def _work(self) -> str:
        result: tasks.Result | None = None
        while True:
            heard = await self._exchange(result)
            task = heard.answer.task
            if isinstance(task, tasks.Leave):
                return f"{task.code}: {task.text}"
            self._note(heard.answer)
            result = await self._do(task, heard.tensors)
            await self._calm(result)

    async def _exchange(self, result: tasks.Result | None) -> Heard:
        """Bring a result, hear what is next. A result that the orchestrator cannot take is withdrawn."""
        try:
            return await self.link.turn(result)
        except Unreachable:
            raise
        except IotaError as error:
            if error.code in ENDS:
                raise
            if result is None or isinstance(result, tasks.Failed):
                raise SessionOver(str(error)) from error
            self._report(f"a result could not be delivered: {error}")
            return await self._exchange(_failed(result.task, error))

    async def _do(self, task: tasks.Task, tensors: tuple[Tensor, ...]) -> tasks.Result | None:
        """The task's result; None when there is nothing to do."""
        if isinstance(task, tasks.Wait):
            return None
        assert not isinstance(task, tasks.Leave)
        try:
            if isinstance(task, tasks.Audit):
                return await self._audit(task, tensors)
            if isinstance(task, tasks.Recompute):
                return await self._recompute(task, tensors)
            if isinstance(task, tasks.Heldout):
                return await self._measure(task, tensors)
            raise IotaError("bad_input", f"a {type(task).__name__} task is for miners, this is a validator")
        except IotaError as error:
            self._report(f"{type(task).__name__.lower()} failed: {error}")
            return _failed(task.task, error)

    async def _audit(self, task: tasks.Audit, tensors: tuple[Tensor, ...]) -> tasks.Audited:
        assert self._auditor is not None
        sheet: tasks.AuditSheet = open_sheet(_attached(task, tensors), tasks.AuditSheet)
        result = await self._auditor.audit(task, sheet)
        self.verdicts[result.verdict] += 1
        self._report(
            f"audit {task.audit} of {sheet.facts.key[:8]}, epoch {task.epoch}, stage {task.stage}, steps "
            f"{task.start_step} to {task.stop_step}: {result.verdict} ({result.why}; {result.seconds:.1f} s)"
        )
        return result

    async def _recompute(self, task: tasks.Recompute, tensors: tuple[Tensor, ...]) -> tasks.Reduced:
        assert self._manifest is not None
        sheet: tasks.ReduceSheet = open_sheet(_attached(task, tensors), tasks.ReduceSheet)
        if sheet.base is None:
            raise IotaError("bad_input", "a third party needs the checkpoint to start from, the sheet names none")
        config = self._manifest.config
        old = old_from_checkpoint(sheet.base, sheet.urls, config, self._objects)
        done = await reduce_shards(sheet, sheet.base.parameters, config, old, self._objects, self._compute)
        self._report(f"recomputed {len(done.shards)} shards of stage {task.stage}, epoch {task.epoch}")
        return tasks.Reduced(task=task.task, shards=tuple(done.shards), bad=tuple(done.bad))

    async def _measure(self, task: tasks.Heldout, tensors: tuple[Tensor, ...]) -> tasks.Measured:
        assert self._manifest is not None and self._heldout is not None and self._replayer is not None
        sheets: list[CheckpointSheet] = [open_sheet(tensor, CheckpointSheet) for tensor in tensors]
        measured = await measure_heldout(
            task, sheets, self._manifest, self._heldout, self._objects, self._replayer, self._clock
        )
        self._report(
            f"held-out loss of checkpoint {task.epoch}: {measured.loss:.4f} nats per token over {measured.tokens:,} "
            f"tokens ({measured.seconds:.1f} s)"
        )
        return measured

    async def _calm(self, result: tasks.Result | None) -> None:
        """A task that fails again and again is not hammered: growing pauses between the tries."""
        if not isinstance(result, tasks.Failed):
            self._failed_before, self._failures = False, Backoff(self._entropy)
            return
        if self._failed_before:
            await self._clock.sleep(self._failures.pause())
        self._failed_before = True

    def _note(self, answer: tasks.Answer) -> None:
        """Tell the owner what changed."""
        if answer.verdict is not None and not answer.verdict.accepted:
            self._report(f"a result was not accepted ({answer.verdict.code}: {answer.verdict.text})")
        waiting = answer.task.text if isinstance(answer.task, tasks.Wait) and answer.task.code != "no_work" else ""
        if waiting and waiting != self._waiting:
            self._report(f"waiting: {waiting}")
        self._waiting = waiting
        what = "waiting" if isinstance(answer.task, tasks.Wait) else type(answer.task).__name__.lower()
        if what != self._task:
            self._task, self._since = what, self._clock.now()


def _attached(task: tasks.Task, tensors: tuple[Tensor, ...]) -> Tensor:
    if not tensors:
        raise IotaError("bad_input", f"a {type(task).__name__} task came without its sheet")
    return tensors[0]


def _failed(task: int, error: IotaError) -> tasks.Failed:
    code = error.code if error.code in FAILURES else OURS.get(error.code, "bad_input")
    return tasks.Failed(task=task, code=code, text=f"{error.code}: {error.cause}"[:300])
