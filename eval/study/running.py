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
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from eval.results import Record, finished, machine


class Named(Protocol):
    """A cell of any study, picklable, with all that its numbers follow from; different ones have different names."""

    @property
    def record(self) -> Record: ...
    @property
    def name(self) -> str: ...


# from a cell and its folder to its numbers. What a killed run continues from is in the folder's `checkpoint`, which is removed
# at the end. A function of a module: the processes import it
Measure = Callable[[Any, Path], Record]


def run_cells(
    cells: Sequence[Named], measure: Measure, out: Path, processes: int, threads: int, title: str,
) -> list[Record]:
    """
    The results of the cells, in their order; those that are in `out` are read, the others run, so many at once. A cell that
    fails is a RuntimeError with the end of its log.
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


def results_of(cells: Sequence[Named], out: Path) -> list[Record]:
    """The results of those cells that are finished."""
    return [json.loads(file.read_text()) for cell in cells if (file := result_file(cell, out)).is_file()]


def run_cell(cell: Named, measure: Measure, out: Path, load: dict[str, int]) -> None:
    """
    What a process does: measures a cell and writes `result.json`; a finished cell is left alone. All that is printed goes to
    the cell's `log.txt`.
    """
    end_with_parent()
    file = result_file(cell, out).absolute()
    folder = file.parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, (folder / "log.txt").open("a") as log:
        # another study may run the same cell
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            finished(file, lambda: {
                "name": cell.name, "cell": cell.record, **measure(cell, folder), "machine": {**machine(), **load}}, indent=1)
        # torchtitan's parser ends the process
        except (Exception, SystemExit) as error:
            sys.stdout.flush()
            raise RuntimeError(f"{cell.name} failed: {error!r}\n{(folder / 'log.txt').read_text()[-3000:]}") from error
        # an exported model stays
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def merge(sources: Sequence[Path], out: Path) -> int:
    """Copies the finished cells of other folders of a study, and returns how many were new."""
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
    # of a forkserver's children the process that asked for them, not the server, which outlives it
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
