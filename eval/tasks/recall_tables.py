"""Results of `eval.recall` as tables and as a figure."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from eval.tables import markdown, save, spread

TITLES = {
    "mqar": "MQAR, share of queries with the right value",
    "passkey": "Passkey, share of numbers with every digit right",
}
LOADS = {"mqar": "pairs, in a sequence of so many tokens", "passkey": "distance, in a sequence of so many tokens"}


def frame(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row a test score, of the records that count."""
    return pd.DataFrame([{
        "task": record["cell"]["task"]["name"], "model": record["cell"]["model"]["label"], "seed": record["cell"]["seed"],
        "lr": record["cell"]["lr"], "parameters": record["parameters"], "tokens": record["tokens_seen"],
        "tokens_per_second": record["tokens_per_second"], "kernels": record["kernels"],
        "causal": not record["audit"]["failure"], **score,
    } for record in records if record["stage"] == "best" for score in record["test"]])


def table(records: Iterable[dict[str, Any]]) -> str:
    """Test accuracy as Markdown, a table for each task: the mean over seeds, and the lowest to the highest."""
    return "\n\n".join(_table(str(task), rows) for task, rows in frame(records).groupby("task", sort=False))


def _table(task: str, rows: pd.DataFrame) -> str:
    models = {str(model): mine for model, mine in rows.groupby("model", sort=False)}
    accuracy = rows.groupby(["length", "load", "model"], sort=False)["accuracy"].agg(spread)
    lines = [
        [f"{size.load:,} in {size.length:,}{' (beyond trained length)' * size.beyond_trained_length}", f"{size.chance:.3f}",
         f"{size.queries:,}", *(accuracy[size.length, size.load, model] for model in models)]
        for size in rows.drop_duplicates(["length", "load"]).itertuples()]
    about = "; ".join(f"{model} {mine['parameters'].iloc[0]:,} parameters, learning rate {mine['lr'].iloc[0]:g}"
                      for model, mine in models.items())
    return "\n".join([
        f"{TITLES[task]}: mean over seeds (lowest to highest), number of seeds: {rows['seed'].nunique()}.", "",
        markdown([LOADS[task], "chance", "queries a seed", *models], lines), "",
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
    save(figure, file)
