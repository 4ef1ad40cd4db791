"""The benchmarks run and say what they measured. Nothing here asserts a speed."""

import argparse
import asyncio
import importlib.util
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from iota.cli import bench
from iota.config.load import check, load_run, save_run
from iota.errors import ConfigError
from iota.lab import bench_control, bench_core, bench_swarm
from iota.lab.bench_workers import progress
from iota.model.partition import count_parameters, cut_blocks

RECIPES = Path(__file__).parent.parent / "recipes"


def test_core_bench_replays_a_recording_and_trains():
    figures = bench_core.measure_core(miners=6, commands=600, repeats=2)
    assert figures["core_min"] <= figures["core_commands_per_s"] <= figures["core_max"]
    assert figures["core_commands"] >= 600 and figures["core_backward_passes"] > 100


def test_every_sample_of_the_recording_goes_through_three_stages():
    driver = bench_core._Driver(bench_core.control_config(6), 6)
    driver.load()
    driver.play(600)
    members = driver.machine.state.members
    passes = [sum(m.total for m in members if m.stage == stage) for stage in range(bench_core.STAGES)]
    done = driver.machine.state.record().samples_full
    assert done == passes[0] > 30
    assert done <= passes[1] <= passes[2] <= done + len(driver.machine.state.samples)


def test_http_bench_gives_its_fields_and_everything_is_accepted():
    figures = bench_control.measure_http(miners=7, seconds=0.6, warmup=0.2, repeats=1)
    assert figures["http_requests"] > 10 and figures["http_declined"] == 0
    assert 0 < figures["http_requests_per_cpu_s"] == figures["http_min"] == figures["http_max"]
    assert figures["http_journal_rows_per_request"] > 0.5


def test_progress_counts_parts_of_what_straddles_an_edge():
    times = [1.0, 2.0, 3.0, 5.0]
    assert progress(times, 1.5, 2.5) == pytest.approx(1.0)
    assert progress(times, 2.0, 4.0) == pytest.approx(1.5)


@pytest.fixture
def tiny(tmp_path):
    """A run file, its configuration, and samples, of the smallest model with one miner a stage."""
    config = load_run(RECIPES / "tiny.toml")
    swarm = msgspec.structs.replace(config.swarm, miners=3, validators=0)
    config = check(msgspec.structs.replace(config, swarm=swarm))
    run, samples = tmp_path / "run.toml", tmp_path / "samples.npy"
    run.write_text(save_run(config))
    shape = (8, 2, config.train.batch, config.model.sequence)
    np.save(samples, np.random.default_rng(0).integers(0, 256, shape))
    return config, run, samples


def test_plain_and_bare_yardsticks_run(tiny):
    config, run, samples = tiny
    identity = msgspec.structs.replace(config, stages=msgspec.structs.replace(config.stages, codec="identity"))
    run.write_text(save_run(identity))
    assert bench_swarm.plain_rate(identity, run, samples, replicas=1, threads=1, seconds=0.3).per_s > 0
    assert bench_swarm.bare_rate(identity, run, samples, seconds=0.3).per_s > 0


def test_the_recipe_is_about_ten_million_parameters_and_ends_no_train_phase():
    config = check(load_run(RECIPES / "bench.toml"))
    total = sum(count_parameters(config, stage, cut) for stage, cut in enumerate(cut_blocks(config)))
    assert 9e6 < total < 11e6 and config.stages.codec == "identity"
    assert config.swarm.miners == 6 and config.stages.count == 3 and config.merge.min_batches >= 10**6


def test_summary_takes_the_better_reference_and_states_the_spread():
    config = check(load_run(RECIPES / "bench.toml"))
    cores = {"miner": 2.0}
    rows = bench_swarm.Turns(
        swarm=[bench_swarm.Window(80.0, 40.0, 10, 30, cores), bench_swarm.Window(90.0, 45.0, 20, 30, cores)],
        one_process=[bench_swarm.Rate(90.0, 45.0), bench_swarm.Rate(110.0, 55.0)],
        replicas=[bench_swarm.Rate(50.0, 50.0), bench_swarm.Rate(60.0, 50.0)],
        bare=[bench_swarm.Rate(85.0, 42.5), bench_swarm.Rate(115.0, 57.5)],
    )
    figures = bench_swarm.summary(config, rows, 60.0)
    assert figures["reference"] == "one_process" and figures["reference_tokens_per_s"] == 100.0
    assert (figures["tokens_per_s"], figures["bare_tokens_per_s"]) == (85.0, 100.0)
    assert (figures["ratio"], figures["ratio_bare"]) == (0.85, 0.85)
    assert (figures["ratio_min"], figures["ratio_max"]) == (round(80 / 110, 4), 1.0)
    assert figures["ratio_per_cpu"] == 0.85 and figures["ratio_bare_per_cpu"] == 0.85
    assert figures["recomputed_share"] == 0.5 and 0.85 < figures["ceiling"] < 0.95


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("iota.nodes.miner.process") is None, reason="needs the miner's process")
def test_swarm_bench_gives_its_fields(tmp_path):
    config = load_run(RECIPES / "tiny.toml")
    merge = msgspec.structs.replace(config.merge, min_batches=10**6, members=2, epoch_limit=1e6)
    swarm = msgspec.structs.replace(config.swarm, miners=6)
    stages = msgspec.structs.replace(config.stages, codec="identity")
    config = msgspec.structs.replace(config, merge=merge, swarm=swarm, stages=stages)
    figures = asyncio.run(bench_swarm.measure(config, seconds=2.0, folder=tmp_path / "run"))
    for name in ("tokens_per_s", "reference_tokens_per_s", "bare_tokens_per_s", "ratio", "ratio_bare", "ceiling"):
        assert figures[name] > 0, name
    assert figures["ratio_min"] <= figures["ratio"] <= figures["ratio_max"]
    assert 0 <= figures["recomputed_share"] <= 1


def test_command_line_prints_json(capsys, monkeypatch):
    parser = argparse.ArgumentParser()
    bench.add(parser.add_subparsers())
    monkeypatch.setattr(bench_control, "measure", lambda **given: {"bench": "control", "sentence": "x", **given})
    arguments = parser.parse_args(["bench", "control", "--json", "--seconds", "2"])
    assert arguments.run(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {"bench": "control", "sentence": "x", "seconds": 2.0, "miners": 1000}
    arguments = parser.parse_args(["bench", "swarm", "--seconds", "0"])
    with pytest.raises(ConfigError, match="length of a window"):
        arguments.run(arguments)
