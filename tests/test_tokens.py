"""Tokenizers, token shards, and the windows that a sample names."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from iota.config.schema import DataConfig, ModelConfig, RunConfig, TokenShard, TrainConfig
from iota.errors import ConfigError, IotaError
from iota.model.data import sample_windows
from iota.store.blobs import MemoryBlobs
from iota.store.tokens import ByteTokenizer, ShardWriter, TokenReader, open_tokenizer, token_dtype

CONFIG = RunConfig(name="a", seed=5, model=ModelConfig(sequence=8), train=TrainConfig(batch=3))


async def sharded(
    tokens: np.ndarray, dtype: str = "uint16", size: int = 50
) -> tuple[MemoryBlobs, tuple[TokenShard, ...]]:
    blobs = MemoryBlobs()
    writer = ShardWriter(blobs, "train", dtype, size)
    for start in range(0, tokens.size, 33):
        await writer.add(tokens[start : start + 33].astype(np.uint32))
    return blobs, await writer.finish()


# ----------------------------------------------------------------------------------------------------- tokenizers


def test_bytes_are_their_own_ids_and_documents_end_with_a_separator_no_text_contains() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("né\0w\n\n")
    assert ids.tolist() == [*"néw".encode(), 10, 0]
    assert tokenizer.decode(ids.tolist()) == "néw\n"
    assert tokenizer.encode("").tolist() == [10, 0]
    assert tokenizer.encode("\ud800").max() < 256


def test_the_vocabulary_must_hold_every_id(tmp_path: Path) -> None:
    assert open_tokenizer(DataConfig(), 256).size == 256
    with pytest.raises(ConfigError, match=r"model.vocabulary = 255 is too small.*largest id is 255"):
        open_tokenizer(DataConfig(), 255)
    library = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    model = library.models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2, "</s>": 300}, unk_token="[UNK]")
    made = library.Tokenizer(model)
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(path))
    data = DataConfig(tokenizer=str(path))
    tokenizer = open_tokenizer(data, 301)
    assert tokenizer.encode("hello world what").tolist() == [1, 2, 0, 300]
    assert tokenizer.decode([1, 2]) == "hello world" and tokenizer.file == path.read_bytes()
    assert tokenizer.digest != open_tokenizer(DataConfig(), 256).digest
    with pytest.raises(ConfigError, match=r"largest id is 300\. Write model.vocabulary = 301"):
        open_tokenizer(data, 300)


def test_tokenizer_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        open_tokenizer(DataConfig(tokenizer=str(tmp_path / "no.json")), 256)
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="no tokenizers JSON file"):
        open_tokenizer(DataConfig(tokenizer=str(tmp_path / "bad.json")), 256)


def test_dtype_is_the_smallest_that_fits() -> None:
    assert [token_dtype(n) for n in (256, 257, 65_536, 65_537)] == ["uint8", "uint16", "uint16", "uint32"]


# --------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(("dtype", "top"), [("uint8", 2**8), ("uint16", 2**16), ("uint32", 2**32)])
async def test_what_is_written_is_read_back_in_any_range(dtype: str, top: int) -> None:
    tokens = np.random.default_rng(1).integers(0, top, 237)
    blobs, shards = await sharded(tokens, dtype)
    assert [shard.tokens for shard in shards] == [50, 50, 50, 50, 37]
    assert [shard.object for shard in shards][:2] == ["data/train-0000.bin", "data/train-0001.bin"]
    reader = TokenReader(shards, blobs.get, CONFIG)
    assert reader.tokens == 237 and reader.windows == 29
    for start, stop in [(0, 237), (0, 0), (49, 51), (50, 100), (10, 201), (236, 237), (237, 237)]:
        assert (await reader.read(start, stop)).tolist() == tokens[start:stop].tolist()
    for start, stop in [(-1, 3), (0, 238), (5, 4)]:
        with pytest.raises(ValueError, match="corpus of 237"):
            await reader.read(start, stop)


async def test_a_sample_is_its_windows_and_labels_are_the_next_tokens() -> None:
    tokens = np.arange(237)
    blobs, shards = await sharded(tokens)
    reader = TokenReader(shards, blobs.get, CONFIG)
    for sample in (0, 1, 9, 10, 1_000_000):
        ids, labels = await reader.batch_windows(sample)
        assert ids.dtype == labels.dtype == np.int64 and ids.shape == labels.shape == (3, 8)
        assert (labels == ids + 1).all() and (ids[:, 0] % 8 == 0).all()
        assert (ids[:, 0] // 8).tolist() == sample_windows(5, 3, 29, sample)
    batches = [await reader.batch_windows(sample) for sample in range(29)]
    seen = Counter(int(first) for ids, _ in batches for first in ids[:, 0])
    assert set(seen.values()) == {3} and len(seen) == 29  # three passes over 29 windows


async def test_held_out_windows_come_in_order_without_overlap() -> None:
    blobs, shards = await sharded(np.arange(100))
    batches = [batch async for batch in TokenReader(shards, blobs.get, CONFIG).in_order(5)]
    assert [ids.shape[0] for ids, _ in batches] == [5, 5, 2]
    assert np.concatenate([ids.ravel() for ids, _ in batches]).tolist() == list(range(96))
    assert np.concatenate([labels.ravel() for _, labels in batches]).tolist() == list(range(1, 97))


async def test_a_shard_is_fetched_once_also_by_many_at_a_time() -> None:
    blobs, shards = await sharded(np.arange(237))
    fetched: list[str] = []

    async def fetch(key: str) -> bytes:
        fetched.append(key)
        await asyncio.sleep(0)
        return await blobs.get(key)

    reader = TokenReader(shards, fetch, CONFIG)
    await asyncio.gather(*(reader.batch_windows(sample) for sample in range(10)))
    assert sorted(fetched) == sorted({shard.object for shard in shards})


async def test_other_bytes_than_the_manifests_are_refused_by_name_and_not_kept() -> None:
    blobs, shards = await sharded(np.arange(237))
    good = await blobs.get(shards[1].object)
    for bad in (good[:-2], good[:-2] + b"\xff\xff", good + b"\0\0", b""):
        await blobs.put(shards[1].object, [bad])
        reader = TokenReader(shards, blobs.get, CONFIG)
        assert (await reader.read(0, 50)).size == 50
        with pytest.raises(IotaError, match=r"data/train-0001\.bin") as caught:
            await reader.read(40, 60)
        assert caught.value.code == "corrupt"
        await blobs.put(shards[1].object, [good])
        assert (await reader.read(40, 60)).tolist() == list(range(40, 60))
    lying = (shards[0], msgspec.structs.replace(shards[1], tokens=49))
    with pytest.raises(IotaError, match="digest"):
        await TokenReader(lying, blobs.get, CONFIG).read(50, 60)


async def test_a_folder_keeps_shards_across_processes_and_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    blobs, shards = await sharded(np.arange(237))
    fetched: list[str] = []

    async def fetch(key: str) -> bytes:
        fetched.append(key)
        return await blobs.get(key)

    assert (await TokenReader(shards, fetch, CONFIG, tmp_path).read(0, 237)).tolist() == list(range(237))
    assert len(fetched) == 5
    assert (await TokenReader(shards, fetch, CONFIG, tmp_path).read(0, 237)).tolist() == list(range(237))
    assert len(fetched) == 5
    (tmp_path / f"{shards[2].digest}.bin").write_bytes(b"damaged")
    assert (await TokenReader(shards, fetch, CONFIG, tmp_path).read(0, 237)).tolist() == list(range(237))
    assert fetched[5:] == [shards[2].object]
