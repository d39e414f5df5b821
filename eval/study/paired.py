"""Results of a study as a table, as differences by seed, and as a figure."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

from eval.results import write, write_lines
from eval.study.cells import curve
from eval.tables import markdown, save, spread

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


def paired(rows: pd.DataFrame, model: str, rival: str) -> pd.DataFrame:
    """
    Differences `model - rival` of the test losses seed by seed, at each length: the mean, `low` and `high` (the 95% confidence
    interval of the paired t-test; NaN with one seed), `seeds`, and `wins`: seeds in which the model is the lower one.
    """
    found = []
    losses = rows.pivot(index=["seq_len", "seed"], columns="model", values="bits_per_byte")
    for length, pairs in losses[[model, rival]].dropna().groupby("seq_len"):
        difference = pairs[model] - pairs[rival]
        low = high = math.nan
        if len(pairs) > 1:
            low, high = stats.ttest_rel(pairs[model], pairs[rival]).confidence_interval()
        found.append({"seq_len": length, "difference": difference.mean(), "low": low, "high": high, "seeds": len(pairs),
                      "wins": (difference < 0).sum()})
    return pd.DataFrame(found)


def table(rows: pd.DataFrame) -> str:
    """Test loss by model and length, mean over seeds and spread, as Markdown."""
    by_model = rows.groupby("model", sort=False)
    lrs = by_model["lr"].unique().map(lambda mine: ", ".join(f"{lr:g}" for lr in sorted(mine)))
    cells = rows.groupby(["model", "seq_len"]).apply(
        lambda some: spread(some["bits_per_byte"]) + " (beyond trained length)" * bool(some["beyond_trained_length"].any()),
        include_groups=False).unstack(fill_value="")
    return markdown(["model", "learning rate", *(f"{length:,}" for length in cells)], (
        [model, lr, *cells.loc[model]] for model, lr in lrs.items()))


def differences(rows: pd.DataFrame) -> str:
    """Differences between every two models by seed and length, with confidence intervals, as Markdown."""
    return markdown(["length", "models", "difference", "95% interval", "lower in"], [
        [f"{row.seq_len:,}", f"{model} - {rival}", *in_words(row)]
        for model, rival in itertools.combinations(rows["model"].unique(), 2)
        for row in paired(rows, model, rival).itertuples()])


def in_words(row: Any) -> tuple[str, str, str]:
    """A row of `paired`: the difference, its interval, and in how many seeds the model is lower."""
    interval = "one seed" if math.isnan(row.low) else f"{row.low:+.3f} to {row.high:+.3f}"
    return f"{row.difference:+.3f}", interval, f"{row.wins} of {row.seeds}"


def sweep(rows: pd.DataFrame) -> str:
    """Validation loss of each model at each learning rate, as Markdown; the best in bold."""
    losses = rows.pivot(index="model", columns="lr", values="validation_bits_per_token").loc[rows["model"].unique()]
    return markdown(["model", *(f"{lr:g}" for lr in losses)], [
        [model, *("" if math.isnan(loss) else f"**{loss:.3f}**" if loss == mine.min() else f"{loss:.3f}" for loss in mine)]
        for model, mine in losses.iterrows()])


def costs(rows: pd.DataFrame) -> str:
    """Size, operations, speed, memory and kernels by model and length, as Markdown."""
    return markdown(["model", "length", "parameters", "FLOPs a token", "tokens/s", "peak memory, GiB", "kernels"], [
        [model, f"{length:,}", f"{group['parameters'].iloc[0]:,}", f"{group['flops_per_token'].iloc[0] / 1e6:.2f} M",
         f"{group['tokens_per_second'].median():,.0f}", f"{group['peak_memory_gib'].max():.2f}", group["kernels"].iloc[0]]
        for (model, length), group in rows.groupby(["model", "seq_len"], sort=False)])


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
    save(figure, file)


def plot_curves(results: Sequence[dict[str, Any]], folders: Sequence[Path], file: Path) -> None:
    """Training loss against tokens, a panel for each length, one line a model: the mean over its seeds."""
    curves = pd.concat([
        curve(folder).assign(model=result["cell"]["model"]["label"], seq_len=result["cell"]["seq_len"])
        for result, folder in zip(results, folders, strict=True)])
    lengths = sorted(curves["seq_len"].unique())
    figure, axes = plt.subplots(1, len(lengths), figsize=(4.2 * len(lengths), 3.6), sharey=True, squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        bits = curves[curves["seq_len"] == length].pivot_table(
            index="n_tokens_seen", columns="model", values="bits_per_token", sort=False)
        bits.plot(ax=axis, title=f"length {length:,}", xlabel="tokens seen", ylabel="bits per token, in training",
                  legend=length == lengths[0])
        axis.grid(alpha=0.3)
    save(figure, file)


def digests(text: dict[str, Any]) -> str:
    """What of a text was hashed, and the digests."""
    # results from before a file's own digest was kept have none
    own = f"of the file {text['file_digest'][:12]}, " if text.get("file_digest") else ""
    tokenizer = " and tokenizer.json" if text["tokenizer"] == "hf" else ""
    return f"SHA-256 {own}of the documents as read{tokenizer} {text['digest'][:12]}"


def report(study: dict[str, Any], out: Path, figure: str) -> None:
    """Writes what `protocol.run` gave: results.jsonl, results.csv, best_lrs.json and a figure; prints the tables."""
    stages = {stage: results for stage, results in study["results"].items() if results}
    frames = {stage: frame(results) for stage, results in stages.items()}
    results = [{"stage": stage, **result} for stage, results in stages.items() for result in results]
    write_lines(out / "results.jsonl", results)
    write(out / "best_lrs.json", json.dumps(study["lrs"]))
    if results:
        text, machine = results[0]["cell"]["text"], results[0]["machine"]
        names = {"bytes": "bytes, bits per byte", "hf": "those of a tokenizer.json"}
        write(out / "facts.json", json.dumps({
            "text": f"{Path(text['path']).name or text['dataset']} ({digests(text)}), first 90% train",
            "tokenizer": names[text["tokenizer"]],
            "machine": f"{machine['device']}, {machine['processes']} cells at once on {machine['threads']} threads each"}))
        everything = pd.concat([rows.assign(stage=stage) for stage, rows in frames.items()])
        write(out / "results.csv", everything.to_csv(index=False))
    grids = {STAGE_TITLES[stage]: rows for stage, rows in frames.items() if stage in STAGE_TITLES}
    if grids:
        plot(grids, out / figure)
        # the logged steps of another machine's cells came along with them
        best = stages.get("best", stages.get("shared", []))
        plot_curves(best, [out / "cells" / result["name"] for result in best], out / "curves.png")
        print("\n\n".join(f"{title}\n\n{table(rows)}\n\n{differences(rows)}" for title, rows in grids.items()))
    print(f"\n{out / 'results.csv'}, {out / 'results.jsonl'}")
