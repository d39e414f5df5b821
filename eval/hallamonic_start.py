"""
Loss of a pretrained model in which attention layers have just become Harmonic layers, before any training:
`python -m eval.hallamonic_start --model DIR --text FILE --layers none 0 15 0-29`.

Every set of layers begins as attention and at random; each is audited before it is scored. Finished cells are in
`start.jsonl` and are not run again.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
import tyro
from transformers import PreTrainedModel

from eval.results import keep_command, write
from eval.scoring.audit import audit
from fla_harmonic.hallamonic.convert import convert_model, layer_options, load_source, parse_layers

INITS = ("attention", "random")


@dataclass
class Options:
    """The cells and where they go."""

    model: str
    """Directory, or name on the hub, of the pretrained model."""

    text: Path
    """UTF-8 text to score."""

    layers: tuple[str, ...] = ("none", "all")
    """Sets of layers to replace, each as `fla_harmonic.hallamonic convert --layers` reads it: none, all, 0, 0,2,4-10."""

    windows: int = 2
    """Windows of the text, one after the other, that know nothing of one another."""

    seq_len: int = 512
    """Tokens of a window."""

    expand_ratio: float | None = None
    """Of the Harmonic layers, as in `convert`."""

    gate_rank: int | None = None
    """Of the Harmonic layers, as in `convert`."""

    audit_length: int = 72
    """Tokens of the sequences that the audit tries."""

    seed: int = 0
    """Seed of what begins at random."""

    out: Path = Path("outputs/hallamonic_start")
    """Folder for results and plot."""


def cells(options: Options) -> list[dict[str, Any]]:
    """Each set of layers with each way to begin; of no layers there is one."""
    common = {"model": options.model, "text": str(options.text), "windows": options.windows, "seq_len": options.seq_len,
              "expand_ratio": options.expand_ratio, "gate_rank": options.gate_rank, "audit_length": options.audit_length,
              "seed": options.seed}
    return [{**common, "layers": layers, "init": init} for layers in dict.fromkeys(options.layers) for init in INITS
            if layers != "none" or init == INITS[0]]


def read_windows(tokens: list[int], windows: int, seq_len: int) -> torch.Tensor:
    """
    The first windows of a text, `[windows, seq_len]`.

    Raises:
        ValueError: the text is shorter, or a window has no target.
    """
    if windows < 1 or seq_len < 2:
        raise ValueError(f"`windows` must be at least 1 and `seq_len` at least 2; got {windows} and {seq_len}.")
    if len(tokens) < windows * seq_len:
        raise ValueError(
            f"expected a text of {windows} x {seq_len} tokens; got {len(tokens)}. Pass a longer text, or fewer windows.")
    return torch.tensor(tokens[:windows * seq_len]).view(windows, seq_len)


@torch.no_grad()
def bits_per_token(model: PreTrainedModel, inputs: torch.Tensor) -> float:
    """Loss in bits of every token of each window but the first, in float32, summed in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for window in inputs.split(1):
        logits = model(window, use_cache=False).logits.float()
        total += F.cross_entropy(logits[0, :-1], window[0, 1:], reduction="none").double().sum()
    return total.item() / math.log(2) / (inputs.shape[0] * (inputs.shape[1] - 1))


def run(cell: dict[str, Any], source: PreTrainedModel, inputs: torch.Tensor) -> dict[str, Any]:
    """
    The cell with its scores.

    Raises:
        RuntimeError: the converted model reads the future.
    """
    torch.manual_seed(cell["seed"])
    layers = parse_layers(cell["layers"], source.config.num_hidden_layers)
    converted = convert_model(
        source, layers, cell["init"], layer_options(source.config, cell["expand_ratio"], cell["gate_rank"]))
    verdict = audit(converted.model, cell["audit_length"])
    if not verdict.causal:
        raise RuntimeError(
            f"expected a causal model; found {verdict.failure} with layers {cell['layers']} replaced. It is not scored.")
    return {**cell, "bits_per_token": bits_per_token(converted.model, inputs), "replaced": len(layers),
            "random_bits_per_token": verdict.random_bits_per_token, "log2_vocab": verdict.log2_vocab,
            "new_parameters": sum(torch.Size(shape).numel() for shape in converted.new.values())}


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown, one row a set of layers."""
    lines = ["| layers replaced | new parameters | attention init | random init | on random tokens |", "|---|---|---|---|---|"]
    for layers, group in pd.DataFrame(results).groupby("layers", sort=False):
        bits = dict(zip(group["init"], group["bits_per_token"], strict=True))
        texts = [f"{bits[init]:.3f}" if init in bits else "" for init in INITS]
        floor = group["random_bits_per_token"].min()
        lines.append(f"| {layers} | {group['new_parameters'].iloc[0]:,} | {texts[0]} | {texts[1]} | {floor:.2f} |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Bits per token of each set of layers."""
    frame = pd.DataFrame(results).pivot(index="layers", columns="init", values="bits_per_token")
    frame = frame.reindex(dict.fromkeys(row["layers"] for row in results))
    axis = frame[[init for init in INITS if init in frame]].plot.bar(figsize=(8, 4), rot=0)
    axis.set(xlabel="layers replaced", ylabel="bits per token before training")
    axis.grid(axis="y", alpha=0.3)
    axis.figure.tight_layout()
    axis.figure.savefig(file, dpi=120)
    plt.close(axis.figure)


def main(options: Options) -> None:
    keep_command(options.out)
    file = options.out / "start.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    results, loaded = [], None
    for cell in cells(options):
        result = next((row for row in known if cell.items() <= row.items()), None)
        if result is None:
            if loaded is None:
                source, tokenizer = load_source(options.model)
                ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
                loaded = source.eval(), read_windows(ids, options.windows, options.seq_len)
            result = run(cell, *loaded)
            print(f"layers {cell['layers']}, {cell['init']}: {result['bits_per_token']:.4f} bits per token", flush=True)
            known.append(result)
            write(file, "".join(json.dumps(row) + "\n" for row in known))
        results.append(result)
    text = table(results)
    write(options.out / "start.md", text + "\n")
    plot(results, options.out / "start.png")
    print(f"{text}\n\n{options.out / 'start.md'}, {options.out / 'start.png'}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
