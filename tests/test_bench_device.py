"""`iota bench device` measures, writes an entry that `iota plan` takes, and refuses what cannot be. No speed counts."""

import json
import threading
from pathlib import Path

import msgspec
import pytest

from iota.cli.main import main
from iota.config.fleet import Machine, parse_fleet
from iota.config.load import check, load_run
from iota.errors import ConfigError, IotaError
from iota.lab import bench_device, bench_line
from iota.lab.bench_device import Line, append, default_name, entry_text, measure_speed
from iota.model.partition import stage_cost
from iota.nodes.miner.device import room_here

RECIPES = Path(__file__).parent.parent / "recipes"
TINY = str(RECIPES / "tiny.toml")
STATED = ["--up", "20", "--down", "100", "--round-trip", "40"]
FAST = ["--device", "cpu", "--seconds", "0.02", "--recipe", TINY]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_speed_is_operations_by_the_cost_model_over_time(count, monkeypatch):
    config = load_run(TINY)
    config = msgspec.structs.replace(config, stages=msgspec.structs.replace(config.stages, count=count))
    clock = iter(range(10**6))
    monkeypatch.setattr(bench_device.time, "perf_counter", lambda: float(next(clock)))
    speed = measure_speed(config, "cpu", "float32", 0.0)
    stage, cut = bench_device.middle(check(config))
    assert stage == {1: 0, 2: 0, 3: 1}[count] and speed.passes == 2
    tokens = config.train.batch * config.model.sequence
    assert speed.flops == 3 * stage_cost(check(config), stage, cut) * tokens, "a second a pass by this clock"
    assert speed.step_parameters > 0


def test_both_dtypes_and_the_room_are_measured(tmp_path):
    machine = bench_device.measure("m", "cpu", tmp_path, 0.02, Line(1.0, 2.0, 3.0), load_run(TINY))
    assert machine.flops_float32 > 0 and machine.flops_bfloat16 > 0 and machine.step_parameters > 0
    room = room_here("cpu", tmp_path)
    assert machine.memory_gb == pytest.approx(room.memory / 1e9, rel=1e-3) and machine.device_memory_gb == 0
    assert machine.disk_gb == pytest.approx(room.disk / 1e9, rel=0.05)
    assert (machine.up_mbits, machine.down_mbits, machine.round_trip_ms) == (1.0, 2.0, 3.0)


def test_what_is_measured_by_default_is_a_middle_stage_between_two_boundaries():
    for device in ("cpu", "cuda"):
        config = check(bench_device.device_config(device))
        assert bench_device.middle(config) == (1, (1, 2)) and config.stages.count == 3


def test_an_entry_survives_the_file(tmp_path):
    machine = Machine(
        name="a", memory_gb=8.5, disk_gb=12.25, up_mbits=0.1, down_mbits=1000.0, round_trip_ms=0.25, count=2,
        flops_float32=1.234e10, flops_bfloat16=9.9e14, step_parameters=5.0e6,
    )  # fmt: skip
    assert parse_fleet(entry_text(machine)).machine == (machine,)
    path = tmp_path / "fleet.toml"
    append(path, msgspec.structs.replace(machine, name='a "b"\nü'))
    assert parse_fleet(path.read_text()).machine[0].name == 'a "b"\nü'
    path.unlink()
    append(path, machine)
    before = "# mine\n" + path.read_text()
    path.write_text(before)
    append(path, msgspec.structs.replace(machine, name="b"))
    assert path.read_text().startswith(before), "what stood there stays"
    assert [row.name for row in parse_fleet(path.read_text()).machine] == ["a", "b"]
    with pytest.raises(ConfigError, match="has a machine 'a' already"):
        append(path, machine)
    path.write_text("[[machine]]\nname = 3\n")
    with pytest.raises(ConfigError, match=r"machine 1\.name = 3"):
        append(path, machine)


def test_the_command_writes_an_entry_that_plan_takes(tmp_path, capsys):
    out = tmp_path / "fleet.toml"
    command = ["bench", "device", *FAST, *STATED, "--folder", str(tmp_path), "--out", str(out)]
    assert main([*command, "--name", "one", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["name"] == "one" and entry["up_mbits"] == 20 and entry["flops_float32"] > 0
    assert main([*command]) == 0
    assert f'name = "{default_name()}"' in capsys.readouterr().out
    assert main(["plan", TINY, "--fleet", str(out), "--set", "stages.count=2"]) == 0
    assert "1 x one" in capsys.readouterr().out
    assert main(command) == 1
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--up", "3"], "not known: down_mbits, round_trip_ms"),
        (["--out", "fleet.toml"], "not known: up_mbits, down_mbits, round_trip_ms"),
        ([*STATED[:4], "--round-trip", "-1"], "round_trip_ms = -1 cannot be"),
        (["--up", "0", *STATED[2:]], "up_mbits = 0 cannot be"),
        (["--url", "ftp://x"], "--url = 'ftp://x' is no address"),
        (["--url", "http://x:99999"], "--url = 'http://x:99999' is no address"),
        (["--url", "http://[::1"], "--url = 'http://[::1' is no address"),
        (["--seconds", "0"], "no length of a window"),
        (["--recipe", "none.toml"], "none.toml does not exist"),
        (["--serve", "8402"], "--serve = '8402' is no address"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_measured(options, wanted, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_device, "measure", lambda *given: pytest.fail("measured"))
    assert main(["bench", "device", *FAST, *options]) == 1
    assert wanted in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_without_a_line_the_entry_says_what_is_missing(tmp_path, capsys):
    assert main(["bench", "device", *FAST, "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "fill it in" in text
    with pytest.raises(ConfigError, match="up_mbits"):
        parse_fleet(text)


# ---------------------------------------------------------------------------------------------------------- the line


@pytest.fixture
def server():
    with bench_line.line_server("127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_line_is_measured_both_ways(server, capsys, tmp_path):
    line = bench_line.measure_line(server, long_enough=0.001)
    assert line.up_mbits > 0 and line.down_mbits > 0 and 0 < line.round_trip_ms < 10_000


def test_stated_values_stand_over_measured_ones(server, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_line, "LARGEST", 2 * bench_line.FIRST)
    command = ["bench", "device", *FAST, "--folder", str(tmp_path), "--url", server, "--up", "7", "--json"]
    assert main(command) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["up_mbits"] == 7 and entry["down_mbits"] > 0 and entry["down_mbits"] != 7


def test_a_server_that_is_not_there_or_refuses(server, monkeypatch):
    monkeypatch.setattr(bench_line, "LARGEST", 10)  # it serves at most so much, and the client asks for more
    with pytest.raises(IotaError, match="GET was answered with 413") as caught:
        bench_line.measure_line(server)
    assert caught.value.code == "unreachable"
    with pytest.raises(IotaError, match="did not answer"):
        bench_line.measure_line("http://127.0.0.1:1/")
