"""
What each part of Harmonic is worth: `python -m eval.ablation --dataset_path wiki.xml`.

Variants of a flavor at equal parameters (the MLP's width makes up for what a variant has more or less), under the protocol of
`eval.crossover`: equal tokens, one sweep for all, several seeds, differences in pairs. The trained timescales are read from
the test text and plotted: do the levels stay apart?

`--study search` tries other blocks around the three levels in place of parts left out. `--extra "name: use_short_conv=true
gate_rank=16"` adds a variant of one's own, as fields of `HarmonicConfig`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro

from eval.results import keep_command, write
from eval.scoring.models import load_recurrent
from eval.study.cells import Cell, Model, merge
from eval.study.paired import report
from eval.study.protocol import Protocol, check_overrides, data_of, run, text_of
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.layers.harmonic import HarmonicLevel
from fla_harmonic.text.tokenizers import ByteTokenizer, JsonTokenizer
from fla_harmonic.titan.components.dataloader import load_split
from fla_harmonic.titan.config import parse_fields
from fla_harmonic.titan.models.flavors import HARMONIC
from fla_harmonic.titan.models.hf_model import HFModelArgs

STUDIES: dict[str, dict[str, tuple[str, ...]]] = {
    "ablation": {
        "full": (),
        "other timescale mode": (),
        "no prediction error": ("use_prediction_error=false",),
        "flat, middle range": ("timescales=[[10,40],[10,40],[10,40]]",),
        "flat, slow range": ("timescales=[[125,1000],[125,1000],[125,1000]]",),
        "one level": ("timescales=[[2.2,1000]]",),
        "two levels": ("timescales=[[2.2,8.3],[125,1000]]",),
        "ranges twice as slow": ("timescales=[[4.4,16.6],[20,80],[250,2000]]",),
        "ranges twice as fast": ("timescales=[[1.1,4.15],[5,20],[62.5,500]]",),
        "gates as MLPs": ("gate_ratio=1",),
    },
    "search": {
        "paper's ranges, confined": ("timescale_mode=bounded",),
        "stack": (),
        "convolution": ("use_short_conv=true",),
        "convolution, wider weights": ("use_short_conv=true", "initializer_range=0.06"),
        "twice as wide, low-rank maps, convolution, wider weights": (
            "expand_ratio=2", "gate_rank=16", "use_short_conv=true", "initializer_range=0.06"),
        "convolution, wider weights, fast": (
            "use_short_conv=true", "initializer_range=0.06", "timescales=[[1.01,1.2],[1.2,8],[8,1000]]"),
        # the flavor debug-best
        "convolution, wider weights, fast, 3 blocks": (
            "use_short_conv=true", "initializer_range=0.06", "timescales=[[1.01,1.2],[1.2,8],[8,1000]]",
            "num_hidden_layers=3"),
        "convolution, wider weights, all levels fast, 3 blocks": (
            "use_short_conv=true", "initializer_range=0.06", "timescales=[[1.01,1.2],[1.2,4],[4,100]]",
            "num_hidden_layers=3"),
    },
}
# of a timescale histogram
_TAU_TOKENS = 4096


@dataclass
class Options:
    """Which variants, on what text, and under which budget. The defaults are a study on two cores."""

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

    dataset: str = "text"
    """torchtitan's `[training] dataset`."""

    dataset_path: str = ""
    """The text."""

    tokenizer: Literal["bytes", "hf"] = "bytes"
    """`[data] tokenizer`."""

    assets: str = "."
    """Folder of the tokenizer.json, for hf."""

    seq_lens: tuple[int, ...] = (2048,)
    """Lengths in tokens; the sweep runs at the first."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and data order."""

    tokens: int = 64 * 4096
    """Token budget of every cell."""

    step_tokens: int = 4096
    """Tokens of an optimizer step."""

    lrs: tuple[float, ...] = (3e-3, 6e-3)
    """Learning rates of the sweep; the first is the shared one."""

    test: int = 32768
    """Target tokens of the test split."""

    validation: int = 16384
    """Target tokens of the validation split."""

    config_file: str = "titan_configs/harmonic_debug.toml"
    """TOML file that gives all else."""

    overrides: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """More torchtitan options for every cell, one at a time."""

    stages: tuple[Literal["shared", "sweep", "best"], ...] = ("sweep", "best")
    """What to run: all at the shared learning rate; the sweeps; each variant at its best."""

    part: str = "1/1"
    """Which part of the cells of each stage, as i/n."""

    merge: tuple[Path, ...] = ()
    """Folders of other parts, whose finished cells are taken over first."""

    processes: int = 2
    """Cells at once."""

    threads: int = 1
    """CPU threads of a cell."""

    out: Path = Path("outputs/ablation")
    """Folder for cells, tables and plots."""


def variants(options: Options) -> dict[str, tuple[str, ...]]:
    """
    The variants that the options name, with their fields.

    Raises:
        ValueError: there is no such variant, or an extra one is no "name: fields".
    """
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


