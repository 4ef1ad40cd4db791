"""The orchestrator: answers peers, keeps the journal ahead of every reply, holds polls, relays tensors.

All decisions are the machine's (`iota.core.machine`); this file only carries them out. One request brings a result and
takes the next task (design section 3.1). Events are durable before the reply that depends on them leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from iota.config.schema import Manifest
from iota.core import queries, tasks
from iota.core.machine import events as ev
from iota.core.machine.machine import Machine, Outcome
from iota.core.machine.state import Member
from iota.core.values import Digest, Key, Tensor, TensorHead, sha256
from iota.errors import IotaError, Refused
from iota.net.peer import Incoming, Outgoing, Receiver
from iota.nodes.effects import Clock, Entropy
from iota.nodes.orchestrator import sheets, steward, views
from iota.nodes.orchestrator.archive import Archive
from iota.nodes.orchestrator.relay import Relay
from iota.store.blobs import Blobs
from iota.store.journal import Journal
from iota.store.manifest import checkpoint_zero
from iota.wire.keys import Identity
from iota.wire.message import pack_sheet
from iota.wire.nonces import NonceBook

REQUESTS = tasks.Join | tasks.Turn | queries.Query
ALIVE = "alive"
NONCE = "nonce/"
INLINE_SHOWS = 8
"""More of them (some 2 KiB each) are attached instead of riding in an answer's control part."""


