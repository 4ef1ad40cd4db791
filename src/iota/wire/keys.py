"""Ed25519 identities: a key pair in a file, signing and verifying.

A key is written as 64 lowercase hex characters everywhere; any other spelling is not a key (a second spelling of the
same key would be a second identity). Whoever signs adds a domain prefix to the data, so that a signature made for one
purpose is never valid for another (messages: `iota.wire.message.DOMAIN`).
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import msgspec
from nacl.bindings import crypto_sign, crypto_sign_open, crypto_sign_seed_keypair
from nacl.exceptions import BadSignatureError

from iota.core.values import Key, sha256
from iota.errors import IotaError

SIGNATURE_BYTES = 64
KEY_HEX = 64
FINGERPRINT_HEX = 32


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's JSON. `key` repeats the public key so that a damaged seed is noticed."""

    format: str
    seed: str
    key: str


_FORMAT = "iota-key-1"


class Identity:
    """A key pair. `key` is the public half; the secret half never leaves this object but for `save`."""

    def __init__(self, seed: bytes) -> None:
        assert len(seed) == 32, "an Ed25519 seed has 32 bytes"
        public, self._secret = crypto_sign_seed_keypair(seed)
        self._seed = seed
        self.key: Key = public.hex()

    def __repr__(self) -> str:
        return f"Identity({self.key[:8]})"

    @classmethod
    def new(cls, seed: bytes) -> Identity:
        """The identity of 32 random bytes (the caller's entropy)."""
        return cls(seed)

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read a key file. Raises IotaError: `no_key` (missing), `bad_key` (damaged, unreadable), `key_exposed` (others
        may read it)."""
        path = Path(path)
        try:
            mode = path.stat().st_mode
            data = path.read_bytes()
        except FileNotFoundError:
            raise IotaError("no_key", f"there is no key file {path}", "Make one with `iota key new`.") from None
        except OSError as error:
            raise IotaError("bad_key", f"cannot read the key file {path}: {error.strerror}") from error
        if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
            raise IotaError("key_exposed", f"others may read the key file {path}", f"Run: chmod 600 {path}")
        try:
            stored = msgspec.json.decode(data, type=_KeyFile)
            seed = bytes.fromhex(stored.seed)
        except ValueError as error:
            raise _damaged(path, str(error)) from None
        if stored.format != _FORMAT:
            raise _damaged(path, f"its format is {stored.format[:40]!r}, not {_FORMAT!r}")
        if len(seed) != 32 or Identity(seed).key != stored.key:
            raise _damaged(path, "the secret and the public half do not fit together")
        return cls(seed)

    def save(self, path: str | Path) -> None:
        """Write the key file with mode 0600, whole or not at all. An existing file is never replaced: IotaError
        `key_exists`; a full disk or a read-only folder: `no_disk`."""
        path = Path(path)
        text = msgspec.json.encode(_KeyFile(_FORMAT, self._seed.hex(), self.key)) + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                _place(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except FileExistsError:
            raise IotaError(
                "key_exists",
                f"there is already a key file {path}",
                "Use it, or choose another path; a lost key is a lost account.",
            ) from None
        except OSError as error:
            raise IotaError("no_disk", f"cannot write the key file {path}: {error.strerror}") from error

    def sign(self, data: bytes) -> bytes:
        """64-byte Ed25519 signature of `data` (which begins with its purpose's domain prefix)."""
        return crypto_sign(data, self._secret)[:SIGNATURE_BYTES]


def _damaged(path: Path, why: str) -> IotaError:
    return IotaError(
        "bad_key", f"the key file {path} is damaged: {why}", "Restore it from a copy; it cannot be repaired."
    )


def _place(temporary: str, path: Path) -> None:
    """Give the finished file its name without ever replacing another, and make the name durable."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without hard links: check and rename; only two simultaneous `save` calls could still collide.
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_key(text: str) -> bool:
    """True for 64 lowercase hex characters and nothing else (`bytes.fromhex` would also take capitals and blanks)."""
    return len(text) == KEY_HEX and not text.strip("0123456789abcdef")


def verify(key: Key, signature: bytes, data: bytes) -> bool:
    """Whether `signature` is `key`'s over exactly `data`. Never raises: what is no key or no signature is False."""
    if not is_key(key) or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        crypto_sign_open(signature + data, bytes.fromhex(key))
    except BadSignatureError:
        return False
    return True


def fingerprint(key: Key) -> str:
    """First 128 bits of SHA-256 over the 32 key bytes, as 32 hex characters: short enough to read out."""
    return sha256(bytes.fromhex(key))[:FINGERPRINT_HEX]
