"""
Recall, where recurrences are known to be weak: `python -m eval.recall`.

Two generated tasks (`eval.tasks.recall_tasks`): associative recall of many pairs (MQAR), and a passkey asked for at growing
distance. Each model trains on a task by itself, on as many tokens as every other: at each learning rate of a sweep, which is
the same for all and decided on the validation set with the first seed; then with every seed at its best. The test sequences
are the same for all. No text is involved, so no torchtitan: a plain loop trains (`eval.tasks.recall_cell`).

A model that reads the future gets no score. What is longer than a model was trained on says so. A study that was killed
continues where it stopped.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from eval.results import Record, keep_command, write, write_lines
from eval.study.cells import Model
from eval.study.options import cli
from eval.study.protocol import best_lrs, check_different
from eval.study.running import run_cells
from eval.tasks.recall_cell import RecallCell, measure
from eval.tasks.recall_tables import frame, plot, table
from eval.tasks.recall_tasks import MQAR, Passkey, Size, Task


@dataclass
class Options:
    """Which study, and what of it is set otherwise."""

    preset: Literal["cpu-small", "gpu"] = "cpu-small"
    """
    The study whose settings are the defaults of all others. cpu-small: the debug flavors at small sizes on two cores; gpu: 28M
    at the sizes of the literature.
    """

    models: tuple[str, ...] = ("harmonic/debug", "mamba/debug", "llama/debug")
    """family/flavor each."""

    tasks: tuple[Literal["mqar", "passkey"], ...] = ("mqar", "passkey")
    """Which tasks."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds of weights and training sequences; the sweep runs with the first."""

    lrs: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Learning rates of the sweep."""

    mqar_steps: int = 1000
    """Optimizer steps."""

    mqar_vocab: int = 32
    """Tokens in the vocabulary: an eighth is filler, the rest keys and values."""

    mqar_sizes: tuple[tuple[int, int], ...] = ((16, 2), (32, 4), (32, 8))
    """Lengths and pairs to train on, in turn, e.g. `64 4 128 8`."""

    mqar_tested: tuple[tuple[int, int], ...] = ((16, 2), (32, 4), (32, 8), (64, 8), (64, 14), (128, 14))
    """Lengths and pairs of the test."""

    passkey_steps: int = 800
    """Optimizer steps."""

    passkey_vocab: int = 32
    """Tokens in the vocabulary: ten digits, two marks, filler."""

    passkey_digits: int = 3
    """Digits of the number."""

    passkey_noise: float = 0.1
    """Share of digits in the filler."""

    passkey_length: int = 32
    """Tokens of a training sequence; the number is anywhere in it."""

    passkey_distances: tuple[int, ...] = (0, 8, 16, 25, 57, 121, 249)
    """Tokens between number and question in the test; sequences are longer than in training where they have to be."""

    step_tokens: int = 512
    """Tokens per optimizer step."""

    test: int = 128
    """Test sequences of a size."""

    validation: int = 128
    """Validation sequences of a trained size."""

    processes: int = 2
    """Cells at once."""

    threads: int = 1
    """CPU threads of a cell."""

    out: Path = Path("outputs/recall")
    """Folder for cells, tables and plot."""


PRESETS = {
    "cpu-small": Options(),
    "gpu": Options(
        preset="gpu", models=("harmonic/28M", "harmonic/28M-best", "mamba/28M", "llama/28M"), seeds=(0, 1, 2),
        lrs=(3e-4, 1e-3, 3e-3), mqar_steps=10000, mqar_vocab=8192, mqar_sizes=((64, 4), (128, 8), (256, 16), (512, 64)),
        mqar_tested=((64, 4), (64, 16), (128, 8), (128, 32), (256, 16), (256, 64), (512, 64), (512, 128), (1024, 256)),
        passkey_steps=5000, passkey_vocab=256, passkey_digits=5, passkey_length=4096,
        passkey_distances=(0, 256, 1024, 2048, 4085, 8192, 16384, 32768, 65525), step_tokens=65536, test=512, validation=256,
        processes=1, threads=8,
    ),
}


def cells(options: Options, task: str, seeds: Iterable[int], lrs: dict[str, Sequence[float]]) -> list[RecallCell]:
    """Cells of a task, checked: every model with every seed at each of its learning rates."""
    if task == "mqar":
        kind: Task = MQAR(options.mqar_vocab)
        trained, tested = (tuple(Size(*size) for size in sizes) for sizes in (options.mqar_sizes, options.mqar_tested))
        steps = options.mqar_steps
    else:
        kind = passkey = Passkey(options.passkey_vocab, options.passkey_digits, options.passkey_noise)
        trained = (Size(options.passkey_length, Passkey.ANYWHERE),)
        tested = tuple(
            Size(max(options.passkey_length, distance + passkey.around), distance) for distance in options.passkey_distances)
        steps = options.passkey_steps
    found = [
        RecallCell(Model.of(name), kind, trained, tested, options.step_tokens, steps, seed, lr, options.validation,
                   options.test)
        for seed, name in itertools.product(seeds, options.models) for lr in lrs[name]
    ]
    for cell in found:
        cell.check()
    return found


def accuracy(result: Record) -> tuple[float, float, float]:
    """The rank of a result by its mean accuracy on the validation set, where that is equal by its loss."""
    scores = pd.DataFrame(result["validation"])
    return scores["accuracy"].mean(), -scores["loss"].mean(), result["cell"]["lr"]


def run(options: Options) -> list[Record]:
    """The results of all cells, each with its `stage`: `"sweep"`, or `"best"` for those that count; what is missing is run."""
    check_different(options, ("models", "tasks", "seeds", "lrs", "mqar_tested", "passkey_distances"))

    def stage(title: str, planned: list[RecallCell]) -> list[Record]:
        return run_cells(planned, measure, options.out, options.processes, options.threads, title)

    # before any of them runs: a mistake in the second task shows here
    sweeps = [cell for task in options.tasks
              for cell in cells(options, task, options.seeds[:1], dict.fromkeys(options.models, options.lrs))]
    keep_command(options.out)
    found = stage("sweep", sweeps)
    planned = []
    for task in options.tasks:
        lrs = best_lrs((result for result in found if result["cell"]["task"]["name"] == task), accuracy)
        planned += cells(options, task, options.seeds, {name: (lr,) for name, lr in lrs.items()})
    return [{"stage": title, **result} for title, results in (("sweep", found), ("best", stage("best", planned)))
            for result in results]


def main(options: Options) -> None:
    records = run(options)
    write_lines(options.out / "recall.jsonl", records)
    write(options.out / "recall.csv", frame(records).to_csv(index=False))
    text = table(records)
    write(options.out / "table.md", text + "\n")
    plot(records, options.out / "recall.png")
    names = ("table.md", "recall.csv", "recall.jsonl", "recall.png")
    print(f"{text}\n\n{', '.join(str(options.out / name) for name in names)}")


if __name__ == "__main__":
    main(cli(PRESETS, __doc__))
