"""
Quality against context length: Harmonic, Mamba and Llama under one token budget: `python -m eval.crossover`.

    python -m eval.crossover --preset cpu-small --dataset_path wiki.xml

Every model trains at every length with every seed on exactly the same number of tokens, by stock torchtitan, with the same
data order, optimizer, schedule, clipping and tokenizer: once at a shared learning rate, once at each model's own best of a
small sweep, which is the same for all and decided on the validation split. All are scored on the same target tokens.

A study that was killed goes on where it stopped. It can be cut: `--part 1/4` runs the first of four parts, in stages
(`--stages shared sweep`, then `--stages best` once `--merge` has brought the sweep together).
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import pandas as pd
import tyro

from eval.cells import Model, merge, run_cells, write
from eval.protocol import STAGES, Protocol, best_lrs, frame, paired, text_of

COLORS = {"harmonic": "C0", "mamba": "C1", "llama": "C2"}
KEYS = ("dataset", "dataset_path", "tokenizer", "assets")


@dataclass(frozen=True)
class Preset:
    """A study by name; the options of the command are set over it."""

    models: tuple[str, ...]
    seq_lens: tuple[int, ...]
    seeds: tuple[int, ...]
    tokens: int
    step_tokens: int
    lrs: tuple[float, ...]
    shared_lr: float
    sweep_seq_len: int
    config_file: str
    dataset: str
    tokenizer: str
    test: int
    validation: int
    micro_tokens: int = 0
    processes: int = 1
    threads: int = 1
    overrides: tuple[str, ...] = ()


PRESETS = {
    "cpu-small": Preset(
        models=("harmonic/debug", "harmonic/debug-best", "mamba/debug", "llama/debug"), seq_lens=(1024, 2048, 4096, 8192),
        seeds=(0, 1, 2), tokens=48 * 8192, step_tokens=8192, lrs=(1.5e-3, 3e-3, 6e-3, 1.2e-2), shared_lr=3e-3,
        sweep_seq_len=2048, config_file="titan_configs/harmonic_debug.toml", dataset="text", tokenizer="bytes",
        test=32768, validation=16384, processes=2,
    ),
    "paper": Preset(
        models=("harmonic/28M", "harmonic/28M-best", "mamba/28M", "llama/28M"),
        seq_lens=(1024, 2048, 4096, 8192, 16384, 32768, 65536), seeds=(0, 1, 2, 3, 4), tokens=1000 * 65536,
        step_tokens=65536, lrs=(5e-4, 1e-3, 2e-3, 4e-3), shared_lr=1e-3, sweep_seq_len=8192,
        config_file="titan_configs/harmonic_28m.toml", dataset="enwik8", tokenizer="hf", test=524288, validation=262144,
        micro_tokens=65536, threads=8, overrides=("--harmonic.loss_chunk_tokens=8192",),
    ),
    "scaling": Preset(
        models=tuple(f"{family}/{size}" for size in ("7M", "15M", "28M", "35M", "112M")
                     for family in ("harmonic", "mamba", "llama")),
        seq_lens=(1024, 8192, 32768), seeds=(0, 1, 2), tokens=2000 * 32768, step_tokens=32768,
        lrs=(5e-4, 1e-3, 2e-3, 4e-3), shared_lr=1e-3, sweep_seq_len=8192, config_file="titan_configs/harmonic_28m.toml",
        dataset="enwik8", tokenizer="hf", test=524288, validation=262144, micro_tokens=32768, threads=8,
        overrides=("--harmonic.loss_chunk_tokens=8192",),
    ),
}


@dataclass
class Options:
    """Which study, on what text, and what of it is set otherwise."""

    preset: Literal["cpu-small", "paper", "scaling"] = "cpu-small"
    """cpu-small: the debug flavors at 1K to 8K bytes; paper: 28M at 1K to 64K tokens; scaling: 7M to 112M."""

    dataset_path: str = ""
    """The text: a UTF-8 file for `text`, enwik8 or its zip, a hub dataset."""

    dataset: str | None = None
    """torchtitan's `[training] dataset`, e.g. `hub` for WikiText-103. Default: the preset's."""

    assets: str = ""
    """Folder of the tokenizer.json where the preset's tokenizer is one."""

    models: tuple[str, ...] | None = None
    """family/flavor each. Default: the preset's, as all below."""

    seq_lens: tuple[int, ...] | None = None
    """Lengths in tokens."""

    seeds: tuple[int, ...] | None = None
    """Seeds of weights and data order."""

    tokens: int | None = None
    """Token budget of every cell."""

    step_tokens: int | None = None
    """Tokens of an optimizer step."""

    lrs: tuple[float, ...] | None = None
    """Learning rates of the sweep."""

    shared_lr: float | None = None
    """The shared one."""

    sweep_seq_len: int | None = None
    """Length of the sweep."""

    config_file: str | None = None
    """TOML file that gives all else."""

    tokenizer: Literal["bytes", "hf"] | None = None
    """`[data] tokenizer`."""

    test: int | None = None
    """Target tokens of the test split."""

    validation: int | None = None
    """Target tokens of the validation split."""

    micro_tokens: int | None = None
    """Most tokens of a forward pass in training; more are accumulated."""

    processes: int | None = None
    """Cells at once."""

    threads: int | None = None
    """CPU threads of a cell."""

    overrides: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """More torchtitan options for every cell, one at a time, e.g. `--overrides=--optimizer.weight_decay=0`."""

    stages: tuple[Literal["shared", "sweep", "best"], ...] = STAGES
    """What to run: all at the shared learning rate; the sweeps; each model at its best, where that is another."""

    part: str = "1/1"
    """Which part of the cells of each stage, as i/n."""

    merge: tuple[Path, ...] = ()
    """Folders of other parts, whose finished cells are taken over first."""

    out: Path = Path("outputs/crossover")
    """Folder for cells, tables and plots."""


