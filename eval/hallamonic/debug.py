"""
Length curves of a small Llama before and after its conversion: `python -m eval.hallamonic_debug`.

A Llama of 631,680 parameters learns the bytes of two novels on sequences of 1,024. All its attention layers become Harmonic
layers, that begin as the attention or at random; phase 1 trains these alone, phase 2 all parameters, by
titan_configs/hallamonic_debug_phase{1,2}.toml. Every model is scored on the same bytes after 1,024 to 16,384 others: what is
beyond the length that it was trained on is labelled so, and never counts as the best.

Phase 1 reads, in the same order, the first windows that the Llama read; phase 2 reads the same split in longer sequences.
All in all a converted model has read more than its Llama, so that it is how a curve runs, and not how low, that tells of the
conversion. With `--control` a Llama that trains for as many further steps is there too.

A run that was killed continues where it stopped.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torchtitan.config import ConfigManager

from eval.scoring import length
from eval.study.cells import Cell, Model, Text, file_digest
from eval.study.protocol import text_of
from eval.study.run_cell import measure
from eval.study.running import run_cells
from fla_harmonic.hallamonic.convert import Convert, convert
from fla_harmonic.titan.config import global_batch_size


@dataclass
class Options:
    """Seeds, budgets and where results go."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initial weights and data order."""

    inits: tuple[Literal["attention", "random"], ...] = ("attention", "random")
    """How the new layers begin."""

    llama_steps: int = 200
    """Optimizer steps of the Llama, of 4,096 bytes each."""

    phase_steps: tuple[int, int] | None = None
    """Those of phase 1 and of phase 2. Default: those of the configs."""

    control: bool = False
    """Train the Llama itself on for as many steps as both phases have."""

    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Bytes before the targets, ascending."""

    targets: int = 4096
    """Bytes that are predicted with every context: the last ones of the test split."""

    processes: int = 2
    """Runs at once."""

    threads: int = 1
    """CPU threads of a run."""

    out: Path = Path("outputs/hallamonic_debug")
    """Folder for runs, table and plot."""


def cell(
    model: Model, config: str, text: Text, seed: int, steps: int | None, start: str, overrides: tuple[str, ...] = (),
) -> Cell:
    """
    A run by its config in titan_configs. What its weights begin as, `start`, is part of the cell's name; where they lie,
    `text.assets`, is not.
    """
    config_file = Path("titan_configs") / f"{config}.toml"
    job = ConfigManager().parse_args([f"--job.config_file={config_file}", "--model.hf_assets_path=."])
    training = job.training
    return Cell(
        model=model, text=text, config_file=str(config_file), config_digest=file_digest(config_file),
        seq_len=training.seq_len, step_tokens=global_batch_size(job) * training.seq_len, steps=steps or training.steps,
        micro_tokens=training.local_batch_size * training.seq_len,
        seed=seed, lr=job.optimizer.lr, longest=max(1024, training.seq_len),
        overrides=(f"--job.description={start}", *overrides))


def study(options: Options) -> dict[str, list[Path]]:
    """Trains, converts, and trains further. Returns the directories of every model, one per seed, by its label."""
    text = text_of("novels", "", "bytes", ".", 4096, 4096)

    def run(cells: list[Cell], title: str) -> list[Path]:
        run_cells(cells, measure, options.out, options.processes, options.threads, title)
        return [options.out / "cells" / cell.name / "hf" for cell in cells]

    llamas = [cell(Model("llama", "llama", "debug"), "llama_debug", text, seed, options.llama_steps, "from scratch")
              for seed in options.seeds]
    found = {"Llama": run(llamas, "Llama")}
    starts: list[tuple[Literal["attention", "random"], int, Path]] = []
    for (seed, directory), init in itertools.product(zip(options.seeds, found["Llama"], strict=True), options.inits):
        converted = options.out / "converted" / f"{directory.parent.name}-{init}"
        convert(Convert(str(directory), converted, init=init, seed=seed))
        starts.append((init, seed, converted))
        found.setdefault(f"{init}, converted", []).append(converted)
    steps = 0
    for phase in (1, 2):
        given = options.phase_steps and options.phase_steps[phase - 1]
        cells = [
            cell(Model(f"{init}-phase{phase}", "hallamonic", "hf"), f"hallamonic_debug_phase{phase}",
                 replace(text, assets=str(start)), seed, given,
                 f"from {start.parent.name if start.name == 'hf' else start.name}")
            for init, seed, start in starts
        ]
        steps += cells[0].steps
        trained = run(cells, f"phase {phase}")
        starts = [(init, seed, directory) for (init, seed, _), directory in zip(starts, trained, strict=True)]
        for init, _, directory in starts:
            found.setdefault(f"{init}, phase {phase}", []).append(directory)
    if options.control:
        found["Llama, trained on"] = run([
            cell(Model("llama-on", "llama", "debug"), "llama_debug", replace(text, assets=str(start)), seed, steps,
                 f"from {start.parent.name}", ("--checkpoint.initial_load_in_hf",))
            for seed, start in zip(options.seeds, found["Llama"], strict=True)
        ], "Llama, trained on")
    return found


def main(options: Options) -> None:
    found = study(options)
    models = [(label, directory) for label, directories in found.items() for directory in directories]
    length.compare(length.Options(
        models=tuple(directory for _, directory in models), labels=tuple(label for label, _ in models),
        contexts=options.contexts, targets=options.targets, windows=1, beyond=True, out=options.out / "length"), [])
