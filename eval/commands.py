"""The exact command of a study, kept beside its results."""

import shlex
import sys
from pathlib import Path

NAME = "commands.txt"


def keep_command(folder: Path) -> None:
    """Adds the command that this process was started with to `commands.txt`, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", *sys.orig_argv[1:]])
    file = folder / NAME
    known = file.read_text().splitlines() if file.is_file() else []
    if command not in known:
        with file.open("a") as lines:
            lines.write(command + "\n")
