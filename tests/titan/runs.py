"""Runs of torchtitan's trainer, several one after another in the same processes, which start but once."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOSS = "loss_metrics/global_avg_loss"
VALIDATION = "validation_metrics/loss"
# 4 windows of 64 bytes a step, however many ranks share them
BATCH, SEQ = 4, 64


def options(out: Path, ranks: int, steps: int, *overrides: str, family: str = "harmonic") -> list[str]:
    """The debug config made small, every step logged."""
    return [
        f"--job.config_file={ROOT / f'titan_configs/{family}_debug.toml'}", f"--job.dump_folder={out}",
        f"--training.steps={steps}", f"--training.seq_len={SEQ}", f"--training.global_batch_size={BATCH}",
        f"--training.local_batch_size={BATCH // ranks}", "--lr_scheduler.warmup_steps=2", "--metrics.log_freq=1",
        "--metrics.no_enable_tensorboard", "--metrics.disable_color_printing",
        # two more steps a run, and no other number: tests of the audit switch it on
        "--audit.interval=0", *overrides,
    ]


def start(ranks: int, log: Path, *jobs: Sequence[str]) -> subprocess.Popen[bytes]:
    """Begin to train the jobs, one after another, on some ranks; one rank is the process itself."""
    launcher, env = [], os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    if ranks == 1:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    else:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
                    "--rdzv_endpoint=localhost:0"]
    command = [sys.executable, *launcher, __file__, json.dumps([list(job) for job in jobs])]
    with log.open("w") as file:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def run(ranks: int, *jobs: Sequence[str]) -> str:
    """Train the jobs, one after another, on some ranks. What they print, if all went well."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = start(ranks, log, *jobs)
        try:
            assert process.wait(timeout=400) == 0, log.read_text()[-4000:]
        finally:
            process.kill()
        return log.read_text()


def read(out: Path) -> list[dict[str, Any]]:
    """All records of a run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def steps(out: Path) -> list[dict[str, Any]]:
    """The logged training steps of a run."""
    return [record for record in read(out) if LOSS in record]


def values(records: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """What of the records does not depend on time or machine."""
    return [tuple(record[name] for name in ("step", LOSS, "grad_norm", "lr", "n_tokens_seen", *names)) for record in records]


def main() -> None:
    import torchtitan.train
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    init_logger()
    # the trainer's wait for other ranks at the end
    torchtitan.train.time.sleep = lambda seconds: None
    for job in json.loads(sys.argv[1]):
        trainer = torchtitan.train.Trainer(ConfigManager().parse_args(job))
        trainer.train()
        trainer.close()
    torchtitan.train.torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
