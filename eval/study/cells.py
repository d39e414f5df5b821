"""
Cells of a study: a cell is one run of stock torchtitan, its exported model, the audit of that and its losses.

A cell runs in a process of its own and leaves `result.json` in a folder that is named after all that the cell is, so that
a finished cell is not run again, a killed one goes on from its checkpoint, and folders of several machines can be merged.
"""

import fcntl
import hashlib
import json
import os
import shutil
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval.results import machine, write


@dataclass(frozen=True)
class Model:
    """
    A model of a study.

    Args:
        label (str):
            Its name in tables and folders.
        family, flavor (str):
            Those of the torchtitan plugin.
        config (tuple[str, ...]):
            Fields in place of the flavor's, as in `[harmonic] config`, one an entry. Default: none.
    """

    label: str
    family: str
    flavor: str
    config: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """
    What cells train and are scored on.

    Args:
        dataset, path (str):
            torchtitan's `[training] dataset` and `dataset_path`.
        digest (str):
            SHA-256 of its documents: a path alone is no text.
        tokenizer, assets (str):
            `[data] tokenizer`, and for "hf" the folder of its tokenizer.json.
        test, validation (int):
            How many tokens of each split are targets; the first ones with a longest window of tokens before them.
    """

    dataset: str
    path: str
    digest: str
    tokenizer: str
    assets: str
    test: int
    validation: int


class Measurable(Protocol):
    """A cell of any study, as plain as a process can be handed: everything that its numbers follow from."""

    @property
    def record(self) -> dict[str, Any]:
        """The cell as JSON gives it back."""

    @property
    def name(self) -> str:
        """Of its folder: readable, and different for different cells."""

    def measure(self, folder: Path) -> dict[str, Any]:
        """Its numbers. What a killed run goes on from is in `folder / "checkpoint"`, which is removed at the end."""


