"""
The page of results, from result files: `python -m eval.report`.

    python -m eval.report --collect outputs

copies what the studies under `outputs` left (tables, figures, the commands that they were started with) to `docs/results`,
and writes `docs/results.md` from there. Without `--collect` it writes the page anew from what is in `docs/results`. A study
that is not there is listed as not run; no number on the page is written by hand.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from eval.results import COMMANDS, write
from eval.scoring.models import FAMILIES
from eval.study import published
from eval.study.paired import STAGE_TITLES, costs, differences, interval, paired, sweep, table
from eval.study.sections import SECTIONS


@dataclass
class Options:
    """Where results are, and where the page goes."""

    collect: Path | None = None
    """Folder with the studies' own folders, whose results are copied first; those of a name replace what was there."""

    results: Path = Path("docs/results")
    """Folder of the results that the page shows."""

    out: Path = Path("docs/results.md")
    """The page."""


def study(folder: Path) -> dict[str, pd.DataFrame]:
    """Results of a study by stage."""
    return dict(iter(pd.read_csv(folder / "results.csv").groupby("stage", sort=False)))


def crossover(folder: Path) -> str:
    """Tables of `eval.crossover`."""
    stages = study(folder)
    parts = []
    for stage, title in STAGE_TITLES.items():
        if stage in stages:
            rows = stages[stage]
            parts += [f"### {title.capitalize()}", "Bits per byte on the test targets: mean (lowest to highest seed).",
                      table(rows), "Differences by seed, with the 95% interval of the paired t-test:", differences(rows)]
    if "sweep" in stages:
        parts += ["### The sweep", "Bits per token on the validation targets, one seed; the best is taken:",
                  sweep(stages["sweep"])]
    rows = stages.get("best", stages.get("shared"))
    if rows is not None:
        parts += ["### Size, speed, memory", costs(rows)]
    return "\n\n".join(parts)


def crossover_beside_published(folder: Path) -> str:
    """Tables of `eval.crossover` with what the paper has."""
    stages = study(folder)
    rows = stages.get("best", stages.get("shared"))
    if rows is None:
        return crossover(folder)
    facts = json.loads((folder / "facts.json").read_text())
    models = list(rows["model"].unique())
    first = {family: next((name for name in models if name.startswith(family)), "") for family in FAMILIES}
    best = next((name for name in models if name.startswith("harmonic") and name.endswith("best")), first["harmonic"])
    parts = [
        crossover(folder), "### Beside the published numbers",
        "The units and the texts differ: signs and trends alone compare. A gap is how much lower Harmonic is.",
        published.comparison(rows, best, first["mamba"], first["llama"]), "What differs in the set-up:",
        published.differences(facts["text"], facts["tokenizer"], rows, facts["machine"])]
    return "\n\n".join(parts)


def ablation(folder: Path) -> str:
    """Tables of `eval.ablation`: each variant against the first."""
    stages = study(folder)
    rows = stages.get("best", stages.get("shared"))
    if rows is None:
        return sweep(stages["sweep"])
    value = "bits_per_byte"
    base = rows["model"].iloc[0]
    lines = [f"| variant | parameters | learning rate | bits per token (validation) | bits per byte (test) | minus {base} | "
             "95% interval | lower in |", "|---" * 8 + "|"]
    for model, mine in rows.groupby("model", sort=False):
        texts = ["", "", ""]
        if model != base:
            row = paired(rows, ["seq_len"], str(model), base).iloc[0]
            texts = [f"{row['difference']:+.3f}", interval(row["low"], row["high"]),
                     f"{int(row['wins'])} of {int(row['seeds'])}"]
        values, first = mine[value], mine.iloc[0]
        texts = [str(model), f"{first['parameters']:,}", f"{first['lr']:g}",
                 f"{mine['validation_bits_per_token'].mean():.3f}",
                 f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})", *texts]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def scan(folder: Path) -> str:
    """The table of `benchmarks.scan`."""
    rows = pd.read_csv(folder / "scan.csv")
    lines = ["| B x T x D | scan | backend | forward, over its bound | forward + backward, over its bound | forward, ns a "
             "token | forward + backward, ns a token | python loop, over forward |", "|---" * 8 + "|"]
    for key, group in rows.groupby(["B", "T", "D", "op", "backend"], sort=False):
        B, T, D, op, backend = key
        forward, both = (group[group["direction"] == name].iloc[0] for name in ("forward", "forward + backward"))
        lines.append(
            f"| {B} x {T:,} x {D} | `{op}` | {backend} | {forward['over_bound']:.2f} | {both['over_bound']:.2f} | "
            f"{forward['ns_per_token']:.0f} | {both['ns_per_token']:.0f} | {forward['loop_over_it']:.1f} |")
    return "\n".join(lines)


BODIES = {body.__name__: body for body in (crossover, crossover_beside_published, ablation, scan)}

_HEAD = """\
# Results

Written by `python -m eval.report` from the files in `{results}`, which the commands below left. Absolute times depend on the
machine, ratios within a table less. Every model was audited for causality (`python -m eval.audit`) before it was scored.
"""


def collect(source: Path, results: Path) -> list[str]:
    """
    Copies the results of the studies in `source` that are there.

    Returns:
        Their names.

    Raises:
        FileNotFoundError: there is none.
    """
    found = []
    for section in SECTIONS:
        folder = source / section.name
        if not (folder / section.files[0]).is_file():
            continue
        for name in (*section.files, *section.figures, COMMANDS):
            if (folder / name).is_file():
                target = results / section.name / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, target)
        found.append(section.name)
    if not found:
        raise FileNotFoundError(
            f"expected folders of studies in {source}, named {', '.join(section.name for section in SECTIONS)}; found none.")
    return found


def page(results: Path, beside: Path) -> str:
    """
    The page in Markdown.

    Args:
        results (Path):
            Folder of the results.
        beside (Path):
            Folder that the page lies in, from which it links figures.
    """
    parts, missing = [_HEAD.format(results=results)], []
    for section in SECTIONS:
        folder = results / section.name
        if not (folder / section.files[0]).is_file():
            missing.append(section.title)
            continue
        parts += [f"## {section.title}\n", section.text]
        if (folder / COMMANDS).is_file():
            parts.append("".join(f"    {line}\n" for line in (folder / COMMANDS).read_text().splitlines()))
        body = BODIES[section.body](folder) if section.body else (folder / section.files[0]).read_text().strip()
        parts.append(body + "\n")
        for figure in section.figures:
            if (folder / figure).is_file():
                parts.append(f"![{section.title}]({os.path.relpath(folder / figure, beside)})\n")
    if missing:
        parts += ["## Not run\n", "".join(f"- {title}\n" for title in missing)]
    return "\n".join(parts)


def main(options: Options) -> None:
    if options.collect is not None:
        print(f"collected: {', '.join(collect(options.collect, options.results))}")
    if not options.results.is_dir():
        raise FileNotFoundError(f"expected results in {options.results}; there is no such folder. Pass `--collect outputs`.")
    write(options.out, page(options.results, options.out.parent))
    print(options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
