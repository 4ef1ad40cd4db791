"""Signed conversations over any transport: `Caller` asks one peer, `Receiver` answers many.

A boundary tensor passes through here once: bytes from the transport, checked views out of it, the same views back in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import msgspec

from iota.core.values import Digest, Key, Tensor, TensorHead
from iota.errors import Refused
from iota.net.transport import Buffer, Channel, Handler, RefusedReply
from iota.wire.codes import MAX_TEXT, refused
from iota.wire.keys import Identity
from iota.wire.message import (
    WINDOW,
    Control,
    Opened,
    Refusal,
    decode_body,
    open_reply,
    open_request,
    request_digest,
    seal,
    tag_of,
)
from iota.wire.nonces import NonceBook, NonceSource, Replayed

RESEALS = 5
"""How often a call is signed again after `replayed`: concurrent requests of one sender may overtake each other. Another
call's acceptance can cost a call one attempt only, so up to `RESEALS` + 1 concurrent calls of one sender always get
through; a node that wants more at once needs more patience or another key."""


class PeerRefused(Refused):
    """The peer's signed refusal. `time` is its clock when it refused, `offset` what to add to ours to match it."""

    def __init__(self, code: str, cause: str, remedy: str, time: float, offset: float) -> None:
        super().__init__(code, cause, remedy)
        self.time = time
        self.offset = offset


@dataclass(frozen=True)
class Reply:
    """An accepted call's answer. `origin` is the peer's signed control part, `control` the same decoded."""

    body: Any
    tensors: tuple[Tensor, ...]
    origin: bytes
    control: Control


class Caller:
    """Signed requests to one peer. `run` may be "" until it is known (set it then). Safe for concurrent calls."""

    def __init__(
        self,
        identity: Identity,
        channel: Channel,
        recipient: Key,
        run: str,
        now: Callable[[], float],
        *,
        nonces: NonceSource | None = None,
        reply_limit: int = 1 << 40,
    ) -> None:
        self.identity = identity
        self.channel = channel
        self.recipient = recipient
        self.run = run
        self.offset = 0.0
        """Seconds added to our clock in messages; may be set from `PeerRefused.offset` after a `clock` refusal."""
        self._now = now
        self._nonces = nonces or NonceSource(now)
        self._reply_limit = reply_limit

    async def call(
        self,
        body: msgspec.Struct,
        tensors: Sequence[Tensor] = (),
        *,
        id: str,
        session: int,
        timeout: float,
        reply_types: Any,
        heads: Sequence[TensorHead] | None = None,
    ) -> Reply:
        """One request and its checked reply.

        Raises `PeerRefused` when the peer declined (nothing changed there), `Unreachable` when no reply came (it may
        have been handled: repeat with the same `id`), plain `Refused` when the reply itself is bad: wrong signer, not
        to this request, damaged; like `Unreachable`, that says nothing about what the peer did.
        """
        known = list(heads) if heads is not None else None
        for attempt in range(RESEALS + 1):
            message = seal(
                self.identity,
                recipient=self.recipient,
                run=self.run,
                session=session,
                time=self._now() + self.offset,
                nonce=self._nonces.next(),
                id=id,
                body=body,
                tensors=tensors,
                heads=known,
            )
            opened = await self._exchange(message, timeout)
            if opened.control.status == "ok":
                answer = decode_body(opened.control, reply_types)
                return Reply(answer, opened.tensors, opened.origin, opened.control)
            refusal: Refusal = decode_body(opened.control, Refusal)
            again = refusal.code == "replayed" and attempt < RESEALS and self._nonces.advance(refusal.nonce)
            if not again:
                break
        offset = refusal.time - self._now()
        raise PeerRefused(refusal.code, refusal.cause, refusal.remedy, refusal.time, offset)

    async def _exchange(self, message: list[Buffer], timeout: float) -> Opened:
        raw = await self.channel.request(message, timeout=timeout)
        return open_reply(
            raw,
            sender=self.recipient,
            recipient=self.identity.key,
            run=self.run,
            reply_to=request_digest(message[0]),
            tensor_limit=self._reply_limit,
        )


