"""A peer's side of the conversation with the orchestrator: joining, and the turn loop's one request (design section 3).

A turn that got no reply is repeated unchanged, with growing pauses, until it gets one: the orchestrator answers the
same turn with the same verdict, so nothing is counted twice. What ends a session raises `SessionOver` (join again);
what ends everything raises the orchestrator's own error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from iota import PROTOCOL
from iota.config.schema import Manifest
from iota.core import tasks
from iota.core.values import Tensor, TensorHead
from iota.errors import IotaError, Refused, Unreachable
from iota.net.peer import Caller, PeerRefused, Reply
from iota.nodes.effects import Clock, Compute, Entropy
from iota.store.files import read_checked, write_atomic
from iota.store.manifest import read_manifest
from iota.wire.message import open_sheet

REJOIN = ("rejoin", "session_over", "unknown_key", "old_turn", "idempotency")
"""Refusals after which a new session is the way on."""
PASSING = ("busy", "replayed")
"""Refusals that time cures."""
FINAL = ("wrong_signer", "protocol", "wrong_recipient", "malformed")
"""A bad reply to the very first message, again and again: something else answers there. Else: damage on the way."""
DAMAGE = ("truncated", "trailing", "malformed", "protocol", "bad_signature", "wrong_digest")
"""Refusals that a message damaged on its way may bring: the same message, sent again, tells which it was."""
DAMAGE_TRIES = 3
"""So many more tries before damage is taken for the truth."""
TAKEOVER = 20.0
"""Seconds to wait for our own lost session to fall silent when its newest token never reached us."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
REPLY_GRACE = 10.0
SLOW_BYTES = 1e6
"""Bytes a second below which a transfer counts as dead."""


class SessionOver(Exception):
    """This session is no longer the orchestrator's; what was in flight is dropped. Join again."""


class _Drained(Exception):
    """The owner asked to stop while a poll was held."""


class Backoff:
    """Pauses of 0.2 s, doubling to 5 s, each times a random factor of 0.5 to 1."""

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self._next = FIRST_PAUSE

    def pause(self) -> float:
        factor = 0.5 + int.from_bytes(self._entropy(2), "little") / 131072
        seconds, self._next = self._next * factor, min(2 * self._next, LONGEST_PAUSE)
        return seconds


@dataclass
class _Trial:
    """What is remembered over the attempts of one request. `first`: nothing was ever heard from there."""

    backoff: Backoff
    since: float
    first: bool
    failures: int = 0
    damaged: int = 0
    clock_set: bool = False


@dataclass(frozen=True)
class Session:
    """What joining gave. `stage` is -1 for validators."""

    number: int
    stage: int
    manifest: Manifest


@dataclass(frozen=True)
class Heard:
    """An answer with its attached tensors and their heads (already checked against each other)."""

    answer: tasks.Answer
    tensors: tuple[Tensor, ...]
    heads: tuple[TensorHead, ...]


@dataclass(frozen=True)
class Peer:
    """What a peer says of itself when it joins. `memory`, `disk`: bytes it lends, 0: not said."""

    role: str
    software: str
    device: str
    dtype: str
    memory: int = 0
    disk: int = 0
    owner: str = ""


