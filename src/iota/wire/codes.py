"""Every code with which a message can be refused: what it means, what to do, and the HTTP status it travels under.

`refused` is the only way this layer builds a refusal, so a code that is not in the table cannot be sent; a test holds
that every code in the table is used. Layers above add their own codes by adding lines here.
"""

from __future__ import annotations

from typing import NamedTuple

from iota.errors import Refused

MAX_TEXT = 2000
"""Characters of a cause or remedy that cross the wire; longer ones are cut, so a refusal always fits."""


class Code(NamedTuple):
    """`status` is what an HTTP server answers with; the signed refusal in the body is what counts."""

    meaning: str
    remedy: str
    status: int


CODES: dict[str, Code] = {
    "truncated": Code(
        "The message is shorter than its own header says.",
        "Send it again; if it repeats, something between the two sides cuts messages.",
        400,
    ),
    "trailing": Code(
        "The message is longer than its own header says.",
        "Send exactly the declared tensors and nothing after them.",
        400,
    ),
    "too_large": Code(
        "The control part or the attached tensors exceed the limit of this method.",
        "Attach less, or send large tensors through the blob store.",
        413,
    ),
    "malformed": Code(
        "The control part or the body is not what this protocol version defines.",
        "Run the same version of iota on both sides; the cause names the place.",
        400,
    ),
    "protocol": Code(
        "The two sides speak different protocol versions.",
        "Install the version of iota that the other side runs.",
        426,
    ),
    "wrong_recipient": Code(
        "The message is addressed to another key.",
        "Use the join URL of this run: its key names the orchestrator.",
        403,
    ),
    "wrong_run": Code(
        "The message belongs to another run.",
        "Use the join URL of the run you mean, and a folder of its own for each run.",
        403,
    ),
    "wrong_path": Code(
        "The signed path or query is not the one the message arrived at.",
        "Do not rewrite paths between the two sides.",
        403,
    ),
    "bad_signature": Code(
        "The signature does not fit the sender's key and these bytes.",
        "Something changed the message on its way, or the key file is damaged.",
        401,
    ),
    "clock": Code(
        "The message's time is too far from this side's clock.",
        "Set the machine's clock (time synchronisation, NTP), or correct by the time given in this refusal.",
        401,
    ),
    "replayed": Code(
        "A message with this nonce or a later one was already accepted from this sender.",
        "Sign the request again with a greater nonce; the idempotency id stays the same.",
        409,
    ),
    "nonce_ahead": Code(
        "The nonce lies more than a day in the future; nonces are nanoseconds of Unix time.",
        "Set the machine's clock and start again.",
        400,
    ),
    "busy": Code(
        "Too many unknown senders wrote in a short time.",
        "Try again in some minutes.",
        503,
    ),
    "unknown_method": Code(
        "This side has no such method.",
        "Run the same version of iota on both sides.",
        404,
    ),
    "bad_tensor": Code(
        "A tensor's declared dtype, shape and length contradict each other or are not allowed.",
        "Send dense little-endian tensors of the known dtypes.",
        400,
    ),
    "wrong_digest": Code(
        "A tensor's bytes do not have the digest that the sender signed.",
        "Send it again; if it repeats, something changes bytes on the way.",
        400,
    ),
    "not_finite": Code(
        "A tensor holds NaN or infinity.",
        "Drop this result; lower the learning rate if it happens often.",
        422,
    ),
    "wrong_signer": Code(
        "The reply or stored message is signed by another key than expected.",
        "Check the key in the join URL; something else may answer at this address.",
        403,
    ),
    "wrong_reply": Code(
        "The reply belongs to another request.",
        "Send the request again under the same idempotency id.",
        409,
    ),
}


def refused(code: str, cause: str, remedy: str = "") -> Refused:
    """A refusal with a code of the table; `remedy` defaults to the table's."""
    return Refused(code, cause[:MAX_TEXT], (remedy or CODES[code].remedy)[:MAX_TEXT])


def status_of(code: str) -> int:
    """HTTP status of a refusal; 409 for codes that only the layers above know."""
    known = CODES.get(code)
    return known.status if known else 409
