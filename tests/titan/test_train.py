import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOSS = "loss_metrics/global_avg_loss"
# 4 windows of 64 bytes a step, however many ranks share them
BATCH, SEQ = 4, 64


def launch(family: str, out: Path, ranks: int, steps: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """torchtitan's stock entry point on the CPU, with the debug config made small."""
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0", "-m", "torchtitan.train",
        f"--job.config_file={ROOT / f'titan_configs/{family}_debug.toml'}", f"--job.dump_folder={out}",
        f"--training.steps={steps}", f"--training.seq_len={SEQ}", f"--training.global_batch_size={BATCH}",
        f"--training.local_batch_size={BATCH // ranks}", "--lr_scheduler.warmup_steps=2", "--metrics.log_freq=1",
        "--metrics.no_enable_tensorboard", "--metrics.disable_color_printing", *overrides,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, cwd=ROOT, timeout=180, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def train(family: str, out: Path, ranks: int, steps: int, *overrides: str) -> list[dict[str, Any]]:
    run = launch(family, out, ranks, steps, *overrides)
    assert run.returncode == 0, run.stdout[-4000:]
    return read(out)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_falls(records: list[dict[str, Any]], steps: int) -> None:
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert records[-1]["n_tokens_seen"] == steps * BATCH * SEQ
    # about uniform over 256 bytes at first
    assert 5 < records[0][LOSS] < 6.7
    assert records[-1][LOSS] < records[0][LOSS] - 0.02 * steps


def check_same(records: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float = 1e-5) -> None:
    for record, reference in zip(records, expected, strict=True):
        for key in ("step", "n_tokens_seen", "lr"):
            assert record[key] == reference[key]
        for key in (LOSS, "grad_norm", "bits_per_token"):
            assert record[key] == pytest.approx(reference[key], rel=rel), (record["step"], key)


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Harmonic, ten steps on one rank, with checkpoints after five and ten."""
    out = tmp_path_factory.mktemp("ten_steps")
    train("harmonic", out, 1, 10, "--checkpoint.interval=5")
    return out


@pytest.mark.processes
def test_harmonic_trains(ten_steps: Path) -> None:
    check_falls(read(ten_steps), 10)


@pytest.mark.processes
def test_two_shards_of_harmonic_train_like_one_rank(ten_steps: Path, tmp_path: Path) -> None:
    check_same(train("harmonic", tmp_path, 2, 10, "--checkpoint.no_enable"), read(ten_steps))


@pytest.mark.processes
def test_resume_continues_bit_for_bit(ten_steps: Path, tmp_path: Path) -> None:
    expected = read(ten_steps)
    # a run that is killed after its eighth step, half a line into the ninth
    shutil.copytree(ten_steps / "checkpoint/step-5", tmp_path / "checkpoint/step-5")
    lines = (ten_steps / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:40])
    actual = train("harmonic", tmp_path, 1, 10, "--checkpoint.interval=5")
    assert [record["step"] for record in actual] == list(range(1, 11))
    for record, reference in zip(actual, expected, strict=True):
        for key in (LOSS, "grad_norm", "lr", "n_tokens_seen", "bits_per_token"):
            assert record[key] == reference[key], (record["step"], key)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_baseline_trains_alike_on_one_rank_and_two(family: str, tmp_path: Path) -> None:
    single = train(family, tmp_path / "single", 1, 5, "--checkpoint.no_enable")
    check_falls(single, 5)
    check_same(train(family, tmp_path / "shards", 2, 5, "--checkpoint.no_enable"), single)


@pytest.mark.processes
@pytest.mark.parametrize(("family", "kind"), [("mamba", "context"), ("mamba", "tensor")])
def test_unsupported_parallelism_ends_at_start_up(family: str, kind: str, tmp_path: Path) -> None:
    run = launch(family, tmp_path, 2, 1, f"--parallelism.{kind}_parallel_degree=2")
    assert run.returncode != 0
    assert f"ValueError: {family}: {kind} parallelism is not supported" in run.stdout, run.stdout[-4000:]
    assert f"parallelism.{kind}_parallel_degree = 2. Remedy" in run.stdout
    assert not (tmp_path / "metrics.jsonl").exists()
