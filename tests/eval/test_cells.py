import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.results import write
from eval.study.cells import Cell, Model, Text, check_cells
from eval.study.running import merge, run_cells

TEXT = Text("text", "a.txt", "0" * 64, "bytes", ".", 64, 32)
CELL = Cell(Model("harmonic/debug", "harmonic", "debug"), TEXT, "titan_configs/harmonic_debug.toml", "0", seq_len=256,
            step_tokens=512, steps=4, seed=0, lr=1e-3, longest=512)
OTHERS = [
    replace(CELL, model=replace(CELL.model, config=("gate_rank=4",))), replace(CELL, model=replace(CELL.model, label="other")),
    replace(CELL, text=replace(TEXT, digest="1" * 64)), replace(CELL, text=replace(TEXT, test=65)),
    replace(CELL, config_digest="1"), replace(CELL, seq_len=128), replace(CELL, steps=5), replace(CELL, seed=1),
    replace(CELL, lr=1.0000001e-3), replace(CELL, longest=256), replace(CELL, micro_tokens=256),
    replace(CELL, overrides=("--optimizer.beta1=0.8",)),
]


def test_cells_that_differ_have_different_folders() -> None:
    assert len({cell.name for cell in (CELL, *OTHERS)}) == 1 + len(OTHERS)
    # the same text elsewhere, as on another machine
    assert replace(CELL, text=replace(TEXT, path="/b.txt")).name == CELL.name
    assert replace(CELL, text=replace(TEXT, file_digest="1" * 64)).name == CELL.name


def test_cell_sees_its_tokens_whatever_its_length(tmp_path: Path) -> None:
    for seq_len in (64, 128, 256, 512):
        options = replace(CELL, seq_len=seq_len).arguments(tmp_path)
        arguments = dict(option.split("=", 1) for option in options if "=" in option)
        batch, steps = int(arguments["--training.global_batch_size"]), int(arguments["--training.steps"])
        assert batch * seq_len * steps == CELL.tokens == 2048
    micro = replace(CELL, seq_len=128, micro_tokens=256).arguments(tmp_path)
    assert "--training.local_batch_size=2" in micro
    assert "--training.global_batch_size=4" in micro


@pytest.mark.parametrize(("cells", "message"), [
    ([CELL, replace(CELL, steps=5)], "as many tokens"),
    ([replace(CELL, steps=8, step_tokens=256), CELL], "as many in a step"),
    ([replace(CELL, seq_len=300)], "whole sequences"),
    ([replace(CELL, seq_len=1024)], "whole sequences"),
    ([replace(CELL, steps=0)], "above 0"),
    ([CELL, CELL], "different cells"),
])
def test_cells_that_are_not_comparable_are_refused(cells: list[Cell], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cells(cells)


def test_merge_takes_finished_cells_and_replaces_none(tmp_path: Path) -> None:
    for part, names in (("one", "ab"), ("two", "bc")):
        for name in names:
            write(tmp_path / part / "cells" / name / "result.json", json.dumps([part, name]))
    write(tmp_path / "two" / "cells" / "unfinished" / "log.txt", "")
    out = tmp_path / "out"
    assert merge([tmp_path / "one", tmp_path / "two"], out) == 3
    assert merge([tmp_path / "two"], out) == 0
    found = {file.parent.name: json.loads(file.read_text())[0] for file in out.glob("cells/*/result.json")}
    assert found == {"a": "one", "b": "one", "c": "two"}
    assert {folder.name for folder in (out / "cells").iterdir()} == {"a", "b", "c"}
    with pytest.raises(FileNotFoundError, match="folder of a study"):
        merge([tmp_path / "nowhere"], out)


def fail(cell: Cell, folder: Path) -> dict[str, Any]:
    os.write(1, b"the reason\n")
    raise SystemExit(2)


@pytest.mark.processes
def test_failed_cell_says_what_its_log_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed: SystemExit.*the reason"):
        run_cells([CELL], fail, tmp_path, 1, 1, "failing")
    assert (tmp_path / "cells" / CELL.name / "log.txt").read_text() == "the reason\n"
    assert not list(tmp_path.glob("cells/*/result.json"))