@dataclass(frozen=True)
class Incoming:
    """A checked request. `origin`: its signed control part (what a relay passes on); `digest`: what the reply names."""

    sender: Key
    session: int
    id: str
    body: Any
    tensors: tuple[Tensor, ...]
    origin: bytes
    digest: Digest
    control: Control


class Outgoing(NamedTuple):
    """What a handler answers with. `heads` spares hashing relayed tensors (the producer's `control.tensors`)."""

    body: msgspec.Struct
    tensors: Sequence[Tensor] = ()
    heads: Sequence[TensorHead] | None = None


class Receiver:
    """Opens requests to this identity and signs the replies.

    `request_types`: a tagged struct type or a union of them; `limits`: most tensor bytes by method (missing: none);
    `newcomers`: methods that may come without a run. The nonce book is the caller's, who keeps it across restarts.
    """

    def __init__(
        self,
        identity: Identity,
        run: str,
        now: Callable[[], float],
        *,
        nonces: NonceBook,
        request_types: Any,
        limits: Mapping[str, int],
        window: float = WINDOW,
        newcomers: frozenset[str] = frozenset({"Join"}),
    ) -> None:
        self.identity = identity
        self.run = run
        self.nonces = nonces
        self._now = now
        self._types = request_types
        self._methods = {tag_of(kind) for kind in get_args(request_types) or (request_types,)}
        self._limits = dict(limits)
        self._window = window
        self._newcomers = newcomers
        self._source = NonceSource(now)

    def open(self, raw: bytes) -> Incoming:
        """Check and decode a request. Raises `Refused`; answer it with `refuse(raw, error)`."""
        opened = open_request(
            raw,
            recipient=self.identity.key,
            run=self.run,
            now=self._now(),
            nonces=self.nonces,
            tensor_limit=self._limit,
            window=self._window,
            any_run=self._newcomers,
        )
        control = opened.control
        body = decode_body(control, self._types)
        sender, session, id = control.sender, control.session, control.id
        return Incoming(sender, session, id, body, opened.tensors, opened.origin, opened.digest, control)

    def _limit(self, control: Control) -> int:
        if control.method not in self._methods:
            known = ", ".join(sorted(self._methods))
            raise refused("unknown_method", f"{control.method[:64]!r} is not served here; served: {known}")
        return self._limits.get(control.method, 0)

    def reply(
        self,
        incoming: Incoming,
        body: msgspec.Struct,
        tensors: Sequence[Tensor] = (),
        heads: Sequence[TensorHead] | None = None,
    ) -> list[Buffer]:
        """The signed answer to a request. `heads` spares hashing relayed tensors."""
        return seal(
            self.identity,
            recipient=incoming.sender,
            run=self.run,
            session=incoming.session,
            time=self._now(),
            nonce=self._source.next(),
            id=incoming.id,
            body=body,
            tensors=tensors,
            heads=heads,
            reply_to=incoming.digest,
            status="ok",
        )

    def refuse(self, request: Incoming | bytes, error: Refused) -> RefusedReply:
        """The signed refusal of a request; give the raw message when it could not be opened (the refusal is then
        addressed to nobody by name, but bound to the request by digest)."""
        now = self._now()
        incoming = request if isinstance(request, Incoming) else None
        parts = seal(
            self.identity,
            recipient=incoming.sender if incoming else "",
            run=self.run,
            session=incoming.session if incoming else 0,
            time=now,
            nonce=self._source.next(),
            id=incoming.id if incoming else "",
            body=Refusal(
                code=error.code[:256],
                cause=error.cause[:MAX_TEXT],
                remedy=error.remedy[:MAX_TEXT],
                time=now,
                nonce=error.last if isinstance(error, Replayed) else 0,
            ),
            reply_to=incoming.digest if incoming else request_digest(request),  # type: ignore[arg-type]
            status="refused",
        )
        return RefusedReply(parts, error.code)

    def handler(self, answer: Callable[[Incoming], Awaitable[Outgoing]]) -> Handler:
        """A transport handler: opens, lets `answer` decide, signs. `Refused` from either is sent back."""

        async def handle(raw: bytes) -> Sequence[Buffer]:
            request: Incoming | bytes = raw
            try:
                request = self.open(raw)
                outgoing = await answer(request)
            except Refused as error:
                return self.refuse(request, error)
            return self.reply(request, *outgoing)

        return handle
