"""Every codec in a whole swarm: it trains, merges, is replayed to the bit, and sends the bytes that its closed form
says; with real processes it also survives export, generation and a resumed run."""

import json

import numpy as np
import pytest

from iota.cli.main import main
from iota.core.machine import events as ev
from iota.core.payload import BACKWARD, CODECS, FORWARD, boundary_tensor
from iota.nodes.checkpoint import history_of
from swarm_case import run_swarm, tiny, weights
from test_process_up import up


def with_codec(codec, **sections):
    return tiny(stages=dict(codec=codec, channels=8), **sections)


@pytest.mark.parametrize("codec", CODECS)
def test_a_swarm_trains_with_it(tmp_path, codec):
    config = with_codec(codec, stop="epochs >= 2", merge=dict(min_batches=3, members=1), data=dict(max_bytes=60_000))
    swarm = run_swarm(config, tmp_path, miners=3, validators=1)
    events = swarm.events()
    merged = [e for e in events if isinstance(e, ev.StageMerged)]
    assert [e.merged for e in merged] == [True] * 6
    verdicts = [e for e in events if isinstance(e, ev.VerdictGiven) and e.validator >= 0]
    assert len(verdicts) >= 3 and all(e.verdict == "valid" and "to the bit" in e.why for e in verdicts)
    assert not [e for e in events if isinstance(e, ev.Declined)]
    passed = [e for e in events if isinstance(e, ev.Passed)]
    forward = boundary_tensor(config, FORWARD).nbytes * sum(e.kind == "f" for e in passed)
    backward = boundary_tensor(config, BACKWARD).nbytes * sum(e.kind != "f" and e.stage > 0 for e in passed)
    assert swarm.orchestrator.meter.boundary == forward + backward > 0
    for e in merged:
        assert np.isfinite(weights(swarm, e.checkpoint)).all()


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_iota_up_export_and_generate(tmp_path, capsys, codec):
    folder, log, out = tmp_path / "run", tmp_path / "log", tmp_path / "model"
    assert up(folder, "epochs >= 2", log, *options(codec)).wait(150) == 0, log.read_text()
    sound(folder, 2)
    assert main(["export", str(folder), str(out)]) == 0
    capsys.readouterr()
    texts = []
    for place in (folder, out):
        assert main(["generate", str(place), "The ", "--tokens", "8", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] and texts[0] == texts[1], "the run and its export are one model"


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["direct4+ids", "subspace"])
def test_a_finished_run_goes_on(tmp_path, codec):
    folder, log = tmp_path / "run", tmp_path / "log"
    for epochs in (1, 2):
        assert up(folder, f"epochs >= {epochs}", log, *options(codec)).wait(150) == 0, log.read_text()
        sound(folder, epochs)


def options(codec):
    sets = (f"stages.codec={codec}", "merge.min_batches=4", "audit.final_wait=60")
    return "--no-report", *(word for value in sets for word in ("--set", value))


def sound(folder, epochs):
    history = history_of(folder)
    assert history["phase"] == "finished"
    assert [row["epoch"] for row in history["epochs"]] == list(range(1, epochs + 1))
    assert history["audits"] and all(audit["verdict"] == "valid" for audit in history["audits"])
