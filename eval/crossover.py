"""
Quality against context length: Harmonic, Mamba and Llama under one token budget: `python -m eval.crossover`.

    python -m eval.crossover --preset cpu-small --dataset_path wiki.xml

Every model trains at every length with every seed on exactly the same number of tokens, by stock torchtitan, with the same
data order, optimizer, schedule, clipping and tokenizer: once at a shared learning rate, once at each model's own best of a
small sweep, which is the same for all and decided on the validation split. All are scored on the same target tokens.

A study that was killed continues where it stopped. It can be cut: `--part 1/4` runs the first of four parts, in stages
(`--stages shared sweep`, then `--stages best` once `--merge` has brought the sweep together).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eval.study.cells import Model
from eval.study.options import StudyOptions, cli
from eval.study.protocol import Protocol


@dataclass
class Options(StudyOptions):
    """Which study, on what text, and what of it is set otherwise."""

    preset: Literal["compare", "cpu-small", "paper", "scaling"] = "cpu-small"
    """
    The study whose settings are the defaults of all others. compare: two novels as bytes, one seed, in minutes; cpu-small: the
    debug flavors at 1K to 8K bytes; paper: 28M at 1K to 64K tokens; scaling: 7M to 112M.
    """

    models: tuple[str, ...] = ()
    """family/flavor each."""

    shared_lr: float = 0.0
    """The shared learning rate."""

    sweep_seq_len: int = 0
    """Length of the sweep."""

    micro_tokens: int = 0
    """Most tokens of a forward pass in training; more are accumulated. 0: all of a step."""

    out: Path = Path("outputs/crossover")
    """Folder for cells, tables and plots."""


PRESETS: dict[str, Options] = {options.preset: options for options in (
    Options(
        preset="cpu-small", models=("harmonic/debug-best", "mamba/debug", "llama/debug"), seq_lens=(1024, 2048, 4096, 8192),
        tokens=32 * 8192, step_tokens=8192, lrs=(3e-3, 6e-3, 1.2e-2), shared_lr=3e-3, sweep_seq_len=2048,
    ),
    # what `make compare` runs, at the shared learning rate alone
    Options(
        preset="compare", models=("harmonic/debug", "mamba/debug", "llama/debug"), seq_lens=(1024, 4096), seeds=(42,),
        tokens=112 * 4096, step_tokens=4096, lrs=(3e-3,), shared_lr=3e-3, sweep_seq_len=1024, dataset="novels",
    ),
    Options(
        preset="paper", models=("harmonic/28M", "harmonic/28M-best", "mamba/28M", "llama/28M"),
        seq_lens=(1024, 2048, 4096, 8192, 16384, 32768, 65536), seeds=(0, 1, 2, 3, 4), tokens=1000 * 65536,
        step_tokens=65536, lrs=(5e-4, 1e-3, 2e-3, 4e-3), shared_lr=1e-3, sweep_seq_len=8192,
        config_file="titan_configs/harmonic_28m.toml", dataset="enwik8", tokenizer="hf", test=524288, validation=262144,
        micro_tokens=65536, processes=1, threads=8, overrides=("--harmonic.loss_chunk_tokens=8192",),
    ),
    Options(
        preset="scaling", models=tuple(f"{family}/{size}" for size in ("7M", "15M", "28M", "35M", "112M")
                                       for family in ("harmonic", "mamba", "llama")),
        seq_lens=(1024, 8192, 32768), tokens=2000 * 32768, step_tokens=32768, lrs=(5e-4, 1e-3, 2e-3, 4e-3), shared_lr=1e-3,
        sweep_seq_len=8192, config_file="titan_configs/harmonic_28m.toml", dataset="enwik8", tokenizer="hf", test=524288,
        validation=262144, micro_tokens=32768, processes=1, threads=8,
        overrides=("--harmonic.loss_chunk_tokens=8192",),
    ),
)}


def protocol_of(options: Options) -> Protocol:
    """The study that the options name; see `StudyOptions.protocol_of`."""
    return options.protocol_of(
        [Model.of(name) for name in options.models], options.shared_lr, options.sweep_seq_len, options.micro_tokens)


def main(options: Options) -> None:
    options.run(protocol_of(options), "crossover.png")


if __name__ == "__main__":
    main(cli(PRESETS, __doc__))
