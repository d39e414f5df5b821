"""Whether memory or time per token grows with a text: processes that have read texts of two lengths, side by side."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from eval.scoring.models import load_recurrent
from eval.tables import markdown
from fla_harmonic import HarmonicForCausalLM

LENGTHS = (1_000, 100_000)
MODES = ("stream", "generate")


@dataclass
class Growth:
    """What was measured at one length."""

    mode: str
    length: int
    peak_bytes: int
    """Largest resident set of the process up to `length`."""
    seconds: float
    """Median time per token after `length`."""
    cpu_seconds: float
    """The same in time of the CPU, which other programs on the machine disturb less."""


def peak_bytes() -> int:
    """Largest resident set of this process so far. (`ru_maxrss` would start from what the parent process held.)"""
    status = Path("/proc/self/status")
    if not status.is_file():
        raise RuntimeError("measuring peak memory needs Linux with /proc; found none. Run it there.")
    return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))


@torch.no_grad()
def _generated(model: HarmonicForCausalLM) -> Iterator[torch.Tensor]:
    token, cache = torch.zeros(1, 1, dtype=torch.long), None
    while True:
        out = model(token, past_key_values=cache, use_cache=True)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        yield token


def _run(pipe: Connection, directory: Path, mode: str, length: int, chunk_size: int) -> None:
    """A process: reads or generates `length` tokens and sends its peak; then, for each word, the times of a chunk."""
    model = load_recurrent(directory)
    vocab = model.config.vocab_size
    texts = model.stream((number * 7919 % vocab for number in count()), chunk_size)
    # in a step of the stream there is a chunk, in one of the generation a token
    steps, chunk = (iter(texts), 1) if mode == "stream" else (_generated(model), chunk_size)
    for _ in islice(steps, length // chunk_size * chunk):
        pass
    pipe.send(peak_bytes())
    while pipe.recv():
        start = time.perf_counter(), time.process_time()
        for _ in islice(steps, chunk):
            pass
        pipe.send((time.perf_counter() - start[0], time.process_time() - start[1]))


def measure(
    model: Path, mode: str, lengths: tuple[int, ...] = LENGTHS, chunk_size: int = 100, rounds: int = 51,
) -> list[Growth]:
    """
    Peak memory and time per token of the Harmonic model in a directory, after several lengths. Each has a process of its own;
    when all are there, they are timed in turn, a chunk at a time, so that a busy machine slows all alike. In the mode
    `"stream"` a text is scored in chunks, in `"generate"` tokens are generated one by one.

    Raises:
        ValueError: for a length that chunks do not fill.
        EOFError: a process ended before its time; its error is above.
    """
    for length in lengths:
        if length < chunk_size or length % chunk_size:
            raise ValueError(f"`lengths` must be positive multiples of chunk_size={chunk_size}; got {length}.")
    # fresh processes: a fork would start from the peak of this one
    context = get_context("spawn")
    pipes = []
    for length in lengths:
        ours, theirs = context.Pipe()
        context.Process(target=_run, args=(theirs, model, mode, length, chunk_size), daemon=True).start()
        # the process alone holds its end: when it is gone, `recv` says so
        theirs.close()
        pipes.append(ours)
    peaks = [pipe.recv() for pipe in pipes]
    times = []
    for _ in range(rounds):
        for pipe in pipes:
            pipe.send(True)
            times.append(pipe.recv())
    for pipe in pipes:
        pipe.send(False)
    medians = np.median(np.reshape(times, (rounds, len(lengths), 2)), axis=0) / chunk_size
    return [Growth(mode, length, peak, *row) for length, peak, row in zip(lengths, peaks, medians.tolist(), strict=True)]


def table(rows: list[Growth]) -> str:
    """The measurements as Markdown, with the ratio to the first length of the same mode."""
    first = {row.mode: row for row in reversed(rows)}
    columns = ["tokens", "mode", "peak memory, MiB", "ratio", "time per token, us", "ratio", "CPU time per token, us", "ratio"]
    units = (("peak_bytes", 2**-20), ("seconds", 1e6), ("cpu_seconds", 1e6))
    return markdown(columns, (
        [f"{row.length:,}", row.mode, *(
            text for name, unit in units
            for text in (f"{getattr(row, name) * unit:.1f}", f"{getattr(row, name) / getattr(first[row.mode], name):.3f}"))]
        for row in rows))
