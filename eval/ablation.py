"""
What each part of Harmonic is worth: `python -m eval.ablation --dataset_path wiki.xml`.

Variants of a flavor at equal parameters (the MLP's width makes up for what a variant has more or less), under the protocol of
`eval.crossover`: equal tokens, one sweep for all, several seeds, differences in pairs. The trained timescales are read from
the test text and plotted: do the levels stay apart?

`--study search` tries other blocks around the three levels in place of parts left out. `--extra "name: use_short_conv=true
gate_rank=16"` adds a variant of one's own, as fields of `HarmonicConfig`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from eval.results import write
from eval.study.cells import Model
from eval.study.options import StudyOptions
from eval.study.protocol import Protocol
from eval.study.timescales import plot_timescales, timescales_of
from eval.study.variants import STUDIES, at_equal_parameters
from fla_harmonic.titan.models.flavors import HARMONIC


@dataclass
class Options(StudyOptions):
    """Which variants, on what text, and under which budget: the first length is the sweep's, the first rate the shared one."""

    study: Literal["ablation", "search"] = "ablation"
    """ablation: parts left out or changed; search: other blocks."""

    base: str = "debug"
    """The flavor of Harmonic that the variants change."""

    variants: tuple[str, ...] = ()
    """Names of the study's variants to run. Default: all."""

    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """One more variant, "name: field=value field=value"."""

    rivals: tuple[str, ...] = ()
    """Other models under the same protocol, e.g. mamba/debug."""

    stages: tuple[Literal["shared", "sweep", "best"], ...] = ("sweep", "best")
    """What to run: all at the shared learning rate; the sweeps; each variant at its best."""

    out: Path = Path("outputs/ablation")
    """Folder for cells, tables and plots."""


def variants(options: Options) -> dict[str, tuple[str, ...]]:
    """The variants that the options name, with their fields; a ValueError for one that is not there or no "name: fields"."""
    known = dict(STUDIES[options.study])
    if "other timescale mode" in known:
        mode = HARMONIC[options.base].hf_config().timescale_mode
        known["other timescale mode"] = (f"timescale_mode={'init' if mode == 'bounded' else 'bounded'}",)
    if wrong := [name for name in options.variants if name not in known]:
        raise ValueError(f"`variants` must be of {tuple(known)}; got {wrong}.")
    chosen = {name: known[name] for name in options.variants or known}
    for entry in options.extra:
        name, colon, fields = entry.partition(":")
        if not (name.strip() and colon) or name.strip() in chosen:
            raise ValueError(f"`extra` must be a new \"name: field=value field=value\"; got {entry!r}.")
        chosen[name.strip()] = tuple(fields.split())
    return chosen


def protocol_of(options: Options) -> Protocol:
    """The study that the options name; see `StudyOptions.protocol_of`."""
    if options.base not in HARMONIC:
        raise ValueError(f"`base` must be one of {tuple(HARMONIC)}; got {options.base!r}.")
    models = [Model(name, "harmonic", options.base, at_equal_parameters(options.base, fields) if fields else ())
              for name, fields in variants(options).items()]
    models += [Model.of(name) for name in options.rivals]
    return options.protocol_of(models, options.lrs[0], options.seq_lens[0])


def main(options: Options) -> None:
    protocol = protocol_of(options)
    lrs = options.run(protocol, "ablation.png")["lrs"]
    if found := timescales_of(protocol.grid(lrs) if lrs else protocol.shared(), options.out):
        write(options.out / "timescales.json", json.dumps(found))
        plot_timescales(found, options.out / "timescales.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
