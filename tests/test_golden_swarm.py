"""Golden (2): plain PyTorch that reads the event log reproduces a swarm's merged weights; and golden (1) through the
whole protocol: one miner a stage, synchronous, equals one process bit for bit."""

import asyncio

import numpy as np
import pytest
import torch

from iota.core.machine import events as ev
from iota.model.data import ids_and_labels, sample_windows
from reference_replay import Run
from swarm_case import initial, run_swarm, tiny, train_tokens, weights
from test_model_golden import PlainModel


def reference(swarm) -> Run:
    torch.manual_seed(0)
    tokens = torch.from_numpy(train_tokens(swarm).astype(np.int64))
    start = [torch.from_numpy(array.copy()) for array in initial(swarm)]
    return Run(swarm.manifest.config, swarm.manifest.cuts, start, tokens).fold(swarm.events())


def holds(swarm, key) -> bool:
    """Whether a member has a pass in hand right now."""
    lease = swarm.orchestrator.machine.soft.lease.get(swarm.state.by_key[key])
    return lease is not None and lease.kind in "fbl"


def test_the_event_log_reproduces_the_merged_weights(tmp_path):
    config = tiny(
        stop="epochs >= 3",
        stages=dict(codec="identity", wire_dtype="float32"),
        merge=dict(outer="nesterov", outer_lr=0.7, outer_momentum=0.5, min_batches=6, members=2),
        train=dict(accumulate=2, lr=2e-3, clip=0.5),
        limits=dict(lease=2.0, grace=0.5, poll=1.0, silence=2.0),
    )

    async def death_and_late_joiner(swarm):
        # A miner dies with a pass in hand, after it had some accepted, and comes back under its key.
        victim = swarm.key("miner-5")
        while not swarm.state.member(victim) or swarm.state.member(victim).passes < 2 or not holds(swarm, victim):
            await asyncio.sleep(0.01)
        swarm.crash("miner-5")
        await asyncio.sleep(8.0)
        await swarm.start_node("miner-5")
        while swarm.state.epoch < 2:
            await asyncio.sleep(0.1)
        swarm.names.append("miner-6")
        await swarm.start_node("miner-6")

    swarm = run_swarm(config, tmp_path, death_and_late_joiner, miners=6, validators=0)
    events = swarm.events()
    kinds = [type(e).__name__ for e in events]
    assert "Rerouted" in kinds, "the scenario must re-route a sample"
    late = next(e.number for e in events if isinstance(e, ev.Registered) and e.key == swarm.key("miner-6"))
    assert any(late in e.members for e in events if isinstance(e, ev.Planned)), "the late joiner merged"
    run = reference(swarm)
    merged = [e for e in events if isinstance(e, ev.StageMerged)]
    assert len(merged) == 9 and all(e.merged for e in merged)
    assert {"Passed", "Stepped", "Loaded", "Planned"} <= run.seen
    moved = 0.0
    for e in merged:
        ours = weights(swarm, e.checkpoint)
        theirs = run.merged[e.epoch, e.stage].numpy()
        assert np.abs(ours - theirs).max() <= 1e-6, (e.epoch, e.stage, np.abs(ours - theirs).max())
        moved = max(moved, float(np.abs(ours - initial(swarm)[e.stage]).max()))
    assert moved > 1e-3
    assert all(abs(a - b) < 1e-5 for a, b in run.losses.values())


@pytest.mark.parametrize(("accumulate", "dtype"), [(1, "float32"), (3, "float32"), (2, "bfloat16")])
def test_synchronous_swarm_is_bit_equal_to_one_process(tmp_path, accumulate, dtype):
    config = tiny(
        stop="epochs >= 3",
        stages=dict(codec="identity", wire_dtype="float32"),
        merge=dict(outer="assign", min_batches=18 * accumulate, members=1, epoch_limit=600.0),
        train=dict(accumulate=accumulate, dtype=dtype, pipeline="synchronous", lr=3e-3, clip=0.6),
        data=dict(max_bytes=60_000),
    )
    swarm = run_swarm(config, tmp_path, miners=3, validators=0)
    events, config = swarm.events(), swarm.manifest.config
    plain, tokens = PlainModel(config), train_tokens(swarm)
    last = next(e.number for e in events if isinstance(e, ev.SessionOpened) and e.stage == 2)
    per_step = accumulate * config.train.batch * config.model.sequence
    window, clipped, merged = [], 0, 0
    for e in events:
        if isinstance(e, ev.Passed) and e.kind == "l":
            window.append(e)
        elif isinstance(e, ev.Stepped) and e.number == last:
            assert [p.sample for p in window] == sorted(p.sample for p in window) and len(window) == accumulate
            for passed in window:
                assert plain.accumulate(*batch(config, tokens, passed.sample)) == passed.loss
            clipped += any(norm > config.train.clip for norm in plain.step(accumulate, per_step))
            window = []
        elif isinstance(e, ev.StageMerged):
            ours = weights(swarm, e.checkpoint)
            assert ours.tobytes() == plain.weights(e.stage).tobytes(), (e.epoch, e.stage)
            assert e.checkpoint.t == plain.t
            merged += 1
    assert merged == 9 and plain.t >= 50 and clipped > 0


def batch(config, tokens, sample):
    length = config.model.sequence
    windows = sample_windows(config.seed, config.train.batch, (len(tokens) - 1) // length, sample)
    return ids_and_labels(np.stack([tokens[w * length : w * length + length + 1] for w in windows]).astype(np.int64))
