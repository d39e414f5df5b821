"""The options that studies of torchtitan's cells have in common, and the command line over presets."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from eval.results import keep_command
from eval.scoring.texts import job_of
from eval.study.cells import Model
from eval.study.paired import report
from eval.study.protocol import Protocol, check_overrides, run, text_of
from eval.study.running import merge
from fla_harmonic.titan.config import data_section

T = TypeVar("T")


@dataclass
class StudyOptions:
    """What text, which budget, what of the study to run, and where."""

    dataset_path: str = ""
    """The text: a UTF-8 file for `text`, enwik8 or its zip, a hub dataset."""

    dataset: str = "text"
    """torchtitan's `[training] dataset`, e.g. `hub` for WikiText-103."""

    tokenizer: Literal["bytes", "hf"] = "bytes"
    """`[data] tokenizer`."""

    assets: str = "."
    """Folder of the tokenizer.json, for hf."""

    seq_lens: tuple[int, ...] = (2048,)
    """Lengths in tokens."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and data order."""

    tokens: int = 64 * 4096
    """Token budget of every cell."""

    step_tokens: int = 4096
    """Tokens per optimizer step."""

    lrs: tuple[float, ...] = (3e-3, 6e-3)
    """Learning rates of the sweep."""

    test: int = 32768
    """Target tokens of the test split."""

    validation: int = 16384
    """Target tokens of the validation split."""

    config_file: str = "titan_configs/harmonic_debug.toml"
    """TOML file that gives all else."""

    overrides: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """More torchtitan options for every cell, one at a time, e.g. `--overrides=--optimizer.weight_decay=0`."""

    stages: tuple[Literal["shared", "sweep", "best"], ...] = ("shared", "sweep", "best")
    """What to run: all at the shared learning rate; the sweeps; each model at its best, where that is another."""

    part: str = "1/1"
    """Which part of the cells of each stage, as i/n."""

    merge: tuple[Path, ...] = ()
    """Folders of other parts, whose finished cells are taken over first."""

    processes: int = 2
    """Cells at once."""

    threads: int = 1
    """CPU threads of a cell."""

    out: Path = Path("outputs/study")
    """Folder for cells, tables and plots."""

    def protocol_of(
        self, models: Sequence[Model], shared_lr: float, sweep_seq_len: int, micro_tokens: int = 0,
    ) -> Protocol:
        """The study of these models, whose cells must be comparable; see `Protocol.check` and `check_overrides`."""
        check_overrides(self.overrides)
        text = text_of(self.dataset, self.dataset_path, self.tokenizer, self.assets, self.test, self.validation,
                       data_section(job_of(Path(self.config_file), self.overrides)))
        protocol = Protocol(
            tuple(models), self.seq_lens, self.seeds, shared_lr, self.lrs, sweep_seq_len, self.tokens, self.step_tokens,
            micro_tokens, text, self.config_file, self.overrides)
        protocol.check()
        return protocol

    def run(self, protocol: Protocol, figure: str) -> dict[str, Any]:
        """Runs a study, as `eval.study.protocol.run`, and writes its tables and figures."""
        keep_command(self.out, append=True)
        merge(self.merge, self.out)
        study = run(protocol, self.stages, self.part, self.out, self.processes, self.threads)
        report(study, self.out, figure)
        return study


def cli(presets: dict[str, T], description: str | None, args: Sequence[str] | None = None) -> T:
    """The options of a command line over those of the preset that its `--preset` names, by default the first."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default=next(iter(presets)))
    # tyro refuses a name that is none
    default = presets.get(parser.parse_known_args(args)[0].preset, next(iter(presets.values())))
    return tyro.cli(type(default), default=default, description=description, args=args)
