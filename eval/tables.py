"""What people read of results: Markdown tables and figures."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def spread(values: pd.Series) -> str:
    """Mean, lowest and highest, to three digits."""
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def curve(axis: Axes, values: pd.Series, beyond: pd.Series, label: str, color: str) -> None:
    """Draws values against their index, a length; those beyond a trained length dashed, with hollow markers."""
    fair = values[~beyond]
    axis.plot(fair, color=color, marker="o", label=label)
    # from the last fair point on, so that the line continues
    axis.plot(values[beyond | (values.index == fair.index.max())], color=color, linestyle="--", zorder=1)
    axis.plot(values[beyond], color=color, linestyle="", marker="o", markerfacecolor="white")
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)


def save(figure: Figure, file: Path) -> None:
    """Writes a figure of pyplot, and closes it."""
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
