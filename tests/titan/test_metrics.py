import json
from pathlib import Path

import fla_harmonic.titan  # noqa: F401  (the CPU shim)
from fla_harmonic.titan.metrics import JSONLLogger

LOSS = "loss_metrics/global_avg_loss"


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, numbers: range) -> None:
    logger = JSONLLogger(path)
    logger.truncate(numbers[0])
    for step in numbers:
        logger.log({LOSS: 1 / step}, step)
    logger.close()


def test_resumed_run_replaces_the_steps_that_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 7))
    write(path, range(4, 9))
    assert steps(path) == list(range(1, 9))
    assert not (tmp_path / "metrics.jsonl.old").exists()


def test_new_run_keeps_the_numbers_of_the_old_one_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    write(path, range(1, 2))
    assert steps(path) == [1]
    assert steps(tmp_path / "metrics.jsonl.old") == [1, 2, 3]


def test_torn_and_foreign_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    with path.open("a") as file:
        file.write('{"x": 1}\n5\n{"step": 3, "lo')
    write(path, range(3, 5))
    assert steps(path) == [1, 2, 3, 4]


def test_numbers_keep_their_digits_and_gain_bits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JSONLLogger(path)
    logger.log({LOSS: 0.1 + 0.2, "mfu(%)": float("nan")}, 1)
    logger.close()
    record = json.loads(path.read_text())
    assert record[LOSS] == 0.1 + 0.2
    assert record["mfu(%)"] is None
    assert abs(record["bits_per_token"] - 0.43280851226668) < 1e-13
