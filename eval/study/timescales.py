"""The timescales that trained models of a study use, read from the test text."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torchtitan.config import ConfigManager

from eval.results import finished
from eval.scoring.models import load_recurrent
from eval.study.cells import Cell
from eval.study.running import result_file
from eval.tables import save
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.layers.harmonic import HarmonicLevel
from fla_harmonic.text import load_split
from fla_harmonic.titan.components.tokenizer import build_tokenizer
from fla_harmonic.titan.config import data_section

# tokens that the timescales are read from
_TOKENS = 4096


@torch.no_grad()
def timescales(cell: Cell, directory: Path) -> list[list[float]]:
    """
    Timescales `1 / (1 - A)` in tokens that a trained model uses on the first tokens of the test split: for each level, over
    layers, the mean (of the logarithm, over tokens) of each channel, sorted.
    """
    model = load_recurrent(directory)
    job = ConfigManager().parse_args(cell.arguments(directory.parent))
    split = load_split(job.training.dataset, job.training.dataset_path, "test", build_tokenizer(job), data_section(job))
    layers = [module for module in model.modules() if isinstance(module, HarmonicAttention)]
    found: list[list[float]] = [[] for _ in layers[0].levels]

    def keep(taus: list[float], level: HarmonicLevel, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        a_min, a_max = level.decay_range
        forgotten = (1 - a_max) + (a_max - a_min) * torch.sigmoid(-outputs[0].double())
        taus.extend(torch.exp(-forgotten.log().mean((0, 1))).tolist())

    for layer in layers:
        for taus, level in zip(found, layer.levels, strict=True):
            level.register_forward_hook(partial(keep, taus))
    model(torch.from_numpy(split.tokens[:_TOKENS].astype(np.int64))[None], use_cache=False)
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
    save(figure, file)


def timescales_of(cells: Sequence[Cell], out: Path) -> dict[str, list[list[float]]]:
    """The timescales of the first seed of each variant at the first length; what was read is kept."""
    found: dict[str, list[list[float]]] = {}
    for cell in cells:
        folder = result_file(cell, out).parent
        if cell.model.family == "harmonic" and cell.model.label not in found and result_file(cell, out).is_file():
            found[cell.model.label] = finished(folder / "timescales.json", partial(timescales, cell, folder / "hf"))
    return found
