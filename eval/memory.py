"""
Peak memory and time of a training step against the sequence length: `python -m eval.memory`.

Each cell is one run of stock torchtitan, batch 1, in a process of its own, of which the peak is known to the end: resident
memory on the CPU, allocated memory on an accelerator. A model that fails at a length, for memory or for time, is not tried
at longer ones. Finished cells are in `memory.jsonl` and are not run again.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
import torch
import tyro

from eval.results import Record, finished_line, keep_command, read_lines, write
from eval.study.cells import ONE_PROCESS
from eval.tables import markdown, save

# what is set for each way to compute the loss; `{chunk}` and `{segment}` are options
LOSSES = {
    "dense": (),
    "chunked": ("--harmonic.loss_chunk_tokens={chunk}",),
    "segments": ("--harmonic.loss_chunk_tokens={chunk}", "--harmonic.segment_len={segment}"),
}
_NO_MEMORY = re.compile(r"OutOfMemoryError|can't allocate memory|MemoryError|bad_alloc|Cannot allocate memory")


@dataclass
class Options:
    """The cells and where they go."""

    families: tuple[Literal["harmonic", "mamba", "llama"], ...] = ("harmonic", "mamba", "llama")
    """Models to train."""

    size: str = "debug"
    """Which of the configs: titan_configs/FAMILY_SIZE.toml."""

    seq_lens: tuple[int, ...] = (8192, 65536, 262144, 1048576)
    """Sequence lengths in tokens, ascending."""

    losses: tuple[Literal["dense", "chunked", "segments"], ...] = ("dense", "chunked", "segments")
    """Ways to compute the loss: dense, chunked, segments (chunked, of segments; Harmonic alone)."""

    chunk: int = 1024
    """Tokens of a chunk of the loss."""

    segment: int = 4096
    """Tokens of a segment."""

    steps: int = 1
    """Optimizer steps of a run; the time is the last one's. The first has compilation in it."""

    limit_gib: float = 0
    """On the CPU, the memory that a run may take; 0: nine tenths of the machine's."""

    timeout_s: int = 3600
    """Seconds that a run may take."""

    threads: int = 2
    """CPU threads of a run."""

    out: Path = Path("outputs/memory")
    """Folder for results and plot."""

    overrides: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """
    More torchtitan options for every cell, one at a time, e.g. `--overrides=--training.mixed_precision_param=float32
    --overrides=--training.dataset=novels`
    """


def cells(options: Options) -> list[list[Record]]:
    """The cells of each model and loss by rising length; a ValueError for lengths that do not rise."""
    if not options.seq_lens or list(options.seq_lens) != sorted(set(options.seq_lens)) or options.seq_lens[0] < 1:
        raise ValueError(f"`seq_lens` must be positive and rise; got {options.seq_lens}.")
    common = {name: getattr(options, name) for name in ("size", "steps", "threads", "limit_gib", "timeout_s")}
    more = {loss: [*(option.format(**vars(options)) for option in LOSSES[loss]), *options.overrides] for loss in LOSSES}
    return [
        [{"model": family, "loss": loss, "seq_len": seq_len, **common, "options": more[loss]} for seq_len in options.seq_lens]
        for family in options.families for loss in options.losses if family == "harmonic" or loss != "segments"]


def run(cell: Record, options: Options) -> Record:
    """
    Trains a cell in a process of its own, and returns it with `peak_gib`, `seconds` (of the last step) and `failed`, which is
    empty, or says why there are no numbers. A failure for another reason than memory or time is a RuntimeError.
    """
    folder = options.out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable, "-m", "torchtitan.train", f"--job.config_file=titan_configs/{cell['model']}_{options.size}.toml",
        f"--job.dump_folder={folder}", f"--training.seq_len={cell['seq_len']}", "--training.local_batch_size=1",
        f"--training.steps={options.steps}", "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1", "--audit.interval=0",
        "--metrics.no_enable_tensorboard", "--checkpoint.no_enable", *cell["options"],
    ]
    env = os.environ | ONE_PROCESS | {"OMP_NUM_THREADS": str(options.threads)}
    result = {**cell, "peak_gib": None, "seconds": None, "failed": ""}
    try:
        done = subprocess.run(command, env=env, timeout=options.timeout_s, preexec_fn=limit_memory(options.limit_gib),
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return {**result, "failed": f"over {options.timeout_s} s"}
    if done.returncode:
        # killed by the kernel, or refused an allocation
        if done.returncode == -9 or _NO_MEMORY.search(done.stdout):
            return {**result, "failed": "out of memory"}
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    # not those of a validation
    *_, last = (line for line in read_lines(folder / "metrics.jsonl") if "loss_metrics/global_avg_loss" in line)
    if last["n_tokens_seen"] != cell["seq_len"] * options.steps:
        raise RuntimeError(
            f"expected {options.steps} steps of {cell['seq_len']} tokens, but the run saw {last['n_tokens_seen']}")
    return {**result, "peak_gib": last["memory/max_active(GiB)"], "seconds": last["time_metrics/end_to_end(s)"],
            "loss_value": last["loss_metrics/global_avg_loss"], "grad_norm": last["grad_norm"]}


def limit_memory(limit_gib: float):
    """What the new process does first: on the CPU it takes a limit, so that it fails before it drags down the machine."""
    if torch.accelerator.is_available():
        return None
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = int(limit_gib * 2**30) if limit_gib else physical * 9 // 10
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def table(results: list[Record]) -> str:
    """The results as Markdown: one row a length, one column a model and loss."""
    texts = {(row["seq_len"], row["model"], row["loss"]):
             row["failed"] or f"{row['peak_gib']:.2f} GiB, {row['seconds']:.1f} s" for row in results}
    columns = list(dict.fromkeys((row["model"], row["loss"]) for row in results))
    return markdown(["length", *(f"{model}, {loss}" for model, loss in columns)], [
        [f"{seq_len:,}", *(texts.get((seq_len, *column), "") for column in columns)]
        for seq_len in sorted({row["seq_len"] for row in results})])


def plot(results: list[Record], file: Path) -> None:
    """Peak memory and time of a step against the length."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    colors, lines = {"harmonic": "C0", "mamba": "C1", "llama": "C2"}, {"dense": ":", "chunked": "--", "segments": "-"}
    for (model, loss), rows in pd.DataFrame(results).groupby(["model", "loss"], sort=False):
        for axis, column in zip(axes, ("peak_gib", "seconds"), strict=True):
            axis.plot(rows["seq_len"], rows[column].astype(float), color=colors[model], linestyle=lines[loss], marker="o",
                      label=f"{model}, {loss}")
    for axis, title in zip(axes, ("peak memory, GiB", "seconds of a step"), strict=True):
        axis.set(title=title, xlabel="length in tokens", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend()
    save(figure, file)


def main(options: Options) -> None:
    keep_command(options.out)
    results: list[Record] = []
    for series in cells(options):
        for cell in series:
            print(f"{cell['model']}, {cell['loss']}, {cell['seq_len']:,} tokens", flush=True)
            results.append(finished_line(options.out / "memory.jsonl", cell, partial(run, cell, options)))
            if results[-1]["failed"]:
                break
    write(options.out / "memory.csv", pd.DataFrame(results).to_csv(index=False))
    text = table(results)
    write(options.out / "memory.md", text + "\n")
    plot(results, options.out / "memory.png")
    print(f"{text}\n\n{options.out / 'memory.md'}, {options.out / 'memory.csv'}, {options.out / 'memory.png'}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
