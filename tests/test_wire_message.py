"""Signed messages: what is sent is what arrives, and everything else is refused with the right code."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.core.tasks import Done, Join, Turn
from iota.core.values import Tensor, TensorHead
from iota.errors import IotaError, Refused
from iota.wire.codes import CODES, refused
from iota.wire.keys import Identity
from iota.wire.message import (
    DOMAIN,
    HEADER_BYTES,
    MAX_CONTROL,
    PROTOCOL,
    Control,
    Opened,
    Refusal,
    check_origin,
    decode_body,
    decode_strict,
    open_reply,
    open_request,
    open_sheet,
    pack_sheet,
    request_digest,
    seal,
)
from iota.wire.nonces import NonceBook

NOW = 1_700_000_000.0
MINER, HUB, EVE = (Identity.new(bytes([number]) * 32) for number in (1, 2, 3))
BODY = Turn(session=3, seq=9, result=Done(task=4), shown=(), draining=False)
LIMIT = 1 << 20


def floats(*values: float) -> Tensor:
    array = np.array(values, dtype="<f4")
    return Tensor("float32", array.shape, memoryview(array))


def request(tensors: tuple[Tensor, ...] = (), **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "recipient": HUB.key, "run": "r", "session": 3, "time": NOW, "nonce": 77, "id": "s3/9", "body": BODY,
        "tensors": tensors,
    }  # fmt: skip
    return b"".join(seal(fields.pop("identity", MINER), **{**fields, **changes}))


def accept(raw: bytes, nonces: NonceBook | None = None, now: float = NOW, **changes: Any) -> Opened:
    fields: dict[str, Any] = {"recipient": HUB.key, "run": "r", "tensor_limit": lambda control: LIMIT}
    return open_request(raw, now=now, nonces=NonceBook() if nonces is None else nonces, **{**fields, **changes})


def code_of(action: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as raised:
        action()
    assert raised.value.code in CODES and raised.value.cause and raised.value.remedy
    return raised.value.code


def control_of(raw: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(raw[HEADER_BYTES : HEADER_BYTES + length_of(raw)])
    return decoded


def length_of(raw: bytes) -> int:
    return int.from_bytes(raw[64:HEADER_BYTES], "little")


def rebuild(raw: bytes, control: Any, signer: Identity | None = None, rest: bytes | None = None) -> bytes:
    """The same message with another control part; signed anew only when a signer is given."""
    data = control if isinstance(control, bytes) else msgspec.msgpack.encode(control)
    signature = signer.sign(DOMAIN + data) if signer else raw[:64]
    tail = raw[HEADER_BYTES + length_of(raw) :] if rest is None else rest
    return signature + len(data).to_bytes(4, "little") + data + tail


def test_round_trip_without_copies() -> None:
    data = np.arange(6, dtype="<f4").reshape(2, 3)
    tensors = (
        Tensor("float32", (2, 3), memoryview(data)),
        Tensor("uint8", (0,), b""),
        Tensor("int8", (3,), b"\x01\x02\x03"),
    )
    parts = seal(MINER, recipient=HUB.key, run="r", session=3, time=NOW, nonce=77, id="i", body=BODY, tensors=tensors)
    assert isinstance(parts[1], memoryview) and np.shares_memory(np.frombuffer(parts[1], "<f4"), data)
    raw = b"".join(parts)
    opened = accept(raw)
    assert decode_body(opened.control, Turn | Join) == BODY
    assert (opened.control.sender, opened.control.session, opened.control.id) == (MINER.key, 3, "i")
    assert [bytes(t.data) for t in opened.tensors] == [data.tobytes(), b"", b"\x01\x02\x03"]
    assert opened.tensors[0].shape == (2, 3)
    assert isinstance(opened.tensors[0].data, memoryview) and opened.tensors[0].data.obj is raw
    assert opened.digest == request_digest(raw) == hashlib.sha256(opened.origin[64:]).hexdigest()


def test_layout_is_final() -> None:
    raw = request()
    assert list(control_of(raw)) == [
        "protocol", "recipient", "run", "sender", "session", "method", "path", "query", "time", "nonce", "id",
        "reply_to", "status", "tensors", "body",
    ]  # fmt: skip
    assert control_of(raw)["body"]["type"] == control_of(raw)["method"] == "Turn"
    assert hashlib.sha256(raw).hexdigest() == "6ff441b8504db514995010221a48805f5c13f74ad0038487c87a5bccb9bd6011"


CHANGES: dict[str, tuple[Any, str]] = {
    "protocol": (PROTOCOL + 1, "protocol"),
    "recipient": (EVE.key, "wrong_recipient"),
    "run": ("other", "wrong_run"),
    "sender": (EVE.key, "bad_signature"),
    "session": (4, "bad_signature"),
    "method": ("Join", "bad_signature"),
    "path": ("/other", "bad_signature"),
    "query": ("a=1", "bad_signature"),
    "time": (NOW + 1, "bad_signature"),
    "nonce": (78, "bad_signature"),
    "id": ("s3/10", "bad_signature"),
    "reply_to": ("0" * 64, "bad_signature"),
    "status": ("ok", "bad_signature"),
    "tensors": ([["float32", [2], 8, "0" * 64]], "bad_signature"),
    "body": (msgspec.to_builtins(Turn(session=3, seq=10, result=None, shown=(), draining=False)), "bad_signature"),
}


def test_the_changes_cover_every_field() -> None:
    assert set(CHANGES) == {field.name for field in msgspec.structs.fields(Control)}


@pytest.mark.parametrize("field", list(CHANGES))
def test_a_changed_field_is_refused(field: str) -> None:
    raw = request((floats(1, 2),))
    value, code = CHANGES[field]
    control = control_of(raw)
    assert control[field] != value
    book = NonceBook()
    assert code_of(lambda: accept(rebuild(raw, {**control, field: value}), book)) == code
    assert len(book) == 0, "a refused message uses no nonce"
    assert accept(raw, book).control.nonce == 77


SIGNED = {
    "path": ("/other", "wrong_path"),
    "query": ("a=1", "wrong_path"),
    "reply_to": ("0" * 64, "malformed"),
    "status": ("ok", "malformed"),
    "time": (float("nan"), "clock"),
    "nonce": (2**62, "nonce_ahead"),
    "sender": (MINER.key.upper(), "bad_signature"),
    "session": (-1, "malformed"),
    "id": ("x" * 257, "malformed"),
}


@pytest.mark.parametrize("field", list(SIGNED))
def test_a_wrong_field_is_refused_though_its_sender_signed_it(field: str) -> None:
    raw = request()
    value, code = SIGNED[field]
    assert code_of(lambda: accept(rebuild(raw, {**control_of(raw), field: value}, MINER))) == code


@pytest.mark.parametrize("nonce", [-1, 1.5, "7", 2**63, None])
def test_a_nonce_is_a_whole_number(nonce: Any) -> None:
    raw = request()
    assert code_of(lambda: accept(rebuild(raw, {**control_of(raw), "nonce": nonce}, MINER))) == "malformed"


@pytest.mark.parametrize("version", [0, 2, None, "1", [], 2**63])
def test_other_versions_are_told_both(version: Any) -> None:
    raw = request()
    future = {"protocol": version, "something": "else"}
    with pytest.raises(Refused, match=f"version {PROTOCOL}") as raised:
        accept(rebuild(raw, future, MINER))
    assert raised.value.code == "protocol"
    assert f"version {version}" in raised.value.cause or "names no version" in raised.value.cause


@pytest.mark.parametrize("skew", [0, 2, -2, 60, -60, 70, -70, 3600])
def test_skewed_clocks(skew: float) -> None:
    raw = request(time=NOW + skew)
    if abs(skew) <= 60:
        assert accept(raw).control.time == NOW + skew
        return
    with pytest.raises(Refused) as raised:
        accept(raw)
    text = str(raised.value)
    assert raised.value.code == "clock" and f"{abs(skew):.1f} s" in text and "60 s" in text and "NTP" in text
    assert ("ahead" if skew > 0 else "behind") in text


def test_a_replay_is_refused_also_after_a_restart() -> None:
    book, raw = NonceBook(), request()
    accept(raw, book)
    assert code_of(lambda: accept(raw, book)) == "replayed"
    fresh = NonceBook()
    fresh.restore(msgspec.json.decode(msgspec.json.encode(book.export()), type=dict[str, tuple[int, float]]))
    assert code_of(lambda: accept(raw, fresh)) == "replayed"
    assert code_of(lambda: accept(request(nonce=76), fresh)) == "replayed"
    accept(request(nonce=78), fresh)


def test_a_newcomer_may_leave_the_run_empty() -> None:
    raw = request(run="")
    assert code_of(lambda: accept(raw)) == "wrong_run"
    assert accept(raw, any_run=frozenset({"Turn"})).control.run == ""


def test_every_changed_byte_is_refused() -> None:
    raw = request((floats(1, 2),))
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1
        code_of(lambda data=bytes(changed): accept(data))
    at = HEADER_BYTES + length_of(raw)
    for place in range(at, len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1
        assert code_of(lambda data=bytes(changed): accept(data)) == "wrong_digest"


def headed(*heads: tuple[str, tuple[int, ...], int], rest: bytes = b"") -> bytes:
    digest = hashlib.sha256(rest).hexdigest()
    named = [TensorHead(dtype, shape, length, digest) for dtype, shape, length in heads]
    first = seal(MINER, recipient=HUB.key, run="r", session=1, time=NOW, nonce=1, id="", body=BODY, heads=named)[0]
    return bytes(first) + rest


BOMBS = {
    "huge, consistent": (headed(("uint8", (2**60,), 2**60)), "too_large"),
    "huge length, small shape": (headed(("uint8", (4,), 2**60), rest=b"1234"), "bad_tensor"),
    "shape product overflows to zero": (headed(("float32", (2**32, 2**32), 0)), "bad_tensor"),
    "shape product overflows to the length": (headed(("uint8", (2**63, 2, 1), 4), rest=b"1234"), "bad_tensor"),
    "negative sides": (headed(("uint8", (-2, -2), 4), rest=b"1234"), "bad_tensor"),
    "negative length": (headed(("uint8", (-4,), -4), rest=b"1234"), "bad_tensor"),
    "unknown dtype": (headed(("object", (4,), 4), rest=b"1234"), "bad_tensor"),
    "too many sides": (headed(("uint8", (1,) * 9, 1), rest=b"1"), "bad_tensor"),
    "truncated": (headed(("uint8", (5,), 5), rest=b"1234"), "truncated"),
    "trailing": (headed(("uint8", (3,), 3), rest=b"1234"), "trailing"),
    "trailing without tensors": (headed(rest=b"1234"), "trailing"),
    "over the method's limit": (headed(("uint8", (LIMIT + 1,), LIMIT + 1), rest=bytes(LIMIT + 1)), "too_large"),
    "together over the limit": (headed(("uint8", (LIMIT,), LIMIT), ("uint8", (1,), 1)), "too_large"),
    "too many tensors": (headed(*[("uint8", (0,), 0)] * 257), "malformed"),
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_header_bombs(name: str) -> None:
    raw, code = BOMBS[name]
    assert code_of(lambda: accept(raw)) == code


def test_not_finite_is_refused() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert code_of(lambda bad=bad: accept(request((floats(1.0, bad),)))) == "not_finite"
    for dtype, bits in (("bfloat16", 0x7F80), ("bfloat16", 0xFFC1), ("float16", 0x7C00), ("float16", 0xFE00)):
        tensor = Tensor(dtype, (2,), np.array([0x3F80, bits], dtype="<u2").tobytes())
        assert code_of(lambda tensor=tensor: accept(request((tensor,)))) == "not_finite"
    accept(request((Tensor("int32", (1,), b"\xff\xff\xff\x7f"), floats(3e38, -3e38, 1e-45))))


@pytest.mark.parametrize(
    "control",
    [
        b"\xdd\xff\xff\xff\xff\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 60_000 + b"\x01",
        b"\xc6\xff\xff\xff\xff",
        b"\x01\x02",
        b"",
    ],
    ids=["array of 2**32", "map of 2**32", "depth 60,000", "bytes of 2**32", "two objects", "empty"],
)
def test_control_bombs(control: bytes) -> None:
    assert code_of(lambda: accept(rebuild(request(), control, MINER))) == "malformed"


def test_bombs_inside_the_body_and_sheets() -> None:
    deep = b"\x91" * 30_000 + b"\x01"
    assert code_of(lambda: decode_strict(deep, Turn, "body")) == "malformed"
    assert code_of(lambda: decode_strict(b"\xdd\xff\xff\xff\xff\x01", tuple[int, ...], "sheet")) == "malformed"
    sheet = pack_sheet(TensorHead("uint8", (1,), 1, "d"))
    assert open_sheet(sheet, TensorHead) == TensorHead("uint8", (1,), 1, "d")
    assert code_of(lambda: open_sheet(Tensor("float32", (0,), b""), TensorHead)) == "bad_tensor"
    assert code_of(lambda: open_sheet(Tensor("uint8", (1,), b"\xc1"), TensorHead)) == "malformed"


def test_sizes_of_the_control_part() -> None:
    for raw in (b"", bytes(67), request()[:-1], bytes(64) + (100).to_bytes(4, "little") + bytes(99)):
        assert code_of(lambda raw=raw: accept(raw)) == "truncated"
    assert (
        code_of(lambda: accept(bytes(64) + (MAX_CONTROL + 1).to_bytes(4, "little") + bytes(MAX_CONTROL + 1)))
        == "too_large"
    )
    with pytest.raises(IotaError, match="at most 65536"):
        request(body=Join(role="x" * 70_000, token="", software="", device="", dtype="", memory=0, disk=0, owner=""))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"seq": "9"}, r"\$\.seq"),
        ({"seq": 2.5}, r"\$\.seq"),
        ({"more": 1}, "more"),
        ({"type": "Nothing"}, r"Nothing"),
        ({"result": {"type": "Done", "task": 4, "x": 1}}, r"\$\.result"),
        ({"shown": [[1, "", "extra"]]}, r"\$\.shown"),
        ({"shown": [{"a": "b"}]}, r"\$\.shown"),
        ({"draining": None}, r"\$\.draining"),
    ],
)
def test_bodies_are_strict(change: dict[str, Any], place: str) -> None:
    raw = request()
    control = control_of(raw)
    opened = accept(rebuild(raw, {**control, "body": {**control["body"], **change}}, MINER))
    with pytest.raises(Refused, match=place) as raised:
        decode_body(opened.control, Turn | Join)
    assert raised.value.code == "malformed"


def test_missing_keys_and_other_methods() -> None:
    raw = request()
    control = control_of(raw)
    short = {key: value for key, value in control["body"].items() if key != "seq"}
    opened = accept(rebuild(raw, {**control, "body": short}, MINER))
    with pytest.raises(Refused, match="seq"):
        decode_body(opened.control, Turn | Join)
    opened = accept(rebuild(raw, {**control, "method": "Join"}, MINER))
    assert code_of(lambda: decode_body(opened.control, Turn | Join)) == "malformed"
    for key in control:
        lacking = {name: value for name, value in control.items() if name != key}
        code = code_of(lambda lacking=lacking: accept(rebuild(raw, lacking, MINER)))
        assert code == ("protocol" if key == "protocol" else "malformed")
    assert code_of(lambda: accept(rebuild(raw, {**control, "extra": 1}, MINER))) == "malformed"


def test_the_method_limit_may_refuse() -> None:
    def none(control: Control) -> int:
        raise refused("unknown_method", f"{control.method} is not served")

    assert code_of(lambda: accept(request(), tensor_limit=none)) == "unknown_method"


# ------------------------------------------------------------------------------------------- replies and origins


def reply(raw: bytes, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "identity": HUB, "recipient": MINER.key, "run": "r", "session": 3, "time": 0.0, "nonce": 1, "id": "",
        "body": Done(task=1), "reply_to": request_digest(raw), "status": "ok",
    }  # fmt: skip
    fields |= changes
    return b"".join(seal(fields.pop("identity"), **fields))


def read(raw: bytes, answer: bytes) -> Opened:
    return open_reply(
        answer, sender=HUB.key, recipient=MINER.key, run="r", reply_to=request_digest(raw), tensor_limit=LIMIT
    )


def test_replies() -> None:
    raw = request()
    assert decode_body(read(raw, reply(raw)).control, Done) == Done(task=1)
    refusal = Refusal(code="clock", cause="c", remedy="r", time=1.0)
    told = read(raw, reply(raw, recipient="", run="other", status="refused", body=refusal))
    assert decode_body(told.control, Refusal) == refusal
    assert code_of(lambda: read(raw, reply(raw, identity=EVE))) == "wrong_signer"
    assert code_of(lambda: read(raw, reply(request(nonce=5)))) == "wrong_reply"
    assert code_of(lambda: read(raw, reply(raw, recipient=EVE.key))) == "wrong_recipient"
    assert code_of(lambda: read(raw, reply(raw, recipient=""))) == "wrong_recipient"
    assert code_of(lambda: read(raw, reply(raw, run="other"))) == "wrong_run"
    assert code_of(lambda: read(raw, reply(raw, status="fine"))) == "malformed"
    assert code_of(lambda: read(raw, reply(raw, tensors=(floats(float("nan")),)))) == "not_finite"
    forged = reply(raw, identity=EVE)
    assert code_of(lambda: read(raw, rebuild(forged, {**control_of(forged), "sender": HUB.key}))) == "bad_signature"
    assert code_of(lambda: accept(reply(raw, recipient=HUB.key))) == "malformed", "a reply is no request"


def test_origins_prove_who_made_a_tensor() -> None:
    tensor = floats(1, 2)
    origin = accept(request((tensor,))).origin
    digest = hashlib.sha256(tensor.data).hexdigest()
    control = check_origin(origin, run="r", sender=MINER.key, digest=digest)
    assert control.sender == MINER.key and decode_body(control, Turn) == BODY
    assert code_of(lambda: check_origin(origin, run="other")) == "wrong_run"
    assert code_of(lambda: check_origin(origin, run="r", sender=EVE.key)) == "wrong_signer"
    assert code_of(lambda: check_origin(origin, run="r", digest="0" * 64)) == "wrong_digest"
    assert code_of(lambda: check_origin(b"", run="r")) == "truncated"
    assert code_of(lambda: check_origin(bytes(64 + MAX_CONTROL + 1), run="r")) == "too_large"
    for place in (0, 63, 64, len(origin) - 1):
        changed = bytearray(origin)
        changed[place] ^= 1
        code_of(lambda data=bytes(changed): check_origin(data, run="r"))


# ---------------------------------------------------------------------------------------------------------- fuzz

VALID = request((floats(1, 2, 3), Tensor("int8", (2,), b"ab")))


def never_but_refused(raw: bytes) -> None:
    for action in (lambda: accept(raw), lambda: read(raw, raw), lambda: check_origin(raw, run="r")):
        try:
            action()
        except Refused as error:
            assert error.code in CODES
        else:
            assert raw == VALID


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_raise_nothing_but_refused(raw: bytes) -> None:
    never_but_refused(raw)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_messages_raise_nothing_but_refused(data: st.DataObject) -> None:
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        kind = data.draw(st.sampled_from(("set", "insert", "cut")))
        if kind == "set" and at < len(raw):
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(max_size=8))
        else:
            del raw[at : at + data.draw(st.integers(1, 8))]
    never_but_refused(bytes(raw))


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(CHANGES)), JSONISH)
def test_signed_nonsense_raises_nothing_but_refused(field: str, value: Any) -> None:
    """A member with a valid key may sign anything."""
    raw = rebuild(VALID, {**control_of(VALID), field: value}, MINER)
    try:
        decode_body(accept(raw).control, Turn | Join)
    except Refused as error:
        assert error.code in CODES
