"""The signed run manifest as an object: 64 bytes of Ed25519 signature, then the manifest as msgpack (format final).

The signature is the orchestrator's, over the domain prefix and the msgpack bytes as they stand. The run id is the run's
name and the first 8 hex digits of the digest of everything else, so it names one manifest and no other.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from iota.config.schema import Manifest
from iota.core.values import Checkpoint, Key, sha256
from iota.errors import IotaError
from iota.wire.keys import SIGNATURE_BYTES, is_key, verify

OBJECT = "manifest.msgpack"
VERSION = 1
DOMAIN = b"iota manifest 1\0"
"""Before the signed bytes, so that a manifest's signature can never pass for a message's."""


class _Version(msgspec.Struct):
    """The one field that every version has."""

    version: int


Sign = Callable[[bytes], bytes]


def name_run(manifest: Manifest) -> Manifest:
    """The manifest with its run id filled in, in the manifest and in its checkpoints."""
    run = f"{manifest.config.name}-{_digest(manifest)[:8]}"
    return _with_run(manifest, run)


def _digest(manifest: Manifest) -> str:
    return sha256(msgspec.msgpack.encode(_with_run(manifest, "")))


def _with_run(manifest: Manifest, run: str) -> Manifest:
    checkpoints = tuple(
        msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(data, type=Checkpoint), run=run))
        for data in manifest.checkpoints
    )
    return msgspec.structs.replace(manifest, run=run, checkpoints=checkpoints)


def seal_manifest(manifest: Manifest, sign: Sign) -> bytes:
    """Signature and msgpack bytes: the object, and what peers are sent when they join."""
    body = msgspec.msgpack.encode(manifest)
    signature = sign(DOMAIN + body)
    assert len(signature) == SIGNATURE_BYTES
    return signature + body


def read_manifest(data: bytes | bytearray | memoryview, key: Key) -> Manifest:
    """The manifest in `data`, if the orchestrator `key` signed it, it is of this version, and its run id is its own.

    Raises IotaError `bad_manifest` otherwise; nothing is decoded before the signature holds.
    """
    raw = bytes(data)
    body = raw[SIGNATURE_BYTES:]
    if not is_key(key) or not verify(key, raw[:SIGNATURE_BYTES], DOMAIN + body):
        raise _bad(f"the run manifest ({len(raw)} bytes) is not signed by the orchestrator {key[:12]}")
    try:
        version = msgspec.msgpack.decode(body, type=_Version).version
        if version != VERSION:
            raise _bad(f"the run manifest has version {version}, this software reads version {VERSION}")
        manifest = msgspec.msgpack.decode(body, type=Manifest)
        named = name_run(manifest)
    except msgspec.DecodeError as error:
        raise _bad(f"the run manifest cannot be decoded: {error}") from error
    if named.run != manifest.run or manifest.orchestrator != key or named.checkpoints != manifest.checkpoints:
        raise _bad(f"the run manifest names itself {manifest.run!r}, its content gives {named.run!r}")
    return manifest


def checkpoint_zero(manifest: Manifest, stage: int) -> Checkpoint:
    """Checkpoint 0 of a stage."""
    return msgspec.msgpack.decode(manifest.checkpoints[stage], type=Checkpoint)


def _bad(cause: str) -> IotaError:
    return IotaError("bad_manifest", cause, "Ask the run's operator for the right address, key and software version")
