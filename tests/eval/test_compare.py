import json
from pathlib import Path

import pytest

from eval.compare import Cell, Options, cells, run, table


def test_every_cell_sees_the_same_tokens() -> None:
    planned = cells(Options())
    assert len(planned) == 6
    assert {cell.tokens for cell in planned} == {Options().tokens}
    assert {cell.batch * cell.seq_len for cell in planned} == {Options().step_tokens}


@pytest.mark.parametrize("wrong", [dict(tokens=4097), dict(seq_lens=(3000,)), dict(tokens=0), dict(seq_lens=(8192,))])
def test_budget_that_does_not_divide_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="every cell must see"):
        cells(Options(**wrong))


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="gru"):
        cells(Options(families=("gru",)))


def test_finished_cell_is_read_and_another_cell_is_refused(tmp_path: Path) -> None:
    cell = Cell("harmonic", 1024, 4, 2, (), "0")
    plan = {"family": "harmonic", "seq_len": 1024, "batch": 4, "steps": 2, "overrides": [], "config": "0"}
    result = {
        "cell": plan,
        "parameters": 5, "tokens_seen": 8192, "tokens_per_second": 1.0, "peak_memory_gib": 0.5,
        "score": {"bits_per_byte": 2.0, "beyond_trained_length": False},
    }
    (tmp_path / "cell.json").write_text(json.dumps(plan))
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert run(cell, tmp_path, 1) == result
    assert "| 1,024 | harmonic | 5 | 8,192 | 2.000 |" in table([result])
    result["score"]["beyond_trained_length"] = True
    assert "2.000 (beyond trained length)" in table([result])
    for other in (Cell("harmonic", 1024, 4, 3, (), "0"), Cell("harmonic", 1024, 4, 2, ("--optimizer.lr=1",), "0"),
                  Cell("harmonic", 1024, 4, 2, (), "1")):
        with pytest.raises(RuntimeError, match="holds another run"):
            run(other, tmp_path, 1)


def test_checkpoint_of_an_unknown_run_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(RuntimeError, match="holds another run"):
        run(Cell("harmonic", 1024, 4, 2, (), "0"), tmp_path, 1)


def test_options_that_make_cells_comparable_cannot_be_overridden() -> None:
    with pytest.raises(ValueError, match="leave"):
        cells(Options(overrides=("--training.steps=7",)))
