"""The join URL: where an orchestrator is and by which key it is known, `http://host:port/#<key or fingerprint>`.

The part after `#` is never sent to a server; it is what makes the address trustworthy, so it cannot be left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from iota.core.values import Key
from iota.errors import IotaError
from iota.wire.keys import FINGERPRINT_HEX, KEY_HEX, fingerprint

_ANYWHERE = ("0.0.0.0", "::", "*")
_REMEDY = "Copy the join URL that the orchestrator prints; it looks like http://host:8400/#<key>."


@dataclass(frozen=True)
class JoinAddress:
    """`base` is `http://host:port`; exactly one of `key` (64 hex) and `print` (32 hex, its fingerprint) comes from the
    URL; with the key, `print` is computed and both are set. With a fingerprint alone, `key` is ""."""

    base: str
    key: Key
    print: str

    def matches(self, key: Key) -> bool:
        """Whether `key` is the one this URL names."""
        return key == self.key if self.key else fingerprint(key) == self.print


def parse_join(url: str) -> JoinAddress:
    """Read a join URL. Raises IotaError `bad_url` saying what is wrong with it."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise _bad(url, str(error)) from None
    if parts.scheme not in ("http", "https"):
        raise _bad(url, "it does not begin with http:// or https://")
    if parts.username is not None or parts.query or parts.path not in ("", "/"):
        raise _bad(url, "only host, port and the key after # belong into it")
    base = f"{parts.scheme}://{_host(url, parts.hostname)}" + ("" if port is None else f":{_port(url, port)}")
    mark = parts.fragment.lower()
    if not mark:
        raise _bad(url, "the orchestrator's key after # is missing")
    if mark.strip("0123456789abcdef") or len(mark) not in (KEY_HEX, FINGERPRINT_HEX):
        raise _bad(url, f"the part after # is no key ({KEY_HEX} hex characters) and no fingerprint ({FINGERPRINT_HEX})")
    if len(mark) == KEY_HEX:
        return JoinAddress(base, mark, fingerprint(mark))
    return JoinAddress(base, "", mark)


def format_join(base: str, key: Key) -> str:
    """The join URL of an orchestrator that others reach at `base`; refuses what no peer could use (`parse_join`)."""
    url = f"{base.rstrip('/')}/#{key}"
    parse_join(url)
    return url


def _host(url: str, host: str | None) -> str:
    if not host:
        raise _bad(url, "the host is missing")
    if host in _ANYWHERE:
        raise _bad(url, f"{host} means every address of one's own machine; nobody can connect to it")
    return f"[{host}]" if ":" in host else host


def _port(url: str, port: int) -> int:
    if port == 0:
        raise _bad(url, "port 0 means any free port; nobody can connect to it")
    return port


def _bad(url: str, why: str) -> IotaError:
    return IotaError("bad_url", f"the join URL {url[:200]!r} cannot be used: {why}", _REMEDY)