class Orchestrator:
    """One run. `secret` (hex) keys its share of every draw. `open`, then serve `handler` beside `run`; `close` ends.

    `observers` are told every event, journaled ones too when the journal is replayed; they must not block.
    """

    def __init__(
        self,
        manifest: Manifest,
        sealed: bytes,
        identity: Identity,
        secret: str,
        *,
        journal: Journal,
        blobs: Blobs,
        blob_url: str,
        clock: Clock,
        entropy: Entropy,
        stop: str = "",
    ) -> None:
        self.manifest = manifest
        self.config = manifest.config
        self.identity = identity
        self.blobs = blobs
        self.clock = clock
        self.journal = journal
        self.machine = Machine(self.config, len(manifest.cuts), manifest.parameters, secret)
        self.relay = Relay(self.config, len(manifest.cuts))
        self.archive = Archive(self.config)
        self.linker = sheets.Linker(identity, blob_url)
        self.meter = views.Meter(clock.now())
        self.observers: list[Callable[[ev.Event], None]] = [self.archive.observe]
        self.told: set[tuple[int, int]] = set()
        """(member, session) of everyone who was told to leave."""
        self._sealed = Tensor("uint8", (len(sealed),), sealed)
        self._entropy = entropy
        self._stop = stop
        self._polls: dict[int, asyncio.Event] = {}
        self._nudge = asyncio.Event()
        self._durable: asyncio.Future[int] | None = None
        self._untidy = False
        self._broken = False
        self._closing = asyncio.Event()
        self._nonces = NonceBook(self.config.limits.clock_window)
        tensor_limit = max(2 * self.relay.largest, 1 << 20)
        self.receiver = Receiver(
            identity,
            manifest.run,
            clock.now,
            nonces=self._nonces,
            request_types=REQUESTS,
            limits={"Turn": tensor_limit},
            window=self.config.limits.clock_window,
        )
        self.message_limit = tensor_limit + (64 << 10) + 68
        self.handler = self.receiver.handler(self._answer)

    # --------------------------------------------------------------------------------------------------- lifetime

    async def open(self) -> None:
        """Fold the journal, or begin the run. Raises IotaError when the journal is not this run's."""
        now = self.clock.now()
        marks = self.journal.marks()
        rows = 0
        for row in self.journal.replay():
            event = ev.decode(row.payload)
            self.machine.replay([event])
            for observe in self.observers:
                observe(event)
            rows += 1
        self._nonces.restore({k[len(NONCE) :]: (v, now) for k, v in marks.items() if k.startswith(NONCE)})
        self.meter.restore(marks)
        if not rows:
            checkpoints = tuple(checkpoint_zero(self.manifest, s) for s in range(len(self.manifest.cuts)))
            self.machine.start(self.manifest.run, now, checkpoints)
        else:
            if self._stop and self._stop != self.machine.state.stop:
                self.machine.extend(self._stop, now)
            self.machine.restarted(now, now - marks.get(ALIVE, int(now * 1000)) / 1000)
        await self.commit()

    async def run(self) -> None:
        """Tick until the run is finished and everyone had time to hear it, or `close` is called. Raises IotaError when
        the journal fails: nothing may be answered then, so the process must end."""
        while not self._closing.is_set():
            if self._broken:
                raise IotaError("internal", "a decision failed half-way (see the traceback above)", "Start it again.")
            self._nudge.clear()
            now = self.clock.now()
            self.machine.tick(now)
            await self.commit()
            await steward.serve_wants(self)
            if self._untidy:
                self._untidy = False
                await steward.clear_away(self)
            pause = max(0.02, min(self.machine.next_due(self.clock.now()) - self.clock.now(), 1.0))
            try:
                async with asyncio.timeout(pause):
                    await self._nudge.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Answer held polls, stop ticking."""
        self._closing.set()
        self._nudge.set()
        for event in self._polls.values():
            event.set()

    @property
    def finished(self) -> bool:
        return self.machine.state.phase == "finished"

    async def commit(self, marks: Mapping[str, int] | None = None) -> None:
        """Journal what the machine decided, wake whom it concerns, and return when all decided so far is durable."""
        if self._broken:
            raise IotaError("internal", "a decision failed half-way; nothing more is journaled", "Start it again.")
        now = self.clock.now()
        rows = []
        for event in self.machine.take_events():
            for observe in self.observers:
                observe(event)
            self.meter.observe(event, now)
            rows.append((now, type(event).__name__, ev.encode(event)))
        self._wake()
        if rows or marks:
            self._durable = self.journal.append(rows, {**(marks or {}), ALIVE: int(now * 1000), **self.meter.marks()})
            if any(row[1] in ("EpochOpened", "VerdictGiven") for row in rows):
                self._untidy = True
        if self._durable is not None:  # also what others decided and this reply may speak of
            await asyncio.shield(self._durable)

    def _wake(self) -> None:
        soft = self.machine.soft
        for sample in soft.released:
            self.relay.release(sample)
        soft.released.clear()
        for number in soft.wake:
            event = self._polls.get(number)
            if event is not None:
                event.set()
        soft.wake.clear()
        if soft.keep_wanted or soft.disputed_at:
            self._nudge.set()

    # ---------------------------------------------------------------------------------------------------- requests

    async def _answer(self, incoming: Incoming) -> Outgoing:
        """A fault of ours in the middle of a decision ends the process (`run` raises): half a decision must not be
        journaled, and the journal brings everything back."""
        if self._broken:
            raise Refused("busy", "the orchestrator is about to restart after a fault of its own", "Ask again.")
        sound = False
        try:
            outgoing = await self._serve(incoming)
            sound = True
        except (IotaError, asyncio.CancelledError):
            sound = True
            raise
        finally:
            if not sound:
                self._broken = True
                self._nudge.set()
        return outgoing

    async def _serve(self, incoming: Incoming) -> Outgoing:
        body = incoming.body
        if isinstance(body, tasks.Turn):
            return await self._turn(incoming, body)
        if isinstance(body, tasks.Join):
            return await self._join(incoming, body)
        return await views.answer(self, incoming.sender, body, self._mark(incoming))

    def _mark(self, incoming: Incoming) -> dict[str, int]:
        return {NONCE + incoming.sender: incoming.control.nonce}

    async def _join(self, incoming: Incoming, body: tasks.Join) -> Outgoing:
        token = self._entropy(32).hex()
        m = self.machine.join(incoming.sender, body, sha256(token.encode()), self.clock.now())
        await self.commit(self._mark(incoming))
        welcome = tasks.Welcome(session=m.session, token=token, stage=m.stage, time=self.clock.now())
        return Outgoing(welcome, (self._sealed,))

    async def _turn(self, incoming: Incoming, turn: tasks.Turn) -> Outgoing:
        key, now = incoming.sender, self.clock.now()
        problem = await self._problem(key, turn, incoming)
        member = self.machine.state.member(key)
        if turn.shown and member is not None:
            turn = msgspec.structs.replace(turn, shown=await steward.check_shown(self, member, turn.shown))
        event = self._poll_event(key)
        event.clear()  # before the question: what changes after the answer sets it
        judged = member.last_seq if member is not None else 0
        out = self.machine.turn(key, turn, _body_digest(incoming), now, problem)
        m = self.machine.state.members[self.machine.state.by_key[key]]
        if turn.seq > judged:  # a turn that comes again must not touch what was relayed since
            self._keep(m, turn, out, incoming)
        outgoing = self._outgoing(m, turn, out)  # before anything is awaited: what it relays may be released meanwhile
        await self.commit(self._mark(incoming))
        return await self._hold(m, turn, event) if self._may_hold(turn, out) else outgoing

    def _poll_event(self, key: Key) -> asyncio.Event:
        """Set whenever a member's wait may be over."""
        m = self.machine.state.member(key)
        return asyncio.Event() if m is None else self._polls.setdefault(m.number, asyncio.Event())

    def _may_hold(self, turn: tasks.Turn, out: Outcome) -> bool:
        """A poll that brought nothing and gets nothing is held; whatever carries news goes at once."""
        return isinstance(out.task, tasks.Wait) and turn.result is None and not (out.step or out.shows or turn.shown)

    async def _hold(self, m: Member, turn: tasks.Turn, event: asyncio.Event) -> Outgoing:
        end = self.clock.now() + self.config.limits.poll
        while True:
            left = end - self.clock.now()
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    await event.wait()
            except TimeoutError:
                left = 0.0
            event.clear()
            out = self.machine.again(m.key, turn, self.clock.now())
            outgoing = self._outgoing(m, turn, out)
            await self.commit()
            if left <= 0 or self._closing.is_set() or not self._may_hold(turn, out):
                return outgoing

    async def _problem(self, key: Key, turn: tasks.Turn, incoming: Incoming) -> tuple[str, str]:
        """What is wrong with what came beside a result: tensors of the wrong shape, an upload that is not there."""
        m = self.machine.state.member(key)
        if m is None or turn.result is None or turn.seq <= m.last_seq:
            return "", ""
        lease = self.machine.soft.lease.get(m.number)
        if isinstance(turn.result, tasks.Passed):
            heads, origin = incoming.control.tensors, incoming.origin
            return self.relay.problem(turn.result, incoming.tensors, heads, origin, lease, m.stage)
        if incoming.tensors:
            return "bad_input", f"a {type(turn.result).__name__} carries no tensors"
        if isinstance(turn.result, tasks.Done) and lease is not None and lease.kind == "upload":
            return await steward.upload_problem(self, m)
        if isinstance(turn.result, tasks.Reduced) and lease is not None:
            return await steward.reduced_problem(self, lease, turn.result)
        return "", ""

    def _keep(self, m: Member, turn: tasks.Turn, out: Outcome, incoming: Incoming) -> None:
        """Hold the tensor of a pass that was accepted just now, for the stage it goes to."""
        accepted = out.verdict is not None and out.verdict.accepted
        if not (accepted and isinstance(turn.result, tasks.Passed) and incoming.tensors):
            return
        sample = self.machine.state.samples.get(turn.result.sample)
        if sample is None:
            return
        kind = "f" if turn.result.loss is None and sample.kind == "f" else "b"
        self.relay.keep(
            sample.id, kind, m.stage, incoming.tensors[0], incoming.control.tensors[0], incoming.origin
        )  # fmt: skip
        self.meter.crossed(incoming.control.tensors[0].length, self.relay.uncompressed)

    # ------------------------------------------------------------------------------------------------------ replies

    def _outgoing(self, m: Member, turn: tasks.Turn, out: Outcome) -> Outgoing:
        task, tensors, heads = self._attach(m, out)
        if isinstance(task, tasks.Leave):
            self.told.add((m.number, m.session))
        shows = sheets.link_shows(self.linker, self.machine, out.shows, self.relay.largest)
        attached = len(shows) > INLINE_SHOWS
        if attached:
            sheet, shows = pack_sheet(tasks.ShowSheet(shows)), ()
            tensors, heads = [*tensors, sheet], None if heads is None else [*heads, sheet.head()]
        answer = tasks.Answer(
            seq=turn.seq,
            verdict=out.verdict,
            step=out.step,
            task=task,
            shows=shows,
            standing=self.machine.standing(m),
            time=self.clock.now(),
            shows_attached=attached,
        )
        return Outgoing(answer, tensors, heads)

    def _attach(self, m: Member, out: Outcome) -> tuple[tasks.Task, list[Tensor], list[TensorHead] | None]:
        task, attach = out.task, out.attach
        if isinstance(task, tasks.Upload):
            return sheets.link_upload(self.linker, self.machine, m.number, task), [], None
        if not isinstance(attach, tuple):
            return task, [], None
        until = getattr(task, "deadline", self.clock.now())
        if attach[0] == "activation":
            held = self.relay.find(*attach)
            return msgspec.structs.replace(task, origin=held.origin), [held.tensor], [held.head]
        if attach[0] == "gradient":
            return self._attach_backward(task, *attach[1:])
        if attach[0] == "checkpoint":
            return task, [sheets.checkpoint_sheet(self.linker, attach[1], until)], None
        if attach[0] == "reduce":
            bound = 4 * 4 * self.manifest.parameters[attach[1].base.stage if attach[1].base else m.stage]
            return task, [sheets.reduce_sheet(self.linker, attach[1], until, bound)], None
        if attach[0] == "audit":
            return task, [sheets.audit_sheet(self.linker, self.machine, self.archive, attach[1], until)], None
        assert attach[0] == "heldout", attach
        return task, [sheets.checkpoint_sheet(self.linker, c, until) for c in attach[1]], None

    def _attach_backward(
        self, task: tasks.Task, sample: int, stage: int, with_input: bool
    ) -> tuple[tasks.Task, list[Tensor], list[TensorHead]]:
        gradient = self.relay.find("gradient", sample, stage)
        held = [gradient]
        change = {"origin": gradient.origin}
        if with_input and stage > 0:
            held.append(self.relay.find("activation", sample, stage))
            change["input_origin"] = held[1].origin
        return msgspec.structs.replace(task, **change), [h.tensor for h in held], [h.head for h in held]

    def operate(self, command: queries.Operate, by: Key) -> str:
        """An operator's order. Raises `Refused`."""
        now = self.clock.now()
        if command.command == "extend":
            if by not in self.config.admit.operators:
                raise Refused("not_operator", f"key {by[:8]} is not an operator of this run", "Use the operator's key.")
            try:
                self.machine.extend(command.target, now)
            except IotaError as error:
                raise Refused("bad_command", error.cause, error.remedy) from error
            return f"stop rule is now: {command.target}"
        done = self.machine.operate(command.command, command.target, by, now)
        self._nudge.set()
        return done


def _body_digest(incoming: Incoming) -> Digest:
    """What "the same request" means: the typed message and its tensors, not the envelope, which differs at each try."""
    heads = msgspec.msgpack.encode(incoming.control.tensors)
    return sha256(bytes(incoming.control.body) + heads)
