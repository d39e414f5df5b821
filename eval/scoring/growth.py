"""Whether memory or time per token grows with a text: processes that have read texts of two lengths, side by side."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from eval.scoring.models import load_recurrent
from eval.tables import markdown
from fla_harmonic import HarmonicForCausalLM

LENGTHS = (1_000, 100_000)
MODES = ("stream", "generate")


@dataclass
class Options:
    """One process."""

    model: Path
    """Hugging Face directory."""

    mode: str
    """stream: a text is scored in chunks. generate: tokens are generated one by one."""

    length: int
    """Tokens before the measurement."""

    chunk_size: int = 100
    """Tokens of a chunk."""


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
    """
    Largest resident set of this process so far. (`ru_maxrss` would start from what the parent process held.)

    Raises:
        RuntimeError: where there is no /proc/self/status.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        raise RuntimeError("measuring peak memory needs Linux with /proc; found none. Run it there.")
    return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def advance(model: HarmonicForCausalLM, mode: str, chunk_size: int) -> Callable[[int], None]:
    """A function that streams or generates that many more tokens (a multiple of `chunk_size`)."""
    if mode == "stream":
        vocab = model.config.vocab_size
        stream = model.stream((number * 7919 % vocab for number in count()), chunk_size)

        def read(tokens: int) -> None:
            for _ in range(0, tokens, chunk_size):
                next(stream)

        return read

    generated = _generated(model)

    def generate(tokens: int) -> None:
        for _ in range(tokens):
            next(generated)

    return generate


@torch.no_grad()
def _generated(model: HarmonicForCausalLM) -> Iterator[torch.Tensor]:
    token, cache = torch.zeros(1, 1, dtype=torch.long), None
    while True:
        out = model(token, past_key_values=cache, use_cache=True)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        yield token


def measure(
    model: Path, mode: str, lengths: tuple[int, ...] = LENGTHS, chunk_size: int = 100, rounds: int = 51,
) -> list[Growth]:
    """
    Peak memory and time per token at several lengths. Each has a process of its own; when all are there, they are timed in
    turn, so that a busy machine slows all alike.

    Args:
        model (Path):
            Hugging Face directory of a Harmonic model.
        mode (str):
            `"stream"` or `"generate"`.
        lengths (tuple[int, ...]):
            Tokens before the measurement. Default: 1,000 and 100,000.
        chunk_size (int):
            Tokens of a chunk, and of a round of the timing. Default: 100.
        rounds (int):
            How often each is timed. Default: 51.

    Raises:
        ValueError: for a length that chunks do not fill.
        RuntimeError: if a process ends before its time.
    """
    for length in lengths:
        if length < chunk_size or length % chunk_size:
            raise ValueError(f"`lengths` must be positive multiples of chunk_size={chunk_size}; got {length}.")
    processes: list[subprocess.Popen[str]] = []
    try:
        for length in lengths:
            command = [sys.executable, "-m", "eval.growth", "--model", str(model), "--mode", mode, "--length", str(length),
                       "--chunk_size", str(chunk_size)]
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))
        peaks = [int(_answer(process)) for process in processes]
        times: list[list[list[float]]] = [[] for _ in processes]
        for _ in range(rounds):
            for process, own in zip(processes, times, strict=True):
                process.stdin.write("next\n")  # type: ignore[union-attr]
                own.append([float(seconds) / chunk_size for seconds in _answer(process).split()])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    medians = [[statistics.median(column) for column in zip(*own, strict=True)] for own in times]
    return [Growth(mode, length, peak, *row) for length, peak, row in zip(lengths, peaks, medians, strict=True)]


def _answer(process: subprocess.Popen[str]) -> str:
    line: str = process.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise RuntimeError(f"expected a measurement from {process.args!r}; the process ended. Its error is above.")
    return line


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


def main(options: Options) -> None:
    model = load_recurrent(options.model)
    more = advance(model, options.mode, options.chunk_size)
    more(options.length)
    print(peak_bytes(), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter(), time.process_time()
        more(options.chunk_size)
        print(time.perf_counter() - start[0], time.process_time() - start[1], flush=True)
