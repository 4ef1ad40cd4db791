"""Fleet files: the machines that a run could be planned for, as TOML (`iota plan --fleet`, `iota bench device --out`).

[[machine]]                # one table for each kind of machine
name = "desktop"
count = 4                  # how many of it (1)
memory_gb = 32             # main memory, 10^9 bytes
device_memory_gb = 0       # the accelerator's own; 0: it computes in main memory
disk_gb = 200              # disk to keep evidence on
flops_float32 = 9e10       # operations/s of a training step, measured by `iota bench device`, or stated;
flops_bfloat16 = 3e11      #   at least the one of the run's train.dtype
step_parameters = 2e8      # parameters/s of an inner step with its digest; 0: not counted
up_mbits = 20              # to and from the orchestrator
down_mbits = 100
round_trip_ms = 40

[hub]                      # the orchestrator's own line; 0 or left out: not counted
up_mbits = 1000
down_mbits = 1000
"""

from __future__ import annotations

import tomllib

import msgspec

from iota.config.load import misfits
from iota.config.schema import Section
from iota.errors import ConfigError

GB = 10**9


class Machine(Section, frozen=True):
    """One kind of machine; the module says what each key means."""

    name: str
    memory_gb: float
    disk_gb: float
    up_mbits: float
    down_mbits: float
    round_trip_ms: float
    count: int = 1
    device_memory_gb: float = 0.0
    flops_float32: float = 0.0
    flops_bfloat16: float = 0.0
    step_parameters: float = 0.0

    def flops(self, dtype: str) -> float:
        """Operations a second in a compute dtype. Raises ConfigError when it was neither measured nor stated."""
        value = self.flops_bfloat16 if dtype == "bfloat16" else self.flops_float32
        if value <= 0:
            raise ConfigError(
                f"machine {self.name!r} has no flops_{dtype}, and the run computes in {dtype}",
                f"Measure it with `iota bench device`, state flops_{dtype}, or plan with --set train.dtype=...",
            )
        return value


class Hub(Section, frozen=True):
    """The orchestrator's line: everything that crosses goes through it."""

    up_mbits: float = 0.0
    down_mbits: float = 0.0


class Fleet(Section, frozen=True):
    """Machines, by kind."""

    machine: tuple[Machine, ...]
    hub: Hub = Hub()


ABOVE_ZERO = ("count", "memory_gb", "disk_gb", "up_mbits", "down_mbits")
MOST = 10**6
"""Machines of one kind: a plan places them one by one."""
AT_LEAST_ZERO = ("device_memory_gb", "flops_float32", "flops_bfloat16", "step_parameters", "round_trip_ms")


def parse_fleet(text: str, place: str = "fleet file") -> Fleet:
    """A fleet from TOML text. Raises ConfigError with every problem: unknown or missing keys, wrong types, values that
    cannot be, two machines of one name, no machine at all."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{place} is not valid TOML: {error}", "Correct the line named") from None
    machines = data.get("machine", [])
    if not isinstance(machines, list) or not all(isinstance(entry, dict) for entry in machines):
        raise ConfigError(f"{place}: machine is no list of tables", "Write [[machine]] above each machine's keys")
    if not machines:
        raise ConfigError(f"{place} has no machines", "Write at least one [[machine]]; `iota bench device` makes one")
    problems = list(misfits(data | {"machine": []}, Fleet, ""))
    for number, entry in enumerate(machines, 1):
        problems += misfits(entry, Machine, f"machine {number}")
    if not problems:
        fleet = msgspec.convert(data, Fleet, strict=True)
        problems = _impossible(fleet)
        if not problems:
            return fleet
    raise ConfigError(f"{place}: " + "\n  ".join(problems))


def _impossible(fleet: Fleet) -> list[str]:
    out = []
    names = [machine.name for machine in fleet.machine]
    for number, machine in enumerate(fleet.machine, 1):
        where = f"machine {number} ({machine.name})"
        out += [
            f"{where}: {k} = {getattr(machine, k)}; write more than 0" for k in ABOVE_ZERO if getattr(machine, k) <= 0
        ]
        out += [
            f"{where}: {k} = {getattr(machine, k)}; write 0 or more" for k in AT_LEAST_ZERO if getattr(machine, k) < 0
        ]
        if machine.count > MOST:
            out.append(f"{where}: count = {machine.count}; write at most {MOST}")
        if not machine.name or names.index(machine.name) != number - 1:
            out.append(f"{where}: the name is empty or taken; write another")
        if machine.flops_float32 <= 0 and machine.flops_bfloat16 <= 0:
            out.append(f"{where}: flops_float32 and flops_bfloat16 are missing; write one, or run `iota bench device`")
    out += [
        f"hub: {k} = {getattr(fleet.hub, k)}; write 0 or more"
        for k in ("up_mbits", "down_mbits")
        if getattr(fleet.hub, k) < 0
    ]
    return out
