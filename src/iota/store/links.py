"""Signed, expiring URLs for single objects (design section 6): peers hold no store credentials.

The orchestrator signs with its Ed25519 key; the blob service knows only the public key. A link is

    BASE/blobs/KEY?verb=PUT&expires=1700000000.000&length=12&sha256=...&sig=...

and the signature covers verb, key, expiry and every limit, so nothing about it can be changed. A PUT link pins length
and SHA-256, or length, or at least a maximal length, and never replaces an object by other bytes. A GET link also
allows HEAD.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import nacl.exceptions
import nacl.signing

from iota.errors import IotaError, Refused
from iota.store.blobs import Blobs, check_key

ROUTE = "/blobs/"
_FIELDS = {
    "verb": re.compile(r"GET|PUT"),
    "expires": re.compile(r"[0-9]{1,12}\.[0-9]{3}"),
    "length": re.compile(r"[0-9]{1,15}"),
    "max": re.compile(r"[0-9]{1,15}"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
    "sig": re.compile(r"[0-9a-f]{128}"),
}
_BLOCK = 1024 * 1024
_FRESH = "Ask the orchestrator for a fresh link"


class Signer(Protocol):
    """What signs a link: an identity's public key in hex, and its signature."""

    @property
    def key(self) -> str: ...

    def sign(self, data: bytes, /) -> bytes:
        """64-byte Ed25519 signature."""
        ...


class Link(msgspec.Struct, frozen=True):
    """What one URL allows, until `expires` (Unix seconds, by the blob service's clock).

    `length`: a PUT must bring exactly so many bytes; `max_length`: at most so many; `sha256`: exactly these bytes.
    """

    verb: str
    key: str
    expires: float
    length: int | None = None
    sha256: str | None = None
    max_length: int | None = None

    def query(self) -> str:
        """The query string without the signature, in its one canonical order."""
        pairs = [f"verb={self.verb}", f"expires={self.expires:.3f}"]
        pairs += [f"length={self.length}"] if self.length is not None else []
        pairs += [f"max={self.max_length}"] if self.max_length is not None else []
        pairs += [f"sha256={self.sha256}"] if self.sha256 is not None else []
        return "&".join(pairs)

    def signed_bytes(self) -> bytes:
        """What the signature covers."""
        return f"iota link 1\n{self.key}\n{self.query()}".encode()


def sign_link(
    identity: Signer,
    base_url: str,
    verb: str,
    key: str,
    expires: float,
    *,
    length: int | None = None,
    sha256: str | None = None,
    max_length: int | None = None,
) -> str:
    """A URL that allows `verb` (GET or PUT) on the object `key` until `expires`.

    A PUT needs `length` or `max_length` (ValueError without); `sha256` pins the bytes. Raises IotaError `bad_key`.
    """
    if verb not in ("GET", "PUT") or (verb == "PUT" and length is None and max_length is None):
        raise ValueError("a link is for GET or PUT, and a PUT link needs length or max_length")
    if ROUTE in urlsplit(base_url).path + "/":
        raise ValueError(f"the base URL may not contain {ROUTE}: {base_url}")
    link = Link(verb, check_key(key), expires, length, sha256, max_length)
    signature = identity.sign(link.signed_bytes()).hex()
    return f"{base_url.rstrip('/')}{ROUTE}{key}?{link.query()}&sig={signature}"


@functools.lru_cache(maxsize=64)
def _verifier(public_key: str) -> nacl.signing.VerifyKey:
    return nacl.signing.VerifyKey(bytes.fromhex(public_key))


def check_link(public_key: str, method: str, path_qs: str, now: float) -> Link:
    """The link in a request's path and query (or in a whole URL), when its signature by `public_key` (hex) holds,
    `method` is what it allows and `now` is not past its expiry.

    Raises Refused: `bad_signature` (none, malformed, forged or altered), `wrong_verb`, `expired`.
    """
    path, _, query = path_qs.partition("?")
    key = path.partition(ROUTE)[2]
    found = _parse(query)
    signature = found.pop("sig", "")
    if not key or not signature or "verb" not in found or "expires" not in found:
        raise Refused("bad_signature", "this address carries no signed link", _FRESH)
    link = Link(
        verb=found["verb"],
        key=key,
        expires=float(found["expires"]),
        length=int(found["length"]) if "length" in found else None,
        sha256=found.get("sha256"),
        max_length=int(found["max"]) if "max" in found else None,
    )
    try:
        _verifier(public_key).verify(link.signed_bytes(), bytes.fromhex(signature))
    except nacl.exceptions.BadSignatureError as error:
        raise Refused(
            "bad_signature", "the link's signature does not hold: it was altered or is another run's", _FRESH
        ) from error
    if method != link.verb and not (method == "HEAD" and link.verb == "GET"):
        raise Refused("wrong_verb", f"this link allows {link.verb}, not {method[:16]!r}", _FRESH)
    if not now <= link.expires:
        raise Refused("expired", f"the link to {key[:512]} expired {now - link.expires:.1f} s ago", _FRESH)
    check_key(key)
    return link


def _parse(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in query[:2048].split("&"):
        name, _, value = pair.partition("=")
        pattern = _FIELDS.get(name)
        if pattern is None or name in found or not pattern.fullmatch(value):
            raise Refused("bad_signature", "this address carries no well-formed signed link", _FRESH)
        found[name] = value
    return found


def check_length(link: Link, length: int, max_object: int) -> None:
    """Before a byte is read: IotaError `wrong_length` or `too_large` when a body of `length` bytes is not allowed."""
    limit = max_object if link.max_length is None else min(link.max_length, max_object)
    if link.length is not None and length != link.length:
        raise IotaError("wrong_length", f"{link.key} must have {link.length} bytes, {length} were declared")
    if length > limit:
        raise IotaError("too_large", f"{link.key}: {length} bytes, at most {limit} are allowed")


def check_digest(link: Link, digest: str) -> None:
    """After the last byte: IotaError `corrupt` when the link pins other bytes."""
    if link.sha256 is not None and digest != link.sha256:
        raise IotaError(
            "corrupt",
            f"{link.key}: the bytes have SHA-256 {digest}, the link pins {link.sha256}",
            "Send what was committed",
        )


async def same_object(blobs: Blobs, key: str, length: int, digest: str) -> bool:
    """Before an upload becomes visible: True when these very bytes lie there already (an upload repeated), False when
    nothing does. Raises Refused `exists` for other bytes: who holds a link must not change what others already rely
    on, such as a shard after it was checked or evidence after it was shown."""
    size = await blobs.size(key)
    if size is None:
        return False
    found = hashlib.sha256()
    if size == length:
        reader = await blobs.open(key)
        try:
            for start in range(0, size, _BLOCK):
                found.update(await reader.read(start, min(start + _BLOCK, size)))
        finally:
            await reader.close()
    if size != length or found.hexdigest() != digest:
        raise Refused("exists", f"{key} was uploaded before, with other bytes", "An object is written once")
    return True