class Link:
    """One peer's link to one run. `folder` is the peer's own (locked) folder: the session token lives there.

    `give_up`: seconds of silence after which `Unreachable` is raised (None: never). `report` gets each notice once;
    `waiting` says at any time what is waited for ("" when nothing is)."""

    def __init__(
        self, caller: Caller, peer: Peer, folder: Path, *, clock: Clock, compute: Compute, entropy: Entropy,
        report: Callable[[str], None], give_up: float | None = None,
    ) -> None:  # fmt: skip
        self.caller = caller
        self.waiting = ""
        self.session = 0
        self._peer, self._folder = peer, folder
        self._clock, self._compute, self._entropy = clock, compute, entropy
        self._report, self._give_up = report, give_up
        self._token_path = folder / f"session-{caller.recipient[:16]}.token"
        self._manifest: Manifest | None = None
        self._seq = 0
        self._poll = 10.0
        self._silence = 15.0
        self._reply_bytes = 0
        self._drain = asyncio.Event()

    def fresh_id(self, what: str) -> str:
        """A message id that nobody used before."""
        return f"{what}-{self._entropy(8).hex()}"

    def drain(self) -> None:
        """From the next turn on, say that nothing new is wanted; a held poll is cut short."""
        self._drain.set()

    @property
    def draining(self) -> bool:
        return self._drain.is_set()

    # ------------------------------------------------------------------------------------------------------ joining

    async def join(self) -> Session:
        """Open a session and check the run manifest against the orchestrator's key.

        Raises IotaError: the orchestrator's refusal (`key_in_use`, `banned`, `not_allowed`, `finished`, ...),
        `bad_manifest`, `wrong_run` when the run behind this key is another than before, `Unreachable` after `give_up`.
        """
        token = await self._compute.run(self._read_token)
        p = self._peer
        request = tasks.Join(
            role=p.role, token=token, software=p.software, device=p.device, dtype=p.dtype, memory=p.memory,
            disk=p.disk, owner=p.owner,
        )  # fmt: skip
        reply = await self._join_reply(request)
        welcome: tasks.Welcome = reply.body
        await self._compute.run(self._write_token, welcome.token)
        if not reply.tensors:
            raise IotaError("bad_manifest", "the orchestrator sent no run manifest", "Use the same version of iota.")
        manifest = await self._compute.run(read_manifest, reply.tensors[0].data, self.caller.recipient)
        self._adopt(manifest)
        self.session, self._seq = welcome.session, 0
        return Session(welcome.session, welcome.stage, manifest)

    def _adopt(self, manifest: Manifest) -> None:
        if manifest.protocol != PROTOCOL:
            raise IotaError(
                "protocol",
                f"run {manifest.run} speaks protocol {manifest.protocol}, this software {PROTOCOL}",
                "Install the version of iota that the run uses.",
            )
        if self._manifest is not None and self._manifest.run != manifest.run:
            raise IotaError(
                "wrong_run",
                f"the orchestrator now serves run {manifest.run}, this process joined {self._manifest.run}",
                "Start again to join the new run.",
            )
        config = manifest.config
        self._manifest, self._poll, self._silence = manifest, config.limits.poll, config.limits.silence
        self._reply_bytes = 8 * config.train.batch * config.model.sequence * config.model.width
        self.caller.run = manifest.run

    async def _join_reply(self, request: tasks.Join) -> Reply:
        """Send the join until it is answered. A reply that got lost opened a session whose token we never saw; that
        session is ours, so `key_in_use` is then waited out."""
        trial = _Trial(Backoff(self._entropy), self._clock.now(), first=self._manifest is None)
        in_use: float | None = None
        while True:
            try:
                reply = await self._attempt(trial, request, (), None, self.fresh_id("join"), 0, tasks.Welcome)
                if reply is not None:
                    return reply
            except PeerRefused as refusal:
                ours = bool(request.token) or trial.failures > 0
                in_use = self._clock.now() if in_use is None else in_use
                if refusal.code != "key_in_use" or not ours or self._clock.now() - in_use > TAKEOVER:
                    raise
                self._say(f"waiting for this key's last session to fall silent ({refusal.cause})")
                await self._clock.sleep(1.0)

    def _read_token(self) -> str:
        try:
            return read_checked(self._token_path).decode("ascii", "replace").strip()[:256]
        except IotaError as error:
            if error.code != "no_object":
                raise
            return ""

    def _write_token(self, token: str) -> None:
        write_atomic(self._token_path, [token.encode()], mode=0o600)

    # ------------------------------------------------------------------------------------------------------- turns

    async def turn(
        self,
        result: tasks.Result | None,
        tensors: Sequence[Tensor] = (),
        heads: Sequence[TensorHead] | None = None,
        shown: tuple[tasks.Shown, ...] = (),
    ) -> Heard:
        """One exchange, repeated until it is answered.

        Raises `SessionOver`; `PeerRefused` when this result cannot be taken at all (nothing changed there: the next
        turn has the same number and must bring something else), or with `banned`, `finished`; `Unreachable` after
        `give_up`."""
        seq, draining = self._seq + 1, self.draining
        id = f"{self.session}-{seq}"
        trial = _Trial(Backoff(self._entropy), self._clock.now(), first=False)
        reply: Reply | None = None
        may_cut = not draining
        while reply is None:
            body = tasks.Turn(session=self.session, seq=seq, result=result, shown=shown, draining=draining)
            try:
                reply = await self._attempt(trial, body, tensors, heads, id, self.session, tasks.Answer, may_cut)
            except _Drained:
                draining = True  # a poll brought nothing, so it may be repeated with another word in it
            except PeerRefused as refusal:
                if refusal.code == "idempotency" and may_cut and draining:
                    draining = may_cut = False  # the cut poll was answered, with a step: hear it before we drain
                    continue
                if refusal.code in REJOIN:
                    raise SessionOver(refusal.cause) from refusal
                raise
        answer: tasks.Answer = reply.body
        if answer.seq != seq:
            raise SessionOver(f"the orchestrator answered turn {answer.seq}, asked was {seq}")
        self._seq = seq
        return _with_shows(Heard(answer, reply.tensors, reply.control.tensors))

    # ------------------------------------------------------------------------------------------------- one attempt

    async def _attempt(
        self, trial: _Trial, body: tasks.Join | tasks.Turn, tensors: Sequence[Tensor],
        heads: Sequence[TensorHead] | None, id: str, session: int, kind: type,
        may_cut: bool = False,
    ) -> Reply | None:  # fmt: skip
        """One call. None: it failed in a way that another try may cure, and the pause before it is over. Raises what
        trying again cannot cure."""
        timeout = self._patience(body) + sum(len(tensor.data) for tensor in tensors) / SLOW_BYTES
        call = self.caller.call(body, tensors, id=id, session=session, timeout=timeout, reply_types=kind, heads=heads)
        try:
            reply = await (self._unless_drained(call) if may_cut and _is_poll(body) else call)
        except PeerRefused as refusal:
            if refusal.code == "clock" and not trial.clock_set:
                trial.clock_set = True
                self.caller.offset = refusal.offset
                self._report(
                    f"this machine's clock differs from the orchestrator's by {-refusal.offset:.1f} s: corrected in "
                    f"messages; set it right (time synchronisation)"
                )
                return None
            if refusal.code not in PASSING and not self._maybe_damage(trial, refusal.code):
                raise
            cause = refusal.cause
        except Refused as error:
            if trial.first and error.code in FINAL and not self._maybe_damage(trial, error.code):
                raise
            cause = f"a damaged reply came: {error.cause}"
        except Unreachable as error:
            cause = error.cause
        else:
            self._heard(trial)
            return reply
        await self._pause(trial, cause)
        return None

    def _patience(self, body: tasks.Join | tasks.Turn) -> float:
        """Seconds to wait for a reply, beside the time that the request's own tensors take. A lost reply must be
        noticed, and asked for again, before the orchestrator takes our silence for death."""
        if self._manifest is None or isinstance(body, tasks.Join):
            return self._poll + REPLY_GRACE
        spare = max(self._silence - self._poll, 0.0) / 2
        held = self._poll if body.result is None else 0.0
        return held + min(max(spare, 1.0), REPLY_GRACE) + self._reply_bytes / SLOW_BYTES

    def _maybe_damage(self, trial: _Trial, code: str) -> bool:
        """Whether to send the same once more before this code is believed."""
        trial.damaged += 1
        return code in DAMAGE + FINAL and trial.damaged <= DAMAGE_TRIES

    async def _unless_drained(self, call: Coroutine[Any, Any, Reply]) -> Reply:
        """The call's reply, or `_Drained` when the owner asks to stop before it comes."""
        asked = asyncio.ensure_future(call)
        drain = asyncio.ensure_future(self._drain.wait())
        try:
            await asyncio.wait({asked, drain}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise _Drained
        finally:
            asked.cancel()
            drain.cancel()
            await asyncio.gather(asked, drain, return_exceptions=True)

    async def _pause(self, trial: _Trial, cause: str) -> None:
        now, pause = self._clock.now(), trial.backoff.pause()
        trial.failures += 1
        silent = now - trial.since
        if self._give_up is not None and silent + pause > self._give_up:
            raise Unreachable(f"the orchestrator did not answer for {silent:.0f} s: {cause}")
        if trial.failures == 1:
            limit = "until it does" if self._give_up is None else f"for {self._give_up:.0f} s"
            self._report(
                f"the orchestrator does not answer ({cause}); trying again in {pause:.1f} s, then every few seconds, "
                f"{limit}"
            )
        self.waiting = f"waiting for the orchestrator since {silent:.0f} s, next try in {pause:.1f} s"
        await self._clock.sleep(pause)

    def _heard(self, trial: _Trial) -> None:
        if trial.failures:
            self._report(f"the orchestrator answers again after {self._clock.now() - trial.since:.0f} s")
        self.waiting = ""

    def _say(self, text: str) -> None:
        """Report a wait once, however long it lasts."""
        if self.waiting != text:
            self._report(text)
        self.waiting = text


def _with_shows(heard: Heard) -> Heard:
    """The same with its shows in place: many come on a sheet, the last of the attached tensors."""
    if not heard.answer.shows_attached:
        return heard
    sheet: tasks.ShowSheet = open_sheet(heard.tensors[-1], tasks.ShowSheet)
    answer = msgspec.structs.replace(heard.answer, shows=sheet.shows, shows_attached=False)
    return Heard(answer, heard.tensors[:-1], heard.heads[:-1])


def _is_poll(body: tasks.Join | tasks.Turn) -> bool:
    """A turn that brings nothing and may be held."""
    return isinstance(body, tasks.Turn) and body.result is None and not body.draining
