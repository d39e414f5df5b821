"""
What trained models gain from context: `python -m eval.length --models outputs/a/hf outputs/b/hf`.

Two measurements on a split that nobody was trained on. Loss on the SAME target tokens, the last ones of the split, with 256,
512, ... 65,536 tokens of context, as far as the text goes; and loss by position in windows of the longest context. No context
begins with a beginning-of-text token.

Models with attention are scored up to their length (`max_position_embeddings`, which for exported models is the trained one);
`--beyond` goes further. Recurrent models are scored at every context. Whatever is longer than a model was trained on is
labelled so and never counts as the best.

With `--config_file` the text is that of a torchtitan job, and what follows these options overrides the TOML. A model whose
early logits depend on later tokens gets no score. What is done is not computed again, so a killed run goes on where it
stopped. Models of equal label are seeds of one: the table has their mean and spread.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import tyro
from torchtitan.config import ConfigManager
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.results import keep_command, machine, write
from eval.scoring.audit import check_causal
from eval.scoring.context import Losses, buckets, is_recurrent, position_losses, window_starts
from eval.scoring.models import digest, load, trained_length
from eval.scoring.targets import bits, target_losses
from fla_harmonic.text import TokenSplit, load_split
from fla_harmonic.text.tokenizers import JsonTokenizer
from fla_harmonic.titan.config import data_section

CONTEXTS = tuple(2 ** power for power in range(8, 17))
BEYOND, UNKNOWN = "beyond trained length", "trained length unknown"


@dataclass
class Options:
    """Which models, on what text, with how much context."""

    models: tuple[Path, ...]
    """Hugging Face directories, as `fla_harmonic.titan.export` writes them."""

    labels: tuple[str, ...] = ()
    """Their names, as many; equal ones are seeds of one model. Default: the directories'."""

    contexts: tuple[int, ...] | None = None
    """Tokens of context, ascending. Default: 256, 512, ... 65,536, as far as the text goes."""

    targets: int = 4096
    """Tokens that are predicted with every context: the last ones of the split."""

    stride: int | None = None
    """
    Targets of a window, its last ones: they have context - stride + 1 to context tokens before them. Default: context / 2,
    at most `targets`.
    """

    windows: int = 8
    """Windows of the longest context for the loss by position, spread evenly over the split."""

    beyond: bool = False
    """Score models with attention beyond their length too."""

    batch_tokens: int = 16384
    """Most tokens of the windows that are computed at once; a longer window is computed alone. Changes no loss."""

    piece: int = 4096
    """Most tokens whose logits are there at once, and that a Harmonic reads at once. Changes no loss."""

    config_file: Path = Path("titan_configs/harmonic_debug.toml")
    """The job whose `[training] dataset` and `[data]` name the text."""

    split: str = "test"
    """train, validation or test."""

    out: Path = Path("outputs/length")
    """Folder for results, table and plot."""