@dataclass(frozen=True)
class Cell:
    """One run of torchtitan: everything that its numbers follow from."""

    model: Model
    text: Text
    config_file: str
    """The TOML file that gives what is not set here."""
    config_digest: str
    seq_len: int
    step_tokens: int
    """Tokens of an optimizer step."""
    steps: int
    seed: int
    lr: float
    longest: int
    """Longest windows of the study: every target has as many tokens before it."""
    micro_tokens: int = 0
    """Most tokens that a forward pass computes; 0: all of a step."""
    overrides: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.step_tokens * self.steps

    @property
    def record(self) -> dict[str, Any]:
        """The cell as JSON gives it back."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def name(self) -> str:
        """Of its folder: readable, and different for different cells. Where the text lies does not matter."""
        record = self.record
        record["text"] |= {"path": "", "assets": ""}
        # a flavor of the same name may be another model tomorrow
        record["flavor"] = flavor_digest(self.model.family, self.model.flavor)
        return folder_name(f"{self.model.label}-{self.seq_len}-seed{self.seed}-lr{self.lr:g}", record)

    def measure(self, folder: Path) -> dict[str, Any]:
        """Trains and exports, or goes on with it, audits and scores: see `eval.study.run_cell`."""
        from eval.study.run_cell import measure

        return measure(self, folder)

    def arguments(self, folder: Path) -> list[str]:
        """torchtitan's command line."""
        batch = self.step_tokens // self.seq_len
        micro = max(1, min(self.micro_tokens or self.step_tokens, self.step_tokens) // self.seq_len)
        log_freq = max(n for n in range(1, 11) if self.steps % n == 0)
        arguments = [
            f"--job.config_file={self.config_file}", f"--job.dump_folder={folder}", f"--model.name={self.model.family}",
            f"--model.flavor={self.model.flavor}", f"--training.dataset={self.text.dataset}",
            f"--training.dataset_path={self.text.path}", f"--data.tokenizer={self.text.tokenizer}",
            f"--model.hf_assets_path={self.text.assets}", f"--training.seq_len={self.seq_len}",
            f"--training.global_batch_size={batch}", f"--training.local_batch_size={micro}",
            f"--training.steps={self.steps}", f"--lr_scheduler.warmup_steps={max(1, self.steps // 10)}",
            f"--optimizer.lr={self.lr}", f"--debug.seed={self.seed}", f"--metrics.log_freq={log_freq}",
            "--metrics.no_enable_tensorboard", "--metrics.disable_color_printing", "--checkpoint.keep_latest_k=2",
            "--data.token_budget=0", *self.overrides,
        ]
        if self.model.config:
            arguments.append(f"--harmonic.config={' '.join(self.model.config)}")
        return arguments


def check_cells(cells: Sequence[Cell]) -> None:
    """
    Raises:
        ValueError: cells differ in their tokens or in what an optimizer step sees, a length does not divide a step, or two
            cells are the same.
    """
    budgets = {(cell.tokens, cell.step_tokens) for cell in cells}
    if len(budgets) != 1:
        raise ValueError(f"expected every cell to see as many tokens, and as many in a step; got (tokens, step) {budgets}.")
    for cell in cells:
        if cell.tokens <= 0 or cell.step_tokens % cell.seq_len:
            raise ValueError(
                f"expected a budget above 0 and steps of whole sequences; got {cell.steps} steps of {cell.step_tokens} tokens "
                f"with sequences of {cell.seq_len}. Make the tokens of a step a multiple of every length.")
    if len({cell.name for cell in cells}) != len(cells):
        raise ValueError(f"expected different cells; got {sorted(cell.name for cell in cells)}.")


def folder_name(text: str, record: dict[str, Any]) -> str:
    """A name for the folder of a record, with a text that tells people which it is."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:10]
    return f"{text.replace('/', '-').replace(' ', '-')}-{digest}"


def flavor_digest(family: str, flavor: str) -> str:
    """SHA-256 of what a flavor is; empty for one whose shape is a directory's."""
    from eval.scoring.models import FAMILIES

    args = FAMILIES.get(family, {}).get(flavor)
    if args is None:
        return ""
    # without what a job sets in them
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier",
             "tie_word_embeddings")
    shape = args.config if hasattr(args, "config") else {name: getattr(args, name) for name in names}
    return hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run_cells(
    cells: Sequence[Measurable],
    out: Path,
    processes: int,
    threads: int,
    title: str,
    module: str = "eval.study.run_cell",
) -> list[dict[str, Any]]:
    """
    The results of the cells, in their order; those that are in `out` are read, the others run.

    Args:
        cells (Sequence[Measurable]):
            The cells.
        out (Path):
            Folder of the study.
        processes, threads (int):
            Cells that run at once, and the CPU threads of each.
        title (str):
            What the progress bar says.
        module (str):
            What their `measure` needs; it is imported once. Default: what torchtitan's cells need.

    Raises:
        RuntimeError: a cell failed; the message has the end of its log.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # imports are made once, by a process that has neither threads nor a device when it forks
    context = get_context("forkserver")
    context.set_forkserver_preload([module])
    waiting = [cell for cell in cells if not (out / "cells" / cell.name / "result.json").is_file()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, ProcessPoolExecutor(processes, context, max_tasks_per_child=1) as pool:
        task = progress.add_task(title, total=len(cells), completed=len(cells) - len(waiting))
        running = {pool.submit(run_cell, cell, out, {"processes": processes, "threads": threads}): cell for cell in waiting}
        try:
            for done in as_completed(running):
                done.result()
                progress.console.print(f"{title}: {running[done].name}", highlight=False)
                progress.advance(task)
        except BaseException:
            # cells that run end, and are kept; the others do not begin
            for waits in running:
                waits.cancel()
            raise
    return [json.loads((out / "cells" / cell.name / "result.json").read_text()) for cell in cells]


def run_cell(cell: Measurable, out: Path, load: dict[str, int]) -> None:
    """Measures a cell in this process, and writes `result.json`; done cells are left alone."""
    end_with_parent()
    folder = (out / "cells" / cell.name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if (folder / "result.json").is_file():
            return
        with redirected(folder / "log.txt"):
            result = {"name": cell.name, "cell": cell.record, **cell.measure(folder), "machine": {**machine(), **load}}
        write(folder / "result.json", json.dumps(result, indent=1))
        # an exported model stays
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def merge(sources: Sequence[Path], out: Path) -> int:
    """
    Takes the finished cells of other folders over.

    Returns:
        How many were new.

    Raises:
        FileNotFoundError: a source is no folder of a study.
    """
    taken = 0
    for source in sources:
        if not (source / "cells").is_dir():
            raise FileNotFoundError(f"expected the folder of a study, with `cells` in it, at {source}; found none.")
        for file in sorted((source / "cells").glob("*/result.json")):
            target = out / "cells" / file.parent.name
            if not (target / "result.json").is_file():
                draft = target.with_name(target.name + ".draft")
                shutil.rmtree(draft, ignore_errors=True)
                shutil.copytree(file.parent, draft)
                shutil.rmtree(target, ignore_errors=True)
                os.replace(draft, target)
                taken += 1
    return taken


def curve(folder: Path) -> pd.DataFrame:
    """The logged steps of a run, without its validations."""
    return pd.read_json(folder / "metrics.jsonl", lines=True).dropna(subset="loss_metrics/global_avg_loss")


def speed(steps: pd.DataFrame) -> float:
    """Tokens per second of a run: the median, without the first logged step, which has the start-up in it."""
    return statistics.median(steps["throughput(tps)"].iloc[min(1, len(steps) - 1):])


def end_with_parent() -> None:
    """Ends this process with the one that started it: what a killed study left running would meet its successor."""
    parent = parent_process()

    def watch() -> None:
        # of a forkserver's children the process that asked for them, not the server, which outlives it
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Waits until no other process runs the cell of this lock, and keeps others out."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def redirected(file: Path) -> Iterator[None]:
    """Sends what this process prints to a file. An error has the end of it in its message."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("a") as log:
        kept = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        # torchtitan's parser ends the process
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"{file.parent.name} failed: {error!r}\n{file.read_text()[-3000:]}") from error
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for copy, stream in zip(kept, (1, 2), strict=True):
                os.dup2(copy, stream)
                os.close(copy)
