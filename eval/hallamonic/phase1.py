"""
Phase 1 of a pretrained model from layers that begin as the attention, and from random ones:
`python -m eval.hallamonic_phase1 --model DIR --layers 10,15,20`.

Both see the same text in the same order, by titan_configs/hallamonic_smollm2_phase1.toml or another config. The result is the
loss of both, and of the original, on the text of each step before that step learns from it, and on the same targets of the
test split. A model that reads the future gets no score. A run that was killed continues where it stopped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from eval.hallamonic.debug import cell
from eval.results import Record, finished, keep_command, write, write_lines
from eval.scoring.models import digest, load
from eval.scoring.targets import window_losses
from eval.study.cells import Cell, Model, curve
from eval.study.protocol import text_of
from eval.study.run_cell import measure, scores
from eval.study.running import run_cells
from eval.tables import markdown, save
from fla_harmonic.hallamonic.convert import Convert, convert


@dataclass
class Options:
    """What to convert, and how long to train."""

    model: Path
    """Hugging Face directory of the pretrained model."""

    layers: str = "10,15,20"
    """The layers to replace: all, or numbers and ranges such as 0,2,4-10."""

    inits: tuple[Literal["attention", "random"], ...] = ("attention", "random")
    """How the new layers begin."""

    seed: int = 0
    """Seed of the data order, and of what begins at random."""

    config: str = "hallamonic_smollm2_phase1"
    """Name of the config in titan_configs."""

    steps: int | None = None
    """Optimizer steps. Default: the config's."""

    targets: int = 1024
    """Tokens of the test split that are predicted before and after."""

    threads: int = 2
    """CPU threads."""

    out: Path = Path("outputs/hallamonic_phase1")
    """Folder for runs, table and plot."""


def original(options: Options, first: Cell) -> Record:
    """What the original scores on the targets of the cells, and `train`, its bits per token on the text of each step."""
    job = ConfigManager().parse_args(first.arguments(options.out / "none"))
    return finished(options.out / "original" / f"{digest(options.model)[:10]}-{first.name}.json",
                    lambda: {**scores(first, job, options.model), "train": step_losses(options.model, job)})


def step_losses(directory: Path, job: JobConfig) -> list[float]:
    """Bits per token of a model on what each step of a job trains on."""
    spec, model = get_train_spec(job.model.name), load(directory)[0]
    assert spec.build_tokenizer_fn is not None
    assert spec.build_dataloader_fn is not None
    loader: Any = spec.build_dataloader_fn(
        dp_world_size=1, dp_rank=0, tokenizer=spec.build_tokenizer_fn(job), job_config=job)
    losses = []
    for inputs, labels in islice(loader, job.training.steps):
        ids = torch.cat([inputs["input"], labels[:, -1:]], 1).to(model.device)
        losses.append(window_losses(model, ids, labels.shape[1]).mean().item() / math.log(2))
    return losses


def table(results: Sequence[tuple[str, Record, list[float]]]) -> str:
    """Results as Markdown: of each model its name, its scores, and its bits per token on the text of each step."""
    columns = ["model", "bits per token, text of the first step", "of the last step", "test split", "random tokens (log2 V)"]
    return markdown(columns, (
        [name, f"{steps[0]:.3f}", f"{steps[-1]:.3f}", f"{result['test']['bits_per_token']:.3f}",
         "{random_bits_per_token:.2f} ({log2_vocab:.2f})".format(**result["test"]["audit"])]
        for name, result, steps in results))


def main(options: Options) -> None:
    keep_command(options.out)
    cells, folders = [], []
    for init in options.inits:
        converted = options.out / "converted" / f"{digest(options.model)[:10]}-{options.layers}-{init}-seed{options.seed}"
        convert(Convert(str(options.model), converted, layers=options.layers, init=init, seed=options.seed))
        text = text_of("novels", "", "hf", str(converted), options.targets, options.targets)
        cells.append(cell(Model(init, "hallamonic", "hf"), options.config, text, options.seed, options.steps,
                          f"from {converted.name}", ("--metrics.log_freq=1",)))
        folders.append(options.out / "cells" / cells[-1].name)
    results = run_cells(cells, measure, options.out, 1, options.threads, "phase 1")
    reference = original(options, cells[0])

    rows: list[tuple[str, Record, list[float]]] = [("original", reference, reference["train"])]
    rows += [(f"{init}, phase 1", result, curve(folder)["bits_per_token"].tolist())
             for init, result, folder in zip(options.inits, results, folders, strict=True)]
    figure, axis = plt.subplots(figsize=(6.5, 4.2))
    for index, (name, result, steps) in enumerate(rows):
        style: dict[str, Any] = {"color": f"C{index - 1}", "marker": "o"} if index else {"color": "gray", "linestyle": "--"}
        axis.plot(range(1, len(steps) + 1), steps, label=f"{name}; test split {result['test']['bits_per_token']:.2f}", **style)
    axis.set(xlabel="step", ylabel="bits per token", title=f"phase 1, layers {options.layers} replaced")
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, options.out / "phase1.png")
    write_lines(options.out / "phase1.jsonl", ({"model": name, **result, "train": steps} for name, result, steps in rows))
    write(options.out / "phase1.md", table(rows) + "\n")
    print(f"{table(rows)}\n\n{options.out / 'phase1.md'}, {options.out / 'phase1.jsonl'}, {options.out / 'phase1.png'}")
