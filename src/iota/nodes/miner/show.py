"""Showing evidence beside the work: each audit once, in the background (design section 6 "Audit")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from iota.core import tasks
from iota.errors import IotaError
from iota.nodes.effects import Clock, Compute
from iota.nodes.evidence import encode_transcript, segment, tensors_wanted
from iota.nodes.miner.retain import Buffer, EpochShelf, Retention
from iota.store.remote import Objects

OURS = ("no_object", "bad_evidence")
"""Errors that trying again cannot cure: we do not have what is asked for."""

FIRST_LULL, LONGEST_LULL = 0.02, 0.5


def note_drawn(retention: Retention, session: int, show: tasks.Show) -> None:
    """Keep what this audit needs beyond the draw."""
    shelf = retention.epochs.get(show.epoch)
    if shelf is not None and show.session == session:
        shelf.drawn.add((show.start_step, show.stop_step))


def evidence_for(retention: Retention, session: int, show: tasks.Show) -> list[tuple[str, list[Buffer]]]:
    """(URL, buffers) of each object to show. Snapshots are mapped, not read. Raises IotaError `no_object` or
    `bad_evidence` when we do not have it. On the compute thread."""
    shelf = retention.epochs.get(show.epoch)
    if shelf is None or show.session != session:
        raise IotaError("no_object", f"session {show.session}, epoch {show.epoch} is not kept here any more")
    entries = shelf.chain.entries
    received, sent = tensors_wanted(entries, *segment(entries, show.start_step, show.stop_step))
    if received - shelf.inputs.digests() or sent - shelf.outputs.digests():
        raise IotaError("no_object", f"the tensors of steps {show.start_step} to {show.stop_step} were not kept")
    rows: list[tuple[str, list[Buffer]]] = [
        (show.transcript_url, [encode_transcript(shelf.chain.transcript())]),
        (show.inputs_url, shelf.inputs.read(received)),
        (show.outputs_url, shelf.outputs.read(sent)),
    ]
    for url, step in _snapshots(shelf, show):
        rows.append((url, [retention.read_snapshot(shelf, step)]))
    return rows


def _snapshots(shelf: EpochShelf, show: tasks.Show) -> list[tuple[str, int]]:
    """The snapshots asked for (an empty URL: not wanted)."""
    final = shelf.cuts[-1].step
    wanted = ((show.start_url, show.start_step), (show.stop_url, show.stop_step), (show.final_url, final))
    return [(url, step) for url, step in wanted if url]


class Shower:
    """Runs the uploads of a session. `take` gives what is to be told with the next turn."""

    def __init__(
        self, objects: Objects, compute: Compute, clock: Clock, retention: Retention, session: int,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._objects, self._compute, self._clock = objects, compute, clock
        self._retention, self._session, self._report = retention, session, report
        self._running: dict[int, asyncio.Task[None]] = {}
        self._told: list[tasks.Shown] = []
        self._done: set[int] = set()
        self._lull = FIRST_LULL

    async def ask(self, shows: tuple[tasks.Show, ...]) -> None:
        """Begin what is new; an audit under way or done is left alone (it is asked for with every answer)."""
        for show in shows:
            if show.audit in self._running or show.audit in self._done:
                continue
            await self._compute.run(note_drawn, self._retention, self._session, show)
            self._running[show.audit] = asyncio.create_task(self._show(show))

    def take(self) -> tuple[tasks.Shown, ...]:
        """Answers not yet delivered; `delivered` strikes them off."""
        return tuple(self._told)

    def delivered(self, shown: tuple[tasks.Shown, ...]) -> None:
        self._told = [row for row in self._told if row not in shown]

    async def rest(self) -> None:
        """Between polls while evidence is owed: answers that repeat what is owed are not held, so asking again at once
        would spin. The pause grows from 20 ms to half a second, and ends when an upload does."""
        if not self._running or self._told:
            self._lull = FIRST_LULL
            return
        await asyncio.wait(list(self._running.values()), timeout=self._lull, return_when=asyncio.FIRST_COMPLETED)
        self._lull = min(2 * self._lull, LONGEST_LULL)

    async def _show(self, show: tasks.Show) -> None:
        try:
            problem = await self._upload(show)
        finally:
            del self._running[show.audit]
        if problem is not None:
            self._done.add(show.audit)
            self._told.append(tasks.Shown(show.audit, problem))

    async def _upload(self, show: tasks.Show) -> str | None:
        """ "" when all is in the store, a problem that stays, or None: try again when asked again."""
        try:
            for url, parts in await self._compute.run(evidence_for, self._retention, self._session, show):
                await self._objects.put(url, parts)
        except IotaError as error:
            if error.code in OURS:
                self._report(f"audit {show.audit} of epoch {show.epoch}: cannot show its evidence: {error.cause}")
                return error.cause[:300]
            self._report(f"audit {show.audit}: the store did not take the evidence ({error.cause}); trying again")
            await self._clock.sleep(1.0)
            return None
        return ""

    async def close(self) -> None:
        """Stop what is under way."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
