"""
Results on disk: whole files, records that are measured once, and the commands and the machine that they come from.

A record is a JSON object. What was measured is read, so that a study that was killed continues where it stopped.
"""

import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

COMMANDS = "commands.txt"

Record = dict[str, Any]


@contextmanager
def draft_of(file: Path) -> Iterator[Path]:
    """A path that becomes the file when the block ends without an error: it is written as a whole, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.draft")
    yield draft
    os.replace(draft, file)


def write(file: Path, text: str) -> None:
    """Writes a file as a whole, or not at all."""
    with draft_of(file) as draft:
        draft.write_text(text)


def write_lines(file: Path, records: Iterable[Record]) -> None:
    """Writes records as JSONL."""
    write(file, "".join(f"{json.dumps(record)}\n" for record in records))


def read_lines(file: Path) -> list[Record]:
    """The records of a JSONL file; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def record_digest(record: Any, digits: int = 16) -> str:
    """The first hex digits of the SHA-256 of a record; what JSON does not know counts as its text."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def finished(file: Path, measure: Callable[[], Any], indent: int | None = None) -> Any:
    """The JSON in a file; where there is no file, it is measured and written first."""
    if not file.is_file():
        write(file, json.dumps(measure(), indent=indent))
    return json.loads(file.read_text())


def finished_line(file: Path, cell: Record, measure: Callable[[], Record]) -> Record:
    """The line of a JSONL file that has all fields of a cell; where none has, it is measured and added first."""
    records = read_lines(file)
    if (known := next((record for record in records if cell.items() <= record.items()), None)) is not None:
        return known
    record = measure()
    write_lines(file, [*records, record])
    return record


def keep_command(folder: Path, append: bool = False) -> None:
    """
    Writes the command of this process to `commands.txt` in a folder, beside the earlier ones where the parts of a study add
    up.
    """
    command = shlex.join(["python", *sys.orig_argv[1:]])
    file = folder / COMMANDS
    known = file.read_text().splitlines() if append and file.is_file() else []
    write(file, "".join(f"{line}\n" for line in dict.fromkeys([*known, command])))


def machine() -> Record:
    """What the numbers were measured on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "cpus": os.cpu_count(), "torch": torch.__version__, "torchtitan": version("torchtitan")}
