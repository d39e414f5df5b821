"""
Quality against context length: Harmonic, Mamba and Llama under one token budget: `python -m eval.crossover`.

    python -m eval.crossover --preset cpu-small --dataset_path wiki.xml

Every model trains at every length with every seed on exactly the same number of tokens, by stock torchtitan, with the same
data order, optimizer, schedule, clipping and tokenizer: once at a shared learning rate, once at each model's own best of a
small sweep, which is the same for all and decided on the validation split. All are scored on the same target tokens.

A study that was killed goes on where it stopped. It can be cut: `--part 1/4` runs the first of four parts, in stages
(`--stages shared sweep`, then `--stages best` once `--merge` has brought the sweep together).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from eval.results import keep_command
from eval.study.cells import Model, merge
from eval.study.paired import report
from eval.study.protocol import Protocol, check_overrides, data_of, run, text_of


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
    # what `make compare` runs, at the shared learning rate alone
    "compare": Preset(
        models=("harmonic/debug", "mamba/debug", "llama/debug"), seq_lens=(1024, 4096), seeds=(42,), tokens=112 * 4096,
        step_tokens=4096, lrs=(3e-3,), shared_lr=3e-3, sweep_seq_len=1024, config_file="titan_configs/harmonic_debug.toml",
        dataset="novels", tokenizer="bytes", test=32768, validation=16384, processes=2,
    ),
    "cpu-small": Preset(
        models=("harmonic/debug-best", "mamba/debug", "llama/debug"), seq_lens=(1024, 2048, 4096, 8192),
        seeds=(0, 1, 2), tokens=32 * 8192, step_tokens=8192, lrs=(3e-3, 6e-3, 1.2e-2), shared_lr=3e-3,
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

    preset: Literal["compare", "cpu-small", "paper", "scaling"] = "cpu-small"
    """
    compare: two novels as bytes, one seed, in minutes; cpu-small: the debug flavors at 1K to 8K bytes; paper: 28M at 1K to 64K
    tokens; scaling: 7M to 112M.
    """

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

    stages: tuple[Literal["shared", "sweep", "best"], ...] = ("shared", "sweep", "best")
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
                   preset.validation, data_of(preset.config_file, preset.overrides))
    models = tuple(Model(name, *name.partition("/")[::2]) for name in preset.models)
    protocol = Protocol(
        models, preset.seq_lens, preset.seeds, preset.shared_lr, preset.lrs, preset.sweep_seq_len, preset.tokens,
        preset.step_tokens, preset.micro_tokens, text, preset.config_file, preset.overrides)
    protocol.check()
    return protocol, preset


def main(options: Options) -> None:
    protocol, preset = protocol_of(options)
    keep_command(options.out, append=True)
    merge(options.merge, options.out)
    study = run(protocol, options.stages, options.part, options.out, preset.processes, preset.threads)
    report(study, options.out, "crossover.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
