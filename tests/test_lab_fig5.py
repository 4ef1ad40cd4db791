"""`iota lab fig5`: jobs that go on after a kill to the bit, controls that control what they say, numbers by hand."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
import torch

from iota.cli.main import main
from iota.errors import ConfigError, IotaError
from iota.lab import fig5_report as report
from iota.lab.fig5_bytes import message_bytes
from iota.lab.fig5_data import open_tokens, prepare
from iota.lab.fig5_fit import fit_rows
from iota.lab.fig5_grid import CELLS, QUICK, jobs
from iota.lab.fig5_queue import Place, Queue
from iota.lab.fig5_rows import Results, read_rows, write_rows
from iota.lab.fig5_spec import Corpus, Spec, check_spec, fields, run_config, token_bytes
from iota.lab.fig5_stages import Bypass
from iota.lab.fig5_text import assemble, text
from iota.lab.fig5_train import Trainer
from iota.lab.fig5_worker import Job, Order, run

CORPUS = Corpus(max_bytes=60_000, vocabulary=300, sequence=32, heldout_tokens=1024)
TINY = Spec(
    seed=3, width=32, ffn=64, heads=2, kv_heads=1, blocks=2, stages=2, vocabulary=300, sequence=32, batch=2, steps=9,
    every=3, warmup_steps=2,
)  # fmt: skip


def tiny(**changes):
    return msgspec.structs.replace(TINY, **changes)


NARROW = {"codec": "bottleneck", "channels": 4, "wire": "bfloat16"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    prepare(CORPUS, folder)
    return folder


def order(spec, folder, tokens, steps=2):
    rows, state = folder / f"{spec.name}.jsonl", folder / "jobs" / f"{spec.name}.safetensors"
    return Order(spec, CORPUS, str(tokens), str(rows), str(state), "cpu", "iota lab fig5", steps)


def outcome(folder, spec):
    """The rows without what differs between sessions."""
    rows = [row for row in read_rows(folder / f"{spec.name}.jsonl") if row["row"] != "session"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


# ------------------------------------------------------------------------------------------------------------- jobs


@pytest.mark.parametrize(
    "changes",
    [NARROW, {"codec": "resbm4+ids", "channels": 6}, {**NARROW, "replicas": 2, "inner_steps": 4, "optimizer": "muon"}],
    ids=["bottleneck", "resbm4+ids", "local"],
)
def test_a_killed_job_goes_on_to_the_bit(changes, tmp_path, tokens, monkeypatch):
    spec = tiny(**changes)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    assert run(order(spec, tmp_path / "a", tokens), threading.Event())
    advance = Trainer.advance

    def die(self):
        if self.progress.step == 7:  # the last checkpoint is of step 6, and one row came with it
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", die)
    with pytest.raises(KeyboardInterrupt):
        run(order(spec, tmp_path / "b", tokens), threading.Event())
    assert Results(tmp_path / "b" / f"{spec.name}.jsonl").end is None
    monkeypatch.setattr(Trainer, "advance", advance)
    assert run(order(spec, tmp_path / "b", tokens), threading.Event())
    assert outcome(tmp_path / "b", spec) == outcome(tmp_path / "a", spec)
    rows = outcome(tmp_path / "a", spec)
    assert rows[-1]["outcome"] == "done" and rows[-1]["step"] == spec.steps
    sessions = [row["step"] for row in read_rows(tmp_path / "b" / f"{spec.name}.jsonl") if row["row"] == "session"]
    assert sessions == [0, 6]
    assert not list((tmp_path / "b" / "jobs").glob("*.safetensors"))


def test_it_learns_and_is_measured_when_asked(tmp_path, tokens):
    spec = tiny(lr=3e-3)
    run(order(spec, tmp_path, tokens), threading.Event())
    curve = Results(tmp_path / f"{spec.name}.jsonl").curve
    assert [row["step"] for row in curve] == [3, 6, 9]
    assert [row["tokens"] for row in curve] == [192, 384, 576]
    assert curve[-1]["heldout_loss"] < curve[0]["heldout_loss"] < math.log(300) + 0.2
    assert len(curve[0]["blocks"]) == 1024 // (8 * 32)
    assert np.mean(curve[0]["blocks"]) == pytest.approx(curve[0]["heldout_loss"], abs=1e-5)


def test_stopping_leaves_a_checkpoint(tmp_path, tokens):
    spec, stop = tiny(**NARROW), threading.Event()
    stop.set()
    assert not run(order(spec, tmp_path, tokens), stop)
    assert (tmp_path / "jobs" / f"{spec.name}.safetensors").exists()
    assert run(order(spec, tmp_path, tokens), threading.Event())


def test_a_changed_job_is_refused(tmp_path, tokens):
    run(order(TINY, tmp_path, tokens), threading.Event())
    with pytest.raises(ConfigError, match=r"lr was 0\.001, is 0\.002"):
        run(order(tiny(lr=2e-3), tmp_path, tokens), threading.Event())
    assert tiny(lr=2e-3).name == TINY.name
    path = tmp_path / f"{TINY.name}.jsonl"
    rows = read_rows(path)
    write_rows(path, [rows[0] | {"data": "0" * 64}, *rows[1:]])
    with pytest.raises(ConfigError, match="the text or its tokens are others"):
        run(order(TINY, tmp_path, tokens), threading.Event())


def test_a_checkpoint_of_another_job_is_refused(tmp_path, tokens):
    read = open_tokens(CORPUS, tokens)
    Trainer(TINY, read, "cpu").save(tmp_path / "x", "data")
    with pytest.raises(IotaError, match="another job"):
        Trainer(tiny(lr=2e-3), read, "cpu").restore(tmp_path / "x", "data")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:500])
    with pytest.raises(IotaError, match="cannot be read"):
        Trainer(TINY, read, "cpu").restore(tmp_path / "x", "data")


def test_divergence_is_a_result(tmp_path, tokens):
    spec = tiny(lr=1e30, warmup_steps=0)
    assert run(order(spec, tmp_path, tokens), threading.Event())
    end = Results(tmp_path / f"{spec.name}.jsonl").end
    assert end["outcome"] == "diverged" and "not finite" in end["why"]
    facts = assemble(tmp_path, "", [])
    assert facts["rows"][0]["diverged"] == [3] and facts["rows"][0]["heldout_loss"] is None


def test_a_line_that_was_being_written_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"row":"job"}\n{"row":"heldo')
    assert read_rows(path) == [{"row": "job"}]
    path.write_bytes(b'{"row":"job"}\n{"row":"heldo\n')
    with pytest.raises(ConfigError, match="damaged"):
        read_rows(path)


# --------------------------------------------------------------------------------------------------------- controls


def test_controls_have_the_parameters_they_promise(tokens):
    read = open_tokens(CORPUS, tokens)

    def built(**changes):
        return Trainer(tiny(**changes), read, "cpu")

    base, narrow, ids = built(), built(**NARROW), {"codec": "resbm+ids", "channels": 4, "wire": "float32"}
    bypass = built(**NARROW, control="bypass")
    assert narrow.parameters == base.parameters + 2 * 4 * 32
    assert bypass.parameters == narrow.parameters
    assert built(**NARROW, control="wide").parameters == base.parameters + 2 * 32 * 32
    assert built(**ids, control="ids").parameters == base.parameters + 16 * (300 + 32)
    block = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32
    assert built(control="removed").parameters == base.parameters - block
    flat = bypass.lines[0].stages[1]
    there = flat.layout.views(flat.state().weights)["boundaries.0.bypass_encoder.down.weight"]
    encoder = narrow.lines[0].stages[0]
    assert np.array_equal(there, encoder.layout.views(encoder.state().weights)["boundaries.0.down.weight"])


@pytest.mark.parametrize("codec", ["bottleneck", "resbm+ids", "resbm4", "direct4+ids"])
def test_an_untrained_bypass_changes_nothing(codec):
    config = run_config(tiny(codec=codec, channels=4))
    bypass = Bypass(config, 0)
    for parameter in bypass.parameters():
        torch.nn.init.zeros_(parameter)
    received, ids = torch.randn(2, 8, config.model.width), torch.zeros((2, 8), dtype=torch.int64)
    hidden, skip = bypass.decode(received, ids)
    assert torch.equal(hidden, received) and (skip is None or not skip.any())


def test_bytes_are_those_that_crossed(tokens):
    trainer = Trainer(tiny(**NARROW), open_tokens(CORPUS, tokens), "cpu")
    trainer.advance()
    assert trainer.crossed() == {"bytes_forward": 8.0, "bytes_backward": 8.0} == trainer.crossed()
    assert token_bytes(run_config(tiny(**NARROW))) == 8.0
    quantised = Trainer(tiny(codec="resbm4", channels=5), open_tokens(CORPUS, tokens), "cpu")
    quantised.advance()
    assert quantised.crossed() == {"bytes_forward": 5.0, "bytes_backward": 5.0}  # a scale and five halves of a byte


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"control": "none"}, "does not exist"),
        ({"codec": "magic"}, "unknown codec"),
        ({"inner_steps": 4}, "replicas"),
        ({"replicas": 2}, "replicas"),
        ({"control": "bypass"}, "no narrow channel"),
        ({"codec": "resbm4", "channels": 4, "control": "wide"}, "quantises"),
        ({"codec": "subspace", "channels": 4, "control": "bypass"}, "subspace"),
        ({**NARROW, "control": "ids"}, "no id tables"),
        ({**NARROW, "channels": 33}, "channels"),
        ({"heads": 3}, "heads"),
        ({"steps": 0}, "0 steps"),
    ],
)
def test_impossible_jobs_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        check_spec(tiny(**changes))


# ------------------------------------------------------------------------------------------------------------- grid


def test_the_grid():
    found = jobs([*CELLS], [0, 1, 2])
    for spec in found:
        check_spec(spec)
    assert len({spec.name for spec in found}) == len(found)
    minimum = jobs(["minimum"], [0, 1, 2])
    assert {spec.tokens for spec in minimum} == {1_228_800}
    for spec in minimum:
        ratio = 4 * spec.width / token_bytes(run_config(spec))
        if spec.control or spec.codec == "identity":
            assert ratio == 1.0
        elif spec.codec == "int8":
            assert 3.9 < ratio < 4 and spec.seed == 0
        else:
            assert ratio == 128.0
    assert minimum[0] == minimum[1].baseline()
    local = [spec for spec in jobs(["local"], [0]) if spec.inner_steps]
    assert {spec.tokens for spec in local} == {1_228_800} and {spec.inner_steps for spec in local} == {8, 32}
    assert [spec.seed for spec in minimum] == sorted(spec.seed for spec in minimum)


def test_text_and_tokenizer_are_deterministic(tokens, tmp_path):
    again, first = prepare(CORPUS, tmp_path), open_tokens(CORPUS, tokens)
    assert again.digest == first.digest
    assert np.array_equal(again.heldout, first.heldout)
    assert again.heldout.size == 1025 and int(again.train.max()) < 300
    with pytest.raises(ConfigError, match="Give more text"):
        prepare(msgspec.structs.replace(CORPUS, heldout_tokens=10**6), tmp_path)
    (place,) = tmp_path.glob("*/train.npy")
    row = np.load(place)
    row[0] ^= 1
    np.save(place, row)
    with pytest.raises(IotaError, match="other tokens"):
        open_tokens(CORPUS, tmp_path)


# ----------------------------------------------------------------------------------------------------------- report


def finished(folder, spec, losses, wire_bytes=16.0):
    """A job's file with held-out losses at steps 150, 300 and 600 (or those of `losses`)."""
    job = {"row": "job", "name": spec.name, "spec": fields(spec), "data": "x", "parameters": 1000}
    session = {"row": "session", "step": 0, "machine": "m", "device": "cpu", "code": "c"}
    curve = [
        {
            "row": "heldout", "step": step, "tokens": step * spec.tokens_per_step, "heldout_loss": loss,
            "blocks": [loss - 0.1, loss + 0.1],
        }
        for step, loss in losses.items()
    ]  # fmt: skip
    end = {"row": "end", "outcome": "done", "bytes_forward": wire_bytes, "bytes_backward": wire_bytes, "seconds": 9.0}
    write_rows(folder / f"{spec.name}.jsonl", [job, session, *curve, end])


