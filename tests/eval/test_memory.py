import json
from pathlib import Path
from typing import Any

import pytest
import tyro

from eval import memory
from eval.memory import Options, cells, main, run, table


def test_every_loss_of_every_model_at_every_length() -> None:
    series = cells(Options(seq_lens=(8, 16), chunk=5, segment=7, overrides=("--a=1",)))
    names = [(cells[0]["model"], cells[0]["loss"]) for cells in series]
    assert names == [("harmonic", "dense"), ("harmonic", "chunked"), ("harmonic", "segments"), ("mamba", "dense"),
                     ("mamba", "chunked"), ("llama", "dense"), ("llama", "chunked")]
    assert all([cell["seq_len"] for cell in of_one] == [8, 16] for of_one in series)
    assert series[2][0]["options"] == ["--harmonic.loss_chunk_tokens=5", "--harmonic.segment_len=7", "--a=1"]


@pytest.mark.parametrize(("options", "message"), [
    (["--families", "gpt"], "families"), (["--losses", "none"], "losses"), (["--seq_lens", "16", "8"], "seq_lens"),
])
def test_unknown_cells_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, SystemExit)) as error:
        cells(tyro.cli(Options, args=options))
    assert message in f"{error.value}{capsys.readouterr().err}"


def test_a_failed_length_ends_its_series_and_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fake(cell: dict[str, Any], options: Options) -> dict[str, Any]:
        ran.append((cell["model"], cell["seq_len"]))
        if cell["model"] == "llama" and cell["seq_len"] == 16:
            return {**cell, "peak_gib": None, "seconds": None, "failed": "out of memory"}
        return {**cell, "peak_gib": 1.5, "seconds": 2.0, "failed": ""}

    monkeypatch.setattr(memory, "run", fake)
    options = Options(families=("harmonic", "llama"), losses=("chunked",), seq_lens=(8, 16, 32), out=tmp_path)
    for _ in range(2):
        main(options)
        assert ran == [("harmonic", 8), ("harmonic", 16), ("harmonic", 32), ("llama", 8), ("llama", 16)]
    # with more time or memory a cell may end otherwise
    for more in ({"timeout_s": 9999}, {"limit_gib": 99.0}, {"threads": 7}):
        ran.clear()
        main(Options(families=("llama",), losses=("chunked",), seq_lens=(8,), out=tmp_path / "more", **more))
        assert ran == [("llama", 8)]
    text = (tmp_path / "memory.md").read_text()
    assert "| 16 | 1.50 GiB, 2.0 s | out of memory |" in text
    assert "| 32 | 1.50 GiB, 2.0 s |  |" in text
    assert (tmp_path / "memory.png").stat().st_size > 0
    assert table([json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]) in text


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_has_a_peak_a_time_and_a_loss_or_a_reason(tmp_path: Path) -> None:
    options = Options(families=("harmonic",), losses=("segments",), seq_lens=(64,), segment=20, threads=1, out=tmp_path)
    result = run(cells(options)[0][0], options)
    assert 0.1 < float(str(result["peak_gib"])) < 4
    assert float(str(result["seconds"])) > 0
    assert 5 < float(str(result["loss_value"])) < 6.7
    options.timeout_s = 1
    assert run(cells(options)[0][0], options)["failed"] == "over 1 s"
