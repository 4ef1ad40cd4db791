"""Signed messages (format final, design section 6 "Wire").

    64-byte Ed25519 signature | control length, u32 little-endian | control, msgpack, at most 64 KiB | tensor bytes ...

The signature covers `DOMAIN` + the control bytes exactly as sent; the control holds each tensor's digest, so it covers
the tensors too. Nothing is re-encoded. Signature + control bytes are a message's `origin`: kept, they prove later who
said what (`check_origin`), without the tensors.

Opening checks in this order, and nothing later is looked at before: sizes, well-formedness (no container may claim
more elements than there are bytes), protocol version, recipient, run, signature, path, time, nonce, limit of the
method; then the tensors' heads, the total length, digests, finiteness. Then the nonce counts as used. The body is
decoded last, by whoever knows its types (`decode_body`). Every failure is `Refused` with a code of `iota.wire.codes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from iota.core.values import Digest, Key, Tensor, TensorHead, check_head, is_finite, sha256
from iota.errors import IotaError
from iota.wire.codes import MAX_TEXT, refused
from iota.wire.keys import SIGNATURE_BYTES, Identity, is_key, verify
from iota.wire.nonces import MAX_NONCE, NonceBook

Buffer = bytes | bytearray | memoryview

PROTOCOL = 1
DOMAIN = b"iota message 1\n"
PATH = "/iota/v1"
WINDOW = 60.0
"""Seconds that a request's time may differ from the receiver's clock."""
MAX_CONTROL = 64 * 1024
MAX_TENSORS = 256
HEADER_BYTES = SIGNATURE_BYTES + 4

Text = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_NONCE)]


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The signed part of a message. Requests have empty `reply_to` and `status`; a reply names the SHA-256 of the
    request's control bytes and is "ok" or "refused". `method` is the body's type tag; `time` in seconds of the sender's
    clock; `nonce` grows with every message of a sender; `id` is the idempotency id (it stays when a request is
    repeated).
    """

    protocol: int
    recipient: Text
    run: Text
    sender: Text
    session: Count
    method: Text
    path: Text
    query: Text
    time: float
    nonce: Count
    id: Text
    reply_to: Text
    status: Text
    tensors: tuple[TensorHead, ...]
    body: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Body of a "refused" reply. `time` is the refusing side's clock, `nonce` the last one it accepted from this sender
    (only with code `replayed`, else 0)."""

    code: Text
    cause: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    remedy: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    time: float
    nonce: Count = 0


class Opened(msgspec.Struct, frozen=True):
    """A checked message. `tensors` are views into the received bytes, `digest` the SHA-256 of the control bytes."""

    control: Control
    origin: bytes
    digest: Digest
    tensors: tuple[Tensor, ...]


class _Version(msgspec.Struct, frozen=True):
    """All that is read of a control part before the versions are known to agree."""

    protocol: int


_SKIM = msgspec.msgpack.Decoder(msgspec.Raw)
_VERSION = msgspec.msgpack.Decoder(_Version)
_CONTROL = msgspec.msgpack.Decoder(Control)
_ENCODER = msgspec.msgpack.Encoder()


# ------------------------------------------------------------------------------------------------------- sealing


def seal(
    identity: Identity,
    *,
    recipient: Key,
    run: str,
    session: int,
    time: float,
    nonce: int,
    id: str,
    body: msgspec.Struct,
    tensors: Sequence[Tensor] = (),
    heads: Sequence[TensorHead] | None = None,
    reply_to: Digest = "",
    status: str = "",
    path: str = PATH,
    query: str = "",
) -> list[Buffer]:
    """Sign a message; returns [signature + length + control, tensor bytes ...] without copying a tensor.

    `heads` spares hashing tensors whose heads are known (a relay). Raises IotaError `too_large` when the control part
    is over 64 KiB: big lists belong into an attached sheet (`pack_sheet`).
    """
    flat = [_flat(tensor) for tensor in tensors]
    control = _ENCODER.encode(
        Control(
            protocol=PROTOCOL,
            recipient=recipient,
            run=run,
            sender=identity.key,
            session=session,
            method=tag_of(type(body)),
            path=path,
            query=query,
            time=time,
            nonce=nonce,
            id=id,
            reply_to=reply_to,
            status=status,
            tensors=tuple(heads) if heads is not None else tuple(tensor.head() for tensor in flat),
            body=msgspec.Raw(_ENCODER.encode(body)),
        )
    )
    if len(control) > MAX_CONTROL:
        what = f"the control part of a {tag_of(type(body))} message"
        cause = f"{what} has {len(control)} bytes, at most {MAX_CONTROL} are allowed"
        raise IotaError("too_large", cause, "Attach long lists as a tensor.")
    first = identity.sign(DOMAIN + control) + len(control).to_bytes(4, "little") + control
    return [first, *(tensor.data for tensor in flat)]


def _flat(tensor: Tensor) -> Tensor:
    """The same tensor with its data as single bytes (a numpy view counts rows in `len`)."""
    data = tensor.data
    if not isinstance(data, memoryview) or (data.ndim == 1 and data.itemsize == 1):
        return tensor
    return Tensor(tensor.dtype, tensor.shape, data.cast("B") if data.nbytes else b"")


def tag_of(kind: type) -> str:
    """The name under which a tagged struct type travels."""
    tag = getattr(kind, "__struct_config__").tag  # noqa: B009  (mypy does not know the attribute on a plain type)
    assert isinstance(tag, str), f"{kind.__name__} is not a tagged message"
    return tag


def pack_sheet(sheet: msgspec.Struct) -> Tensor:
    """A struct as an attached uint8 tensor (lists too long for the control part)."""
    data = _ENCODER.encode(sheet)
    return Tensor("uint8", (len(data),), data)


# ------------------------------------------------------------------------------------------------------- opening


def open_request(
    raw: Buffer,
    *,
    recipient: Key,
    run: str,
    now: float,
    nonces: NonceBook,
    tensor_limit: Callable[[Control], int],
    window: float = WINDOW,
    any_run: frozenset[str] = frozenset(),
    path: str = PATH,
    query: str = "",
) -> Opened:
    """Check a whole request (order: see the module). `tensor_limit` gives the most tensor bytes for this control part,
    and may itself refuse; methods in `any_run` may leave the run empty (a newcomer does not know it yet). The nonce is
    recorded only when everything else is right: what is refused here changes nothing."""
    signature, control_bytes, rest = _split(raw)
    control = _read_control(control_bytes)
    if control.recipient != recipient:
        raise refused("wrong_recipient", f"addressed to {_short(control.recipient)}, this is {_short(recipient)}")
    if control.run != run and not (control.run == "" and control.method in any_run):
        raise refused("wrong_run", f"the message is for run {control.run[:64]!r}, this is {run!r}")
    _check_signature(control, signature, control_bytes)
    if control.path != path or control.query != query:
        signed = f"{control.path[:64]}?{control.query[:64]}"
        raise refused("wrong_path", f"signed for {signed!r}, arrived at {f'{path}?{query}'!r}")
    if control.reply_to or control.status:
        raise refused("malformed", "a reply was sent where a request belongs")
    _check_clock(control.time, now, window)
    nonces.check(control.sender, control.nonce, now)
    tensors = _open_tensors(control, rest, tensor_limit(control))
    nonces.accept(control.sender, control.nonce, now)
    return Opened(control, signature + control_bytes, sha256(control_bytes), tensors)


def open_reply(
    raw: Buffer, *, sender: Key, recipient: Key, run: str, reply_to: Digest, tensor_limit: int = 1 << 40
) -> Opened:
    """Check a whole reply: signed by `sender`, for `recipient`, to the request whose control bytes hash to `reply_to`.
    That digest makes it fresh, so neither time nor nonce matter (a client with a wrong clock must be able to read why
    it was refused). `run` "" takes any run. A refusal may have an empty recipient (the request was unreadable), and
    another run (that may be the reason)."""
    signature, control_bytes, rest = _split(raw)
    control = _read_control(control_bytes)
    if control.recipient != recipient and not (control.status == "refused" and control.recipient == ""):
        raise refused(
            "wrong_recipient", f"the reply is addressed to {_short(control.recipient)}, this is {_short(recipient)}"
        )
    if run and control.run != run and control.status != "refused":
        raise refused("wrong_run", f"the reply is from run {control.run[:64]!r}, this is {run!r}")
    if control.sender != sender:
        raise refused("wrong_signer", f"the reply is signed by {_short(control.sender)}, expected {_short(sender)}")
    _check_signature(control, signature, control_bytes)
    if control.reply_to != reply_to:
        raise refused("wrong_reply", f"the reply is to {control.reply_to[:16]!r}, this request is {reply_to[:16]!r}")
    if control.status not in ("ok", "refused"):
        raise refused("malformed", f"a reply's status is ok or refused, not {control.status[:32]!r}")
    return Opened(control, signature + control_bytes, sha256(control_bytes), _open_tensors(control, rest, tensor_limit))


def check_origin(origin: bytes, *, run: str, sender: Key | None = None, digest: Digest | None = None) -> Control:
    """Verify a stored control part (signature + control bytes) and return it.

    `sender`: who must have signed it; `digest`: a tensor that it must have attached. What it was about (sample, task)
    is in its body: `decode_body`. Time and nonce are not looked at: an origin is kept, not received.
    """
    if len(origin) <= SIGNATURE_BYTES:
        raise refused("truncated", f"an origin has more than {SIGNATURE_BYTES} bytes, not {len(origin)}")
    if len(origin) > SIGNATURE_BYTES + MAX_CONTROL:
        raise refused("too_large", f"an origin has at most {SIGNATURE_BYTES + MAX_CONTROL} bytes, not {len(origin)}")
    control_bytes = bytes(origin[SIGNATURE_BYTES:])
    control = _read_control(control_bytes)
    if control.run != run:
        raise refused("wrong_run", f"the origin is from run {control.run[:64]!r}, this is {run!r}")
    if sender is not None and control.sender != sender:
        raise refused("wrong_signer", f"the origin is signed by {_short(control.sender)}, expected {_short(sender)}")
    _check_signature(control, bytes(origin[:SIGNATURE_BYTES]), control_bytes)
    if digest is not None and all(head.digest != digest for head in control.tensors):
        raise refused("wrong_digest", f"the origin signs no tensor with digest {digest[:16]}")
    return control


def request_digest(raw: Buffer) -> Digest:
    """What a reply to `raw` names: the hash of its control bytes, or of all of it when they cannot be told apart."""
    view = memoryview(raw)
    length = int.from_bytes(view[SIGNATURE_BYTES:HEADER_BYTES], "little")
    if len(view) < HEADER_BYTES or length > MAX_CONTROL or HEADER_BYTES + length > len(view):
        return sha256(view)
    return sha256(view[HEADER_BYTES : HEADER_BYTES + length])


def decode_body(control: Control, types: Any) -> Any:
    """The typed message of a checked control part. `types` is a tagged struct type or a union of them. Wrong, missing
    or extra fields are refused (`malformed`) with their place."""
    body = decode_strict(bytes(control.body), types, f"the body of {control.method}")
    if tag_of(type(body)) != control.method:
        raise refused("malformed", f"the method is {control.method!r}, the body a {tag_of(type(body))}")
    return body


def open_sheet(tensor: Tensor, kind: Any) -> Any:
    """Inverse of `pack_sheet`; anything else than a well-formed `kind` is refused."""
    if tensor.dtype != "uint8" or len(tensor.shape) != 1:
        raise refused("bad_tensor", f"a sheet is a flat uint8 tensor, not {tensor.dtype} {tensor.shape}")
    return decode_strict(tensor.data, kind, "the attached sheet")


def decode_strict(data: Buffer, kind: Any, what: str) -> Any:
    """Decode msgpack from a stranger: refused (`malformed`) unless whole, well-formed and of type `kind`.

    The bytes are first skimmed without building anything: a few bytes may claim 2**32 elements, and the decoder would
    reserve memory for them before it noticed.
    """
    try:
        _SKIM.decode(data)
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise refused("malformed", f"{what}: {error}"[:MAX_TEXT]) from None


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def _split(raw: Buffer) -> tuple[bytes, bytes, memoryview]:
    """Signature, control bytes (copies) and the rest (a view)."""
    view = memoryview(raw)
    if len(view) < HEADER_BYTES:
        raise refused("truncated", f"a message has at least {HEADER_BYTES} bytes, not {len(view)}")
    length = int.from_bytes(view[SIGNATURE_BYTES:HEADER_BYTES], "little")
    if length > MAX_CONTROL:
        raise refused("too_large", f"the control part claims {length} bytes, at most {MAX_CONTROL} are allowed")
    end = HEADER_BYTES + length
    if end > len(view):
        raise refused("truncated", f"the control part claims {length} bytes, {len(view) - HEADER_BYTES} are there")
    return bytes(view[:SIGNATURE_BYTES]), bytes(view[HEADER_BYTES:end]), view[end:]


def _read_control(data: bytes) -> Control:
    """Decode all of the control part but the body; the version first, since another version may mean another layout."""
    try:
        _SKIM.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise refused("malformed", f"the control part is not msgpack: {error}") from None
    try:
        protocol: int | None = _VERSION.decode(data).protocol
    except (msgspec.MsgspecError, ValueError):
        protocol = None
    if protocol != PROTOCOL:
        theirs = "names no version" if protocol is None else f"speaks version {protocol}"
        raise refused("protocol", f"this side speaks protocol version {PROTOCOL}, the message {theirs}")
    try:
        control = _CONTROL.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise refused("malformed", f"the control part: {error}") from None
    if len(control.tensors) > MAX_TENSORS:
        raise refused("malformed", f"{len(control.tensors)} tensors are attached, at most {MAX_TENSORS} are allowed")
    return control


def _check_signature(control: Control, signature: bytes, control_bytes: bytes) -> None:
    if not is_key(control.sender):
        raise refused("bad_signature", f"the sender {control.sender[:80]!r} is no key (64 lowercase hex characters)")
    if not verify(control.sender, signature, DOMAIN + control_bytes):
        raise refused("bad_signature", f"the signature is not {_short(control.sender)}'s over these bytes")


def _check_clock(time: float, now: float, window: float) -> None:
    offset = time - now
    if not abs(offset) <= window:  # also refuses NaN
        side = "ahead of" if offset > 0 else "behind"
        cause = f"the sender's clock is {abs(offset):.1f} s {side} this side's, at most {window:g} s are allowed"
        raise refused("clock", cause)


def _open_tensors(control: Control, rest: memoryview, limit: int) -> tuple[Tensor, ...]:
    """Heads, limit and total length first; only then are bytes hashed and looked at."""
    for number, head in enumerate(control.tensors):
        problem = check_head(head)
        if problem:
            raise refused("bad_tensor", f"tensor {number}: {problem}"[:MAX_TEXT])
    total = sum(head.length for head in control.tensors)
    if total > limit:
        raise refused("too_large", f"{control.method[:64]} attaches {total} tensor bytes, at most {limit} are allowed")
    if total > len(rest):
        raise refused("truncated", f"{total} tensor bytes are declared, {len(rest)} are there")
    if total < len(rest):
        raise refused("trailing", f"{total} tensor bytes are declared, {len(rest)} are there")
    tensors, at = [], 0
    for number, head in enumerate(control.tensors):
        data = rest[at : at + head.length]
        at += head.length
        if sha256(data) != head.digest:
            raise refused("wrong_digest", f"tensor {number}'s bytes do not have the signed digest {head.digest[:16]}")
        tensor = Tensor(head.dtype, head.shape, data)
        if not is_finite(tensor):
            raise refused("not_finite", f"tensor {number} ({head.dtype} {head.shape}) holds NaN or infinity"[:MAX_TEXT])
        tensors.append(tensor)
    return tuple(tensors)


def _short(key: Key) -> str:
    return f"key {key[:16]!r}" if key else "nobody"
