"""
Sizes and costs of the layer, as docs/architecture.md prints them, and its figure:

    python -m benchmarks.architecture --png docs/architecture.png

Nothing is timed: parameters, states, floating point operations and the bytes that autograd saves are counted, so the numbers
are the same on every machine.
"""

from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from matplotlib.text import Text
from torch import nn

from eval.tables import markdown, save
from fla_harmonic import HarmonicAttention, HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.layers.harmonic import TIMESCALES

# rows of the table of options: what is changed, and how
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("default", {}),
    ('`timescale_mode="init"`', {"timescale_mode": "init"}),
    ("two levels", {"timescales": TIMESCALES[::2]}),
    ("`use_prediction_error=False`", {"use_prediction_error": False}),
    ("`gate_ratio=2`", {"gate_ratio": 2}),
    ("`gate_rank=32`", {"gate_rank": 32}),
    ("`expand_ratio=2`", {"expand_ratio": 2}),
    ("`use_output_gate=False`", {"use_output_gate": False}),
    ("`use_output_gate=False, use_output_proj=False`", {"use_output_gate": False, "use_output_proj": False}),
    ("`use_short_conv=True`", {"use_short_conv": True}),
    ("the paper's", {"gate_ratio": 2, "use_output_gate": False, "use_output_proj": False}),
)
MODELS = (
    ("`HarmonicConfig.paper()`", HarmonicConfig.paper()),
    ("stack of two blocks (`28M-stack`)",
     HarmonicConfig(hidden_size=256, vocab_size=50257, intermediate_size=592, num_hidden_layers=2)),
)


@dataclass
class Cost:
    """
    What a layer costs: trained numbers, numbers that it remembers of a sequence, floating point operations of the forward pass
    per token (2 per weight of a linear map or convolution, 2 per channel of a level), and bytes per token, in float32, that
    training holds between the forward and the backward pass.
    """

    parameters: int
    state: int
    flops: int
    saved: int


def cost(layer: nn.Module, inputs: torch.Tensor) -> Cost:
    """The cost of a layer or model; the inputs `[1, T, ...]` count among what it saves."""
    weights = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear | nn.Conv1d))
    mixers = [m for m in layer.modules() if isinstance(m, HarmonicAttention)]
    scanned = sum(len(m.levels) * m.level_size for m in mixers)
    return Cost(sum(p.numel() for p in layer.parameters()), sum(m.state_size() for m in mixers), 2 * (weights + scanned),
                saved_bytes(layer, inputs))


