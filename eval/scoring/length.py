"""
What trained models gain from context: `python -m eval.length --models outputs/a/hf outputs/b/hf`.

Two measurements on a split that nobody was trained on. Loss on the SAME target tokens, the last ones of the split, with 256,
512, ... 65,536 tokens of context, as far as the text goes; and loss by position in windows of the longest context. No context
begins with a beginning-of-text token.

Models with attention are scored up to their length (`max_position_embeddings`, which for exported models is the trained one);
`--beyond` goes further. Recurrent models are scored at every context. Whatever is longer than a model was trained on is
labelled so and never counts as the best.

With `--config_file` the text is that of a torchtitan job, and what follows these options overrides the TOML. A model whose
early logits depend on later tokens gets no score. What is done is not computed again, so a killed run continues where it
stopped. Models of equal label are seeds of one: the table has their mean and spread.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.results import Record, finished, keep_command, machine, record_digest, write, write_lines
from eval.scoring.context import Losses, buckets, is_recurrent, window_starts
from eval.scoring.in_situ import InSitu
from eval.scoring.models import digest, is_beyond, label_of, load, to_accelerator, trained_length
from eval.scoring.targets import bits, target_losses
from eval.scoring.texts import job_of, split_of
from eval.tables import curve, markdown, save, spread
from fla_harmonic.text import TokenSplit
from fla_harmonic.text.tokenizers import JsonTokenizer

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
class Measurement:
    """Everything that the numbers of one measurement follow from."""

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
    """Digest of the model, as `tokens` is of the text's."""
    tokens: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.length}-{record_digest(asdict(self))}"


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

    def measurements(self, weights: str, limit: int | None) -> list[Measurement]:
        """Those of a model, by its digest and the most tokens of context that it takes; `None`: any number."""
        found = [
            Measurement("context", context, self.stride or min(max(1, context // 2), len(self.targets)),
                        (self.targets.start, self.targets.stop), (), weights, self.tokens)
            for context in self.contexts if limit is None or context <= limit
        ]
        # all models have the same targets at a position: shorter windows begin where the longest do
        window = min(limit or self.contexts[-1], self.contexts[-1])
        return [*found, Measurement("position", window, window, (), self.starts, weights, self.tokens)]


def plan_of(options: Options, split: TokenSplit, tokenizer: JsonTokenizer) -> Plan:
    """What the options ask for; a ValueError where contexts, targets or stride do not fit one another or the text."""
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
        text_bytes(tokenizer, split.tokens[targets.start:].tolist()), hashlib.sha256(split.tokens.tobytes()).hexdigest())


def text_bytes(tokenizer: JsonTokenizer, ids: list[int]) -> int:
    """UTF-8 bytes of the text of some ids at the end of a text, special tokens not counted."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    # ids that begin within a character: each byte of its rest is decoded to U+FFFD, of three bytes
    strays = len(text) - len(text.lstrip("\ufffd"))
    return len(text.encode()) - 2 * strays


def measure(
    model: PreTrainedModel, wanted: Measurement, tokens: np.ndarray, num_bytes: int, losses_of: Losses, batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> Record:
    """
    Returns:
        Of a context: `bits_per_token` and `bits_per_byte`. Of positions: `buckets` (see `eval.scoring.context.buckets`) and
        the `bits_per_token` of all.
    """
    length = wanted.length
    of_targets = partial(target_losses, model, tokens, seq_len=length, stride=wanted.stride, progress=progress,
                         losses_of=losses_of)
    if wanted.kind == "position":
        losses = torch.stack([of_targets(start + 1, start + length + 1) for start in wanted.starts])
        return {"bits_per_token": bits(losses) / losses.numel(), "buckets": buckets(losses)}
    losses = of_targets(*wanted.targets, batch_size=max(1, batch_tokens // length))
    return {"bits_per_token": bits(losses) / len(losses), "bits_per_byte": bits(losses) / num_bytes}


def run(directory: Path, label: str, plan: Plan, split: TokenSplit, options: Options) -> list[Record]:
    """The records of a model that is causal; those that are in `out` are read, the others measured."""
    model = to_accelerator(load(directory)[0])
    vocabulary, largest = model.get_input_embeddings().num_embeddings, int(split.tokens.max())
    if largest >= vocabulary:
        raise ValueError(f"expected tokens below {vocabulary}, the vocabulary of {directory}; the text has {largest}. Put "
                         "the model's own tokenizer there.")
    trained = trained_length(model)
    limit = None if is_recurrent(model) or options.beyond else trained
    # only where something is left to measure
    losses_of = cache(lambda: Losses(model, options.piece))

    def timed(wanted: Measurement) -> Record:
        bar.set_postfix_str(f"{wanted.kind} {wanted.length:,}")
        began = time.perf_counter()
        of_windows = losses_of()
        # short pieces of the text once per model, with the largest measurement
        with InSitu(model, short_pieces=wanted.kind == "position") as audit:
            result = measure(model, wanted, split.tokens, plan.num_bytes, of_windows, options.batch_tokens, bar.update)
        return {"cell": asdict(wanted), **result, "seconds": time.perf_counter() - began,
                "audit": asdict(audit.verdict.require()),
                "machine": machine()}

    files = {wanted: options.out / "cells" / f"{wanted.name}.json" for wanted in plan.measurements(digest(directory), limit)}
    total = sum(len(wanted.starts) * wanted.length or len(plan.targets)
                for wanted, file in files.items() if not file.is_file())
    with tqdm(total=total, unit="target", unit_scale=True, desc=label, mininterval=1) as bar:
        records = [finished(file, partial(timed, wanted)) for wanted, file in files.items()]
    return [{"model": label, "type": model.config.model_type, "directory": str(directory), **record, "trained_length": trained}
            for record in records]


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """
    Records, as `length.jsonl` has them, with a row for each context and each bucket of positions: the targets have
    `context_from` to `context_to` tokens before them. `label` says whether that is more than the model was trained on.
    """
    rows = []
    for record in records:
        cell, trained = record["cell"], record["trained_length"]
        if cell["kind"] == "context":
            found = [{"context_from": cell["length"] - cell["stride"] + 1, "context_to": cell["length"],
                      "targets": cell["targets"][1] - cell["targets"][0], "bits_per_token": record["bits_per_token"],
                      "bits_per_byte": record["bits_per_byte"]}]
        else:
            found = [{"context_from": bucket["first"] + 1, "context_to": bucket["stop"], "targets": bucket["targets"],
                      "bits_per_token": bucket["bits"] / bucket["targets"]} for bucket in record["buckets"]]
        rows += [{
            **record, **more, "kind": cell["kind"], "stride": cell["stride"], "causal": not record["audit"]["failure"],
            "label": UNKNOWN if trained is None else BEYOND * is_beyond(more["context_to"], trained)} for more in found]
    return pd.DataFrame(rows, columns=[
        "model", "type", "directory", "kind", "context_from", "context_to", "targets", "stride", "bits_per_token",
        "bits_per_byte", "trained_length", "label", "causal"])


def table(records: Sequence[Record], value: str = "bits_per_token") -> str:
    """
    Records as two Markdown tables: loss (`value`) with each context on the same targets, and loss by position. A model's
    column has the mean over its seeds (and the spread, lowest to highest). The lowest of a row is bold; what is longer than a
    model was trained on says so, and is never the lowest.
    """
    rows = frame(records)
    parts = (("context", value, "on the same targets, by tokens of context"),
             ("position", "bits_per_token", "by tokens before the target"))
    return "\n\n".join(f"{of.replace('_', ' ').capitalize()} {title}\n\n{_table(rows[rows['kind'] == kind], of)}"
                       for kind, of, title in parts)


def _table(rows: pd.DataFrame, value: str) -> str:
    models, lines = list(rows["model"].unique()), []
    for (start, stop), group in rows.groupby(["context_from", "context_to"]):
        cells = dict(list(group.groupby("model")))
        fair = {model: mine[value].mean() for model, mine in cells.items() if not mine["label"].any()}
        lines.append([
            f"{start:,}" if start == stop else f"{start:,} to {stop:,}",
            ", ".join(f"{number:,}" for number in sorted(group["targets"].unique())),
            *(_text(cells[model], value, len(fair) > 1 and fair.get(model) == min(fair.values())) if model in cells else ""
              for model in models)])
    return markdown(["context", "targets", *models], lines)


def _text(rows: pd.DataFrame, value: str, is_lowest: bool) -> str:
    text = spread(rows[value]) if len(rows) > 1 else f"{rows[value].iloc[0]:.3f}"
    return f"**{text}**" if is_lowest else " ".join([text, *(f"({label})" for label in _labels(rows))])


def _labels(rows: pd.DataFrame) -> list[str]:
    return sorted({*rows["label"]} - {""})


def plot(records: Sequence[Record], file: Path) -> None:
    """Loss against context, and by position; what is longer than a model was trained on is dashed, with hollow markers."""
    rows = frame(records)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, kind in zip(axes, ("context", "position"), strict=True):
        for index, model in enumerate(rows["model"].unique()):
            by_context = rows[(rows["kind"] == kind) & (rows["model"] == model)].groupby("context_to")
            values = by_context["bits_per_token"]
            curve(axis, values.mean(), by_context["label"].agg(any).astype(bool), model, f"C{index}")
            if (values.max() > values.min()).any():
                axis.fill_between(values.min().index, values.min(), values.max(), color=f"C{index}", alpha=0.15)
    axes[0].set(xlabel="tokens of context", ylabel="bits per token", title="the same targets with more context")
    axes[1].set(xlabel="tokens before the target", ylabel="bits per token", title="by position in the longest windows")
    labels = _labels(rows)
    axes[0].legend(title=f"dashed: {', '.join(labels)}" if labels else None)
    save(figure, file)


def compare(options: Options, overrides: Sequence[str]) -> list[Record]:
    """Scores the models on the text of a torchtitan job, writes records, tables and plot, and returns the records."""
    labels = options.labels or tuple(map(label_of, options.models))
    if not options.models or len(labels) != len(options.models):
        raise ValueError(f"expected models and as many `labels`; got {len(options.models)} models and {len(labels)} labels.")
    job = job_of(options.config_file, overrides)
    keep_command(options.out)
    records: list[Record] = []
    plans = []
    for directory, label in zip(options.models, labels, strict=True):
        split = split_of(job, options.split, directory)
        plans.append(plan_of(options, split, JsonTokenizer(directory)))
        if plans[-1] != plans[0]:
            raise ValueError(
                f"expected the same tokens for every model; {directory} has another tokenizer than {options.models[0]}, so "
                "their targets differ. Score them in runs of their own.")
        records += [{**record, "dataset": job.training.dataset, "split": options.split}
                    for record in run(directory, label, plans[-1], split, options)]
        write_lines(options.out / "length.jsonl", records)
    write(options.out / "length.csv", frame(records).to_csv(index=False))
    plot(records, options.out / "length.png")
    text = table(records)
    write(options.out / "table.md", text + "\n")
    print(f"{text}\n\n{options.out / 'length.csv'}, {options.out / 'length.jsonl'}, {options.out / 'length.png'}")
    return records