@dataclass(frozen=True)
class Cell:
    """One measurement: everything that its numbers follow from."""

    kind: str
    """`"context"`: loss on the targets; `"position"`: loss by position in windows."""

    length: int
    """Tokens of context, or of a window."""

    stride: int
    """Targets of a window."""

    targets: tuple[int, ...]
    """First target and the one after the last, of a context."""

    starts: tuple[int, ...]
    """First tokens of the windows, of positions."""

    weights: str
    """Digest of the model."""

    tokens: str
    """Digest of the text's tokens."""

    @property
    def name(self) -> str:
        record = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kind}-{self.length}-{hashlib.sha256(record.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Plan:
    """What every model is scored on: the same for all."""

    contexts: tuple[int, ...]
    targets: range
    starts: tuple[int, ...]
    stride: int | None
    num_bytes: int
    """UTF-8 bytes of the targets' text."""
    tokens: str
    beyond: bool

    def cells(self, weights: str, limit: int | None) -> list[Cell]:
        """
        The cells of a model.

        Args:
            weights (str):
                Digest of the model.
            limit (int | None):
                Most tokens of context that it takes; `None`: any number.
        """
        contexts = [context for context in self.contexts if limit is None or context <= limit]
        cells = [
            Cell("context", context, self.stride or min(max(1, context // 2), len(self.targets)),
                 (self.targets.start, self.targets.stop), (), weights, self.tokens)
            for context in contexts
        ]
        # all models have the same targets at a position: shorter windows begin where the longest do
        window = self.contexts[-1] if limit is None else min(limit, self.contexts[-1])
        return [*cells, Cell("position", window, window, (), self.starts, weights, self.tokens)]


def plan_of(options: Options, split: TokenSplit, tokenizer: JsonTokenizer) -> Plan:
    """
    Raises:
        ValueError: contexts, targets or stride do not fit one another or the text.
    """
    available = len(split.tokens) - options.targets
    contexts = options.contexts or tuple(context for context in CONTEXTS if context <= available)
    if options.targets < 1 or not contexts or list(contexts) != sorted(set(contexts)) or contexts[0] < 1:
        raise ValueError(
            f"`targets` must be positive, and `contexts` be positive and rise; got {options.targets:,} targets, contexts "
            f"{contexts} and a split of {len(split.tokens):,} tokens. By default it needs {CONTEXTS[0]} more than targets.")
    if contexts[-1] > available:
        raise ValueError(
            f"expected {contexts[-1]:,} tokens before {options.targets:,} targets; the split has {len(split.tokens):,}. Ask "
            "for shorter `contexts` or fewer `targets`, or pass a longer text.")
    if options.stride is not None and not 1 <= options.stride <= contexts[0]:
        raise ValueError(f"`stride` must be in [1, {contexts[0]}], the shortest context; got {options.stride}.")
    targets = range(available, len(split.tokens))
    return Plan(
        contexts, targets, tuple(window_starts(len(split.tokens), contexts[-1], options.windows)), options.stride,
        text_bytes(tokenizer, split.tokens[targets.start:].tolist()), hashlib.sha256(split.tokens.tobytes()).hexdigest(),
        options.beyond)


def text_bytes(tokenizer: JsonTokenizer, ids: list[int]) -> int:
    """UTF-8 bytes of the text of some ids at the end of a text, special tokens not counted."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    # ids that begin within a character: each byte of its rest is decoded to U+FFFD, of three bytes
    strays = len(text) - len(text.lstrip("\ufffd"))
    return len(text.encode()) - 2 * strays


def measure(
    model: PreTrainedModel,
    cell: Cell,
    tokens: np.ndarray,
    num_bytes: int,
    losses_of: Losses,
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """
    Returns:
        Of a context: `bits_per_token` and `bits_per_byte`. Of positions: `buckets`, each with `first`, `stop`, `targets`,
        `bits`, and the `bits_per_token` of all.
    """
    if cell.kind == "position":
        losses = position_losses(model, tokens, cell.starts, cell.length, losses_of, progress)
        return {"bits_per_token": bits(losses) / losses.numel(), "buckets": [asdict(bucket) for bucket in buckets(losses)]}
    first, stop = cell.targets
    losses = target_losses(model, tokens, first, stop, cell.length, cell.stride, max(1, batch_tokens // cell.length), progress,
                           losses_of)
    return {"bits_per_token": bits(losses) / len(losses), "bits_per_byte": bits(losses) / num_bytes}


def run(directory: Path, label: str, plan: Plan, split: TokenSplit, options: Options) -> list[dict[str, Any]]:
    """
    The records of a model; those that are in `out` are read, the others measured.

    Raises:
        RuntimeError: the model is not causal.
        ValueError: the text has tokens that it does not know.
    """
    model: Any = load(directory)[0]
    trained = trained_length(model)
    limit = None if is_recurrent(model) or options.beyond else trained
    cells = plan.cells(digest(directory), limit)
    files = {cell: options.out / "cells" / f"{cell.name}.json" for cell in cells}
    waiting = [cell for cell in cells if not files[cell].is_file()]
    if waiting:
        vocabulary, largest = model.get_input_embeddings().num_embeddings, int(split.tokens.max())
        if largest >= vocabulary:
            raise ValueError(f"expected tokens below {vocabulary}, the vocabulary of {directory}; the text has {largest}. Put "
                             "the model's own tokenizer there.")
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        verdict, losses_of = check_causal(model), Losses(model, options.piece)
        total = sum(len(cell.starts) * cell.length or len(plan.targets) for cell in waiting)
        with tqdm(total=total, unit="target", unit_scale=True, desc=label, mininterval=1) as bar:
            for cell in waiting:
                bar.set_postfix_str(f"{cell.kind} {cell.length:,}")
                began = time.perf_counter()
                result = measure(model, cell, split.tokens, plan.num_bytes, losses_of, options.batch_tokens, bar.update)
                seconds = time.perf_counter() - began
                write(files[cell], json.dumps(
                    {"cell": asdict(cell), **result, "seconds": seconds, "audit": asdict(verdict), "machine": machine()}))
    return [
        {"model": label, "type": model.config.model_type, "directory": str(directory), **json.loads(file.read_text()),
         "trained_length": trained}
        for file in files.values()
    ]


def frame(records: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """
    Records, as `length.jsonl` has them, with a row for each context and each bucket of positions: the targets have
    `context_from` to `context_to` tokens before them. `label` says whether that is more than the model was trained on.
    """
    rows = []
    for record in records:
        cell, trained = record["cell"], record["trained_length"]
        row = {**{key: record[key] for key in ("model", "type", "directory")}, "kind": cell["kind"], "trained_length": trained,
               "stride": cell["stride"], "causal": not record["audit"]["failure"]}
        if cell["kind"] == "context":
            found = [{"context_from": cell["length"] - cell["stride"] + 1, "context_to": cell["length"],
                      "targets": cell["targets"][1] - cell["targets"][0], "bits_per_token": record["bits_per_token"],
                      "bits_per_byte": record["bits_per_byte"]}]
        else:
            found = [{"context_from": bucket["first"] + 1, "context_to": bucket["stop"], "targets": bucket["targets"],
                      "bits_per_token": bucket["bits"] / bucket["targets"]} for bucket in record["buckets"]]
        for more in found:
            label = UNKNOWN if trained is None else BEYOND if more["context_to"] > trained else ""
            rows.append({**row, **more, "label": label})
    columns = ["model", "type", "directory", "kind", "context_from", "context_to", "targets", "stride", "bits_per_token",
               "bits_per_byte", "trained_length", "label", "causal"]
    return pd.DataFrame(rows, columns=columns)


def table(records: Sequence[dict[str, Any]], value: str = "bits_per_token") -> str:
    """
    Records as two Markdown tables: loss with each context on the same targets, and loss by position. A model's column has the
    mean over its seeds (and the spread, lowest to highest). The lowest of a row is bold; what is longer than a model was
    trained on says so, and is never the lowest.

    Args:
        records (Sequence[dict]):
            Lines of `length.jsonl`.
        value (str):
            `"bits_per_token"` or `"bits_per_byte"`, of the first table. Default: `"bits_per_token"`.
    """
    rows = frame(records)
    contexts, positions = (rows[rows["kind"] == kind] for kind in ("context", "position"))
    return "\n\n".join([
        f"{_title(value)} on the same targets, by tokens of context\n\n{_table(contexts, value)}",
        f"{_title('bits_per_token')} by tokens before the target\n\n{_table(positions, 'bits_per_token')}"])


def _title(value: str) -> str:
    return value.replace("_", " ").capitalize()


def _table(rows: pd.DataFrame, value: str) -> str:
    models = list(rows["model"].unique())
    lines = [f"| context | targets | {' | '.join(models)} |", "|---" * (len(models) + 2) + "|"]
    for (start, stop), group in rows.groupby(["context_from", "context_to"]):
        cells = dict(list(group.groupby("model")))
        fair = {model: mine[value].mean() for model, mine in cells.items() if not mine["label"].any()}
        texts = [_text(cells[model], value, len(fair) > 1 and fair.get(model) == min(fair.values())) if model in cells else ""
                 for model in models]
        span = f"{start:,}" if start == stop else f"{start:,} to {stop:,}"
        targets = sorted(group["targets"].unique())
        lines.append(f"| {span} | {', '.join(f'{number:,}' for number in targets)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _text(rows: pd.DataFrame, value: str, is_lowest: bool) -> str:
    values = rows[value]
    text = f"{values.mean():.3f}" + (f" ({values.min():.3f} to {values.max():.3f})" if len(values) > 1 else "")
    labels = sorted({label for label in rows["label"] if label})
    return f"**{text}**" if is_lowest else " ".join([text, *(f"({label})" for label in labels)])


def plot(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Loss against context, and by position; what is longer than a model was trained on is dashed, with hollow markers."""
    rows = frame(records)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, kind in zip(axes, ("context", "position"), strict=True):
        for index, model in enumerate(rows["model"].unique()):
            mine = rows[(rows["kind"] == kind) & (rows["model"] == model)]
            by_context = mine.groupby("context_to")
            mean, low, high = (getattr(by_context["bits_per_token"], of)() for of in ("mean", "min", "max"))
            is_fair = ~by_context["label"].agg(any).astype(bool)
            color = f"C{index}"
            axis.plot(mean[is_fair], color=color, marker="o", label=model)
            # from the last fair point on, so that the line goes on
            axis.plot(mean[~is_fair | (mean.index == mean.index[is_fair].max())], color=color, linestyle="--", zorder=1)
            axis.plot(mean[~is_fair], color=color, linestyle="", marker="o", markerfacecolor="white")
            if (high > low).any():
                axis.fill_between(mean.index, low, high, color=color, alpha=0.15)
        axis.set_xscale("log", base=2)
        axis.set_ylabel("bits per token")
        axis.grid(alpha=0.3)
    axes[0].set(xlabel="tokens of context", title="the same targets with more context")
    axes[1].set(xlabel="tokens before the target", title="by position in the longest windows")
    labels = sorted({label for label in rows["label"] if label})
    axes[0].legend(title=f"dashed: {', '.join(labels)}" if labels else None)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(options: Options, overrides: list[str]) -> None:
    labels = options.labels or tuple(folder.parent.name if folder.name == "hf" else folder.name for folder in options.models)
    if not options.models or len(labels) != len(options.models):
        raise ValueError(f"expected models and as many `labels`; got {len(options.models)} models and {len(labels)} labels.")
    job = ConfigManager().parse_args([f"--job.config_file={options.config_file}", *overrides])
    data = data_section(job)
    if data.reset_documents:
        raise ValueError(
            "scoring with states that start anew at each document is not supported, but data.reset_documents = true. "
            "Remedy: --data.no-reset_documents, which scores the documents as one text")
    keep_command(options.out)
    records: list[dict[str, Any]] = []
    first: Plan | None = None
    for directory, label in zip(options.models, labels, strict=True):
        tokenizer = JsonTokenizer(directory)
        split = load_split(job.training.dataset, job.training.dataset_path, options.split, tokenizer, data)
        plan = plan_of(options, split, tokenizer)
        first = first or plan
        if plan != first:
            raise ValueError(
                f"expected the same tokens for every model; {directory} has another tokenizer than {options.models[0]}, so "
                "their targets differ. Score them in runs of their own.")
        records += [{**record, "dataset": job.training.dataset, "split": options.split}
                    for record in run(directory, label, plan, split, options)]
        write(options.out / "length.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    write(options.out / "length.csv", frame(records).to_csv(index=False))
    plot(records, options.out / "length.png")
    write(options.out / "table.md", table(records) + "\n")
    print(f"{table(records)}\n\n{options.out / 'length.csv'}, {options.out / 'length.jsonl'}, {options.out / 'length.png'}")


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
