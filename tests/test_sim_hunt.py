"""A hunt: random faults over many seeds, each run to its end and checked like every fault test. Not in `make test`.

The same seeds every time, so that a change is to blame when one fails; `HUNT_SEED=n HUNT_RUNS=m` goes on to others, and
`HUNT_SECONDS=s` as far as that takes. What a failing seed shows becomes a named test.
"""

import os
import time

import pytest

from fault_case import small, survive
from iota.sim.effects import draw
from iota.sim.faults import DEFAULT_KINDS, LINK_KINDS, FaultPlan, random_plan
from iota.sim.swarm import ORCHESTRATOR, STORE

FIRST = int(os.environ.get("HUNT_SEED", "0"))
RUNS = int(os.environ.get("HUNT_RUNS", "12"))
SECONDS = float(os.environ.get("HUNT_SECONDS", "0"))
DURATION = 24.0


def hunted(seed: int, miners: int, validators: int) -> FaultPlan:
    """Faults of everybody: machines and links, and the store's links."""
    nodes = [f"miner-{i}" for i in range(miners)] + [f"validator-{i}" for i in range(validators)] + [ORCHESTRATOR]
    kinds = (*DEFAULT_KINDS, "corrupt", "slow_link", "full_disk")
    many = random_plan(seed, nodes, DURATION, count=4 + int(12 * draw(seed, "count")), kinds=kinds)
    store = random_plan(seed + 1_000_000, [STORE], DURATION, count=int(3 * draw(seed, "store")), kinds=LINK_KINDS)
    return FaultPlan(tuple(sorted((*many.faults, *store.faults), key=lambda f: f.at)), seed)


def run(seed: int, folder) -> None:
    stages = 1 + int(3 * draw(seed, "stages"))
    miners, validators = stages * (1 + int(3 * draw(seed, "miners"))), int(3 * draw(seed, "validators"))
    plan = hunted(seed, miners, validators)
    pipeline = "synchronous" if draw(seed, "pipeline") < 0.2 else "asynchronous"
    outer = "assign" if draw(seed, "outer") < 0.3 else "nesterov"
    config = small(
        "epochs >= 7",
        stages=dict(codec="identity", wire_dtype="float32", count=stages),
        train=dict(pipeline=pipeline),
        merge=dict(outer=outer, members=max(1, miners // stages - 1)),
    )
    crowd = dict(miners=miners, validators=validators)
    try:
        survive(config, folder, plan=plan, seed=seed, limit=4000.0, punctual=False, honest=False, **crowd)
    except BaseException as error:
        error.add_note(f"seed {seed}: {crowd}, {stages} stages, {pipeline}, {outer}, {plan}")
        raise


@pytest.mark.slow
def test_random_faults_over_many_seeds(tmp_path):
    began, seed = time.monotonic(), FIRST
    while time.monotonic() - began < SECONDS if SECONDS else seed < FIRST + RUNS:
        run(seed, tmp_path / str(seed))
        seed += 1
    assert seed > FIRST
