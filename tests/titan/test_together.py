"""What is right by itself is right with the rest: long-context training beside validation and tied tables."""

from pathlib import Path

import pytest
import tied_flavors  # noqa: F401  (the small flavor "tied")
from runs import LOSS, VALIDATION, options, read, run, steps

LONG = {
    "chunks": ["--harmonic.loss_chunk_tokens=50"],
    "segments": ["--harmonic.segment_len=24"],
    "both": ["--harmonic.loss_chunk_tokens=20", "--harmonic.segment_len=40"],
}
FLAVORS = ("debug", "tied")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("together")
    jobs = [
        options(out / f"{flavor}-{name}", 1, 3, f"--model.flavor={flavor}", "--checkpoint.no_enable", "--validation.enable",
                "--validation.freq=2", "--validation.steps=2", "--validation.local_batch_size=2", "--validation.seq_len=64",
                "--experimental.custom_import=tied_flavors", *overrides)
        for flavor in FLAVORS for name, overrides in {"dense": [], **LONG}.items()
    ]
    run(1, *jobs)
    return out


@pytest.mark.processes
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", LONG)
def test_training_and_validation_equal_the_dense_ones(flavor: str, name: str, runs: Path) -> None:
    expected, actual = (runs / f"{flavor}-{other}" for other in ("dense", name))
    assert len(steps(actual)) == 3
    for key in (LOSS, "grad_norm"):
        assert [step[key] for step in steps(actual)] == pytest.approx([step[key] for step in steps(expected)], rel=1e-5)
    scores = [[record[VALIDATION] for record in read(out) if VALIDATION in record] for out in (actual, expected)]
    assert len(scores[0]) == 3
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
