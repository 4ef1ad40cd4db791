"""Creating a run: reproducible, signed, opened again, and refused when it is another."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from iota.config.load import check, load_run
from iota.config.schema import Manifest, RunConfig
from iota.core.values import sha256
from iota.errors import ConfigError, IotaError
from iota.model.layout import initial_state
from iota.nodes.orchestrator import create
from iota.nodes.orchestrator.create import create_run
from iota.store.blobs import MemoryBlobs
from iota.store.manifest import OBJECT, checkpoint_zero, read_manifest, seal_manifest
from iota.store.tokens import ByteTokenizer, TokenReader
from iota.wire.keys import Identity

ME = Identity.new(b"m" * 32)
TINY = load_run(Path(__file__).parent.parent / "recipes" / "tiny.toml")


def changed(config: RunConfig, section: str = "", **values: object) -> RunConfig:
    if not section:
        return msgspec.structs.replace(config, **values)
    part = msgspec.structs.replace(getattr(config, section), **values)
    return msgspec.structs.replace(config, **{section: part})


async def make(config: RunConfig = TINY, blobs: MemoryBlobs | None = None, now: float = 1.5) -> Manifest:
    return await create_run(config, MemoryBlobs() if blobs is None else blobs, ME.key, now, ME.sign)


async def test_a_run_is_created_whole_and_the_same_every_time() -> None:
    blobs, lines = MemoryBlobs(), []
    manifest = await create_run(TINY, blobs, ME.key, 1.5, ME.sign, lines.append)
    assert manifest == read_manifest(await blobs.get(OBJECT), ME.key) == await make()
    assert manifest.run.startswith("tiny-") and len(manifest.run) == len("tiny-") + 8
    assert manifest.config == check(TINY) and manifest.cuts == ((0, 1), (1, 2), (2, 3))
    assert manifest.created == 1.5 and manifest.orchestrator == ME.key and manifest.bytes_per_token == 1.0
    assert any("stage 2" in line for line in lines) and manifest.run in lines[-1]
    assert (await make(now=2.5)).run != manifest.run


async def test_checkpoint_zero_is_the_initial_state_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "PIECE_BYTES", 20_000)
    blobs = MemoryBlobs()
    manifest = await make(blobs=blobs)
    for stage, cut in enumerate(manifest.cuts):
        checkpoint = checkpoint_zero(manifest, stage)
        assert (checkpoint.run, checkpoint.epoch, checkpoint.stage, checkpoint.t) == (manifest.run, 0, stage, 0)
        assert checkpoint.parameters == manifest.parameters[stage] and len(checkpoint.pieces) > 2
        state, place = [], 0
        for piece in checkpoint.pieces:
            data = await blobs.get(piece.object, piece.offset, piece.offset + 4 * (piece.stop - piece.start))
            assert piece.part == "weights" and piece.start == place and sha256(data) == piece.digest
            state.append(np.frombuffer(data, dtype="<f4"))
            place = piece.stop
        assert place == checkpoint.parameters
        assert np.array_equal(np.concatenate(state), initial_state(manifest.config, stage, cut, TINY.seed))


async def test_the_corpus_is_split_and_readable_through_the_manifest() -> None:
    blobs = MemoryBlobs()
    manifest = await make(blobs=blobs)
    train, held = TokenReader.train(manifest, blobs.get), TokenReader.heldout(manifest, blobs.get)
    assert held.tokens == TINY.data.heldout_tokens
    assert 150_000 < train.tokens < 200_000
    assert manifest.tokenizer_digest == ByteTokenizer.digest
    ids, labels = await train.batch_windows(0)
    assert ids.shape == (2, 32) and (ids[:, 1:] == labels[:, :-1]).all()
    everything = (await train.read(0, train.tokens)).tobytes()
    held_text = (await held.read(0, held.tokens)).tobytes()
    assert held_text[100:160] not in everything
    assert manifest.trigram_loss is not None and 1.0 < manifest.trigram_loss < 3.5


async def test_creating_again_opens_and_another_configuration_is_refused_with_both_values() -> None:
    blobs = MemoryBlobs()
    manifest = await make(blobs=blobs)
    before = dict(blobs._objects)
    assert await make(blobs=blobs, now=99.0) == manifest
    same = changed(changed(TINY, stop="epochs >= 30", folder="elsewhere"), "swarm", port=9000, miners=1)
    assert await make(same, blobs) == manifest
    for other, text in [
        (changed(TINY, seed=7), "seed is 0 there, 7 in the run file"),
        (changed(TINY, "train", lr=0.5), "train.lr is 0.001 there, 0.5 in the run file"),
        (changed(TINY, "model", width=64), "model.width is 32 there, 64 in the run file"),
        (changed(TINY, "train", lr_tokens=5000), "train.lr_tokens is 100000 there, 5000 in the run file"),
    ]:
        with pytest.raises(ConfigError, match=text):
            await make(other, blobs)
    assert dict(blobs._objects) == before


async def test_a_new_stop_rule_does_not_change_the_learning_rate_horizon() -> None:
    blobs = MemoryBlobs()
    short = changed(changed(TINY, stop="tokens >= 50000"), "train", lr_tokens=0)
    assert (await make(short, blobs)).config.train.lr_tokens == 50_000
    opened = await make(changed(short, stop="tokens >= 90000"), blobs)
    assert opened.config.train.lr_tokens == 50_000
    with pytest.raises(ConfigError, match="lr_tokens is 50000 there, 70000"):
        await make(changed(changed(short, stop="tokens >= 90000"), "train", lr_tokens=70_000), blobs)


async def test_a_killed_creation_leaves_no_run_and_is_simply_repeated() -> None:
    class Full(MemoryBlobs):
        async def put(self, key, parts):  # type: ignore[no-untyped-def]
            if key.startswith("checkpoints/0/1"):
                raise IotaError("disk_full", "no space")
            await super().put(key, parts)

    blobs = Full()
    with pytest.raises(IotaError, match="no space"):
        await make(blobs=blobs)
    assert await blobs.size(OBJECT) is None
    rest = MemoryBlobs()
    rest._objects.update(blobs._objects)
    assert await make(blobs=rest) == await make()


async def test_a_manifest_that_was_touched_is_refused() -> None:
    blobs = MemoryBlobs()
    manifest = await make(blobs=blobs)
    data = await blobs.get(OBJECT)
    other = Identity.new(b"o" * 32)
    flipped = [data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :] for n in (0, 63, 64, 200, len(data) - 1)]
    for bad in [*flipped, data[:-1], data + b"\0", b"", data[:64]]:
        with pytest.raises(IotaError) as caught:
            read_manifest(bad, ME.key)
        assert caught.value.code == "bad_manifest"
    for key in (other.key, "", ME.key.upper()):
        with pytest.raises(IotaError, match="not signed by"):
            read_manifest(data, key)
    # Rightly signed, but not what it says it is: another run's id, another version, another orchestrator, no manifest.
    for lie in [
        msgspec.structs.replace(manifest, run="tiny-00000000"),
        msgspec.structs.replace(manifest, created=3.0),
        msgspec.structs.replace(manifest, version=2),
        msgspec.structs.replace(manifest, checkpoints=(*manifest.checkpoints[:1], b"\xc1")),
    ]:
        with pytest.raises(IotaError) as caught:
            read_manifest(seal_manifest(lie, ME.sign), ME.key)
        assert caught.value.code == "bad_manifest"
    with pytest.raises(IotaError, match="names itself"):
        read_manifest(seal_manifest(manifest, other.sign), other.key)


async def test_a_run_of_another_key_is_not_opened() -> None:
    blobs = MemoryBlobs()
    await make(blobs=blobs)
    other = Identity.new(b"o" * 32)
    with pytest.raises(IotaError, match="not signed by"):
        await create_run(TINY, blobs, other.key, 1.5, other.sign)


async def test_too_little_text_says_how_much_there_is_and_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words only")
    with pytest.raises(ConfigError, match=r"18 training tokens .* less than one window of model.sequence \+ 1 = 33"):
        await make(changed(TINY, "data", source=str(tmp_path)))
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"a few words only {n} " * 10)
    with pytest.raises(ConfigError, match=r"data.heldout_tokens = 2048.*Raise data.heldout_share"):
        await make(changed(TINY, "data", source=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"stages\.count"):
        await make(changed(TINY, "stages", count=9))


async def test_another_tokenizer_goes_into_the_store_and_has_no_byte_yardstick(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.train_from_iterator([("the merge of the stage " * 50)], trainer)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    config = changed(changed(TINY, "data", tokenizer=str(path)), "model", vocabulary=300)
    blobs = MemoryBlobs()
    manifest = await make(config, blobs)
    assert manifest.trigram_loss is None and manifest.bytes_per_token > 1.0
    assert manifest.train_shards[0].dtype == "uint16"
    assert await blobs.get("data/tokenizer.json") == path.read_bytes()
    assert sha256(path.read_bytes()) == manifest.tokenizer_digest


def test_creation_needs_no_torch() -> None:
    code = "import sys, iota.nodes.orchestrator.create; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
