"""What the layers of a Harmonic model remember of a row of text."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fla_harmonic.layers import HarmonicAttention


class LayerLayout(NamedTuple):
    """Shapes, without the batch, of what a `HarmonicAttention` remembers: its levels' states, and its convolution's inputs."""

    levels: tuple[int, ...]
    conv: tuple[int, int] | None


class LayerState(NamedTuple):
    """What a `HarmonicAttention` remembers of B rows: each level `[B, D]`, the convolution `[B, hidden_size, conv_size]`."""

    levels: tuple[torch.Tensor, ...]
    conv: torch.Tensor | None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LayerState":
        """The state with every tensor replaced by the function's value."""
        return LayerState(tuple(map(function, self.levels)), None if self.conv is None else function(self.conv))


# one entry a layer
States = Sequence[LayerState]


def state_layout(blocks: Iterable[nn.Module]) -> tuple[LayerLayout, ...]:
    """What the blocks of a Harmonic model remember; a ValueError for a block with another layer than `HarmonicAttention`."""
    layout = []
    for index, block in enumerate(blocks):
        attn = getattr(block, "attn", None)
        if not isinstance(attn, HarmonicAttention):
            raise ValueError(
                f"expected HarmonicAttention in every block, but block {index} has {type(attn).__name__}: its memory is not a "
                "state that one segment can pass to the next. Remedy: harmonic.segment_len = 0 and harmonic.stateful = false"
            )
        conv = (attn.hidden_size, attn.conv_size) if attn.use_short_conv else None
        layout.append(LayerLayout((attn.level_size,) * len(attn.levels), conv))
    return tuple(layout)


def zero_states(layout: Iterable[LayerLayout], rows: int, device: torch.device | str | None = None) -> States:
    """The states before the first token, float32."""
    return [
        LayerState(
            tuple(torch.zeros(rows, size, device=device) for size in layer.levels),
            None if layer.conv is None else torch.zeros(rows, *layer.conv, device=device),
        )
        for layer in layout
    ]
