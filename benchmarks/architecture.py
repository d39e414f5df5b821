"""
Sizes and costs of the layer, as docs/architecture.md prints them, and its figure:

    python -m benchmarks.architecture --png docs/architecture.png

Nothing is timed: parameters, states, floating point operations and the bytes that autograd saves are counted, so the numbers
are the same on every machine.
"""

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from eval.tables import markdown
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


@dataclass
class Options:
    """Width of the layer, and where the figure goes."""

    hidden_size: int = 256
    """H."""

    png: Path | None = None
    """File for the figure, if wanted."""


@dataclass
class Cost:
    """
    What a layer costs.

    Args:
        parameters (int):
            Trained numbers.
        state (int):
            Numbers that it remembers of a sequence.
        flops (int):
            Floating point operations of the forward pass per token: 2 per weight of a linear map or convolution, 2 per
            channel of a level.
        saved (int):
            Bytes per token, in float32, that training holds between the forward and the backward pass.
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


def option_rows(hidden_size: int) -> list[tuple[str, Cost]]:
    """The cost of a layer with each option."""
    inputs = torch.randn(1, 512, hidden_size, requires_grad=True)
    return [(name, cost(HarmonicAttention(hidden_size=hidden_size, **options), inputs)) for name, options in OPTIONS]


def model_rows() -> list[tuple[str, Cost]]:
    """The cost of the models of about 28M parameters, with their logits."""
    configs = {
        "`HarmonicConfig.paper()`": HarmonicConfig.paper(),
        "stack of two blocks (`28M-stack`)": HarmonicConfig(
            hidden_size=256, vocab_size=50257, intermediate_size=592, num_hidden_layers=2),
    }
    return [(name, cost(HarmonicForCausalLM(config), torch.randint(config.vocab_size, (1, 64))))
            for name, config in configs.items()]


def table(title: str, rows: list[tuple[str, Cost]]) -> str:
    """The rows in Markdown."""
    return markdown((title, "parameters", "state", "FLOPs per token", "training, bytes per token"), (
        (name, *(f"{value:,}" for value in astuple(costs))) for name, costs in rows))


def draw(file: Path) -> None:
    """The layer as a diagram, and how much of a token its levels still remember after n more."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Circle, FancyBboxPatch

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2), width_ratios=(1.75, 1))
    colors = ("tab:red", "tab:green", "tab:blue")
    names = ("fast", "medium", "slow")

    def box(x: float, y: float, text: str, color: str = "0.35", width: float = 1.5) -> None:
        left.add_patch(FancyBboxPatch((x - width / 2, y - 0.32), width, 0.64, boxstyle="round,pad=0.04", fc="white", ec=color))
        left.text(x, y, text, ha="center", va="center", fontsize=9)

    def circle(x: float, y: float, text: str) -> None:
        left.add_patch(Circle((x, y), 0.24, fc="white", ec="0.2"))
        left.text(x, y, text, ha="center", va="center", fontsize=11)

    def path(*points: tuple[float, float], color: str = "0.35") -> None:
        """A line through the points with an arrow at its end."""
        left.plot(*zip(*points[:-1], strict=True), color=color, lw=1, zorder=0, solid_capstyle="butt")
        left.annotate("", points[-1], points[-2], arrowprops=dict(arrowstyle="-|>", color=color, lw=1, shrinkA=0, shrinkB=0))

    def label(x: float, y: float, text: str) -> None:
        left.text(x, y, text, fontsize=10, ha="left", va="center")

    columns = (1.4, 5.6, 9.8)
    label(-0.75, 0, "$x$")
    path((-0.5, 0), (columns[0], 0), (columns[0], 0.65))
    for number, (x, color) in enumerate(zip(columns, colors, strict=True), start=1):
        low, high = TIMESCALES[number - 1]
        box(x, 1, "gate, input", color)
        path((x, 1.36), (x, 1.79))
        box(x, 2.15, f"scan, {names[number - 1]}\n$\\tau$ {low:g} to {high:g}", color, width=1.9)
        path((x, 2.51), (x, 2.8))
        box(x, 3.15, "norm", color)
        path((x, 3.51), (x, 5.16) if number == 3 else (x, 5.42), color=color)
        label(x + 0.08, 4.75, f"$y_{number}$")
        label(x + 0.08, 0.4, f"$z_{number}$")
    for number, x in enumerate(columns[:2], start=1):
        error = x + 2.1
        # the output comes down through the prediction, what it is compared with from the level below
        path((x, 3.9), (x + 1.5, 3.9), (x + 1.5, 2.55), color=colors[number - 1])
        box(x + 1.5, 2.2, f"$P_{number}$", color=colors[number - 1], width=0.6)
        path((x + 1.5, 1.84), (x + 1.5, 0), (error - 0.26, 0))
        circle(error, 0, "$-$")
        label(error + 0.2, -0.4, f"$e_{number}$")
        path((error + 0.24, 0), (error + 0.62, 0))
        box(error + 1.05, 0, "norm", width=0.8)
        path((error + 1.5, 0), (columns[number], 0), (columns[number], 0.65))
    path((columns[0], 0), (columns[0], -0.8), (columns[0] + 2.1, -0.8), (columns[0] + 2.1, -0.26))
    path((columns[0], 4.35), (columns[1] + 2.1, 4.35), (columns[1] + 2.1, 0.26), color=colors[0])
    left.plot([columns[0], columns[2]], [5.42, 5.42], color="0.35", lw=1, zorder=0)
    circle(columns[2], 5.42, "$+$")
    path((columns[2] + 0.24, 5.42), (columns[2] + 1.66, 5.42))
    circle(columns[2] + 1.9, 5.42, r"$\times$")
    path((-0.5, 0), (-0.5, -1.3), (columns[2] + 1.9, -1.3), (columns[2] + 1.9, 2.78))
    box(columns[2] + 1.9, 3.15, "SiLU($W_g x$)", width=1.6)
    path((columns[2] + 1.9, 3.51), (columns[2] + 1.9, 5.16))
    path((columns[2] + 1.9, 5.68), (columns[2] + 1.9, 6.1))
    box(columns[2] + 1.9, 6.45, "$W_o$", width=0.8)
    path((columns[2] + 1.5, 6.45), (columns[2] + 0.9, 6.45))
    label(columns[2] + 0.6, 6.45, "$o$")
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
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(options: Options) -> None:
    torch.manual_seed(0)
    print(table(f"layer, H = {options.hidden_size}", option_rows(options.hidden_size)))
    print()
    print(table("model", model_rows()))
    if options.png is not None:
        draw(options.png)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
