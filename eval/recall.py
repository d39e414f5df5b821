"""
Recall, where recurrences are known to be weak: `python -m eval.recall`.

Two generated tasks (`eval.tasks.recall_tasks`): associative recall of many pairs (MQAR), and a passkey asked for at growing
distance. Each model trains on a task by itself, on as many tokens as every other: at each learning rate of a sweep, which is
the same for all and decided on the validation set with the first seed; then with every seed at its best. The test sequences
are the same for all. No text is involved, so no torchtitan: a plain loop trains (`eval.tasks.recall_cell`).

A model that reads the future gets no score. What is longer than a model was trained on says so. A study that was killed goes
on where it stopped.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import pandas as pd
import tyro

from eval.results import keep_command, write
from eval.study.cells import Model, run_cells
from eval.tasks.recall_cell import RecallCell
from eval.tasks.recall_tasks import MQAR, Passkey, Size

TITLES = {
    "mqar": "MQAR, share of queries with the right value",
    "passkey": "Passkey, share of numbers with every digit right",
}
LOADS = {"mqar": "pairs, in a sequence of so many tokens", "passkey": "distance, in a sequence of so many tokens"}


@dataclass(frozen=True)
class Preset:
    """A study by name; the options of the command are set over it."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    lrs: tuple[float, ...]
    mqar_steps: int
    mqar_vocab: int
    mqar_sizes: tuple[tuple[int, int], ...]
    mqar_tested: tuple[tuple[int, int], ...]
    passkey_steps: int
    passkey_vocab: int
    passkey_digits: int
    passkey_noise: float
    passkey_length: int
    passkey_distances: tuple[int, ...]
    step_tokens: int
    test: int
    validation: int
    processes: int = 1
    threads: int = 1


PRESETS = {
    "cpu-small": Preset(
        models=("harmonic/debug", "mamba/debug", "llama/debug"), tasks=("mqar", "passkey"), seeds=(0, 1),
        lrs=(1e-3, 2e-3, 4e-3), mqar_steps=1000, mqar_vocab=32, mqar_sizes=((16, 2), (32, 4), (32, 8)),
        mqar_tested=((16, 2), (32, 4), (32, 8), (64, 8), (64, 14), (128, 14)), passkey_steps=800, passkey_vocab=32,
        passkey_digits=3, passkey_noise=0.1, passkey_length=32, passkey_distances=(0, 8, 16, 25, 57, 121, 249),
        step_tokens=512, test=128, validation=128, processes=2,
    ),
    "gpu": Preset(
        models=("harmonic/28M", "harmonic/28M-best", "mamba/28M", "llama/28M"), tasks=("mqar", "passkey"), seeds=(0, 1, 2),
        lrs=(3e-4, 1e-3, 3e-3), mqar_steps=10000, mqar_vocab=8192, mqar_sizes=((64, 4), (128, 8), (256, 16), (512, 64)),
        mqar_tested=((64, 4), (64, 16), (128, 8), (128, 32), (256, 16), (256, 64), (512, 64), (512, 128), (1024, 256)),
        passkey_steps=5000, passkey_vocab=256, passkey_digits=5, passkey_noise=0.1, passkey_length=4096,
        passkey_distances=(0, 256, 1024, 2048, 4085, 8192, 16384, 32768, 65525), step_tokens=65536, test=512, validation=256,
        threads=8,
    ),
}


