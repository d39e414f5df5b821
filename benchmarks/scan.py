"""
Time of the CPU scans over the time of one streaming pass: `python -m benchmarks.scan`.

The bound is `torch.add` of two inputs into a ready buffer: the bytes that a scan must at least read and write. Scan and
bound are timed in turn within one process, and the ratio is the median over the rounds, since absolute times say little
on a shared machine. Nothing is timed unless every backend first agrees with the float64 oracle.
"""

import csv
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import tyro

from fla_harmonic.ops.harmonic import chunk_harmonic, linear_scan, naive_linear_scan, naive_recurrent_harmonic
from fla_harmonic.ops.harmonic.chunk import usable_backends

DECAY_RANGE = (0.9, 0.999)
OPS = {
    "linear_scan": lambda a, b, backend: linear_scan(a, b, backend=backend)[0],
    "chunk_harmonic": lambda a, b, backend: chunk_harmonic(a, b, DECAY_RANGE, backend=backend)[0],
}


@dataclass
class Options:
    """Sizes and repetitions of the benchmark."""

    sizes: list[tuple[int, int, int]] = field(default_factory=lambda: [(16, 1024, 256), (1, 16384, 256), (1, 65536, 256)])
    """(B, T, D), one row of the table each."""

    rounds: int = 7
    """Timed rounds; each times the bound and every scan once."""

    threads: int = 2
    """Threads of torch and of the scans."""

    csv: Path | None = None
    """File for the table, if wanted."""


def check(backends: list[str]) -> None:
    """Raises a RuntimeError unless every backend agrees with the oracle in float64."""
    a, b = -torch.rand(2, 300, 24), torch.randn(2, 300, 24)
    expected = {
        "linear_scan": naive_linear_scan(a.double(), b.double())[0],
        "chunk_harmonic": naive_recurrent_harmonic(a.double(), b.double(), DECAY_RANGE)[0],
    }
    for name, op in OPS.items():
        for backend in backends:
            error = (op(a, b, backend) - expected[name]).abs().max().item()
            if not error < 1e-5:
                raise RuntimeError(f"{name} on {backend}: expected the oracle within 1e-5; off by {error:.2e}. Not timed.")


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def python_loop(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The recurrence as a user would first write it: one torch expression a token."""
    h, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in range(x.shape[1]):
        h = torch.exp(g[:, t]) * h + x[:, t]
        out[:, t] = h
    return out


def measure(size: tuple[int, int, int], backends: list[str], rounds: int) -> list[dict[str, object]]:
    """One row a scan: the median over the rounds of its time over that of the bound, and of the python loop over it."""
    a, b = -torch.rand(size), torch.randn(size)
    grad, out = torch.randn(size), torch.empty(size)
    a_grad, b_grad = a.clone().requires_grad_(), b.clone().requires_grad_()

    def both(name: str, backend: str) -> None:
        OPS[name](a_grad, b_grad, backend).backward(grad)
        a_grad.grad = b_grad.grad = None

    runs: dict[tuple[str, str, str], Callable[[], object]] = {}
    for name, op in OPS.items():
        for backend in backends:
            runs[name, backend, "forward"] = partial(op, a, b, backend)
            runs[name, backend, "forward + backward"] = partial(both, name, backend)
    for run in runs.values():
        run()
    ratios: dict[tuple[str, str, str], list[float]] = {key: [] for key in runs}
    speedups: dict[tuple[str, str, str], float] = {}
    for _ in range(rounds):
        for key, run in runs.items():
            bound = seconds(lambda: torch.add(a, b, out=out))
            ratios[key].append(seconds(run) / bound)
    loop = seconds(lambda: python_loop(a, b))
    for key in runs:
        if key[2] == "forward":
            speedups[key] = loop / statistics.median(seconds(runs[key]) for _ in range(rounds))
    return [
        {"B": size[0], "T": size[1], "D": size[2], "op": name, "backend": backend, "pass": direction,
         "over streaming": round(statistics.median(ratios[name, backend, direction]), 2),
         "python loop over it": round(speedups[name, backend, direction], 1) if direction == "forward" else ""}
        for name, backend, direction in runs
    ]


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    backends = usable_backends(torch.zeros(1))
    check(backends)
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}; "
          f"kernels that ran: {', '.join(backends)}; median of {options.rounds} rounds")
    rows = [row for size in options.sizes for row in measure(size, backends, options.rounds)]
    columns = list(rows[0])
    width = {column: max(len(column), *(len(str(row[column])) for row in rows)) for column in columns}
    print("  ".join(column.rjust(width[column]) for column in columns))
    for row in rows:
        print("  ".join(str(row[column]).rjust(width[column]) for column in columns))
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
