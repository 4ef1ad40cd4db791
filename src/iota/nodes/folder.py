"""Where a run lies on its own machine, and the keys it is created with.

RUN/run.toml            the configuration that `iota up` started it with
RUN/join.url            where peers find it
RUN/operator.key        may pause, resume, stop, ban and allow (0600); may be moved elsewhere
RUN/operator.public     its public half, part of the run's configuration
RUN/history.json        what the report is made of
RUN/orchestrator/       key, secret (0600), public.key, journal.sqlite
RUN/blobs/              objects of the blob service
RUN/miner-N/, validator-N/, logs/   what `iota up` starts
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from iota.config.schema import RunConfig
from iota.core.values import Key
from iota.errors import IotaError
from iota.net.address import format_join
from iota.nodes.effects import Entropy
from iota.store.files import write_atomic
from iota.wire.keys import Identity, is_key

SECRET_BYTES = 32


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run's folder."""

    path: Path

    @property
    def orchestrator(self) -> Path:
        return self.path / "orchestrator"

    @property
    def public_key(self) -> Path:
        return self.orchestrator / "public.key"

    @property
    def journal(self) -> Path:
        return self.orchestrator / "journal.sqlite"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def run_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def join_url(self) -> Path:
        return self.path / "join.url"

    @property
    def history(self) -> Path:
        return self.path / "history.json"

    @property
    def operator_key(self) -> Path:
        return self.path / "operator.key"

    @property
    def operator_public(self) -> Path:
        return self.path / "operator.public"


def folder_of(config: RunConfig) -> RunFolder:
    """The run's folder: as configured, else runs/<name>."""
    return RunFolder(Path(config.folder) if config.folder else Path("runs") / config.name)


def public_url(config: RunConfig) -> str:
    """Where peers reach the orchestrator."""
    return config.swarm.public_url or f"http://{config.swarm.host}:{config.swarm.port}"


def blob_url(config: RunConfig) -> str:
    """Where peers reach the blob service."""
    return config.swarm.blob_url or f"http://{config.swarm.host}:{config.swarm.blob_port}"


@dataclass(frozen=True)
class Keys:
    """What a run is created with. `secret` (hex) keys the orchestrator's share of every draw; `operator` is public."""

    identity: Identity
    secret: str
    operator: Key


def prepare(folder: RunFolder, config: RunConfig, entropy: Entropy) -> Keys:
    """Make what is missing of keys, secret and join URL; what is there is kept. Raises IotaError `bad_key`,
    `key_exposed`, `no_disk`."""
    identity = load_or_new(folder.orchestrator / "key", entropy)
    secret = _secret(folder.orchestrator / "secret", entropy)
    operator = _operator(folder, entropy)
    _write(folder.public_key, identity.key + "\n")
    _write(folder.join_url, format_join(public_url(config), identity.key) + "\n")
    return Keys(identity, secret, operator)


def load_or_new(path: Path, entropy: Entropy) -> Identity:
    """The identity in a key file, made when there is none."""
    if not path.exists():
        Identity.new(entropy(32)).save(path)
    return Identity.load(path)


def with_operator(config: RunConfig, operator: Key) -> RunConfig:
    """The configuration with the run's own operator among those it names."""
    if operator in config.admit.operators:
        return config
    admit = msgspec.structs.replace(config.admit, operators=(*config.admit.operators, operator))
    return msgspec.structs.replace(config, admit=admit)


def read_public_key(folder: RunFolder) -> Key | None:
    """The orchestrator's public key; None while nobody created the run. Raises IotaError `bad_key`."""
    try:
        text = folder.public_key.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IotaError("bad_key", f"cannot read {folder.public_key}: {error.strerror}") from error
    if not is_key(text):
        raise IotaError(
            "bad_key", f"{folder.public_key} holds no key", "Start `iota orchestrator RUN.toml`; it writes the file."
        )
    return text


def _operator(folder: RunFolder, entropy: Entropy) -> Key:
    """The public half stays when the key itself was moved to a safer place."""
    if folder.operator_public.exists() and not folder.operator_key.exists():
        text = folder.operator_public.read_text(encoding="ascii", errors="replace").strip()
        if is_key(text):
            return text
    key = load_or_new(folder.operator_key, entropy).key
    _write(folder.operator_public, key + "\n")
    return key


def _secret(path: Path, entropy: Entropy) -> str:
    if not path.exists():
        _write(path, entropy(SECRET_BYTES).hex() + "\n", mode=0o600)
    try:
        text = path.read_text(encoding="ascii").strip()
        good = len(bytes.fromhex(text)) == SECRET_BYTES
    except OSError as error:
        raise IotaError("bad_key", f"cannot read the run's secret {path}: {error.strerror}") from error
    except ValueError:
        good = False
    if not good:
        raise IotaError("bad_key", f"the run's secret {path} is damaged", "Restore it from a copy of the run's folder.")
    return text


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a small file, unless it says so already."""
    data = text.encode("ascii")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() == data:
            return
    except OSError as error:
        raise IotaError(
            "no_disk", f"cannot write {path}: {error.strerror}", "Check the folder's permissions."
        ) from error
    write_atomic(path, [data], mode=mode)
    if mode == 0o600:
        os.chmod(path, mode)
