import sys
from pathlib import Path
from typing import Any

import pytest

from eval.results import COMMANDS, finished, finished_line, keep_command, read_lines, record_digest
from eval.tables import markdown


def test_measured_once_and_written_as_a_whole(tmp_path: Path) -> None:
    calls = []

    def measure() -> dict[str, Any]:
        calls.append(1)
        return {"a": (1, 2)}

    def killed() -> dict[str, Any]:
        raise KeyboardInterrupt

    file = tmp_path / "cells" / "a.json"
    with pytest.raises(KeyboardInterrupt):
        finished(file, killed)
    assert not file.exists()
    assert finished(file, measure) == finished(file, measure) == {"a": [1, 2]}
    assert len(calls) == 1
    assert list(file.parent.iterdir()) == [file]


def test_lines_are_known_by_the_fields_of_their_cell(tmp_path: Path) -> None:
    file, cells = tmp_path / "a.jsonl", [{"n": n, "options": ["x"]} for n in (1, 2, 1)]
    assert read_lines(file) == []
    found = [finished_line(file, cell, lambda n=index: {**cells[n], "result": n}) for index, cell in enumerate(cells)]
    assert [record["result"] for record in found] == [0, 1, 0]
    assert read_lines(file) == found[:2]


def test_digest_is_of_the_content() -> None:
    assert record_digest({"a": 1, "b": (2,)}) == record_digest({"b": [2], "a": 1}) != record_digest({"a": 1, "b": [3]})
    assert len(record_digest({}, 10)) == 10


def test_commands_of_parts_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("1/2", "2/2", "1/2"):
        monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "-m", "eval.x", "--part", part, "a b"])
        keep_command(tmp_path, append=True)
    lines = (tmp_path / COMMANDS).read_text().splitlines()
    assert lines == ["python -m eval.x --part 1/2 'a b'", "python -m eval.x --part 2/2 'a b'"]
    keep_command(tmp_path)
    assert (tmp_path / COMMANDS).read_text().splitlines() == lines[:1]


def test_markdown() -> None:
    assert markdown(["a", "b"], [[1, "x"], ["", 2.5]]) == "| a | b |\n|---|---|\n| 1 | x |\n|  | 2.5 |"
