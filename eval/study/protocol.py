"""
The protocol of a study: every model at one shared learning rate, and at its own best of a sweep that is the same for all.

The sweep runs at one length with the first seed and is decided on the validation split; the test split is looked at once,
at the end. Differences between models are taken seed by seed: two models of a seed see the same windows in the same order.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.results import Record
from eval.study.cells import Cell, Model, Text, check_cells, file_digest
from eval.study.run_cell import measure
from eval.study.running import results_of, run_cells
from fla_harmonic.text.corpus import load_documents
from fla_harmonic.titan.config import Data


@dataclass(frozen=True)
class Protocol:
    """What is compared, and on what: see `eval.study.options`."""

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
            model, self.text, self.config_file, file_digest(Path(self.config_file)), seq_len, self.step_tokens,
            self.tokens // self.step_tokens, seed, lr, max(self.seq_lens), self.micro_tokens, self.overrides)

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
        """A ValueError where lists are empty or have doubles, the budget does not divide, or cells differ in their tokens."""
        check_different(self, ("models", "seq_lens", "seeds", "lrs"))
        if self.sweep_seq_len not in self.seq_lens or self.shared_lr not in self.lrs:
            raise ValueError(
                f"the sweep must be at a length of the study and have the shared learning rate in it; got length "
                f"{self.sweep_seq_len} of {self.seq_lens}, learning rate {self.shared_lr} of {self.lrs}.")
        if self.tokens % self.step_tokens:
            raise ValueError(f"`tokens` must be whole steps of {self.step_tokens} tokens; got {self.tokens}.")
        check_cells(self.shared())
        check_cells(self.sweep())


def check_different(options: Any, names: Sequence[str]) -> None:
    """A ValueError where one of these lists is empty, or says something twice."""
    for name in names:
        values = getattr(options, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"`{name}` must be one or more different values; got {values}.")


def text_of(
    dataset: str, path: str, tokenizer: str, assets: str, test: int, validation: int, data: Data | None = None,
) -> Text:
    """A text with its digests, in the first of which the tokenizer has a part; `data` is the job's `[data]` section."""
    data = data or Data()
    digest = hashlib.sha256()
    for document in load_documents(
            dataset, path or None, text_field=data.text_field, hub_config=data.hub_config, hub_split=data.hub_split):
        digest.update(len(document).to_bytes(8, "little") + document)
    if tokenizer == "hf":
        file = Path(assets) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"expected the tokenizer of the study at {file}; found none. Pass `--assets FOLDER`.")
        digest.update(file.read_bytes())
    own = file_digest(Path(path)) if path and Path(path).is_file() else ""
    return Text(dataset, path, digest.hexdigest(), tokenizer, assets, test, validation, own)


def best_lrs(results: Iterable[Record], rank: Callable[[Record], Any]) -> dict[str, float]:
    """Learning rate of the result of highest rank, the first of equal ones, by model."""
    found: dict[str, Record] = {}
    for result in results:
        label = result["cell"]["model"]["label"]
        found[label] = max(found.get(label, result), result, key=rank)
    return {label: result["cell"]["lr"] for label, result in found.items()}


def low_loss(result: Record) -> float:
    """The rank of a result by its loss on the validation split."""
    return -result["validation"]["bits_per_token"]


def check_overrides(overrides: Sequence[str]) -> None:
    """A ValueError for an option that makes cells comparable."""
    ours = ("--job.", "--training.dataset", "--training.seq_len", "--training.steps", "--training.local_batch_size",
            "--training.global_batch_size", "--data.tokenizer", "--data.token_budget", "--data.budget_seq_len", "--model.",
            "--optimizer.lr", "--debug.seed", "--checkpoint.", "--lr_scheduler.warmup_steps")
    if wrong := [override for override in overrides if override.startswith(ours)]:
        raise ValueError(f"`overrides` must leave {ours} to the study; got {wrong}.")


def share(cells: list, part: str) -> list:
    """The cells of a part; a ValueError for one that is no `i/n`."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    index, count = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= index <= count:
        raise ValueError(f"`part` must be i/n with 1 <= i <= n; got {part!r}.")
    return cells[index - 1::count]


def run(protocol: Protocol, stages: Sequence[str], part: str, out: Path, processes: int, threads: int) -> Record:
    """
    Runs the stages, and returns `results`, by stage: the sweep's cells that are there at the end, and the grids that are
    whole; and `lrs`, the best learning rate of each model, empty where another part has to bring some of the sweep.

    Raises:
        RuntimeError: the best learning rates are wanted and sweeps are missing.
    """
    def results(stage: str, cells: list[Cell]) -> list[Record]:
        if stage in stages:
            run_cells(share(cells, part), measure, out, processes, threads, stage)
        found = results_of(cells, out)
        # a grid with holes would set means over different seeds side by side
        if stage != "sweep" and len(found) < len(cells):
            print(f"{stage}: {len(found)} of {len(cells)} cells, no table")
            return []
        return found

    found = {"shared": results("shared", protocol.shared()), "sweep": results("sweep", protocol.sweep())}
    lrs = best_lrs(found["sweep"], low_loss) if len(found["sweep"]) == len(protocol.sweep()) else {}
    if "best" in stages and not lrs and (part == "1/1" or "sweep" not in stages):
        raise RuntimeError("the best learning rates need the whole sweep; some of its cells are missing. Run `--stages "
                           "sweep`, or `--merge` the folders that have them.")
    if lrs:
        found["best"] = results("best", protocol.grid(lrs))
    return {"results": found, "lrs": lrs}