def compressed(**changes):
    return msgspec.structs.replace(Spec(seed=0, codec="bottleneck", channels=8, wire="bfloat16"), **changes)


def test_gaps_are_paired(tmp_path):
    for seed, base, gap in ((0, 5.0, 0.10), (1, 4.0, 0.12), (2, 5.0, 0.20)):
        finished(tmp_path, Spec(seed=seed), {150: 6.0, 300: 5.5, 600: base}, 2048.0)
        spec = compressed(seed=seed)
        finished(tmp_path, spec, {150: 6.06, 300: 5.5 * 1.02, 600: base + gap})
    facts = assemble(tmp_path, "the command", [])
    base, row = facts["rows"]
    assert (base["codec"], base["ratio"], base["gap_percent"]) == ("identity", 1.0, 0.0)
    assert (row["codec"], row["ratio"], row["bytes_per_token"], row["seeds"]) == ("bottleneck", 128.0, 16.0, [0, 1, 2])
    assert row["gap_percent"] == pytest.approx(3.0)  # 2, 3 and 4 percent
    assert row["gap_ci95"] == pytest.approx([3 - 2.48414, 3 + 2.48414], abs=1e-4)
    assert row["gap_text_ci95"] == pytest.approx([3.0, 3.0], abs=1e-4)  # both blocks have the same gap
    assert row["heldout_loss"] == pytest.approx((5.1 + 4.12 + 5.2) / 3, abs=1e-5)
    around = message_bytes()
    assert row["bytes_per_token_with_headers"] == pytest.approx(16 + sum(around.values()) / 2 / 2048, abs=1e-3)
    (found,) = facts["slopes"]
    # log2 tokens 0, 1, 2: slopes (last - first) / 2 of gaps 1, 2, then 2, 3, 4
    assert found["slope_per_doubling"] == pytest.approx(1.0, abs=1e-4)
    assert found["ci95"] == pytest.approx(
        [1 - 4.30265 * 0.5 / math.sqrt(3), 1 + 4.30265 * 0.5 / math.sqrt(3)], abs=1e-3
    )
    assert found["gaps"] == pytest.approx([1.0, 2.0, 3.0], abs=1e-4)
    assert "bottleneck-k8-bfloat16" in text(facts) and "+3.00" in text(facts)


