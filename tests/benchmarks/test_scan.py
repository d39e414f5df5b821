from pathlib import Path

import pytest
import torch

from benchmarks import scan
from benchmarks.scan import main


def test_table_and_plot_name_every_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(sizes=[(1, 40, 8)], rounds=1, threads=1, csv=tmp_path / "scan.csv", png=tmp_path / "scan.png")
    assert "kernels that ran: numba, torch" in capsys.readouterr().out
    lines = (tmp_path / "scan.csv").read_text().splitlines()
    assert lines[0] == "B,T,D,op,backend,direction,over_bound,ns_per_token,loop_over_it"
    assert len(lines) == 1 + 2 * 2 * 2
    assert (tmp_path / "scan.png").stat().st_size > 0


def test_wrong_scan_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scan.OPS, "linear_scan", lambda a, b, backend: torch.zeros_like(b))
    with pytest.raises(RuntimeError, match=r"expected the oracle.*Not timed"):
        main(sizes=[(1, 40, 8)], rounds=1, threads=1)


def test_backend_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="triton"):
        main(backends=("triton",), rounds=1, threads=1)
