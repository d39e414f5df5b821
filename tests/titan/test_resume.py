"""A run that stops and continues is the run that does not stop."""

import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import LOSS, options, run, start, steps, values
from torch.distributed.checkpoint import FileSystemReader

from fla_harmonic.titan.components.checkpoint import RANDOM_STATE, checkpoint_steps, is_whole

SAVES = ["--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]


def resumed(source: Path, step: int, out: Path) -> Path:
    """A folder in which a run continues from one checkpoint of another."""
    shutil.copytree(source / f"checkpoint/step-{step}", out / f"checkpoint/step-{step}")
    return out


def without_identity(checkpoint: Path) -> None:
    """Leave out of a checkpoint which data it was written with."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    del metadata.state_dict_metadata["dataloader.identity"]
    kept = {index: item for index, item in metadata.storage_data.items() if index.fqn != "dataloader.identity"}
    metadata.storage_data = kept
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on one rank, and the same resumed after two, from a save that went on while training did."""
    out = tmp_path_factory.mktemp("whole")
    asynchronous = [*SAVES, "--checkpoint.async_mode=async"]
    run(1, options(out, 1, 6, *asynchronous))
    resumed(out, 2, out / "resumed")
    run(1, options(out / "resumed", 1, 6, *asynchronous))
    return out


@pytest.mark.processes
def test_resume_after_an_asynchronous_save_is_bit_equal(whole: Path) -> None:
    assert values(steps(whole / "resumed"), "bits_per_byte") == values(steps(whole), "bits_per_byte")[2:]


@pytest.mark.processes
def test_other_data_is_refused_unless_it_is_meant(whole: Path, tmp_path: Path) -> None:
    refused, meant, phase, old = (tmp_path / name for name in ("refused", "meant", "phase", "old"))
    for folder in (refused, meant, old):
        resumed(whole, 2, folder)
    short = "--training.seq_len=32"
    with pytest.raises(AssertionError, match=r"written with, seq_len = 64, but this job has seq_len = 32\. Remedy: "):
        run(1, options(refused, 1, 4, *SAVES, short))
    # a checkpoint from before loaders named their data
    without_identity(old / "checkpoint/step-2")
    log = run(1, options(meant, 1, 4, *SAVES, short, "--checkpoint.exclude_from_loading=dataloader"),
              options(phase, 1, 2, *SAVES, short, f"--checkpoint.initial_load_path={whole / 'checkpoint/step-2'}"),
              options(old, 1, 6, *SAVES))
    assert log.count("the data starts from its beginning") == 2
    assert "does not say which data" in log
    # step and optimizer go on in the one, the weights alone in the other
    assert [record["step"] for record in steps(meant)] == [3, 4]
    assert [record["step"] for record in steps(phase)] == [1, 2]
    assert steps(meant)[0][LOSS] == steps(phase)[0][LOSS]
    assert values(steps(old)) == values(steps(whole))[2:]


@pytest.mark.processes
def test_the_random_state_is_saved(whole: Path) -> None:
    names = FileSystemReader(whole / "checkpoint/step-2").read_metadata().state_dict_metadata
    assert f"{RANDOM_STATE}.cpu" in names
    first, last = ({f"{RANDOM_STATE}.cpu": torch.get_rng_state()} for _ in range(2))
    for step, state in ((2, first), (6, last)):
        dcp.load(state, checkpoint_id=whole / f"checkpoint/step-{step}")
    # training draws nothing: what is drawn after a resume does not depend on where it was
    assert all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.processes
@pytest.mark.slow
def test_two_shards_resume_bit_equal_and_other_degrees_within_rounding(whole: Path, tmp_path: Path) -> None:
    shards, again, there, back = (tmp_path / name for name in ("shards", "again", "there", "back"))
    resumed(whole, 2, there)
    run(2, options(shards, 2, 6, *SAVES), options(there, 2, 6, *SAVES))
    resumed(shards, 2, again)
    run(2, options(again, 2, 6, *SAVES))
    resumed(there, 4, back)
    run(1, options(back, 1, 6, *SAVES))
    assert values(steps(again)) == values(steps(shards))[2:]
    for step, *rest in values([*steps(there)[:2], *steps(back)]):
        assert rest == pytest.approx(values(steps(whole))[step - 1][1:], rel=1e-6), step
    assert [record["step"] for record in steps(back)] == [5, 6]


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_run_goes_on_bit_equal(whole: Path, tmp_path: Path) -> None:
    job = options(tmp_path, 1, 6, "--checkpoint.interval=1")
    process = start(1, tmp_path / "log", job)
    metrics, began = tmp_path / "metrics.jsonl", time.monotonic()
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
        assert time.monotonic() - began < 200
        time.sleep(0.01)
    process.kill()
    process.wait()
    found = checkpoint_steps(tmp_path / "checkpoint")
    assert any(map(is_whole, found.values()))
    assert 6 not in found
    run(1, job)
    assert values(steps(tmp_path)) == values(steps(whole))