def test_unfinished_jobs_give_no_figure(tmp_path):
    finished(tmp_path, Spec(seed=0), {600: 5.0}, 2048.0)
    finished(tmp_path, compressed(), {600: 5.1})
    path = tmp_path / f"{compressed().name}.jsonl"
    write_rows(path, read_rows(path)[:-1])
    assert [row["codec"] for row in assemble(tmp_path, "", [])["rows"]] == ["identity"]


def test_the_baseline_is_read_between_its_rows(tmp_path):
    finished(tmp_path, Spec(seed=0), {150: 6.0, 600: 5.0})
    local = compressed(batch=4, replicas=2, inner_steps=8)
    finished(tmp_path, local, {300: 5.5, 600: 5.1})
    groups = report.read(tmp_path)
    run, base = groups[local.name].runs[0], groups[Spec(seed=0).name].runs[0]
    (first, gap), (_, last) = report.gap_curve(run, base)
    assert first == 300 * 2048 and gap[0] == pytest.approx(0.0, abs=1e-9)  # half way between 6 and 5 in log tokens
    assert last[0] == pytest.approx(2.0)


def test_interaction_with_local_steps(tmp_path):
    local = {"batch": 4, "replicas": 2, "inner_steps": 8}
    for seed, extra in ((0, 0.0), (1, 0.05)):
        finished(tmp_path, Spec(seed=seed), {600: 5.0})
        finished(tmp_path, compressed(seed=seed), {600: 5.1})  # 2%
        finished(tmp_path, Spec(seed=seed, **local), {600: 5.5})  # 10%
        finished(tmp_path, compressed(seed=seed, **local), {600: 5.61 + 1.1 * extra})  # 2%, then 3%, of 5.5
    (row,) = report.interaction_rows(report.read(tmp_path))
    assert (row["H"], row["seeds"]) == (8, [0, 1])
    assert row["gap_synchronous"] == pytest.approx(2.0) and row["gap_of_local_steps_alone"] == pytest.approx(10.0)
    assert row["interaction"] == pytest.approx(0.5)
    assert row["ci95"] == pytest.approx([0.5 - 12.7062 * 0.5, 0.5 + 12.7062 * 0.5], abs=1e-3)