def preset_of(options: Options) -> Preset:
    """The preset with the options set over it."""
    preset = PRESETS[options.preset]
    given = {name: value for name in vars(preset) if name != "overrides" and (value := getattr(options, name)) is not None}
    return replace(preset, **given, overrides=(*preset.overrides, *options.overrides))


def protocol_of(options: Options) -> tuple[Protocol, Preset]:
    """
    The study that the options name.

    Raises:
        ValueError: its cells would not be comparable, or an option is set by the study itself.
    """
    preset = preset_of(options)
    check_overrides(preset.overrides)
    text = text_of(preset.dataset, options.dataset_path, preset.tokenizer, options.assets or ".", preset.test,
                   preset.validation)
    models = tuple(Model(name, *name.split("/", 1)) for name in preset.models)
    protocol = Protocol(
        models, preset.seq_lens, preset.seeds, preset.shared_lr, preset.lrs, preset.sweep_seq_len, preset.tokens,
        preset.step_tokens, preset.micro_tokens, text, preset.config_file, preset.overrides)
    protocol.check()
    return protocol, preset


def check_overrides(overrides: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: an option is one that makes cells comparable.
    """
    ours = ("--job.", "--training.dataset", "--training.seq_len", "--training.steps", "--training.local_batch_size",
            "--training.global_batch_size", "--data.tokenizer", "--data.token_budget", "--data.budget_seq_len", "--model.",
            "--optimizer.lr", "--debug.seed", "--checkpoint.", "--lr_scheduler.warmup_steps")
    for override in overrides:
        if override.startswith(ours):
            raise ValueError(f"`overrides` must leave {ours} to the study; got {override!r}.")


def share(cells: list, part: str) -> list:
    """
    The cells of a part `i/n`.

    Raises:
        ValueError: it is none.
    """
    try:
        index, count = map(int, part.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 1 <= index <= count:
        raise ValueError(f"`part` must be i/n with 1 <= i <= n; got {part!r}.")
    return cells[index - 1::count]


def run(protocol: Protocol, stages: tuple[str, ...], part: str, out: Path, processes: int, threads: int) -> dict[str, Any]:
    """
    Runs the stages.

    Returns:
        `results`, by stage, of the cells that are there at the end, and `lrs`, the best learning rate of each model; both
        without what another part has to bring.

    Raises:
        RuntimeError: the best learning rates are wanted and sweeps are missing.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for stage, cells in (("shared", protocol.shared()), ("sweep", protocol.sweep())):
        if stage in stages:
            run_cells(share(cells, part), out, processes, threads, stage)
        results[stage] = finished(cells, out)
    lrs = best_lrs(results["sweep"]) if len(results["sweep"]) == len(protocol.sweep()) else {}
    if "best" in stages and not lrs and part == "1/1":
        raise RuntimeError("the best learning rates need the whole sweep; some of its cells are missing. Run `--stages sweep`, "
                           "or `--merge` the folders that have them.")
    if lrs:
        cells = protocol.grid(lrs)
        if "best" in stages:
            run_cells(share(cells, part), out, processes, threads, "best")
        results["best"] = finished(cells, out)
    return {"results": results, "lrs": lrs}


def finished(cells: list, out: Path) -> list[dict[str, Any]]:
    files = [out / "cells" / cell.name / "result.json" for cell in cells]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def table(rows: pd.DataFrame, value: str = "bits_per_byte") -> str:
    """Mean over seeds (and the spread, lowest to highest) by model and length, as Markdown."""
    lengths = sorted(rows["seq_len"].unique())
    lines = ["| model | learning rate | " + " | ".join(f"{length:,}" for length in lengths) + " |",
             "|---|---|" + "---|" * len(lengths)]
    for model in rows["model"].unique():
        mine = rows[rows["model"] == model]
        texts = []
        for length in lengths:
            values = mine[mine["seq_len"] == length][value]
            label = " (beyond trained length)" * bool(mine[mine["seq_len"] == length]["beyond_trained_length"].any())
            texts.append(f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f}){label}" if len(values) else "")
        lines.append(f"| {model} | {', '.join(f'{lr:g}' for lr in sorted(mine['lr'].unique()))} | {' | '.join(texts)} |")
    return "\n".join(lines)


