"""
Time of the scans over the time of a streaming pass: `python -m benchmarks.scan [--device cuda]`.

The bound of a pass is the time to stream the bytes that any scan must read and write: 3 tensors forward (two inputs, the
states); with backward 5 more for `linear_scan` (log-decays, states, incoming gradient, two gradients) and 6 more for
`chunk_harmonic`. It is measured as `torch.add` of two inputs into a ready buffer, once beside every timed pass, and scaled
by tensors. The ratio is the median over the rounds: absolute times say little on a shared machine. The scans allocate what
they return. Nothing is timed unless every backend first agrees with the float64 oracle.
"""

import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
import torch
import tyro
from torch.utils.benchmark.utils.timer import timer

from eval.tables import markdown, save
from fla_harmonic.ops.harmonic import (
    chunk_harmonic,
    linear_scan,
    naive_linear_scan,
    naive_recurrent_harmonic,
    usable_backends,
)

DECAY_RANGE = (0.9, 0.999)
FORWARD, BOTH = "forward", "forward + backward"
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "linear_scan": lambda a, b, backend: linear_scan(a, b, backend=backend)[0],
    "chunk_harmonic": lambda a, b, backend: chunk_harmonic(a, b, DECAY_RANGE, backend=backend)[0],
}
# tensors of the inputs' size that a pass must move
TENSORS = {("linear_scan", FORWARD): 3, ("linear_scan", BOTH): 8, ("chunk_harmonic", FORWARD): 3, ("chunk_harmonic", BOTH): 9}
# a timed pass: its time over its bound's, its time per token, and how many times longer the python loop takes
COLUMNS = ["B", "T", "D", "op", "backend", "direction", "over_bound", "ns_per_token", "loop_over_it"]


def check(backends: list[str], device: str, dtype: torch.dtype) -> None:
    """Raises a RuntimeError unless every backend agrees with the oracle in float64."""
    a, b = (x.to(device, dtype) for x in (-torch.rand(2, 300, 24), torch.randn(2, 300, 24)))
    expected = {
        "linear_scan": naive_linear_scan(a.double(), b.double())[0],
        "chunk_harmonic": naive_recurrent_harmonic(a.double(), b.double(), DECAY_RANGE)[0],
    }
    bound = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for name, op in OPS.items():
        for backend in backends:
            error = (op(a, b, backend) - expected[name]).abs().max().item()
            if not error < bound:
                raise RuntimeError(f"{name} on {backend}: expected the oracle within {bound}; off by {error:.2e}. Not timed.")


def seconds(run: Callable[[], object]) -> float:
    """Wall time of a call, with what it started on the device."""
    start = timer()
    run()
    return timer() - start


def python_loop(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The recurrence as a user would first write it: a torch expression per token."""
    h, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in range(x.shape[1]):
        h = torch.exp(g[:, t]) * h + x[:, t]
        out[:, t] = h
    return out


def measure(size: tuple[int, int, int], backends: list[str], device: str, dtype: torch.dtype, rounds: int) -> list[tuple]:
    """The `COLUMNS` of every timed pass of one size."""
    a, b, grad = (x.to(device, dtype) for x in (-torch.rand(size), torch.randn(size), torch.randn(size)))
    out = torch.empty_like(a)
    a_grad, b_grad = a.clone().requires_grad_(), b.clone().requires_grad_()

    def both(op: Callable[..., torch.Tensor], backend: str) -> None:
        op(a_grad, b_grad, backend).backward(grad)
        a_grad.grad = b_grad.grad = None

    runs: dict[tuple[str, str, str], Callable[[], object]] = {}
    for name, op in OPS.items():
        for backend in backends:
            runs[name, backend, FORWARD] = partial(op, a, b, backend)
            runs[name, backend, BOTH] = partial(both, op, backend)
    for run in runs.values():
        run()
    # (time, time over the bound's) of each round
    times: dict[tuple[str, str, str], list[tuple[float, float]]] = {key: [] for key in runs}
    for _ in range(rounds):
        for (name, backend, direction), run in runs.items():
            bound = seconds(partial(torch.add, a, b, out=out)) * TENSORS[name, direction] / 3
            elapsed = seconds(run)
            times[name, backend, direction].append((elapsed, elapsed / bound))
    loop = seconds(partial(python_loop, a, b))
    rows = []
    for (name, backend, direction), timed in times.items():
        elapsed, ratio = map(statistics.median, zip(*timed, strict=True))
        rows.append((*size, name, backend, direction, ratio, elapsed / (size[0] * size[1]) * 1e9,
                     loop / elapsed if direction == FORWARD else None))
    return rows


def plot(rows: pd.DataFrame, title: str, file: Path) -> None:
    """Time over the bound for every size, a panel per direction."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, (direction, panel) in zip(axes, rows.groupby("direction"), strict=True):
        for (op, backend), line in panel.groupby(["op", "backend"], sort=False):
            sizes = [f"{B} x {T:,} x {D}" for B, T, D in zip(line["B"], line["T"], line["D"], strict=True)]
            axis.plot(sizes, line["over_bound"], "o-", label=f"{op}, {backend}")
        axis.set(title=direction, yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time over the streaming bound")
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(figure, file)


def main(
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
    sizes: tuple[tuple[int, int, int], ...] = (
        (16, 1024, 256), (1, 4096, 256), (1, 16384, 256), (1, 65536, 256), (1, 1048576, 256)),
    backends: tuple[str, ...] = (),
    rounds: int = 7,
    threads: int = 2,
    csv: Path | None = None,
    png: Path | None = None,
) -> None:
    """
    Args:
        device: cpu or cuda.
        dtype: Of the inputs.
        sizes: (B, T, D), one group of rows each.
        backends: Backends to time. Default: all that run on the device.
        rounds: Timed rounds; each times the bound and every scan once.
        threads: CPU threads of torch and of the scans.
        csv: File for the table, if wanted.
        png: File for a plot of it, if wanted.
    """
    torch.set_num_threads(threads)
    kind: torch.dtype = getattr(torch, dtype)
    usable = usable_backends(torch.zeros(1, dtype=kind, device=device))
    if wrong := set(backends) - set(usable):
        raise ValueError(f"`backends` must be of {usable} on {device} with {dtype}; got {sorted(wrong)}.")
    timed = list(backends) or usable
    check(timed, device, kind)
    machine = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine()
    title = (f"{machine}, {threads} CPU threads, {dtype}, torch {torch.__version__}; kernels that ran: {', '.join(timed)}; "
             f"median of {rounds} rounds")
    print(title)
    rows = []
    for size in sizes:
        measured = measure(size, timed, device, kind, rounds)
        rows += measured
        print(markdown(("B", "T", "D", "op", "backend", "pass", "over bound", "ns/token", "loop over it"), (
            (*key, f"{ratio:.2f}", f"{ns:.1f}", "" if loop is None else f"{loop:.1f}")
            for *key, ratio, ns, loop in measured)), flush=True)
    frame = pd.DataFrame(rows, columns=COLUMNS)
    if csv is not None:
        frame.to_csv(csv, index=False, lineterminator="\r\n")
    if png is not None:
        plot(frame, title, png)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
