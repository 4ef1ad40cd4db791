"""Whole runs of the state machine without faults: phases, merges, audits, pay, the stop rule."""

from __future__ import annotations

import pytest
from machine_swarm import Swarm, config

from iota.core.machine import events as ev


@pytest.mark.parametrize(("stages", "per_stage"), [(3, 2), (1, 3), (1, 1), (3, 1), (2, 4)])
def test_run_ends(stages: int, per_stage: int) -> None:
    swarm = Swarm(config(merge={"members": per_stage}), stages)
    swarm.miners(stages * per_stage)
    swarm.add("validator")
    swarm.finish()
    s = swarm.mc.state
    assert s.epoch == 3 and len(s.ledger) == 3 and s.queue == []
    swarm.check_replay()
