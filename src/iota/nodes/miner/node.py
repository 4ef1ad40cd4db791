"""The miner: one loop of turns. The result of the last task goes out; the verdict on it and the next task come in.

Everything blocking runs on the injected compute, one call a task. A boundary tensor's way: wire -> this file -> stage
worker -> trainer, and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

import iota
from iota.config.schema import Manifest
from iota.core import tasks
from iota.core.values import CheckpointSheet, Digest, Tensor
from iota.errors import IotaError, Unreachable
from iota.model.boundary import reads_tokens
from iota.model.needs import MemoryNeed
from iota.net.peer import Caller
from iota.nodes.data_source import data_fetch
from iota.nodes.effects import Clock, Compute, Entropy
from iota.nodes.link import Backoff, Heard, Link, Peer, Session, SessionOver
from iota.nodes.miner.device import Room, check_disk, check_memory
from iota.nodes.miner.load import Floats, check_checkpoint, fetch_state
from iota.nodes.miner.reduce import Reducer
from iota.nodes.miner.show import Shower
from iota.nodes.miner.stage import Given, StageWorker, Work, failed
from iota.nodes.miner.status import MinerStatus
from iota.store.remote import Objects
from iota.store.tokens import TokenReader
from iota.wire.message import open_sheet

DEADLINE_GRACE = 5.0
"""Seconds that a transfer may outlast its deadline: clocks and polls are not exact."""
QUICK = 5.0
"""A session that ends sooner than this many seconds was no session: pause before the next."""
ENDS = ("banned", "finished", "not_allowed")
"""Refusals of a turn after which there is nothing to come back for."""


@dataclass(frozen=True)
class MinerSettings:
    """What a miner's owner decides. `device` as `pick_device` returned it; `dtype` "": the run's. Limits in bytes, 0:
    none. `give_up`: seconds of an unreachable orchestrator after which to stop (None: never). `room`: what the machine
    has."""

    folder: Path
    device: str = "cpu"
    dtype: str = ""
    max_memory: int = 0
    max_disk: int = 0
    owner: str = ""
    give_up: float | None = None
    room: Room | None = None


class Miner:
    """One miner process. `run` works until the run ends, `drain` ends it after the work in hand. `report` gets each
    notice for the owner once; `status` is always current."""

    def __init__(
        self,
        settings: MinerSettings,
        caller: Caller,
        objects: Objects,
        *,
        clock: Clock,
        compute: Compute,
        entropy: Entropy,
        report: Callable[[str], None] = lambda text: None,
        worker_class: type[StageWorker] = StageWorker,
    ) -> None:
        self.settings = settings
        self.status = MinerStatus(key=caller.identity.key, device=settings.device, dtype=settings.dtype)
        self.worker: StageWorker | None = None
        self._caller, self._objects = caller, objects
        self._clock, self._compute, self._entropy = clock, compute, entropy
        self._report = report
        self._worker_class = worker_class
        self._tokens: TokenReader | None = None
        self._fetched: tuple[Digest, dict[str, Floats]] | None = None
        """The last checkpoint fetched, by root; the same arrays as the worker's base."""
        self._failures = Backoff(entropy)
        self._failed_before = False
        peer = Peer(
            role="miner",
            software=f"iota {iota.__version__}",
            device=settings.device,
            dtype=settings.dtype or "as the run",
            memory=settings.max_memory,
            disk=settings.max_disk,
            owner=settings.owner,
        )
        self.link = Link(
            caller, peer, settings.folder, clock=clock, compute=compute, entropy=entropy, report=report,
            give_up=settings.give_up,
        )  # fmt: skip

    def drain(self) -> None:
        """Finish what was begun, take nothing new, leave."""
        self._report("draining: the work in hand is finished, nothing new is taken; again to leave at once")
        self.link.drain()

    def line(self) -> str:
        """What this miner does now, in one line for its owner."""
        return self.link.waiting or self.status.line(self._clock.now())

    async def run(self) -> str:
        """Work until there is nothing more to do here; says why in plain words.

        Raises IotaError when this miner cannot take part: refused, too little memory or disk, orchestrator unreachable
        for longer than allowed."""
        while True:
            session = await self.link.join()
            began, shower = self._clock.now(), None
            try:
                shower, heard = await self._open(session)
                return await self._work(shower, heard)
            except SessionOver as over:
                self._report(f"this session is over ({over}); joining again")
            finally:
                if shower is not None:
                    await shower.close()
                await self._compute.run(self._end)
            if self._clock.now() - began < QUICK:
                await self._clock.sleep(self._failures.pause())

    # ------------------------------------------------------------------------------------------------------ session

    async def _open(self, session: Session) -> tuple[Shower, Heard]:
        """Make the stage, if it fits, and hear the first task meanwhile: a large stage takes longer to make than a peer
        may be silent, but not longer than its first task, a load, may take."""
        need = self._fit(session)  # before a task is taken, which would be held for somebody who is not coming
        making = asyncio.ensure_future(self._begin(session, need))
        try:
            heard = await self._hear()
            while isinstance(heard.answer.task, tasks.Wait) and not making.done():
                heard = await self._hear()
            return await making, heard
        finally:  # what a thread has begun cannot be cancelled
            await asyncio.gather(making, return_exceptions=True)

    async def _hear(self) -> Heard:
        try:
            return await self.link.turn(None)
        except Unreachable:
            raise
        except IotaError as error:
            if error.code in ENDS:
                raise
            raise SessionOver(str(error)) from error

    def _fit(self, session: Session) -> MemoryNeed:
        """What this session's stage needs. Raises IotaError when it does not fit."""
        manifest, stage, settings = session.manifest, session.stage, self.settings
        if not 0 <= stage < len(manifest.cuts):
            raise IotaError("bad_stage", f"assigned stage {stage} of {len(manifest.cuts)}", "Report this as a fault.")
        cut, dtype = manifest.cuts[stage], self._dtype(manifest)
        need = check_memory(
            manifest.config, stage, cut, settings.max_memory, device=settings.device, dtype=dtype, room=settings.room
        )
        disk = check_disk(manifest.config, stage, cut, settings.max_disk, room=settings.room)
        free = settings.room.disk if settings.room else 0
        if free and disk > free:
            self._report(
                f"evidence may take up to {disk:,} bytes, free on this disk are {free:,}: a pass whose evidence cannot "
                f"be kept does not count"
            )
        return need

    def _dtype(self, manifest: Manifest) -> str:
        return self.settings.dtype or manifest.config.train.dtype

    async def _begin(self, session: Session, need: MemoryNeed) -> Shower:
        """Make the stage this session is for."""
        manifest, stage, settings, dtype = session.manifest, session.stage, self.settings, self._dtype(session.manifest)
        worker = self.worker = await self._compute.run(
            self._worker_class, manifest, self._caller.identity.key, stage, session.number, settings.device, dtype,
            settings.folder, settings.max_disk,
        )  # fmt: skip
        reads = reads_tokens(manifest.config, stage)  # the stage of an earlier session may have been another
        self._tokens = (self._tokens or self._reader(manifest)) if reads else None
        self._reducer = Reducer(self._objects, self._compute, worker)
        self.status.run, self.status.stage, self.status.session = manifest.run, stage, session.number
        self.status.dtype = dtype
        self._report(
            f"joined run {manifest.run}, session {session.number}: stage {stage} of {len(manifest.cuts)}, "
            f"{worker.parameters:,} parameters, on {settings.device} in {dtype}, about {need.total / 2**20:,.0f} MiB"
        )
        return Shower(
            self._objects, self._compute, self._clock, worker.retention, session.number, self._report
        )  # fmt: skip

    def _reader(self, manifest: Manifest) -> TokenReader:
        fetch = data_fetch(self._caller, self._objects, lambda: self.link.fresh_id("data"))
        return TokenReader.train(manifest, fetch, self.settings.folder / "tokens")

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = self._fetched = None

    # --------------------------------------------------------------------------------------------------------- loop

    async def _work(self, shower: Shower, heard: Heard) -> str:
        work = Work(None)
        self._note(heard.answer)
        while True:
            answer = heard.answer
            if isinstance(answer.task, tasks.Leave):
                return f"{answer.task.code}: {answer.task.text}"
            await shower.ask(answer.shows)
            work = await self._do(heard, work)
            for notice in work.notices:
                self._report(notice)
            await self._calm(work)
            if isinstance(answer.task, tasks.Wait):
                await shower.rest()
            heard = await self._exchange(work, shower)

    async def _exchange(self, work: Work, shower: Shower) -> Heard:
        """Bring a result, hear what is next. A result that the orchestrator cannot take is withdrawn."""
        shown = shower.take()
        try:
            heard = await self.link.turn(work.result, work.tensors, work.heads, shown)
        except Unreachable:
            raise
        except IotaError as error:
            if error.code in ENDS:
                raise
            if work.result is None or isinstance(work.result, tasks.Failed):
                raise SessionOver(str(error)) from error
            self._report(f"a result could not be delivered: {error}")
            assert self.worker is not None
            await self._compute.run(self.worker.abandon)
            task = work.result.task
            again = Work(tasks.Failed(task=task, code="bad_input", text=f"{error.code}: {error.cause}"[:300]))
            return await self._exchange(again, shower)
        shower.delivered(shown)
        self._note(heard.answer)
        return heard

    async def _do(self, heard: Heard, last: Work) -> Work:
        """Settle the last result, do the next task."""
        answer, worker = heard.answer, self.worker
        assert worker is not None
        task, problem, given = answer.task, None, Given()
        accepted = answer.verdict is not None and answer.verdict.accepted
        began = self._clock.now()
        if isinstance(task, tasks.Load | tasks.Forward | tasks.Backward):
            try:
                given = await self._gather(task, heard)
            except IotaError as error:
                problem = Work(failed(task.task, error), notices=(str(error),))
        if isinstance(task, tasks.Forward | tasks.Backward):
            began = self._clock.now()
        if last.result is None and not answer.step and isinstance(task, tasks.Wait):
            return Work(None)
        work = await self._compute.run(worker.turn, accepted, answer.step, None if problem else task, given)
        if isinstance(work.result, tasks.Passed | tasks.Loaded):
            seconds = self._clock.now() - began
            return timed(work, seconds)
        if problem is None and isinstance(task, tasks.Upload | tasks.Reduce):
            problem = await self._merge(task, heard)
        if problem is not None:
            return Work(problem.result, notices=work.notices + problem.notices)
        return work

    async def _gather(self, task: tasks.Load | tasks.Forward | tasks.Backward, heard: Heard) -> Given:
        """What a task needs beside what came with it."""
        worker = self.worker
        assert worker is not None
        if isinstance(task, tasks.Load):
            sheet: CheckpointSheet = open_sheet(_attached(heard), CheckpointSheet)
            check_checkpoint(
                sheet.checkpoint, run=worker.run, epoch=task.epoch, stage=task.stage, parameters=worker.parameters,
                t=task.t,
            )  # fmt: skip
            if task.stage != worker.stage:
                raise IotaError("stale", f"told to load stage {task.stage}, this session holds stage {worker.stage}")
            return Given(checkpoint=sheet.checkpoint, arrays=await self._state_of(sheet, worker))
        ids = labels = None
        if self._tokens is not None and (isinstance(task, tasks.Forward) or task.with_input):
            ids, labels = await self._tokens.batch_windows(task.sample)
        trainer = worker.trainer
        return Given(
            heard.tensors, heard.heads, ids if trainer.reads_ids else None, labels if trainer.last else None
        )  # fmt: skip

    async def _state_of(self, sheet: CheckpointSheet, worker: StageWorker) -> dict[str, Floats]:
        """The checkpoint's parts. What was fetched for a load that came too late serves the next load of the same."""
        root = sheet.checkpoint.root()
        if self._fetched is None or self._fetched[0] != root:
            self._fetched = None
            worker.release()
            self._fetched = root, await fetch_state(self._objects, self._compute, sheet, worker.reduced)
        return self._fetched[1]

    async def _merge(self, task: tasks.Upload | tasks.Reduce, heard: Heard) -> Work:
        """Upload or reduce, as long as the announced deadline allows: later, nobody could use it."""
        left = max(task.deadline - heard.answer.time, 0.0) + DEADLINE_GRACE
        try:
            async with asyncio.timeout(left):
                if isinstance(task, tasks.Reduce):
                    sheet: tasks.ReduceSheet = open_sheet(_attached(heard), tasks.ReduceSheet)
                    return Work(await self._reducer.reduce(task, sheet))
                return Work(await self._upload(task))
        except TimeoutError:
            error = IotaError("too_late", f"the {type(task).__name__.lower()} was not done within {left:.0f} s")
        except IotaError as failure:
            error = failure
        return Work(failed(task.task, error), notices=(str(error),))

    async def _upload(self, task: tasks.Upload) -> tasks.Done:
        upload = self.worker.upload if self.worker is not None else None
        if upload is None or upload.epoch != task.epoch:
            raise IotaError("stale", f"there is no upload of epoch {task.epoch} here")
        await self._objects.put(task.url, upload.pieces)
        await self._objects.put(task.manifest_url, [upload.encoded])
        return tasks.Done(task=task.task)

    async def _calm(self, work: Work) -> None:
        """A task that fails again and again is not hammered: growing pauses between the tries."""
        if not isinstance(work.result, tasks.Failed):
            self._failed_before, self._failures = False, Backoff(self._entropy)
            return
        if self._failed_before:
            await self._clock.sleep(self._failures.pause())
        self._failed_before = True

    # ------------------------------------------------------------------------------------------------ for the owner

    def _note(self, answer: tasks.Answer) -> None:
        """Keep the status line, and report what changed."""
        status, now = self.status, self._clock.now()
        before, status.standing = status.standing, answer.standing
        if before is None or (before.epoch, before.phase) != (answer.standing.epoch, answer.standing.phase):
            self._report(status.line(now))
        elif before.last_verdict != answer.standing.last_verdict or before.paid_total != answer.standing.paid_total:
            self._report(f"audit {answer.standing.last_verdict}, paid so far {answer.standing.paid_total:,}")
        if answer.verdict is not None and not answer.verdict.accepted:
            status.refused = f"{answer.verdict.code}: {answer.verdict.text}"
            self._report(f"a result was not accepted ({status.refused})")
        task = answer.task
        if isinstance(task, tasks.Wait):
            if status.waiting != task.text and task.code != "no_work":
                self._report(f"waiting: {task.text}")
            status.begin("wait", now, task.text)
        else:
            what = type(task).__name__.lower()
            status.begin(f"{what} {task.sample}" if isinstance(task, tasks.Forward | tasks.Backward) else what, now)


def timed(work: Work, seconds: float) -> Work:
    """The same work with its result's compute time filled in."""
    result = work.result
    assert isinstance(result, tasks.Passed | tasks.Loaded)
    result = msgspec.structs.replace(result, seconds=seconds)
    return Work(result, work.tensors, work.heads, work.notices)


def _attached(heard: Heard) -> Tensor:
    if not heard.tensors:
        raise IotaError("bad_input", f"a {type(heard.answer.task).__name__} came without its sheet")
    return heard.tensors[0]