@dataclass
class Options:
    """Which study, and what of it is set otherwise."""

    preset: Literal["cpu-small", "gpu"] = "cpu-small"
    """cpu-small: the debug flavors at small sizes on two cores; gpu: 28M at the sizes of the literature."""

    models: tuple[str, ...] | None = None
    """family/flavor each. Default: the preset's, as all below."""

    tasks: tuple[Literal["mqar", "passkey"], ...] | None = None
    """Which tasks."""

    seeds: tuple[int, ...] | None = None
    """Seeds of weights and training sequences; the sweep runs with the first."""

    lrs: tuple[float, ...] | None = None
    """Learning rates of the sweep."""

    mqar_steps: int | None = None
    """Optimizer steps."""

    mqar_vocab: int | None = None
    """Tokens in the vocabulary: an eighth is filler, the rest keys and values."""

    mqar_sizes: tuple[tuple[int, int], ...] | None = None
    """Lengths and pairs to train on, in turn, e.g. `64 4 128 8`."""

    mqar_tested: tuple[tuple[int, int], ...] | None = None
    """Lengths and pairs of the test."""

    passkey_steps: int | None = None
    """Optimizer steps."""

    passkey_vocab: int | None = None
    """Tokens in the vocabulary: ten digits, two marks, filler."""

    passkey_digits: int | None = None
    """Digits of the number."""

    passkey_noise: float | None = None
    """Share of digits in the filler."""

    passkey_length: int | None = None
    """Tokens of a training sequence; the number is anywhere in it."""

    passkey_distances: tuple[int, ...] | None = None
    """Tokens between number and question in the test; sequences are longer than in training where they have to be."""

    step_tokens: int | None = None
    """Tokens of an optimizer step."""

    test: int | None = None
    """Test sequences of a size."""

    validation: int | None = None
    """Validation sequences of a trained size."""

    processes: int | None = None
    """Cells at once."""

    threads: int | None = None
    """CPU threads of a cell."""

    out: Path = Path("outputs/recall")
    """Folder for cells, tables and plot."""


def preset_of(options: Options) -> Preset:
    """The preset with the options set over it."""
    preset = PRESETS[options.preset]
    return replace(preset, **{name: value for name in vars(preset) if (value := getattr(options, name)) is not None})


def cells(preset: Preset, task: str, seeds: Iterable[int], lrs: dict[str, Sequence[float]]) -> list[RecallCell]:
    """
    Cells of a task: every model with every seed at each of its learning rates.

    Raises:
        ValueError: see `RecallCell.check`.
    """
    if task == "mqar":
        kind: MQAR | Passkey = MQAR(preset.mqar_vocab)
        trained, tested = (tuple(Size(*size) for size in sizes) for sizes in (preset.mqar_sizes, preset.mqar_tested))
        steps = preset.mqar_steps
    else:
        kind = passkey = Passkey(preset.passkey_vocab, preset.passkey_digits, preset.passkey_noise)
        trained = (Size(preset.passkey_length, Passkey.ANYWHERE),)
        tested = tuple(
            Size(max(preset.passkey_length, distance + passkey.around), distance) for distance in preset.passkey_distances)
        steps = preset.passkey_steps
    found = [
        RecallCell(Model(name, *name.partition("/")[::2]), kind, trained, tested, preset.step_tokens, steps, seed, lr,
                   preset.validation, preset.test)
        for seed, name in itertools.product(seeds, preset.models) for lr in lrs[name]
    ]
    for cell in found:
        cell.check()
    return found


