"""What people read of results: Markdown tables and figures."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def spread(values: pd.Series) -> str:
    """Mean, lowest and highest, to three digits."""
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def save(figure: Figure, file: Path) -> None:
    """Writes a figure of pyplot, and closes it."""
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
