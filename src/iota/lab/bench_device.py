"""`iota bench device`: what this machine brings to a run, as an entry of a fleet file.

Operations/s are those of a stage at work: forward and backward of blocks between two boundaries through the trainer
that miners use, packing included, counted as 3 x the forward's operations (`model.partition.stage_cost`), as
`iota plan` counts them. Each dtype takes half of the time; the median pass counts, so a short disturbance does not. The
inner step and the digest of the weights after each pass are timed apart: they follow parameters, not tokens.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from iota.config.fleet import GB, Machine, parse_fleet
from iota.config.load import check
from iota.config.schema import ModelConfig, RunConfig, StagesConfig, TrainConfig
from iota.errors import ConfigError
from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor
from iota.model.cost import tokens_per_sample
from iota.model.layout import initial_state
from iota.model.partition import cut_blocks, stage_cost
from iota.model.trainer import StageTrainer
from iota.model.wires import pack
from iota.nodes.miner.device import room_here
from iota.store.files import write_atomic

DTYPES = ("float32", "bfloat16")


class Speed(msgspec.Struct, frozen=True):
    """`flops`: operations/s of a pass; `step_parameters`: parameters/s of an inner step with its digest; `passes`: how
    many were timed."""

    flops: float
    step_parameters: float
    passes: int


class Line(msgspec.Struct, frozen=True):
    """The way to the orchestrator, stated or measured."""

    up_mbits: float
    down_mbits: float
    round_trip_ms: float


def device_config(device: str) -> RunConfig:
    """What is measured unless a run is given: the middle one of three stages of one block, of a width at which the
    device shows what it can (512 on a CPU, 2048 elsewhere), with the paper's codec."""
    width, ffn, heads, sequence = (512, 1408, 8, 256) if device == "cpu" else (2048, 8192, 32, 1024)
    return RunConfig(
        name="device",
        model=ModelConfig(width=width, blocks=3, heads=heads, kv_heads=heads // 4, ffn=ffn, sequence=sequence),
        stages=StagesConfig(count=3, codec="bottleneck", channels=width // 32),
        train=TrainConfig(batch=4),
    )


def middle(config: RunConfig) -> tuple[int, tuple[int, int]]:
    """The stage that is measured, with its cut: the one in the middle, the first of two."""
    stage = (config.stages.count - 1) // 2
    return stage, cut_blocks(config)[stage]


def measure_speed(config: RunConfig, device: str, dtype: str, seconds: float) -> Speed:
    """Time passes of the middle stage, each with a step, for `seconds`, at least two, after one that is not timed."""
    config = check(config)
    stage, cut = middle(config)
    trainer = StageTrainer(config, stage, cut, device, dtype)
    trainer.load(initial_state(config, stage, cut, 0), None, None, 0, 0, tokens_per_sample(config))
    work = _pass(config, trainer)
    work(0)
    trainer.step()
    times: list[float] = []
    steps: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 2 or time.monotonic() < end:
        start = time.perf_counter()
        work(len(times) + 1)
        worked = time.perf_counter()
        trainer.step()
        trainer.weights_digest()
        times.append(worked - start)
        steps.append(time.perf_counter() - worked)
    operations = 3 * stage_cost(config, stage, cut) * tokens_per_sample(config)
    return Speed(operations / statistics.median(times), trainer.layout.size / statistics.median(steps), len(times))


def _pass(config: RunConfig, trainer: StageTrainer) -> Callable[[int], None]:
    """One accepted pass on inputs of the right shape that never change."""
    forward, backward = (boundary_tensor(config, way) for way in (FORWARD, BACKWARD))
    rng = np.random.default_rng(0)
    batch, sequence = config.train.batch, config.model.sequence
    values = torch.from_numpy(rng.standard_normal((batch, sequence, forward.channels), dtype=np.float32))
    x = None if trainer.first else pack(values, forward)
    gradient = pack(values * 1e-4, backward)
    tokens = rng.integers(0, config.model.vocabulary, (2, batch, sequence))
    ids = tokens[0] if trainer.reads_ids else None

    def work(number: int) -> None:
        if trainer.last:
            trainer.forward_loss(number, x, ids, tokens[1])
        else:
            trainer.forward(number, x, ids)
            trainer.backward(number, gradient)
        trainer.accept()

    return work


def measure(
    name: str, device: str, folder: Path, seconds: float, line: Line | None, config: RunConfig | None = None
) -> Machine:
    """This machine's entry. `folder`: where its miner would keep its files; `seconds` for both dtypes together; a
    `line` of None leaves zeros, which no fleet file may hold."""
    measured = config or device_config(device)
    speeds = {dtype: measure_speed(measured, device, dtype, seconds / len(DTYPES)) for dtype in DTYPES}
    room = room_here(device, folder)
    line = line or Line(0.0, 0.0, 0.0)
    return Machine(
        name=name,
        memory_gb=_rounded(room.memory / GB),
        disk_gb=_rounded(room.disk / GB),
        device_memory_gb=_rounded(room.device / GB),
        flops_float32=_rounded(speeds["float32"].flops),
        flops_bfloat16=_rounded(speeds["bfloat16"].flops),
        step_parameters=_rounded(statistics.mean(speed.step_parameters for speed in speeds.values())),
        up_mbits=line.up_mbits,
        down_mbits=line.down_mbits,
        round_trip_ms=line.round_trip_ms,
    )


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


# --------------------------------------------------------------------------------------------------------- the file


def default_name() -> str:
    """This host's name, in characters that need no care."""
    return re.sub(r"[^a-z0-9-]+", "-", platform.node().lower()).strip("-") or "machine"


def entry_text(machine: Machine) -> str:
    """The entry as TOML."""
    rows = [f"{key} = {_toml(value)}" for key, value in msgspec.structs.asdict(machine).items()]
    return "[[machine]]\n" + "\n".join(rows) + "\n"


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.4e}" if value >= 1e7 else f"{value:g}"


def check_free(path: Path, name: str) -> str:
    """The fleet file's text ("" when there is none yet), after checking that it is one and has no machine of this name.

    Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"fleet file {path} cannot be read: {error}", "Give another --out") from None
    if text.strip() and any(machine.name == name for machine in parse_fleet(text, str(path)).machine):
        raise ConfigError(f"fleet file {path} has a machine {name!r} already", "Remove its entry, or give --name")
    return text


def append(path: Path, machine: Machine) -> None:
    """Add the entry at the end of the fleet file, or begin one. Raises ConfigError as `check_free` does, and when the
    result would be no fleet file (then nothing is written)."""
    text = check_free(path, machine.name)
    whole = text + ("\n" if text.strip() else "") + entry_text(machine)
    parse_fleet(whole, str(path))
    write_atomic(path, [whole.encode()])