def test_the_fit_and_what_it_cannot_say(tmp_path):
    """gap = 4 - 0.5 * log2(bytes / 16) + 0.25 * log2(tokens / 1.2M), exactly."""
    for steps in (150, 600, 2400):
        finished(tmp_path, Spec(seed=0, steps=steps), {steps: 5.0}, 2048.0)
        for channels in (8, 32):
            size = 2.0 * channels
            gap = 4 - 0.5 * math.log2(size / 16) + 0.25 * math.log2(steps / 600)
            finished(tmp_path, compressed(steps=steps, channels=channels), {steps: 5 * (1 + gap / 100)}, size)
    (row,) = fit_rows(report.read(tmp_path))
    assert row["points"] == 6 and row["not_varied"] == ["width", "boundaries"]
    found = row["models"]["linear"]["coefficients"]
    assert found["constant"]["value"] == pytest.approx(4.0)
    assert found["per doubling of bytes_per_token"]["value"] == pytest.approx(-0.5)
    assert found["per doubling of tokens"]["value"] == pytest.approx(0.25)
    case = row["cases"]["1.5B, three bottlenecks, 400M tokens"]
    assert case["not_supported"] == ["width"] and "linear" not in case
    assert case["beyond_the_data_by"]["tokens"] == pytest.approx(81.4)
    assert "no prediction, width not varied" in text(assemble(tmp_path, "", []))