def best_lrs(results: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Learning rate with the highest mean accuracy on the validation set, the lower loss where that is equal, by model."""
    found: dict[str, tuple[float, float, float]] = {}
    for result in results:
        scores = pd.DataFrame(result["validation"])
        rank = (scores["accuracy"].mean(), -scores["loss"].mean(), result["cell"]["lr"])
        label = result["cell"]["model"]["label"]
        found[label] = max(found.get(label, rank), rank)
    return {label: rank[2] for label, rank in found.items()}


def run(preset: Preset, out: Path) -> list[dict[str, Any]]:
    """
    Runs the study, or what is not there of it.

    Returns:
        The results of all cells, each with its `stage`: `"sweep"`, or `"best"` for those that count.

    Raises:
        ValueError: a list of the study is empty or says something twice; see also `RecallCell.check`.
        RuntimeError: a cell failed.
    """
    for name in ("models", "tasks", "seeds", "lrs", "mqar_tested", "passkey_distances"):
        values = getattr(preset, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"`{name}` must be one or more different values; got {values}.")

    def stage(title: str, planned: list[RecallCell]) -> list[dict[str, Any]]:
        return run_cells(planned, out, preset.processes, preset.threads, title, "eval.tasks.recall_cell")

    # before any of them runs: a mistake in the second task shows here
    sweeps = [cell for task in preset.tasks
              for cell in cells(preset, task, preset.seeds[:1], dict.fromkeys(preset.models, preset.lrs))]
    keep_command(out)
    found = stage("sweep", sweeps)
    planned = []
    for task in preset.tasks:
        lrs = best_lrs(result for result in found if result["cell"]["task"]["name"] == task)
        planned += cells(preset, task, preset.seeds, {name: (lr,) for name, lr in lrs.items()})
    return [{"stage": title, **result} for title, results in (("sweep", found), ("best", stage("best", planned)))
            for result in results]


def frame(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row a test score, of the records that count."""
    return pd.DataFrame([{
        "task": record["cell"]["task"]["name"], "model": record["cell"]["model"]["label"], "seed": record["cell"]["seed"],
        "lr": record["cell"]["lr"], "parameters": record["parameters"], "tokens": record["tokens_seen"],
        "tokens_per_second": record["tokens_per_second"], "kernels": record["kernels"],
        "causal": not record["audit"]["failure"], **score,
    } for record in records if record["stage"] == "best" for score in record["test"]])


def table(records: Iterable[dict[str, Any]]) -> str:
    """
    Test accuracy as Markdown, a table for each task: the mean over seeds, and the lowest to the highest.

    Args:
        records (Iterable[dict[str, Any]]):
            Results as `run` returns them, or the lines of recall.jsonl.
    """
    return "\n\n".join(_table(str(task), rows) for task, rows in frame(records).groupby("task", sort=False))


def _table(task: str, rows: pd.DataFrame) -> str:
    models = {str(model): mine for model, mine in rows.groupby("model", sort=False)}
    lines = [f"| {LOADS[task]} | chance | queries a seed | {' | '.join(models)} |", "|---" * (len(models) + 3) + "|"]
    for _, size in rows.drop_duplicates(["length", "load"]).iterrows():
        texts = []
        for mine in models.values():
            found = mine[(mine["length"] == size["length"]) & (mine["load"] == size["load"])]["accuracy"]
            texts.append(f"{found.mean():.3f} ({found.min():.3f} to {found.max():.3f})")
        label = " (beyond trained length)" * size["beyond_trained_length"]
        lines.append(f"| {size['load']:,} in {size['length']:,}{label} | {size['chance']:.3f} | {size['queries']:,} | "
                     f"{' | '.join(texts)} |")
    about = "; ".join(f"{model} {mine['parameters'].iloc[0]:,} parameters, learning rate {mine['lr'].iloc[0]:g}"
                      for model, mine in models.items())
    return "\n".join([
        f"{TITLES[task]}: mean over seeds (lowest to highest), number of seeds: {rows['seed'].nunique()}.", "", *lines, "",
        f"Each trained on {rows['tokens'].iloc[0]:,} tokens: {about}."])


def plot(records: Iterable[dict[str, Any]], file: Path) -> None:
    """Test accuracy by task, a line a model; the bars are the seeds' spread, what is grey is beyond the trained length."""
    rows = frame(records)
    tasks = list(rows["task"].unique())
    figure, axes = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4.5), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        mine = rows[rows["task"] == task]
        sizes = mine.drop_duplicates(["length", "load"]).reset_index(drop=True)
        for model, its in mine.groupby("model", sort=False):
            accuracy = its.groupby(["length", "load"], sort=False)["accuracy"]
            mean = accuracy.mean()
            axis.errorbar(range(len(sizes)), mean, [mean - accuracy.min(), accuracy.max() - mean], marker="o", capsize=3,
                          label=model)
        axis.plot(range(len(sizes)), sizes["chance"], color="black", linestyle=":", label="chance")
        for place in sizes.index[sizes["beyond_trained_length"]]:
            axis.axvspan(place - 0.5, place + 0.5, color="0.92")
        axis.set_xticks(range(len(sizes)), [f"{size.load:,}\nin {size.length:,}" for size in sizes.itertuples()], fontsize=8)
        axis.set(title=TITLES[task], xlabel=f"{LOADS[task]} (grey: beyond trained length)", ylabel="accuracy",
                 ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(options: Options) -> None:
    records = run(preset_of(options), options.out)
    write(options.out / "recall.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    write(options.out / "recall.csv", frame(records).to_csv(index=False))
    text = table(records)
    write(options.out / "table.md", text + "\n")
    plot(records, options.out / "recall.png")
    names = ("table.md", "recall.csv", "recall.jsonl", "recall.png")
    print(f"{text}\n\n{', '.join(str(options.out / name) for name in names)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
