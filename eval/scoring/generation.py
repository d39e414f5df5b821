"""What generation costs per token after a growing context: time, and the memory of what the model keeps of the context."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from eval.results import Record, finished, machine, record_digest
from eval.scoring.models import is_beyond
from eval.tables import curve, markdown, save


@dataclass(frozen=True)
class Subject:
    """A model that generates; `digest` is that of its weights, `limit` the length that it was made for."""

    label: str
    model: PreTrainedModel
    digest: str
    limit: int | None


class Generation:
    """One sequence that a model, whose cache is transformers' DynamicCache, reads and then continues greedily."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config: Any = model.config
        self.cache = DynamicCache(config=config.get_text_config())
        # transformers renamed it
        self.name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> float:
        """Seconds that tokens `[1, T]` take."""
        began = _now(ids.device)
        logits = self.model(ids, use_cache=True, logits_to_keep=1, **{self.name: self.cache}).logits
        self.token = logits[:, -1:].argmax(-1)
        return _now(ids.device) - began

    def generate(self, tokens: int) -> float:
        """Seconds per token, over some tokens."""
        return sum(self.read(self.token) for _ in range(tokens)) / tokens

    @property
    def cache_bytes(self) -> int:
        """Bytes of what is kept of the sequence: keys and values of attention layers, states of recurrent ones."""
        storages = [leaf.untyped_storage() for leaf in tree_leaves([vars(layer) for layer in self.cache.layers])
                    if isinstance(leaf, torch.Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def measure(
    subjects: Sequence[Subject], tokens: np.ndarray, context: int, new_tokens: int, rounds: int, piece: int,
) -> list[Record]:
    """
    Lets models read the context, `piece` tokens at once, and generate `new_tokens` in turn, so that what else the machine does
    meets all alike. A text that is shorter than the context is repeated.

    Returns:
        For each model `model`, `seconds_a_token` (the median of the rounds), `seconds_to_read`, `cache_bytes` and
        `beyond_trained_length`.
    """
    ids = torch.from_numpy(np.resize(tokens, context).astype(np.int64))[None]
    runs, reading, kept = [Generation(subject.model) for subject in subjects], [], []
    for run in runs:
        reading.append(sum(run.read(some.to(run.model.device)) for some in ids.split(piece, 1)))
        kept.append(run.cache_bytes)
        # the first one compiles
        run.generate(1)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, seconds in zip(runs, times, strict=True):
            seconds.append(run.generate(new_tokens))
    return [
        {"model": subject.label, "seconds_a_token": statistics.median(seconds), "seconds_to_read": read, "cache_bytes": size,
         "beyond_trained_length": is_beyond(context, subject.limit)}
        for subject, seconds, read, size in zip(subjects, times, reading, kept, strict=True)]


def run(
    subjects: Sequence[Subject], tokens: np.ndarray, contexts: Sequence[int], new_tokens: int, rounds: int, piece: int,
    out: Path,
) -> list[Record]:
    """The records of all contexts; those that are in `out` are read, the others measured. Arguments as `measure`."""
    common = {"new_tokens": new_tokens, "rounds": rounds, "piece": piece,
              "models": [[subject.label, subject.digest] for subject in subjects], "threads": torch.get_num_threads()}

    def measured(cell: Record) -> Record:
        return {"cell": cell, "results": measure(subjects, tokens, cell["context"], new_tokens, rounds, piece),
                "machine": machine()}

    cells = [{"context": context, **common} for context in contexts]
    return [finished(out / "cells" / f"generation-{cell['context']}-{record_digest(cell)}.json", partial(measured, cell))
            for cell in tqdm(cells, desc="generation", unit="context")]


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """A row for each context and model, with the ratios to the first model at the same context."""
    rows = pd.DataFrame([{"context": record["cell"]["context"], **result}
                         for record in records for result in record["results"]])
    costs = rows[["seconds_a_token", "cache_bytes"]]
    return rows.assign(**(costs / costs.groupby(rows["context"]).transform("first")).set_axis(
        ["time_ratio", "cache_ratio"], axis="columns"))


def table(records: Sequence[Record]) -> str:
    """Records as Markdown: a row for each context, the other models with their ratio to the first."""
    rows = frame(records)
    models, lines = list(rows["model"].unique()), []
    for context, group in rows.groupby("context"):
        texts = [f"{context:,}"]
        for index, row in enumerate(group.set_index("model").loc[models].to_dict("records")):
            time_ratio, cache_ratio = (f" ({row[ratio]:.2g}x)" * (index > 0) for ratio in ("time_ratio", "cache_ratio"))
            beyond = " (beyond trained length)" * row["beyond_trained_length"]
            texts += [f"{1000 * row['seconds_a_token']:.2f}{time_ratio}{beyond}",
                      f"{row['cache_bytes'] / 2**20:.3g}{cache_ratio}"]
        lines.append(texts)
    return markdown(["context", *(f"{model}: {of}" for model in models for of in ("ms per token", "cache, MiB"))], lines)


def plot(records: Sequence[Record], file: Path) -> None:
    """Time per token and bytes kept against the context; beyond the trained length dashed, with hollow markers."""
    rows = frame(records)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    columns = (("seconds_a_token", 1e3, "milliseconds per token"), ("cache_bytes", 2**-20, "MiB kept of the context"))
    for axis, (column, scale, title) in zip(axes, columns, strict=True):
        for index, (model, mine) in enumerate(rows.set_index("context").groupby("model", sort=False)):
            curve(axis, mine[column] * scale, mine["beyond_trained_length"], str(model), f"C{index}")
        axis.set(xlabel="tokens of context", title=title, ylim=(0, None))
    axes[0].legend(title="dashed: beyond trained length" if rows["beyond_trained_length"].any() else None)
    save(figure, file)
