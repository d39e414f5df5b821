"""Tables of the page of results that are made of result files: each function takes the folder of a study's results."""

import json
from pathlib import Path

import pandas as pd

from eval.scoring.models import FAMILIES
from eval.study import published
from eval.study.paired import STAGE_TITLES, costs, differences, in_words, paired, sweep, table
from eval.tables import markdown, spread


def crossover(folder: Path) -> str:
    """Tables of `eval.crossover`."""
    stages = _stages(folder)
    parts = [
        part for stage, title in STAGE_TITLES.items() if stage in stages for part in (
            f"### {title.capitalize()}", "Bits per byte on the test targets: mean (lowest to highest seed).",
            table(stages[stage]), "Differences by seed, with the 95% interval of the paired t-test:",
            differences(stages[stage]))]
    if "sweep" in stages:
        parts += ["### The sweep", "Bits per token on the validation targets, one seed; the best is taken:",
                  sweep(stages["sweep"])]
    if (rows := _grid(stages)) is not None:
        parts += ["### Size, speed, memory", costs(rows)]
    return "\n\n".join(parts)


def crossover_beside_published(folder: Path) -> str:
    """Tables of `eval.crossover` with what the paper has."""
    rows = _grid(_stages(folder))
    if rows is None:
        return crossover(folder)
    facts = json.loads((folder / "facts.json").read_text())
    models = list(rows["model"].unique())
    first = {family: next((name for name in models if name.startswith(family)), "") for family in FAMILIES}
    best = next((name for name in models if name.startswith("harmonic") and name.endswith("best")), first["harmonic"])
    return "\n\n".join([
        crossover(folder), "### Beside the published numbers",
        "The units and the texts differ: signs and trends alone compare. A gap is how much lower Harmonic is.",
        published.comparison(rows, best, first["mamba"], first["llama"]), "What differs in the set-up:",
        published.differences(facts["text"], facts["tokenizer"], rows, facts["machine"])])


def ablation(folder: Path) -> str:
    """Tables of `eval.ablation`: each variant against the first."""
    stages = _stages(folder)
    rows = _grid(stages)
    if rows is None:
        return sweep(stages["sweep"])
    base = rows["model"].iloc[0]
    lines = []
    for model, mine in rows.groupby("model", sort=False):
        against = ("", "", "") if model == base else in_words(next(paired(rows, str(model), base).itertuples()))
        lines.append([model, f"{mine['parameters'].iloc[0]:,}", f"{mine['lr'].iloc[0]:g}",
                      f"{mine['validation_bits_per_token'].mean():.3f}", spread(mine["bits_per_byte"]), *against])
    return markdown(["variant", "parameters", "learning rate", "bits per token (validation)", "bits per byte (test)",
                     f"minus {base}", "95% interval", "lower in"], lines)


def scan(folder: Path) -> str:
    """The table of `benchmarks.scan`."""
    lines = []
    for (B, T, D, op, backend), rows in pd.read_csv(folder / "scan.csv").groupby(["B", "T", "D", "op", "backend"], sort=False):
        forward, both = (rows[rows["direction"] == name].iloc[0] for name in ("forward", "forward + backward"))
        lines.append([f"{B} x {T:,} x {D}", f"`{op}`", backend, *(f"{row['over_bound']:.2f}" for row in (forward, both)),
                      *(f"{row['ns_per_token']:.0f}" for row in (forward, both)), f"{forward['loop_over_it']:.1f}"])
    return markdown(["B x T x D", "scan", "backend", "forward, over its bound", "forward + backward, over its bound",
                     "forward, ns a token", "forward + backward, ns a token", "python loop, over forward"], lines)


def _stages(folder: Path) -> dict[str, pd.DataFrame]:
    """Results of a study by stage."""
    return dict(iter(pd.read_csv(folder / "results.csv").groupby("stage", sort=False)))


def _grid(stages: dict[str, pd.DataFrame]) -> pd.DataFrame | None:
    """Those that count."""
    return stages.get("best", stages.get("shared"))
