"""
Cells of a study on a pool of processes.

A cell runs in a process of its own and leaves `result.json` in the folder of its name: a finished cell is not run again, a
killed one continues from its checkpoint, and folders of several machines can be merged.
"""

import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from eval.results import finished, machine


class Named(Protocol):
    """A cell of any study, picklable: everything that its numbers follow from."""

    @property
    def record(self) -> dict[str, Any]:
        """The cell as JSON gives it back."""

    @property
    def name(self) -> str:
        """Of its folder, different for different cells."""


def run_cells(
    cells: Sequence[Named],
    measure: Callable[[Any, Path], dict[str, Any]],
    out: Path,
    processes: int,
    threads: int,
    title: str,
) -> list[dict[str, Any]]:
    """
    The results of the cells, in their order; those that are in `out` are read, the others run.

    Args:
        cells (Sequence[Named]):
            The cells.
        measure (Callable):
            A function of a module, from a cell and its folder to its numbers. What a killed run continues from is in
            `folder / "checkpoint"`, which is removed at the end.
        out (Path):
            Folder of the study.
        processes, threads (int):
            Cells that run at once, and the CPU threads of each.
        title (str):
            What the progress bar says.

    Raises:
        RuntimeError: a cell failed; the message has the end of its log.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # imports are made once, by a process that has neither threads nor a device when it forks
    context = get_context("forkserver")
    context.set_forkserver_preload([measure.__module__])
    waiting = [cell for cell in cells if not result_file(cell, out).is_file()]
    load = {"processes": processes, "threads": threads}
    with (tqdm(total=len(cells), initial=len(cells) - len(waiting), desc=title, unit="cell") as bar,
          ProcessPoolExecutor(processes, context, max_tasks_per_child=1) as pool):
        running = {pool.submit(run_cell, cell, measure, out, load): cell for cell in waiting}
        try:
            for done in as_completed(running):
                done.result()
                bar.write(f"{title}: {running[done].name}")
                bar.update()
        except BaseException:
            # cells that run end, and are kept; the others do not begin
            pool.shutdown(cancel_futures=True)
            raise
    return results_of(cells, out)


def result_file(cell: Named, out: Path) -> Path:
    return out / "cells" / cell.name / "result.json"


def results_of(cells: Sequence[Named], out: Path) -> list[dict[str, Any]]:
    """The results of those cells that are finished."""
    return [json.loads(file.read_text()) for cell in cells if (file := result_file(cell, out)).is_file()]


def run_cell(cell: Named, measure: Callable[[Any, Path], dict[str, Any]], out: Path, load: dict[str, int]) -> None:
    """Measures a cell in this process, and writes `result.json`; finished cells are left alone."""
    end_with_parent()
    file = result_file(cell, out).absolute()
    folder = file.parent
    folder.mkdir(parents=True, exist_ok=True)

    def numbers() -> dict[str, Any]:
        with redirected(folder / "log.txt"):
            return {"name": cell.name, "cell": cell.record, **measure(cell, folder), "machine": {**machine(), **load}}

    # another process may run the same cell
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished(file, numbers, indent=1)
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