def differences(rows: pd.DataFrame, value: str = "bits_per_byte") -> str:
    """Differences between every two models by seed and length, with confidence intervals, as Markdown."""
    models = list(rows["model"].unique())
    lines = ["| length | models | difference | 95% interval | lower in |", "|---|---|---|---|---|"]
    for index, model in enumerate(models):
        for rival in models[index + 1:]:
            for row in paired(rows, ["seq_len"], model, rival, value).itertuples():
                lines.append(f"| {row.seq_len:,} | {model} - {rival} | {row.difference:+.3f} | {row.low:+.3f} to "
                             f"{row.high:+.3f} | {row.wins} of {row.seeds} |")
    return "\n".join(lines)


def costs(rows: pd.DataFrame) -> str:
    """Size, operations, speed, memory and kernels by model and length, as Markdown."""
    lines = ["| model | length | parameters | FLOPs a token | tokens/s | peak memory, GiB | kernels |",
             "|---|---|---|---|---|---|---|"]
    for (model, length), group in rows.groupby(["model", "seq_len"], sort=False):
        first = group.iloc[0]
        lines.append(
            f"| {model} | {length:,} | {first['parameters']:,} | {first['flops_per_token'] / 1e6:.2f} M | "
            f"{group['tokens_per_second'].median():,.0f} | {group['peak_memory_gib'].max():.2f} | {first['kernels']} |")
    return "\n".join(lines)


def plot(frames: dict[str, pd.DataFrame], file: Path, unit: str) -> None:
    """Test loss against length, a panel for each protocol; the bars are the seeds' spread."""
    figure, axes = plt.subplots(1, len(frames), figsize=(5.5 * len(frames), 4), sharey=True, squeeze=False)
    for axis, (title, rows) in zip(axes[0], frames.items(), strict=True):
        for index, (model, mine) in enumerate(rows.groupby("model", sort=False)):
            by_length = mine.groupby("seq_len")["bits_per_byte"]
            mean = by_length.mean()
            axis.errorbar(mean.index, mean, [mean - by_length.min(), by_length.max() - mean], marker="o", capsize=3,
                          color=f"C{index}", label=model)
        axis.set(title=title, xlabel="length in training and in the test, tokens", xscale="log")
        axis.set_xticks(sorted(rows["seq_len"].unique()), [f"{length:,}" for length in sorted(rows["seq_len"].unique())])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(unit)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(options: Options) -> None:
    protocol, preset = protocol_of(options)
    merge(options.merge, options.out)
    study = run(protocol, options.stages, options.part, options.out, preset.processes, preset.threads)
    frames = {stage: frame(results) for stage, results in study["results"].items() if results}
    lines = [json.dumps({"stage": stage, **result}) for stage, results in study["results"].items() for result in results]
    write(options.out / "results.jsonl", "\n".join(lines) + "\n")
    write(options.out / "best_lrs.json", json.dumps(study["lrs"]))
    if not frames:
        return
    everything = pd.concat([rows.assign(stage=stage) for stage, rows in frames.items()])
    write(options.out / "results.csv", everything.to_csv(index=False))
    grids = {stage: rows for stage, rows in frames.items() if stage != "sweep"}
    if grids:
        names = {"shared": "shared learning rate", "best": "each model's best learning rate"}
        plot({names[stage]: rows for stage, rows in grids.items()}, options.out / "crossover.png",
             "bits per byte, same targets for all")
        print("\n\n".join(f"{names[stage]}\n\n{table(rows)}\n\n{differences(rows)}" for stage, rows in grids.items()))
    print(f"\n{options.out / 'results.csv'}, {options.out / 'results.jsonl'}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
