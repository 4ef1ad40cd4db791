"""Evidence that a miner says it showed but did not put into the store: invalid, and said so by the orchestrator."""

from iota.nodes.miner.stage import StageWorker
from iota.sim.swarm import Swarm
from swarm_case import run_swarm, tiny


def test_saying_shown_without_showing_is_invalid(tmp_path, monkeypatch):
    config = tiny(stop="epochs >= 2", merge=dict(members=1), audit=dict(final_wait=60.0))
    liar = {}

    async def lose(swarm: Swarm):
        liar["key"] = swarm.key("miner-1")
        put = swarm.blobs.put

        async def without(key, parts):
            audit = swarm.state.audits.get(int(key.split("/")[2])) if key.startswith("audits/") else None
            mine = audit is not None and swarm.state.members[audit.number].key == liar["key"]
            if not (mine and key.endswith("inputs.bin")):
                await put(key, parts)

        swarm.blobs.put = without

    swarm = run_swarm(config, tmp_path, lose, miners=3, validators=1, workers={"miner-1": StageWorker})
    by_key = {}
    for audit in swarm.state.audits.values():
        row = (audit.verdict, "not in the store" in audit.why)
        by_key.setdefault(swarm.state.members[audit.number].key, set()).add(row)
    assert by_key.pop(liar["key"]) == {("invalid", True)}
    assert set.union(*by_key.values()) == {("valid", False)}
