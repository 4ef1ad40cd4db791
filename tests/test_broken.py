"""A fault in the orchestrator's own code: its process ends, and nothing half decided was journaled."""

import asyncio

import pytest

from iota.core.machine import events as ev
from iota.core.machine.machine import Machine
from iota.errors import IotaError
from swarm_case import run_swarm, tiny


def test_a_fault_in_a_decision_ends_the_process_and_nothing_of_it_is_journaled(tmp_path):
    seen = {}

    async def plant(swarm):
        while swarm.state.phase != "train" or not swarm.state.samples:
            await asyncio.sleep(0.01)
        machine, sound = swarm.orchestrator.machine, swarm.orchestrator.machine.turn

        def faulty(key, turn, *rest):
            before = len(machine._events)
            outcome = sound(key, turn, *rest)
            if seen or len(machine._events) == before:
                return outcome
            seen.update(rows=swarm.journal.last, manifest=swarm.manifest, events=swarm.events)
            raise ZeroDivisionError("a planted fault")

        machine.turn = faulty

    with pytest.raises((IotaError, ZeroDivisionError), match=r"half-way|planted"):
        run_swarm(tiny(stop="epochs >= 2"), tmp_path, plant, miners=3, validators=0)
    events = seen["events"]()
    assert len(events) == seen["rows"], "rows of the half decision, or after it, are in the journal"
    manifest = seen["manifest"]
    again = Machine(manifest.config, len(manifest.cuts), manifest.parameters, "00" * 32)
    again.replay(events)
    again.restarted(again.state.phase_at + 0.1, 0.0)
    assert isinstance(events[0], ev.RunStarted) and again.state.phase == "train"
