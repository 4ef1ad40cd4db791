"""What a message adds to a boundary tensor: measured on messages that are really sealed."""

from __future__ import annotations

from iota.core.tasks import Answer, Forward, Passed, Standing, Turn, Verdict
from iota.core.values import Tensor, sha256
from iota.wire.keys import SIGNATURE_BYTES, Identity
from iota.wire.message import HEADER_BYTES, seal

WHEN = 1.8e9


def message_bytes() -> dict[str, int]:
    """Bytes around one boundary tensor on its way to the orchestrator (`up`: signature, control part with the result)
    and from there to the next stage (`down`: signature, control part with the task and the tensor's signed origin).
    HTTP's own headers are not among them."""
    identity = Identity.new(bytes(32))
    digest = sha256(b"")
    tensor = Tensor("uint8", (8, 256, 16), bytes(8 * 256 * 16))
    passed = Passed(
        task=12_345, sample=12_345, head=digest, inp=digest, out=digest, cut=None, loss=None, seconds=0.512345,
        recomputed=False,
    )  # fmt: skip
    turn = Turn(session=1, seq=12_345, result=passed, shown=(), draining=False)
    up = _around(identity, turn, tensor)
    origin = bytes(up - HEADER_BYTES + SIGNATURE_BYTES)
    forward = Forward(task=12_346, epoch=12, sample=12_345, attempt=1, deadline=WHEN, origin=origin)
    standing = Standing(
        epoch=12, phase="train", phase_since=WHEN, phase_until=WHEN, passes_epoch=123, passes_total=12_345,
        last_verdict="valid", paid_total=10**6,
    )  # fmt: skip
    answer = Answer(
        seq=12_345, verdict=Verdict(True, "", ""), step=False, task=forward, shows=(), standing=standing, time=WHEN
    )
    return {"up": up, "down": _around(identity, answer, tensor)}


def _around(identity: Identity, body: Turn | Answer, tensor: Tensor) -> int:
    """The first part of the sealed message: everything but the tensor."""
    parts = seal(
        identity, recipient=identity.key, run="fig5-0123456789ab", session=1, time=WHEN, nonce=2 * 10**15, id="1-12345",
        body=body, tensors=(tensor,), reply_to=sha256(b"") if isinstance(body, Answer) else "",
        status="ok" if isinstance(body, Answer) else "",
    )  # fmt: skip
    return len(parts[0])
