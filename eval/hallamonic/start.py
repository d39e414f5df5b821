"""
Loss of a pretrained model in which attention layers have just become Harmonic layers, before any training:
`python -m eval.hallamonic_start --model DIR --text FILE --layers none 0 15 0-29`.

Every set of layers begins as attention and at random; each is audited before it is scored. Finished cells are in
`start.jsonl` and are not run again.
"""

import math
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from eval.results import Record, finished_line, keep_command, write
from eval.scoring.audit import check_causal
from eval.scoring.in_situ import InSitu
from eval.tables import markdown, save
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


def cells(options: Options) -> list[Record]:
    """Each set of layers with each way to begin; of no layers there is one."""
    common = {**asdict(options), "text": str(options.text)}
    del common["out"]
    return [{**common, "layers": layers, "init": init} for layers in dict.fromkeys(options.layers) for init in INITS
            if layers != "none" or init == INITS[0]]


def read_windows(tokens: list[int], windows: int, seq_len: int) -> torch.Tensor:
    """The first windows of a text, `[windows, seq_len]`; a ValueError where it is shorter, or a window has no target."""
    if windows < 1 or seq_len < 2:
        raise ValueError(f"`windows` must be at least 1 and `seq_len` at least 2; got {windows} and {seq_len}.")
    if len(tokens) < windows * seq_len:
        raise ValueError(
            f"expected a text of {windows} x {seq_len} tokens; got {len(tokens)}. Pass a longer text, or fewer windows.")
    return torch.tensor(tokens[:windows * seq_len]).view(windows, seq_len)


@torch.no_grad()
def bits_per_token(model: PreTrainedModel, inputs: torch.Tensor) -> float:
    """Loss in bits of every token of each window but the first, in float32, summed in float64."""
    nats = 0.0
    for window in inputs:
        logits = model(window[None], use_cache=False).logits[0, :-1].float()
        nats += F.cross_entropy(logits, window[1:], reduction="none").double().sum().item()
    return nats / math.log(2) / inputs[:, 1:].numel()


def run(cell: Record, source: PreTrainedModel, inputs: torch.Tensor) -> Record:
    """The cell with its scores; a RuntimeError where the converted model reads the future."""
    torch.manual_seed(cell["seed"])
    layers = parse_layers(cell["layers"], source.config.num_hidden_layers)
    converted = convert_model(
        source, layers, cell["init"], layer_options(source.config, cell["expand_ratio"], cell["gate_rank"]))
    verdict = check_causal(converted.model, cell["audit_length"])
    with InSitu(converted.model) as audit:
        bits = bits_per_token(converted.model, inputs)
    audit.verdict.require()
    print(f"layers {cell['layers']}, {cell['init']}: {bits:.4f} bits per token", flush=True)
    return {**cell, "bits_per_token": bits, "replaced": len(layers),
            "random_bits_per_token": verdict.random_bits_per_token, "log2_vocab": verdict.log2_vocab,
            "new_parameters": sum(torch.Size(shape).numel() for shape in converted.new.values())}


def table(results: list[Record]) -> str:
    """The results as Markdown, one row a set of layers."""
    rows = []
    for layers, group in pd.DataFrame(results).groupby("layers", sort=False):
        bits = group.set_index("init")["bits_per_token"].map("{:.3f}".format)
        rows.append([layers, f"{group['new_parameters'].iloc[0]:,}", *(bits.get(init, "") for init in INITS),
                     f"{group['random_bits_per_token'].min():.2f}"])
    return markdown(["layers replaced", "new parameters", "attention init", "random init", "on random tokens"], rows)


def plot(results: list[Record], file: Path) -> None:
    """Bits per token of each set of layers."""
    frame = pd.DataFrame(results).pivot(index="layers", columns="init", values="bits_per_token")
    frame = frame.reindex(dict.fromkeys(row["layers"] for row in results))
    axis = frame[[init for init in INITS if init in frame]].plot.bar(figsize=(8, 4), rot=0)
    axis.set(xlabel="layers replaced", ylabel="bits per token before training")
    axis.grid(axis="y", alpha=0.3)
    save(axis.figure, file)


def main(options: Options) -> None:
    keep_command(options.out)

    @cache
    def loaded() -> tuple[PreTrainedModel, torch.Tensor]:
        source, tokenizer = load_source(options.model)
        ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
        return source.eval(), read_windows(ids, options.windows, options.seq_len)

    def measured(cell: Record) -> Record:
        return run(cell, *loaded())

    results = [finished_line(options.out / "start.jsonl", cell, partial(measured, cell)) for cell in cells(options)]
    text = table(results)
    write(options.out / "start.md", text + "\n")
    plot(results, options.out / "start.png")
    print(f"{text}\n\n{options.out / 'start.md'}, {options.out / 'start.png'}")
