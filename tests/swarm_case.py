"""Shared by tests that run a whole simulated swarm on a tiny model: its configuration, and running it to the end."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch

from iota.config.load import check, load_run
from iota.config.schema import RunConfig
from iota.sim import loop as virtual
from iota.sim.swarm import Swarm
from iota.store.manifest import checkpoint_zero

TINY = Path(__file__).parent.parent / "recipes/tiny.toml"
replace = msgspec.structs.replace


def tiny(**sections) -> RunConfig:
    """recipes/tiny.toml with changes: stop="...", merge=dict(outer="nesterov"), ..."""
    config = load_run(TINY)
    for name, value in sections.items():
        if isinstance(value, dict):
            value = replace(getattr(config, name), **value)
        config = replace(config, **{name: value})
    return check(config)


def run_swarm(config: RunConfig, folder: Path, script=None, limit: float = 3600.0, **options) -> Swarm:
    """Run a swarm until it is finished; `script(swarm)` runs beside it. Returns it with its final state."""
    torch.set_num_threads(1)

    async def main(loop):
        swarm = Swarm(loop, config, folder, **options)
        await swarm.start()
        beside = loop.create_task(script(swarm)) if script else None
        await swarm.finish()
        if beside is not None:
            await beside
        return swarm

    return virtual.run(main, limit=limit, leaks_ok=True)


def weights(swarm: Swarm, checkpoint, part: str = "weights") -> np.ndarray:
    """One part of a stage's checkpoint from the store's bytes, float32."""
    out = np.zeros(checkpoint.parameters, dtype="<f4")
    for piece in checkpoint.pieces:
        if piece.part == part:
            data = swarm.blobs._objects[piece.object]
            size = 4 * (piece.stop - piece.start)
            out[piece.start : piece.stop] = np.frombuffer(data[piece.offset : piece.offset + size], "<f4")
    return out


def initial(swarm: Swarm) -> list[np.ndarray]:
    return [weights(swarm, checkpoint_zero(swarm.manifest, s)) for s in range(len(swarm.manifest.cuts))]


def train_tokens(swarm: Swarm) -> np.ndarray:
    """The run's training tokens as the manifest's shards hold them."""
    return np.concatenate([np.frombuffer(swarm.blobs._objects[s.object], s.dtype) for s in swarm.manifest.train_shards])
