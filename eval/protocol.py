"""
The protocol of a study: every model at one shared learning rate, and at its own best of a sweep that is the same for all.

The sweep runs at one length with the first seed and is decided on the validation split; the test split is looked at once,
at the end. Differences between models are taken seed by seed: two models of a seed see the same windows in the same order.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from eval.cells import Cell, Model, Text, check_cells, file_digest
from fla_harmonic.titan.corpus import load_documents

STAGES = ("shared", "sweep", "best")


@dataclass(frozen=True)
class Protocol:
    """
    Args:
        models (tuple[Model, ...]):
            Models to compare.
        seq_lens (tuple[int, ...]):
            Lengths in tokens.
        seeds (tuple[int, ...]):
            Seeds of initial weights and data order.
        shared_lr (float):
            Learning rate of the shared protocol.
        lrs (tuple[float, ...]):
            The sweep of each model.
        sweep_seq_len (int):
            Its length.
        tokens, step_tokens (int):
            Budget of every cell, and tokens of an optimizer step.
        micro_tokens (int):
            Most tokens of a forward pass; 0: all of a step.
        text (Text):
            What all train and are scored on.
        config_file (str):
            The TOML file that all cells start from.
        overrides (tuple[str, ...]):
            More torchtitan options for every cell.
    """

    models: tuple[Model, ...]
    seq_lens: tuple[int, ...]
    seeds: tuple[int, ...]
    shared_lr: float
    lrs: tuple[float, ...]
    sweep_seq_len: int
    tokens: int
    step_tokens: int
    micro_tokens: int
    text: Text
    config_file: str
    overrides: tuple[str, ...] = ()

    def cell(self, model: Model, seq_len: int, seed: int, lr: float) -> Cell:
        return Cell(
            model=model, text=self.text, config_file=self.config_file, config_digest=file_digest(Path(self.config_file)),
            seq_len=seq_len, step_tokens=self.step_tokens, steps=self.tokens // self.step_tokens, seed=seed, lr=lr,
            longest=max(self.seq_lens), micro_tokens=self.micro_tokens, overrides=self.overrides)

    def grid(self, lrs: dict[str, float]) -> list[Cell]:
        """Models x lengths x seeds, each model at its learning rate."""
        return [self.cell(model, seq_len, seed, lrs[model.label])
                for seed, seq_len, model in itertools.product(self.seeds, self.seq_lens, self.models)]

    def shared(self) -> list[Cell]:
        """The grid at the shared learning rate."""
        return self.grid({model.label: self.shared_lr for model in self.models})

    def sweep(self) -> list[Cell]:
        """Every model at every learning rate of the sweep."""
        return [self.cell(model, self.sweep_seq_len, self.seeds[0], lr)
                for lr, model in itertools.product(self.lrs, self.models)]

    def check(self) -> None:
        """
        Raises:
            ValueError: lengths, seeds or learning rates are missing or double, the budget does not divide, or cells differ
                in their tokens.
        """
        for name in ("models", "seq_lens", "seeds", "lrs"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"`{name}` must be one or more different values; got {values}.")
        if self.sweep_seq_len not in self.seq_lens or self.shared_lr not in self.lrs:
            raise ValueError(
                f"the sweep must be at a length of the study and have the shared learning rate in it; got length "
                f"{self.sweep_seq_len} of {self.seq_lens}, learning rate {self.shared_lr} of {self.lrs}.")
        if self.tokens % self.step_tokens:
            raise ValueError(f"`tokens` must be whole steps of {self.step_tokens} tokens; got {self.tokens}.")
        check_cells(self.shared())
        check_cells(self.sweep())


def text_of(dataset: str, path: str, tokenizer: str, assets: str, test: int, validation: int) -> Text:
    """
    A text with its digest.

    Raises:
        ValueError, FileNotFoundError: as `load_documents`.
    """
    digest = hashlib.sha256()
    for document in load_documents(dataset, path or None):
        digest.update(len(document).to_bytes(8, "little") + document)
    return Text(dataset, path, digest.hexdigest(), tokenizer, assets, test, validation)


def best_lrs(results: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Learning rate with the lowest loss on the validation split, by model."""
    found: dict[str, tuple[float, float]] = {}
    for result in results:
        label, lr = result["cell"]["model"]["label"], result["cell"]["lr"]
        bits = result["validation"]["bits_per_token"]
        if label not in found or bits < found[label][0]:
            found[label] = (bits, lr)
    return {label: lr for label, (_, lr) in found.items()}


def frame(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row a result, with the columns that tables and plots use."""
    return pd.DataFrame([{
        "model": result["cell"]["model"]["label"], "seq_len": result["cell"]["seq_len"], "seed": result["cell"]["seed"],
        "lr": result["cell"]["lr"], "tokens": result["tokens_seen"], "parameters": result["parameters"],
        "flops_per_token": result["flops_per_token"], "tokens_per_second": result["tokens_per_second"],
        "peak_memory_gib": result["peak_memory_gib"], "kernels": result["kernels"],
        "validation_bits_per_token": result["validation"]["bits_per_token"],
        "bits_per_token": result["test"]["bits_per_token"], "bits_per_byte": result["test"]["bits_per_byte"],
        "targets": result["test"]["targets"], "window": result["test"]["seq_len"], "stride": result["test"]["stride"],
        "causal": not result["test"]["audit"]["failure"], "beyond_trained_length": result["test"]["beyond_trained_length"],
    } for result in results])


def paired(rows: pd.DataFrame, by: Sequence[str], model: str, rival: str, value: str = "bits_per_byte") -> pd.DataFrame:
    """
    Differences `model - rival` seed by seed, within each group of the columns `by`.

    Returns:
        The columns `by`, `difference` (the mean), `low` and `high` (the 95% confidence interval of the paired t-test; none
        with one seed), `seeds`, and `wins`: seeds in which the model is the lower one.
    """
    wide = rows.pivot_table(index=[*by, "seed"], columns="model", values=value)
    found = []
    for key, pairs in wide[[model, rival]].dropna().groupby(level=list(range(len(by)))):
        difference = pairs[model] - pairs[rival]
        low = high = float("nan")
        if len(pairs) > 1:
            low, high = stats.ttest_rel(pairs[model], pairs[rival]).confidence_interval()
        keys = key if isinstance(key, tuple) else (key,)
        found.append({**dict(zip(by, keys, strict=True)), "difference": difference.mean(), "low": low, "high": high,
                      "seeds": len(pairs), "wins": int((difference < 0).sum())})
    return pd.DataFrame(found)