def saved_bytes(layer: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes per token of all memory, parameters aside, that the forward pass saves for the backward pass."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    # the tensors themselves: freed memory could be handed out again under the same address
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        address = x.untyped_storage().data_ptr()
        if address not in parameters:
            kept[address] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = layer(inputs)
    total = sum(x.untyped_storage().nbytes() for x in kept.values())
    del output
    return total // inputs.shape[1]


def draw(file: Path) -> None:
    """The layer as a diagram, and how much of a token its levels still remember after n more."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2), width_ratios=(1.75, 1))
    colors, names = ("tab:red", "tab:green", "tab:blue"), ("fast", "medium", "slow")
    nodes: dict[tuple[float, float], Text] = {}

    def node(x: float, y: float, text: str, color: str = "0.35", style: str = "round,pad=0.6") -> None:
        nodes[x, y] = left.text(x, y, text, ha="center", va="center", fontsize=9, zorder=4,
                                bbox=dict(boxstyle=style, fc="white", ec=color))

    def arrow(*points: tuple[float, float], color: str = "0.35") -> None:
        """From the node at the first point through the others, to the border of the node at the last."""
        left.plot(*zip(*points[:-1], strict=True), color=color, lw=1, zorder=0)
        end = nodes[points[-1]].get_bbox_patch() if points[-1] in nodes else None
        left.annotate("", points[-1], points[-2],
                      arrowprops=dict(arrowstyle="-|>", color=color, lw=1, shrinkA=0, shrinkB=0, patchB=end))

    columns, top, last = (1.4, 5.6, 9.8), 5.42, 11.7
    node(columns[2], top, "$+$", style="circle")
    node(last, top, r"$\times$", style="circle")
    node(last, 3.15, "SiLU($W_g x$)")
    node(last, 6.45, "$W_o$")
    for number, (x, color, name, (low, high)) in enumerate(zip(columns, colors, names, TIMESCALES, strict=True), start=1):
        node(x, 1, "gate, input", color)
        node(x, 2.15, f"scan, {name}\n$\\tau$ {low:g} to {high:g}", color)
        node(x, 3.15, "norm", color)
        for lower, upper in pairwise((0, 1, 2.15, 3.15, top)):
            arrow((x, lower), (x, upper), color=color if upper == top else "0.35")
        left.text(x + 0.08, 4.75, f"$y_{number}$")
        left.text(x + 0.08, 0.35, f"$z_{number}$")
    for number, (below, above) in enumerate(pairwise(columns), start=1):
        prediction, error, norm = below + 1.5, below + 2.1, below + 3.15
        node(prediction, 2.2, f"$P_{number}$", colors[number - 1])
        node(error, 0, "$-$", style="circle")
        node(norm, 0, "norm")
        left.text(error + 0.2, -0.5, f"$e_{number}$")
        # the output comes down through the prediction, what it is compared with from the level below
        arrow((below, 3.9), (prediction, 3.9), (prediction, 2.2), color=colors[number - 1])
        arrow((prediction, 2.2), (prediction, 0), (error, 0))
        arrow((error, 0), (norm, 0))
        arrow((norm, 0), (above, 0), (above, 1))
    arrow((-0.5, 0), (columns[0], 0), (columns[0], -0.8), (columns[0] + 2.1, -0.8), (columns[0] + 2.1, 0))
    arrow((columns[0], 4.35), (columns[1] + 2.1, 4.35), (columns[1] + 2.1, 0), color=colors[0])
    arrow((columns[0], top), (columns[2], top))
    arrow((columns[2], top), (last, top))
    arrow((-0.5, 0), (-0.5, -1.3), (last, -1.3), (last, 3.15))
    arrow((last, 3.15), (last, top))
    arrow((last, top), (last, 6.45))
    arrow((last, 6.45), (last - 1, 6.45))
    left.text(-0.75, 0, "$x$", va="center")
    left.text(last - 1.3, 6.45, "$o$", va="center")
    left.set(xlim=(-1, 12.9), ylim=(-1.6, 6.95), title="HarmonicAttention")
    left.axis("off")

    n = torch.logspace(0, 4, 300)
    for (low, high), color, name in zip(TIMESCALES, colors, names, strict=True):
        least, most = ((1 - 1 / tau) ** n for tau in (low, high))
        right.fill_between(n.numpy(), least.numpy(), most.numpy(), color=color, alpha=0.35, label=name)
    right.set(xscale="log", xlabel="tokens since", ylabel="share of a state that is left, $A^n$",
              title='what a level remembers (mode "bounded")')
    right.legend(fontsize=9)
    right.grid(alpha=0.3)
    save(figure, file)


def main(hidden_size: int = 256, png: Path | None = None) -> None:
    """
    Args:
        hidden_size: Width of the layer.
        png: File for the figure, if wanted.
    """
    torch.manual_seed(0)
    inputs = torch.randn(1, 512, hidden_size, requires_grad=True)
    layers = {name: cost(HarmonicAttention(hidden_size=hidden_size, **options), inputs) for name, options in OPTIONS}
    # of about 28M parameters, with their logits
    models = {name: cost(HarmonicForCausalLM(config), torch.randint(config.vocab_size, (1, 64))) for name, config in MODELS}
    for title, rows in ((f"layer, H = {hidden_size}", layers), ("model", models)):
        print(markdown((title, "parameters", "state", "FLOPs per token", "training, bytes per token"), (
            (name, *(f"{value:,}" for value in astuple(costs))) for name, costs in rows.items())), end="\n\n")
    if png is not None:
        draw(png)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
