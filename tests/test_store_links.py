"""Links: what one allows, and that nothing else gets through."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from iota.errors import IotaError, Refused
from iota.store.links import Link, check_length, check_link, sign_link


class Signer:
    def __init__(self, seed: int = 1) -> None:
        self._key = SigningKey(bytes([seed]) * 32)
        self.key = bytes(self._key.verify_key).hex()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data).signature


SIGNER = Signer()
BASE = "http://127.0.0.1:8401"
GET = sign_link(SIGNER, BASE, "GET", "run/e1/s0.bin", 100.0)
PUT = sign_link(SIGNER, BASE + "/", "PUT", "run/up", 100.25, length=12, sha256="ab" * 32)


def refusal(method: str, url: str, now: float = 0.0, key: str = SIGNER.key) -> str:
    with pytest.raises(Refused) as caught:
        check_link(key, method, url, now)
    assert caught.value.remedy
    return caught.value.code


def test_what_is_signed_comes_back() -> None:
    assert check_link(SIGNER.key, "GET", GET, 100.0) == Link("GET", "run/e1/s0.bin", 100.0)
    assert check_link(SIGNER.key, "HEAD", GET, 0.0).verb == "GET"
    assert check_link(SIGNER.key, "PUT", PUT, 0.0) == Link("PUT", "run/up", 100.25, 12, "ab" * 32)
    path_qs = PUT.removeprefix(BASE)
    assert path_qs.startswith("/blobs/run/up?")
    assert check_link(SIGNER.key, "PUT", path_qs, 0.0).length == 12
    behind_proxy = sign_link(SIGNER, "https://h/store", "PUT", "k", 5.0, max_length=3)
    assert check_link(SIGNER.key, "PUT", behind_proxy, 0.0).max_length == 3


def test_wrong_verb_expired_forged_and_anonymous() -> None:
    assert [refusal(method, GET) for method in ("PUT", "DELETE", "POST")] == ["wrong_verb"] * 3
    assert [refusal(method, PUT) for method in ("GET", "HEAD")] == ["wrong_verb"] * 2
    assert refusal("GET", GET, 100.001) == "expired"
    assert refusal("GET", GET, float("nan")) == "expired"
    assert refusal("GET", GET, key=Signer(2).key) == "bad_signature"
    anonymous = [
        "",
        "?",
        "/blobs/",
        "/blobs/run/up",
        "/other/run/up?verb=GET",
        GET.partition("&sig=")[0],
        GET + "&sig=" + "0" * 128,
    ]
    assert [refusal("GET", url) for url in anonymous] == ["bad_signature"] * len(anonymous)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("verb=PUT", "verb=GET"),
        ("expires=100.250", "expires=999.250"),
        ("length=12", "length=13"),
        ("&length=12", ""),
        ("length=12", "max=12"),
        ("sha256=" + "ab" * 32, "sha256=" + "cd" * 32),
        ("&sha256=" + "ab" * 32, ""),
        ("run/up", "run/up2"),
        ("run/up", "run/../up"),
        ("run/up", "run%2Fup"),
        ("&sig=", "&extra=1&sig="),
        ("&length=12", "&length=12&length=12"),
    ],
)
def test_nothing_about_a_link_can_be_changed(old: str, new: str) -> None:
    assert old in PUT
    assert refusal("PUT", PUT.replace(old, new)) == "bad_signature"
    assert refusal("GET", PUT.replace(old, new)) == "bad_signature"


@given(st.integers(0, len(PUT) - 1), st.sampled_from(string.ascii_lowercase + string.digits + "&=/?.%"))
def test_any_changed_character_after_the_base_is_refused(at: int, char: str) -> None:
    start = len(BASE)
    if at < start + len("/blobs/") or PUT[at] == char:
        return
    assert refusal("PUT", PUT[:at] + char + PUT[at + 1 :]) in ("bad_signature", "wrong_verb", "expired")


@given(st.text(max_size=200))
def test_garbage_is_refused_never_an_accident(text: str) -> None:
    assert refusal("GET", text) == "bad_signature"
    assert refusal("GET", "/blobs/x?" + text) == "bad_signature"


def test_what_cannot_be_signed() -> None:
    with pytest.raises(ValueError, match="length"):
        sign_link(SIGNER, BASE, "PUT", "k", 1.0)
    with pytest.raises(ValueError, match="GET or PUT"):
        sign_link(SIGNER, BASE, "DELETE", "k", 1.0)
    with pytest.raises(IotaError) as caught:
        sign_link(SIGNER, BASE, "GET", "../k", 1.0)
    assert caught.value.code == "bad_key"


def test_lengths() -> None:
    check_length(Link("PUT", "k", 1.0, length=3), 3, 10)
    check_length(Link("PUT", "k", 1.0, max_length=3), 0, 10)
    for link, length, code in [
        (Link("PUT", "k", 1.0, length=3), 2, "wrong_length"),
        (Link("PUT", "k", 1.0, length=30), 30, "too_large"),
        (Link("PUT", "k", 1.0, max_length=3), 4, "too_large"),
        (Link("PUT", "k", 1.0, max_length=30), 11, "too_large"),
    ]:
        with pytest.raises(IotaError) as caught:
            check_length(link, length, 10)
        assert caught.value.code == code