def at_equal_parameters(base: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    """
    The fields, and the MLP's width that brings the variant nearest to the base's parameters.

    Raises:
        ValueError: no width does, within 1%.
    """
    target = parameters(base, ())
    narrow, wide = (parameters(base, (*fields, f"intermediate_size={width}")) for width in (1, 2))
    width = max(1, round((target - narrow) / (wide - narrow)) + 1)
    sized = (*fields, f"intermediate_size={width}")
    if abs(parameters(base, sized) - target) > 0.01 * target:
        raise ValueError(
            f"expected a variant of {base} with {target:,} parameters; {' '.join(fields)} has {narrow:,} beside the narrowest "
            "MLP. Choose smaller maps, e.g. a gate_rank, or fewer blocks.")
    return sized


def parameters(base: str, fields: tuple[str, ...]) -> int:
    args = HFModelArgs(family="harmonic", config=HARMONIC[base].config, overrides=parse_fields(fields))
    with torch.device("meta"):
        return sum(p.numel() for p in args.build_hf().parameters())


def protocol_of(options: Options) -> Protocol:
    """
    Raises:
        ValueError: its cells would not be comparable.
    """
    if options.base not in HARMONIC:
        raise ValueError(f"`base` must be one of {tuple(HARMONIC)}; got {options.base!r}.")
    check_overrides(options.overrides)
    models = tuple(Model(name, "harmonic", options.base, at_equal_parameters(options.base, fields) if fields else ())
                   for name, fields in variants(options).items())
    models += tuple(Model(name, *name.partition("/")[::2]) for name in options.rivals)
    text = text_of(options.dataset, options.dataset_path, options.tokenizer, options.assets, options.test, options.validation,
                   data_of(options.config_file, options.overrides))
    protocol = Protocol(
        models, options.seq_lens, options.seeds, options.lrs[0], options.lrs, options.seq_lens[0], options.tokens,
        options.step_tokens, 0, text, options.config_file, options.overrides)
    protocol.check()
    return protocol


@torch.no_grad()
def timescales(cell: Cell, directory: Path) -> list[list[float]]:
    """
    Timescales `1 / (1 - A)` that a trained model uses on the first tokens of the test split, in tokens.

    Returns:
        For each level, over layers, the mean (of the logarithm, over tokens) of each channel, sorted.
    """
    model = load_recurrent(directory)
    tokenizer = ByteTokenizer() if cell.text.tokenizer == "bytes" else JsonTokenizer(cell.text.assets)
    data = data_of(cell.config_file, cell.overrides)
    split = load_split(cell.text.dataset, cell.text.path or None, "test", tokenizer, data)
    layers = [module for module in model.modules() if isinstance(module, HarmonicAttention)]
    found: list[list[float]] = [[] for _ in layers[0].levels]

    def keep(level: HarmonicLevel, index: int):
        def hook(module: torch.nn.Module, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
            a_min, a_max = level.decay_range
            forgotten = (1 - a_max) + (a_max - a_min) * torch.sigmoid(-outputs[0].double())
            found[index].extend(torch.exp(-forgotten.log().mean((0, 1))).tolist())
        return hook

    handles = [level.register_forward_hook(keep(level, index))  # type: ignore[arg-type]
               for layer in layers for index, level in enumerate(layer.levels)]
    model(torch.from_numpy(split.tokens[:_TAU_TOKENS].astype(np.int64))[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [sorted(level) for level in found]


def plot_timescales(found: dict[str, list[list[float]]], file: Path) -> None:
    """A histogram of the timescales of each level, a panel for each variant."""
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 2.4 * rows), sharex=True, squeeze=False)
    bins = np.geomspace(1, 4000, 50)
    for axis, (name, levels) in zip(axes.flat, found.items(), strict=False):
        for index, taus in enumerate(levels, start=1):
            axis.hist(np.clip(taus, bins[0], bins[-1]), bins, alpha=0.6, label=f"level {index}")
        axis.set(title=name, xscale="log")
        axis.title.set_fontsize(9)
    for axis in axes.flat[len(found):]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("timescale, tokens")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def timescales_of(cells: Sequence[Cell], out: Path) -> dict[str, list[list[float]]]:
    """The timescales of the first seed of each variant at the first length; what was read is kept."""
    found: dict[str, list[list[float]]] = {}
    for cell in cells:
        folder = out / "cells" / cell.name
        if cell.model.family != "harmonic" or cell.model.label in found or not (folder / "result.json").is_file():
            continue
        file = folder / "timescales.json"
        if not file.is_file():
            write(file, json.dumps(timescales(cell, folder / "hf")))
        found[cell.model.label] = json.loads(file.read_text())
    return found


def main(options: Options) -> None:
    protocol = protocol_of(options)
    keep_command(options.out, append=True)
    merge(options.merge, options.out)
    study = run(protocol, options.stages, options.part, options.out, options.processes, options.threads)
    report(study, options.out, "ablation.png")
    cells = protocol.grid(study["lrs"]) if study["lrs"] else protocol.shared()
    if found := timescales_of(cells, options.out):
        write(options.out / "timescales.json", json.dumps(found))
        plot_timescales(found, options.out / "timescales.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
