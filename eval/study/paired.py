"""Results of a study as a table, as differences by seed, and as a figure."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

from eval.results import write
from eval.study.cells import curve

STAGE_TITLES = {"shared": "shared learning rate", "best": "each model's best learning rate"}

def frame(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row a result, with the columns that tables and plots use."""
    return pd.DataFrame([{
        "model": result["cell"]["model"]["label"], "seq_len": result["cell"]["seq_len"], "seed": result["cell"]["seed"],
        "lr": result["cell"]["lr"], "tokens": result["tokens_seen"], "parameters": result["parameters"],
        "flops_per_token": result["flops_per_token"], "tokens_per_second": result["tokens_per_second"],
        "peak_memory_gib": result["peak_memory_gib"], "kernels": result["kernels"],
        "validation_bits_per_token": result["validation"]["bits_per_token"],
        "bits_per_token": result["test"]["bits_per_token"], "bits_per_byte": result["test"]["bits_per_byte"],
        "targets": result["test"]["targets"], "window": result["test"]["seq_len"], "stride": result["test"]["stride"],
        "causal": not result["test"]["audit"]["failure"], "beyond_trained_length": result["test"]["beyond_trained_length"],
    } for result in results])


def paired(rows: pd.DataFrame, by: Sequence[str], model: str, rival: str, value: str = "bits_per_byte") -> pd.DataFrame:
    """
    Differences `model - rival` seed by seed, within each group of the columns `by`.

    Returns:
        The columns `by`, `difference` (the mean), `low` and `high` (the 95% confidence interval of the paired t-test; none
        with one seed), `seeds`, and `wins`: seeds in which the model is the lower one.
    """
    wide = rows.pivot_table(index=[*by, "seed"], columns="model", values=value)
    found = []
    for key, pairs in wide[[model, rival]].dropna().groupby(level=list(range(len(by)))):
        difference = pairs[model] - pairs[rival]
        low = high = float("nan")
        if len(pairs) > 1:
            low, high = stats.ttest_rel(pairs[model], pairs[rival]).confidence_interval()
        keys = key if isinstance(key, tuple) else (key,)
        found.append({**dict(zip(by, keys, strict=True)), "difference": difference.mean(), "low": low, "high": high,
                      "seeds": len(pairs), "wins": int((difference < 0).sum())})
    return pd.DataFrame(found)


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
                lines.append(f"| {row.seq_len:,} | {model} - {rival} | {row.difference:+.3f} | "
                             f"{interval(row.low, row.high)} | {row.wins} of {row.seeds} |")
    return "\n".join(lines)


def interval(low: float, high: float) -> str:
    """An interval in words."""
    return "one seed" if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"


def sweep(rows: pd.DataFrame, value: str = "validation_bits_per_token") -> str:
    """Validation loss of each model at each learning rate, as Markdown; the best in bold."""
    lrs = sorted(rows["lr"].unique())
    lines = [f"| model | {' | '.join(f'{lr:g}' for lr in lrs)} |", "|---" * (1 + len(lrs)) + "|"]
    for model, mine in rows.groupby("model", sort=False):
        values = mine.set_index("lr")[value]
        texts = [f"{values[lr]:.3f}" if lr in values else "" for lr in lrs]
        lines.append(f"| {model} | " + " | ".join(f"**{text}**" if lr == values.idxmin() else text
                                                 for lr, text in zip(lrs, texts, strict=True)) + " |")
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


def plot(frames: dict[str, pd.DataFrame], file: Path) -> None:
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
    axes[0][0].set_ylabel("bits per byte, same targets for all")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def plot_curves(results: Sequence[dict[str, Any]], folders: Sequence[Path], file: Path) -> None:
    """Training loss against tokens, a panel for each length, one line a model: the mean over its seeds."""
    curves = pd.concat([
        curve(folder).assign(model=result["cell"]["model"]["label"], seq_len=result["cell"]["seq_len"])
        for result, folder in zip(results, folders, strict=True)])
    lengths = sorted(curves["seq_len"].unique())
    figure, axes = plt.subplots(1, len(lengths), figsize=(4.2 * len(lengths), 3.6), sharey=True, squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        for index, (model, steps) in enumerate(curves[curves["seq_len"] == length].groupby("model", sort=False)):
            bits = steps.groupby("n_tokens_seen")["bits_per_token"].mean()
            axis.plot(bits.index, bits, color=f"C{index}", label=model)
        axis.set(title=f"length {length:,}", xlabel="tokens seen")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("bits per token, in training")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def report(study: dict[str, Any], out: Path, figure: str) -> None:
    """Writes what `protocol.run` gave: results.jsonl, results.csv, best_lrs.json and a figure; prints the tables."""
    frames = {stage: frame(results) for stage, results in study["results"].items() if results}
    lines = [json.dumps({"stage": stage, **result}) for stage, results in study["results"].items() for result in results]
    write(out / "results.jsonl", "".join(f"{line}\n" for line in lines))
    write(out / "best_lrs.json", json.dumps(study["lrs"]))
    first = next((result for results in study["results"].values() for result in results), None)
    if first is not None:
        text, machine = first["cell"]["text"], first["machine"]
        names = {"bytes": "bytes, bits per byte", "hf": "those of a tokenizer.json"}
        write(out / "facts.json", json.dumps({
            "text": f"{Path(text['path']).name or text['dataset']} (SHA-256 {text['digest'][:12]}), first 90% train",
            "tokenizer": names[text["tokenizer"]],
            "machine": f"{machine['device']}, {machine['processes']} cells at once on {machine['threads']} threads each"}))
        everything = pd.concat([rows.assign(stage=stage) for stage, rows in frames.items()])
        write(out / "results.csv", everything.to_csv(index=False))
    grids = {STAGE_TITLES[stage]: rows for stage, rows in frames.items() if stage in STAGE_TITLES}
    if grids:
        plot(grids, out / figure)
        # of another machine's cells the logged steps came along
        results = study["results"]["best" if study["results"].get("best") else "shared"]
        plot_curves(results, [out / "cells" / result["name"] for result in results], out / "curves.png")
        print("\n\n".join(f"{title}\n\n{table(rows)}\n\n{differences(rows)}" for title, rows in grids.items()))
    print(f"\n{out / 'results.csv'}, {out / 'results.jsonl'}")
