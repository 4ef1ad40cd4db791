"""Identities, key files, locks, nonces and the table of codes."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iota.errors import IotaError, Refused
from iota.wire.codes import CODES, refused, status_of
from iota.wire.keys import Identity, fingerprint, is_key, verify
from iota.wire.locks import lock_folder, lock_key
from iota.wire.nonces import NonceBook, NonceSource, Replayed

SOURCE = Path(__file__).parent.parent / "src" / "iota"
SEED = bytes(range(32))


def test_rfc8032_vector() -> None:
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    identity = Identity.new(seed)
    assert identity.key == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    signature = identity.sign(b"")
    assert signature.hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065")
    assert verify(identity.key, signature, b"")
    assert not verify(identity.key, signature, b"x")
    assert not verify(identity.key.upper(), signature, b""), "another spelling is not the same key"
    assert (
        not verify("00" * 32, signature, b"")
        and not verify("zz", signature, b"")
        and not verify(identity.key, b"", b"")
    )


def test_only_canonical_hex_is_a_key() -> None:
    key = Identity.new(SEED).key
    assert is_key(key)
    for bad in (key.upper(), key[:-1], key + "0", " " + key[1:], key[:-1] + "\n", "", "é" * 64):
        assert not is_key(bad)
    assert len(fingerprint(key)) == 32


def test_key_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    identity = Identity.new(SEED)
    identity.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load(path).key == identity.key
    assert os.listdir(path.parent) == ["key"], "no temporary file stays"
    before = path.read_bytes()
    with pytest.raises(IotaError) as raised:
        Identity.new(bytes(32)).save(path)
    assert raised.value.code == "key_exists" and path.read_bytes() == before
    assert os.listdir(path.parent) == ["key"]
    assert SEED.hex() not in repr(identity)


def test_damaged_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    Identity.new(SEED).save(path)
    good = path.read_bytes()
    flipped = good.replace(SEED.hex()[:8].encode(), b"11111111")
    cases = (
        b"",
        good[:-20],
        b"\xff\xfe",
        flipped,
        good.replace(b"iota-key-1", b"iota-key-9"),
        good.replace(b'"key"', b'"kay"'),
    )
    for damaged in cases:
        path.write_bytes(damaged)
        with pytest.raises(IotaError) as raised:
            Identity.load(path)
        assert raised.value.code == "bad_key" and str(path) in raised.value.cause
        assert SEED.hex() not in str(raised.value), "the secret never enters an error text"
    path.write_bytes(good)
    path.chmod(0o644)
    with pytest.raises(IotaError, match="chmod 600"):
        Identity.load(path)
    with pytest.raises(IotaError) as raised:
        Identity.load(tmp_path / "none")
    assert raised.value.code == "no_key"


def test_save_into_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IotaError) as raised:
        Identity.new(SEED).save(tmp_path / "file" / "key")
    assert raised.value.code in ("no_disk", "key_exists") and (tmp_path / "file").read_bytes() == b""


def test_locks_exclude_and_name_the_holder(tmp_path: Path) -> None:
    key = Identity.new(SEED).key
    with lock_folder(tmp_path / "node"):
        with pytest.raises(IotaError, match=f"process {os.getpid()}") as raised:
            lock_folder(tmp_path / "node")
        assert raised.value.code == "folder_in_use"
        with lock_folder(tmp_path / "other"):
            pass
    lock_folder(tmp_path / "node").release()
    with lock_key(key, tmp_path / "keys"), pytest.raises(IotaError, match=key[:16]) as raised:
        lock_key(key, tmp_path / "keys")
    assert raised.value.code == "key_in_use"


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        f"from iota.wire.locks import lock_folder as lock; lock({str(tmp_path)!r}); print('held', flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        # The lock object was dropped, but only `release` or the end of the process gives the lock back.
        with pytest.raises(IotaError, match=f"process {child.pid}"):
            lock_folder(tmp_path)
    finally:
        child.kill()
        child.communicate()
    lock_folder(tmp_path).release()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50)), max_size=60), st.integers(0, 60))
def test_nonces_only_grow_also_across_restart(messages: list[tuple[str, int]], cut: int) -> None:
    book, greatest = NonceBook(), {"a": -1, "b": -1}
    for number, (sender, nonce) in enumerate(messages):
        if number == cut:
            fresh = NonceBook()
            fresh.restore(book.export())
            book = fresh
        if nonce > greatest[sender]:
            book.check(sender, nonce, 0.0)
            book.accept(sender, nonce, 0.0)
            greatest[sender] = nonce
        else:
            with pytest.raises(Replayed) as raised:
                book.check(sender, nonce, 0.0)
            assert raised.value.last == greatest[sender]


def test_nonces_far_ahead_and_pruning() -> None:
    book = NonceBook(window=60.0, capacity=3)
    with pytest.raises(Refused) as raised:
        book.check("a", int((1000 + 86_401) * 1e9), 1000.0)
    assert raised.value.code == "nonce_ahead" and len(book) == 0
    for sender in "abc":
        book.accept(sender, 1, 1000.0)
    with pytest.raises(Refused) as raised:
        book.check("d", 1, 1100.0)
    assert raised.value.code == "busy", "memory is bounded"
    book.check("a", 2, 1100.0)
    assert book.prune(1119.0, ()) == 0, "a copy of the last message could still be inside the window"
    assert book.prune(1121.0, {"a"}) == 2 and book.last("a") == 1 and book.last("b") == -1
    book.restore({"a": (0, 0.0), "z": (5, 0.0)})
    assert book.last("a") == 1 and book.last("z") == 5


def test_capacity_makes_room_by_itself() -> None:
    book = NonceBook(window=60.0, capacity=2)
    book.accept("a", 1, 0.0)
    book.accept("b", 1, 500.0)
    book.check("c", 1, 500.0)
    assert book.export() == {"b": (1, 500.0)}


def test_nonce_source() -> None:
    clock = [10.0]
    source = NonceSource(lambda: clock[0])
    first, second = source.next(), source.next()
    assert first == 10_000_000_000 and second == first + 1
    clock[0] = 5.0
    assert source.next() == second + 1, "a clock set back does not matter"
    assert source.advance(second + 100) and source.next() == second + 101
    assert not source.advance(2**62) and source.next() == second + 102


def test_every_code_is_in_the_table_and_every_code_of_the_table_is_used() -> None:
    used = set()
    for path in [*(SOURCE / "wire").glob("*.py"), *(SOURCE / "net").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("refused", "Refused")
            ):
                code = node.args[0]
                if isinstance(code, ast.Constant):
                    used.add(code.value)
                else:
                    assert path.name in ("codes.py",), (
                        f"{path}:{node.lineno} refuses with a code that cannot be read off"
                    )
    assert used <= set(CODES), used - set(CODES)
    everywhere = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "codes.py")
    assert all(f'"{code}"' in everywhere for code in CODES)
    for code, entry in CODES.items():
        assert entry.meaning.endswith(".") and entry.remedy.endswith(".") and 400 <= entry.status < 600, code


def test_refusals_have_bounded_texts() -> None:
    error = refused("clock", "x" * 10_000)
    assert len(error.cause) == 2000 and error.remedy == CODES["clock"].remedy
    assert status_of("bad_signature") == 401 and status_of("some_later_code") == 409
