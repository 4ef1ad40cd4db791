"""The yardsticks of `iota bench swarm`: plain PyTorch on the same model, and the swarm's stages without a protocol.

    python -m iota.lab.bench_workers < JSON parameters

One process each. It prints "ready" once it has done a first sample, reads the window's start as one line (seconds of
the monotonic clock, which all processes of a machine share), works from then on, and prints the samples it did in the
window as one line of JSON. Samples that straddle an edge of the window count in proportion.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

Samples = np.ndarray
"""int64 [samples, 2, batch, sequence]: ids and labels of the run's first training samples."""
SLACK = 4
"""Samples that a stage may be ahead of the slowest one, as a pipeline with room for so many would let it."""
LOOK = 0.0005


class Job(msgspec.Struct):
    """What one worker does. `kind`: plain (the whole model; `worker` of `workers` replicas takes every `workers`-th
    sample) or bare (stage `stage`; `worker` counts over all stages, `members` in each). `run`: the run file."""

    kind: str
    run: str
    samples: str
    worker: int
    workers: int
    threads: int
    warmup: float
    seconds: float
    stage: int = 0
    members: int = 1
    counters: str = ""


class Done(msgspec.Struct):
    """Samples done in the window, by interpolation, and per CPU-second of this process (all its threads)."""

    samples: float
    per_cpu_s: float


def progress(times: list[float], start: float, stop: float) -> float:
    """How many of the things finished at `times` (ascending, one after another) were done between start and stop.

    Linear between two completions; so a window need not begin or end with one."""
    counts = np.arange(1, len(times) + 1, dtype=float)
    low, high = np.interp([start, stop], times, counts)
    return float(high - low)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    os.environ["OMP_NUM_THREADS"] = str(job.threads)  # before torch loads
    import torch

    torch.set_num_threads(job.threads)
    work = (_plain if job.kind == "plain" else _bare)(job)
    work(0)
    print("ready", flush=True)
    start = float(sys.stdin.readline()) + job.warmup
    times = [time.monotonic()]
    number, cpu = 1, time.process_time()
    while times[-1] < start + job.seconds:
        work(number)
        times.append(time.monotonic())
        number += 1
    per_cpu = (number - 1) / (time.process_time() - cpu)
    print(msgspec.json.encode(Done(progress(times, start, start + job.seconds), per_cpu)).decode(), flush=True)


def _plain(job: Job) -> Callable[[int], None]:
    """Plain PyTorch: forward, loss, backward; every `accumulate` samples mean, clip, fused AdamW."""
    import torch
    import torch.nn.functional as F

    from iota.config.load import check, load_run
    from iota.model.layout import Layout, initial_state
    from iota.model.llama import LlamaStage

    config = check(load_run(job.run))
    whole = msgspec.structs.replace(config, stages=msgspec.structs.replace(config.stages, count=1))
    cut = (0, config.model.blocks)
    model, train = LlamaStage(whole, 0, cut), config.train
    for name, values in Layout.of(model).views(initial_state(whole, 0, cut, config.seed)).items():
        model.get_parameter(name).data = torch.tensor(values)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )
    samples = np.load(job.samples)
    parameters = list(model.parameters())

    def work(number: int) -> None:
        ids, labels = torch.from_numpy(samples[(number * job.workers + job.worker) % len(samples)])
        with torch.autocast("cpu", torch.bfloat16, enabled=train.dtype == "bfloat16"):
            logits = model(ids)
        torch.autograd.backward((F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()),))
        if (number + 1) % train.accumulate == 0:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad /= train.accumulate
            torch.nn.utils.clip_grad_norm_(parameters, train.clip)
            optimizer.step()
            optimizer.zero_grad()

    return work


def _bare(job: Job) -> Callable[[int], None]:
    """One stage's loop of forward, backward, step on inputs of the right shape that never change, kept in step with
    the other stages by counters in a shared file."""
    import torch

    from iota.config.load import check, load_run
    from iota.model.boundary import BACKWARD, FORWARD, boundary_tensor
    from iota.model.layout import initial_state
    from iota.model.partition import cut_blocks
    from iota.model.trainer import StageTrainer
    from iota.model.wires import pack

    config = check(load_run(job.run))
    cut = cut_blocks(config)[job.stage]
    trainer = StageTrainer(config, job.stage, cut, "cpu", config.train.dtype)
    trainer.load(initial_state(config, job.stage, cut, config.seed), None, None, 0, 0, 1)
    wires = [boundary_tensor(config, way) for way in (FORWARD, BACKWARD)]
    shape = (config.train.batch, config.model.sequence, wires[0].channels)
    draw = torch.from_numpy(np.random.default_rng(job.worker).standard_normal(shape, dtype=np.float32))
    x = None if trainer.first else pack(draw, wires[0])
    gradient = pack(draw * 1e-4, wires[1])
    samples = np.load(job.samples)
    counters = np.memmap(job.counters, dtype=np.int64, mode="r+")

    def ahead() -> bool:
        done = counters.reshape(-1, job.members).sum(axis=1)
        return bool(done[job.stage] - done.min() >= SLACK)

    def work(number: int) -> None:
        while number and ahead():
            time.sleep(LOOK)
        ids, labels = samples[(number * job.members + job.worker % job.members) % len(samples)]
        given = ids if trainer.reads_ids else None
        if trainer.last:
            trainer.forward_loss(number, x, given, labels)
        else:
            trainer.forward(number, x, given)
            trainer.backward(number, gradient)
        trainer.accept()
        if (number + 1) % config.train.accumulate == 0:
            trainer.step()
        if number:  # the first is before the start, at whatever time each process gets to it
            counters[job.worker] += 1

    return work


if __name__ == "__main__":
    main()
