"""The exact command of a study, kept beside its results."""

import shlex
import sys
from pathlib import Path

NAME = "commands.txt"


def keep_command(folder: Path, append: bool = False) -> None:
    """
    Writes the command that this process was started with to `commands.txt`, beside the earlier ones where parts of a study
    add up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", *sys.orig_argv[1:]])
    file = folder / NAME
    known = file.read_text().splitlines() if append and file.is_file() else []
    if command not in known:
        file.write_text("".join(f"{line}\n" for line in (*known, command)))
