"""Plans by hand: what a sample costs, what binds, who holds what, what is refused; and the command that prints them."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.cli.main import main
from iota.config.fleet import Fleet, Hub, Machine, parse_fleet
from iota.config.load import load_run, parse_run
from iota.errors import ConfigError
from iota.model import cost, needs
from iota.model.cost import Timing, merge_traffic, pipeline_rate, recomputed, timing, tokens_per_second, traffic
from iota.model.partition import count_parameters, cut_blocks, stage_cost
from iota.model.plan import Plan, make_plan, place, plan_cut, with_count

RECIPES = Path(__file__).parent.parent / "recipes"
RUN = """
name = "a"
[model]
width = 64
blocks = 6
heads = 2
kv_heads = 1
ffn = 160
vocabulary = 256
sequence = 100
[stages]
count = 3
codec = "bottleneck"
channels = 16
[train]
batch = 5
accumulate = 4
max_in_flight = 3
[merge]
min_batches = 10
"""
FLEET = """
[[machine]]
name = "small"
count = 6
memory_gb = 8
disk_gb = 50
flops_float32 = 1e9
up_mbits = 8
down_mbits = 16
round_trip_ms = 50
"""


def run_of(*extra):
    return parse_run(RUN + "\n".join(extra))


def machine(**changes):
    whole = dict(
        name="m", memory_gb=8.0, disk_gb=50.0, flops_float32=1e9, up_mbits=8.0, down_mbits=16.0, round_trip_ms=50.0
    )
    return Machine(**(whole | changes))


def changed(config, section, **values):
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **values)})


# --------------------------------------------------------------------------------------------------------- one sample


def test_bytes_of_a_sample_are_the_payloads_and_the_messages_around_them():
    config = run_of()
    payload = 5 * 100 * 16 * 2  # batch, sequence, channels, bfloat16
    ids = 5 * 101  # windows of T + 1 tokens, a byte each
    first, middle, last = (traffic(config, stage) for stage in range(3))
    assert (first.up, first.down, first.tasks) == (payload + 2000, payload + 3800 + ids, 2)
    assert (middle.up, middle.down, middle.tasks) == (2 * payload + 2000, 2 * payload + 3800, 2)
    assert (last.up, last.down, last.tasks) == (payload + 1000, payload + 1900 + ids, 1)


def test_one_stage_sends_no_tensor():
    alone = traffic(with_count(run_of(), 1), 0)
    assert (alone.up, alone.down, alone.tasks) == (1000, 1900 + 505, 1)


def test_an_integer_format_counts_its_scales():
    config = changed(run_of(), "stages", codec="int8")
    assert traffic(config, 0).up == 5 * 100 * (64 + 2) + 2000


def test_time_of_a_sample_by_hand():
    config, cuts = changed(run_of(), "train", pipeline="synchronous"), cut_blocks(run_of())
    one = timing(config, 1, cuts[1], machine(step_parameters=1e6))
    assert one.compute == pytest.approx(3 * stage_cost(config, 1, cuts[1]) * 500 / 1e9)
    assert one.step == pytest.approx(count_parameters(config, 1, cuts[1]) / 1e6 / 4)
    assert one.uplink == pytest.approx((32_000 + 2000) / 1e6) and one.downlink == pytest.approx((32_000 + 3800) / 2e6)
    assert one.latency == pytest.approx(0.1)
    assert one.total == pytest.approx(one.compute + one.step + one.uplink + one.downlink + one.latency)


def test_recomputed_forwards_follow_samples_in_flight_and_steps():
    config = run_of()
    assert [recomputed(config, stage) for stage in range(3)] == [2 / 4, 1 / 4, 0]
    assert recomputed(changed(config, "train", accumulate=1), 0) == 1
    assert recomputed(changed(config, "train", pipeline="synchronous"), 0) == 0
    bench = load_run(RECIPES / "bench.toml")
    assert [recomputed(bench, stage) for stage in range(3)] == [0.25, 0.125, 0]
    more = timing(config, 0, (0, 2), machine()).compute / timing(config, 0, (0, 2), machine(flops_float32=2e9)).compute
    assert more == pytest.approx(2)


def test_the_compute_dtype_must_be_stated():
    config = changed(run_of(), "train", dtype="bfloat16")
    with pytest.raises(ConfigError, match="machine 'm' has no flops_bfloat16, and the run computes in bfloat16"):
        timing(config, 0, (0, 2), machine())
    assert timing(config, 0, (0, 2), machine(flops_bfloat16=1e9)).compute > 0


# ------------------------------------------------------------------------------------------------------ what binds


@pytest.mark.parametrize(
    ("changes", "binds"),
    [
        (dict(flops_float32=1e7), "compute"),
        (dict(step_parameters=1e4), "compute"),
        (dict(up_mbits=0.1), "uplink"),
        (dict(down_mbits=0.1), "downlink"),
        (dict(round_trip_ms=5000.0), "latency"),
    ],
)
def test_the_slowest_part_binds(changes, binds):
    config = run_of()
    found = plan_cut(config, cut_blocks(config), Fleet(machine=(machine(count=6, **changes),)))
    assert found.training.binds == binds


def timed(seconds):
    return Timing(compute=seconds, step=0.0, uplink=0.0, downlink=0.0, latency=0.0)


def test_the_slowest_stage_sets_the_pace():
    held = [[(timed(1.0), 4)], [(timed(1.0), 2), (timed(4.0), 2)], [(timed(1.0), 5)]]
    rate = pipeline_rate(run_of(), held, Hub())
    assert rate.stage == 1 and rate.tokens_per_s == pytest.approx(500 * (2 / 1 + 2 / 4))


def test_few_samples_in_flight_set_the_pace():
    config = changed(run_of(), "train", max_in_flight=1)
    held = [[(timed(1.0), 2)], [(timed(1.0), 2)], [(timed(2.0), 2)]]
    rate = pipeline_rate(config, held, Hub())
    assert (rate.stage, rate.binds) == (-1, "compute")
    assert rate.tokens_per_s == pytest.approx(500 * 2 / 4), "two under way, four seconds each"


def test_the_orchestrators_line_sets_the_pace():
    config = run_of()
    up = sum(traffic(config, stage).up for stage in range(3))
    rate = pipeline_rate(config, [[(timed(1e-6), 1)]] * 3, Hub(up_mbits=1e9, down_mbits=1.0))
    assert (rate.binds, rate.stage) == ("hub downlink", -1)
    assert rate.tokens_per_s == pytest.approx(500 * 125_000 / up)


def test_a_slow_line_makes_compression_pay_and_a_fast_one_less():
    config = changed(run_of(), "stages", channels=1)
    plain = changed(config, "stages", codec="identity", wire_dtype="float32")
    ratio = []
    for mbits in (1, 10, 1000):
        narrow, whole = (
            tokens_per_second(c, cut_blocks(c), flops=1e9, mbits=mbits, round_trip_ms=0.0) for c in (config, plain)
        )
        ratio.append(narrow.tokens_per_s / whole.tokens_per_s)
    assert ratio[0] > 3 > ratio[1] > ratio[2] and ratio[2] == pytest.approx(1, abs=0.05)
    assert tokens_per_second(plain, cut_blocks(plain), flops=1e9, mbits=1, round_trip_ms=0.0).binds in (
        "uplink",
        "downlink",
    )
    double = tokens_per_second(config, cut_blocks(config), flops=1e9, mbits=10, members=2)
    single = tokens_per_second(config, cut_blocks(config), flops=1e9, mbits=10)
    assert double.tokens_per_s == pytest.approx(2 * single.tokens_per_s)


# ----------------------------------------------------------------------------------------------------------- merging


def test_bytes_of_a_merge_are_the_papers():
    config, cut = run_of(), (0, 2)
    w = 3 * 65_536 * -(-4 * count_parameters(config, 0, cut) // 65_536)  # delta and two moments, whole chunks
    r = w * 4 // 3  # weights, outer momentum, two moments
    two, four, alone = (merge_traffic(config, 0, cut, members) for members in (2, 4, 1))
    assert (alone.up, alone.down) == (w + r, 0)
    assert (two.up, two.down) == (w + r, w)
    assert (four.up, four.down) == (w + r // 2, 3 * w // 2 + r // 2)
    bare = changed(config, "merge", outer="assign", inner_state="reset")
    w = r = w // 3
    total = merge_traffic(bare, 0, cut, 4)
    assert total.up + total.down == 4 * w - 2 * w // 4, "4W - 2W/N with own copies skipped"


def test_an_epoch_is_training_and_merging():
    config = run_of()
    plan = plan_cut(config, cut_blocks(config), parse_fleet(FLEET))
    assert [row.holders for row in plan.stages] == [{"small": 2}] * 3
    assert plan.train_seconds == pytest.approx(2 * 10 * 500 / plan.training.tokens_per_s)
    slowest = max((row.merge.up + row.merge.audit_up) / 1e6 + row.merge.down / 2e6 for row in plan.stages)
    assert plan.merge_seconds == pytest.approx(slowest)
    share = plan.train_seconds / (plan.train_seconds + plan.merge_seconds)
    assert plan.tokens_per_s == pytest.approx(plan.training.tokens_per_s * share)
    long = plan_cut(changed(config, "merge", min_batches=10**6), cut_blocks(config), parse_fleet(FLEET), limited=False)
    assert long.binds == long.training.binds and plan.binds == "merge uplink"
    assert long.tokens_per_s == pytest.approx(long.training.tokens_per_s, rel=1e-3)


# --------------------------------------------------------------------------------------------------------- placement


def test_machines_go_where_they_fit_and_where_it_is_slow():
    assert place([[1.0, 1.0]], [4]) == [[2], [2]]
    # the second kind fits stage 1 only, so the first takes stage 0
    assert place([[1.0, 1.0], [0.0, 9.0]], [1, 1]) == [[1, 0], [0, 1]]
    assert place([[1.0, 0.0], [0.0, 0.0]], [3, 5]) is None, "stage 1 fits nowhere"
    assert place([[1.0, 1.0]], [1]) is None


def test_an_empty_stage_gets_a_machine_over_others():
    # Kind 1 fits stages 1 and 2, kind 0 fits 0 and 1; placing slow stages first leaves one empty until they shift.
    held = place([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]], [2, 1])
    assert held is not None and all(sum(row) == 1 for row in held) and held[2] == [0, 1]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_placement_finds_every_machine_a_stage_and_no_stage_empty_if_that_can_be(data):
    stages, kinds = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    rates = st.sampled_from([0.0, 1.0, 2.5])
    speed = [[data.draw(rates) for _ in range(stages)] for _ in range(kinds)]
    counts = [data.draw(st.integers(1, 3)) for _ in range(kinds)]
    held = place(speed, counts)
    slots = [kind for kind, count in enumerate(counts) for _ in range(count)]

    def possible(stage, left):
        if stage == stages:
            return True
        return any(
            speed[kind][stage] > 0 and possible(stage + 1, left[:i] + left[i + 1 :]) for i, kind in enumerate(left)
        )

    assert (held is not None) == possible(0, slots)
    if held is not None:
        assert all(sum(row) > 0 for row in held)
        assert all(speed[kind][stage] > 0 for stage, row in enumerate(held) for kind, n in enumerate(row) if n)
        for kind, count in enumerate(counts):
            assert sum(row[kind] for row in held) == (count if any(speed[kind]) else 0)


# ------------------------------------------------------------------------------------------------------ best number


def test_the_best_number_of_stages_is_the_fastest():
    report = make_plan(run_of(), parse_fleet(FLEET))
    rates = {row.count: row.tokens_per_s for row in report.candidates}
    assert list(rates) == [1, 2, 3, 4, 5, 6] and report.configured.count == 3
    assert report.best.count == max(rates, key=lambda count: rates[count])
    assert report.best.tokens_per_s == rates[report.best.count]


def test_memory_binds_when_fewer_stages_would_be_faster():
    config = changed(changed(run_of(), "model", width=256, ffn=704), "train", batch=1)
    two = with_count(config, 2)
    whole = needs.memory_need(with_count(config, 1), 0, (0, 6)).total
    half = max(needs.memory_need(two, stage, cut).total for stage, cut in enumerate(cut_blocks(two)))
    assert half < whole
    fleet = Fleet(machine=(machine(count=6, memory_gb=(whole - 1) / 1e9, round_trip_ms=1000.0),))
    report = make_plan(config, fleet)
    assert report.binds == "memory" and report.best.count == 2
    first = report.candidates[0]
    assert first.unlimited > report.best.tokens_per_s and "memory_gb" in first.refused
    roomy = make_plan(config, Fleet(machine=(machine(count=6, round_trip_ms=1000.0),)))
    assert roomy.best.count == 1 and roomy.binds == roomy.best.binds != "memory"


def test_what_fits_nowhere_says_which_number_is_too_small():
    config = run_of()
    need = needs.memory_need(config, 0, cut_blocks(config)[0]).total
    with pytest.raises(ConfigError) as caught:
        make_plan(config, Fleet(machine=(machine(count=9, memory_gb=0.1),)))
    assert "stage 0 of 3 fits on no machine (m: memory_gb = 0.1 is too small" in str(caught.value)
    assert f"it needs {need / 1e9:.4g}" in str(caught.value)
    with pytest.raises(ConfigError, match="disk_gb = 1e-05 is too small"):
        make_plan(config, Fleet(machine=(machine(count=9, disk_gb=1e-5),)))
    with pytest.raises(ConfigError, match="device_memory_gb"):
        make_plan(config, Fleet(machine=(machine(count=9, device_memory_gb=1e-5),)))


def test_too_few_machines_for_the_configured_number():
    report = make_plan(run_of(), Fleet(machine=(machine(count=2),)))
    assert report.configured is None and report.refused == "3 stages need as many machines, the fleet has 2"
    assert report.best.count in (1, 2)


def test_compression_is_compared_with_none_on_the_same_machines():
    report = make_plan(run_of(), parse_fleet(FLEET))
    rows = {row.codec: row for row in report.compared}
    assert list(rows) == ["identity, float32", "identity, bfloat16", "bottleneck, bfloat16"]
    assert [row.ratio for row in rows.values()] == [1, 2, 8]
    assert [row.forward for row in rows.values()] == [128_000, 64_000, 16_000]
    assert rows["bottleneck, bfloat16"].training == pytest.approx(report.configured.training.tokens_per_s)
    assert make_plan(with_count(run_of(), 1), parse_fleet(FLEET)).compared == ()


def test_tied_embeddings_keep_one_stage():
    config = changed(with_count(run_of(), 1), "model", tie_embeddings=True)
    assert [row.count for row in make_plan(config, parse_fleet(FLEET)).candidates] == [1]


# ------------------------------------------------------------------------------------------------------- fleet files


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "has no machines"),
        ("machine = 3", "machine is no list of tables"),
        ("[[machine]", "not valid TOML"),
        (FLEET + "memry = 3", "unknown key 'memry' in section [machine 1]. Did you mean 'memory_gb'"),
        (FLEET.replace("disk_gb = 50\n", ""), "disk_gb is missing in section [machine 1]; write a finite number"),
        (FLEET.replace("= 50\n", '= "50"\n', 1), 'machine 1.disk_gb = "50" is a text'),
        (FLEET.replace("up_mbits = 8", "up_mbits = 0"), "machine 1 (small): up_mbits = 0.0; write more than 0"),
        (FLEET.replace("count = 6", "count = 0"), "count = 0; write more than 0"),
        (FLEET.replace("count = 6", f"count = {10**9}"), f"count = {10**9}; write at most 1000000"),
        (FLEET.replace("= 50\n", f"= {10**400}\n", 1), "is too large; write a finite number"),
        (FLEET.replace("flops_float32 = 1e9\n", ""), "flops_float32 and flops_bfloat16 are missing"),
        (FLEET + FLEET, "machine 2 (small): the name is empty or taken"),
        (FLEET + "[hub]\nup_mbits = -1", "hub: up_mbits = -1.0; write 0 or more"),
        (FLEET + "[hub]\nup = 1", "unknown key 'up' in section [hub]"),
        (FLEET + "[fleet]\n", "unknown key 'fleet' in the top level"),
    ],
)
def test_a_fleet_file_that_cannot_be_says_why(text, wanted):
    with pytest.raises(ConfigError) as caught:
        parse_fleet(text, "here")
    assert str(caught.value).startswith("here") and wanted in str(caught.value)


def test_the_example_is_a_fleet():
    fleet = parse_fleet((RECIPES / "fleet.toml").read_text(encoding="utf-8"))
    assert sum(row.count for row in fleet.machine) == 8 and fleet.hub.up_mbits > 0


# ---------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def files(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "fleet.toml").write_text(FLEET)
    return [str(tmp_path / "run.toml"), "--fleet", str(tmp_path / "fleet.toml")]


def test_the_command_prints_a_plan(files, capsys):
    assert main(["plan", *files]) == 0
    text = capsys.readouterr().out
    for words in ("as configured: 3 stages", "2 x small", "bottleneck, bfloat16", "8.0x", "peak main", "assumed: "):
        assert words in text, words
    for purpose in ("parameters", "gradients", "moments", "activations", "base", "upload", "others", "results"):
        assert f"\n{purpose}" in text


def test_the_command_prints_json_with_the_same_numbers(files, capsys):
    assert main(["plan", *files, "--json", "--set", "stages.count=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = make_plan(with_count(run_of(), 2), parse_fleet(FLEET))
    assert found["configured"]["count"] == 2 and len(found["candidates"]) == 6
    assert found["configured"]["tokens_per_s"] == pytest.approx(report.configured.tokens_per_s)
    assert found["configured"]["stages"][0]["memory"]["activations"] == report.configured.stages[0].memory.activations


def test_the_command_refuses_what_cannot_be(files, capsys, tmp_path):
    assert main(["plan", files[0], "--fleet", str(tmp_path / "none.toml")]) == 1
    assert "fleet file" in capsys.readouterr().err
    assert main(["plan", *files, "--set", "stages.count=7"]) == 1
    assert "stages.count = 7 is more than model.blocks = 6" in capsys.readouterr().err


def test_the_cost_model_needs_no_torch():
    import subprocess
    import sys

    script = "import sys; import iota.model.plan, iota.cli.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_large_preset_is_planned(tmp_path):
    config = parse_run('name = "a"\npreset = "70b"\n[train]\nbatch = 1\nmax_in_flight = 1\ndtype = "bfloat16"\n')
    fleet = Fleet(
        machine=(machine(count=9, memory_gb=2000.0, device_memory_gb=400.0, disk_gb=50_000.0, flops_bfloat16=3e14),)
    )
    plan = plan_cut(config, cut_blocks(config), fleet)
    assert isinstance(plan, Plan), plan
    assert sum(row.parameters for row in plan.stages) == 70_553_706_496 + 16 * 8192 * 128
    assert cost.tokens_per_sample(config) == 4096
