"""A run's folder without a swarm: created from a little text, its stages "merged" to weights made up here."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from iota.config.load import load_run
from iota.config.schema import Manifest, RunConfig
from iota.core.values import Checkpoint, Piece, sha256
from iota.model.layout import Layout, initial_state
from iota.nodes import checkpoint as run_folder
from iota.nodes.orchestrator.create import create_run
from iota.store.blobs import FolderBlobs
from iota.wire.keys import Identity

TINY = load_run(Path(__file__).parent.parent / "recipes" / "tiny.toml")
ME = Identity.new(b"e" * 32)


def changed(config: RunConfig, section: str = "", **values: Any) -> RunConfig:
    """Another value in a section, or at the top."""
    if not section:
        return msgspec.structs.replace(config, **values)
    part = msgspec.structs.replace(getattr(config, section), **values)
    return msgspec.structs.replace(config, **{section: part})


def run_config(text: Path, codec: str = "bottleneck", wire: str = "bfloat16", **model: Any) -> RunConfig:
    """Three stages of one block over documents that are written into the folder `text`."""
    text.mkdir(exist_ok=True)
    for i in range(40):
        rows = [f"Document {i}, line {j}: the {i * j} quick foxes." for j in range(30)]
        (text / f"{i}.txt").write_text("\n".join(rows))
    config = changed(changed(TINY, seed=11), "stages", codec=codec, channels=4, wire_dtype=wire)
    config = changed(config, "data", source=str(text), tokenizer="bytes", heldout_share=0.2, heldout_tokens=512)
    return changed(config, "model", **({"vocabulary": 256, "sequence": 32} | model))


async def create(folder: Path, config: RunConfig) -> Manifest:
    return await create_run(config, FolderBlobs(folder / "blobs", durable=False), ME.key, 1.5, ME.sign)


async def make_run(folder: Path, codec: str = "bottleneck", wire: str = "bfloat16", **model: Any) -> Manifest:
    """A created run of a text that lies beside it."""
    return await create(folder, run_config(folder.parent / "text", codec, wire, **model))


def loud_state(config: RunConfig, stage: int, cut: tuple[int, int]) -> np.ndarray:
    """Weights that give logits of order one, and norms that are not one."""
    layout, flat = Layout.for_stage(config, stage, cut), initial_state(config, stage, cut, 7)
    for name, view in layout.views(flat).items():
        if view.ndim > 1:
            view *= 8
        else:
            view += np.random.default_rng(len(name)).standard_normal(view.shape, dtype=np.float32) / 5
    return flat


async def merge(folder: Path, manifest: Manifest, epoch: int = 3) -> list[np.ndarray]:
    """Pretend a merge: new weights of every stage in shards that hold weights and moments one after another."""
    blobs = FolderBlobs(folder / "blobs", durable=False)
    states, checkpoints = [], []
    for stage, size in enumerate(manifest.parameters):
        draws = np.random.default_rng(stage)
        parts = {name: draws.standard_normal(size, dtype=np.float32) * np.float32(0.05) for name in ("m", "v")}
        parts["weights"] = loud_state(manifest.config, stage, manifest.cuts[stage])
        edges, pieces = [0, size // 3, size // 2, size], []
        for shard, (low, high) in enumerate(pairwise(edges)):
            name = f"merge/{epoch}/{stage}/{shard}/abc.bin"
            buffers = {part: values[low:high].tobytes() for part, values in parts.items()}
            await blobs.put(name, list(buffers.values()))
            for i, (part, data) in enumerate(buffers.items()):
                pieces.append(Piece(part, low, high, name, i * 4 * (high - low), sha256(data)))
        pieces.sort(key=lambda piece: (piece.part, piece.start))
        checkpoints.append(Checkpoint(manifest.run, epoch, stage, size, 7, tuple(pieces)))
        states.append(parts["weights"])
    run_folder.write_checkpoints(folder, checkpoints[::-1])
    assert run_folder.read_checkpoints(folder, manifest.run) == checkpoints
    return states


async def merged_run(folder: Path, codec: str = "bottleneck", wire: str = "bfloat16", **model: Any) -> Manifest:
    """A run with merged weights."""
    manifest = await make_run(folder, codec, wire, **model)
    await merge(folder, manifest)
    return manifest


def bpe_tokenizer(path: Path, vocabulary: int = 300) -> None:
    """A byte-level BPE tokenizer as a `tokenizers` JSON file."""
    import tokenizers as library

    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.train_from_iterator(["the merge of the stage of the quick foxes " * 50], trainer)
    made.save(str(path))