def test_message_bytes_are_those_of_real_messages():
    around = message_bytes()
    assert 500 < around["up"] < 1000 and around["up"] < around["down"] < 2000


# ------------------------------------------------------------------------------------------------------ the command


def test_command_refuses_and_lists(tmp_path, capsys):
    paths = ["--results", str(tmp_path / "r"), "--work", str(tmp_path / "w")]
    assert main(["lab", "fig5", "--cells", "maximum", *paths]) == 1
    assert "cell 'maximum' does not exist" in capsys.readouterr().err
    assert main(["lab", "fig5", "--minutes", "-1", *paths]) == 1
    assert main(["lab", "fig5", "--quick", "--list", "--json", *paths]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["job"] for row in listed] == [spec.name for spec in jobs([QUICK], [0, 1])]
    assert {row["state"] for row in listed} == {"0/24"}
    assert not (tmp_path / "w").exists()


def test_report_command_writes_files(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    finished(tmp_path / "r", Spec(seed=0), {300: 5.5, 600: 5.0}, 2048.0)
    finished(tmp_path / "r", compressed(), {300: 5.5, 600: 5.1})
    assert main(["lab", "fig5", "--report", "--results", str(tmp_path / "r"), "--work", str(tmp_path / "w")]) == 0
    assert "bottleneck-k8-bfloat16" in capsys.readouterr().out
    facts = json.loads((tmp_path / "r.json").read_text())
    assert [row["gap_percent"] for row in facts["rows"]] == [0.0, 2.0]
    speed = {row["codec"]: row for row in facts["speed"]["rows"]}
    assert speed["bottleneck"]["ratio"] == 128.0 and speed["identity"]["ratio"] == 1.0
    assert speed["bottleneck"]["tokens_per_s_10"] > 50 * speed["identity"]["tokens_per_s_10"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_one_queue_a_folder(tmp_path):
    place = Place(tmp_path / "w", tmp_path / "r", CORPUS, "cpu", "")
    finished_job = jobs([QUICK], [0])[0]
    (tmp_path / "r").mkdir()
    finished(tmp_path / "r", finished_job, {24: 5.0})
    queue = Queue(place, [finished_job], 1, None)
    assert queue.run(print).done == [finished_job.name]
    import fcntl

    with (tmp_path / "w" / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(IotaError, match="another lab works"):
            queue.run(print)


@pytest.mark.slow
def test_kill_and_resume_of_the_real_command(tmp_path):
    """SIGKILL of the parent: its child writes a checkpoint and leaves; the same command ends with equal numbers."""

    def command(name):
        folders = ["--results", str(tmp_path / name / "r"), "--work", str(tmp_path / name)]
        return [sys.executable, "-m", "iota.cli.main", "lab", "fig5", "--quick", "--seeds", "1", *folders]

    subprocess.run(command("whole"), check=True, timeout=600)
    process = subprocess.Popen(command("cut"))
    first = jobs([QUICK], [0])[0]
    rows = tmp_path / "cut" / "r" / f"{first.name}.jsonl"
    limit = time.monotonic() + 300
    while not (rows.exists() and Results(rows).curve) and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command("cut"), check=True, timeout=600)
    for spec in jobs([QUICK], [0]):
        assert outcome(tmp_path / "cut" / "r", spec) == outcome(tmp_path / "whole" / "r", spec)


def test_jobs_show_how_far_they_are(tmp_path, tokens, monkeypatch):
    monkeypatch.setattr("iota.lab.fig5_worker.SHOW_SECONDS", 0.0)
    spec = tiny(steps=2)
    place = Place(tmp_path / "w", tmp_path, CORPUS, "cpu", "")
    place.state(spec).parent.mkdir(parents=True)
    job = Job(order(spec, tmp_path, tokens, 0), open_tokens(CORPUS, tokens), [])
    job.state_path = place.state(spec)
    assert job.run(threading.Event())
    assert place.state(spec).with_suffix(".step").read_text().split()[0] == "2"
