"""
Phase 1 of a pretrained model from layers that begin as the attention, and from random ones:
`python -m eval.hallamonic_phase1 --model DIR --layers 10,15,20`.

Both see the same text in the same order, by titan_configs/hallamonic_smollm2_phase1.toml or another config. The result is the
curves of both on what they train on, and what they, and the original, score on the same targets of the test split. A model
that reads the future gets no score. A run that was killed goes on where it stopped.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import tyro
from torchtitan.config import ConfigManager

from eval.cells import Cell, Model, curve, run_cells, write
from eval.commands import keep_command
from eval.hallamonic_debug import cell
from eval.models import digest
from eval.protocol import text_of
from eval.run_cell import scores
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


def original(options: Options, first: Cell) -> dict[str, Any]:
    """What the original scores on the targets of the cells."""
    file = options.out / "original" / f"{digest(options.model)[:10]}-{first.name}.json"
    if not file.is_file():
        job = ConfigManager().parse_args(first.arguments(options.out / "none"))
        write(file, json.dumps(scores(first, job, options.model)))
    return json.loads(file.read_text())


def table(results: Sequence[tuple[str, dict[str, Any], float | None, float | None]]) -> str:
    """Results as Markdown: name, scores, first and last loss in training."""
    lines = ["| model | bits a token, first step | last step | test split | random tokens (log2 V) |", "|---|---|---|---|---|"]
    for name, result, first, last in results:
        test, verdict = result["test"], result["test"]["audit"]
        steps = ["" if value is None else f"{value:.3f}" for value in (first, last)]
        lines.append(f"| {name} | {steps[0]} | {steps[1]} | {test['bits_per_token']:.3f} | "
                     f"{verdict['random_bits_per_token']:.2f} ({verdict['log2_vocab']:.2f}) |")
    return "\n".join(lines)


def main(options: Options) -> None:
    keep_command(options.out)
    cells, folders = [], []
    for init in options.inits:
        converted = options.out / "converted" / f"{digest(options.model)[:10]}-{options.layers}-{init}-seed{options.seed}"
        converted.parent.mkdir(parents=True, exist_ok=True)
        convert(Convert(str(options.model), converted, layers=options.layers, init=init, seed=options.seed))
        text = text_of("novels", "", "hf", str(converted), options.targets, options.targets)
        cells.append(cell(Model(init, "hallamonic", "hf"), options.config, text, options.seed, options.steps,
                          f"from {converted.name}", ("--metrics.log_freq=1",)))
        folders.append(options.out / "cells" / cells[-1].name)
    results = run_cells(cells, options.out, 1, options.threads, "phase 1")
    reference = original(options, cells[0])

    figure, axis = plt.subplots(figsize=(6.5, 4.2))
    rows: list[tuple[str, dict[str, Any], float | None, float | None]] = [("original", reference, None, None)]
    for init, result, folder in zip(options.inits, results, folders, strict=True):
        steps = curve(folder)
        label = f"{init}; test split {result['test']['bits_per_token']:.2f}"
        axis.plot(steps["step"], steps["bits_per_token"], marker="o", label=label)
        rows.append((f"{init}, phase 1", result, steps["bits_per_token"].iloc[0], steps["bits_per_token"].iloc[-1]))
    axis.axhline(reference["test"]["bits_per_token"], color="gray", linestyle="--", label="original, test split")
    axis.set(xlabel="step", ylabel="bits a token", title=f"phase 1, layers {options.layers} replaced")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(options.out / "phase1.png", dpi=120)
    plt.close(figure)
    write(options.out / "phase1.jsonl", "".join(
        json.dumps({"model": name, "first_step": first, "last_step": last, **result}) + "\n"
        for name, result, first, last in rows))
    write(options.out / "phase1.md", table(rows) + "\n")
    print(f"{table(rows)}\n\n{options.out / 'phase1.md'}, {options.out / 'phase1.jsonl'}, {options.out / 'phase1.png'}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
