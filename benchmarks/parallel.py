"""
Does every kind of parallelism train like one process?

    python -m benchmarks.parallel

trains `titan_configs/harmonic_debug.toml`, made small, in each layout from the same initial weights on the same windows, on
gloo, and prints a table: loss and gradient norm before clipping after the last step, and the largest relative difference to
one process over all steps. Loss curves alone prove nothing: clipping hides a wrong size of the gradient, and a state lost at
a shard's border moves the loss by less than a thousandth.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import tyro

from eval.results import read_lines
from eval.tables import markdown

if TYPE_CHECKING:
    from torchtitan.train import Trainer

ROOT = Path(__file__).parents[1]
LOSS, NORM = "loss_metrics/global_avg_loss", "grad_norm"
GLOBAL_BATCH, SEQ_LEN = 4, 128
BOUND = 1e-6
DIFFERENCES = ["loss_difference", "norm_difference"]


@dataclass(frozen=True)
class Layout:
    """
    How a model is spread over processes and trained: torchtitan's degrees, batches of a rank in a step, the options of
    segments and of the chunked loss (0: whole sequences), whether blocks are recomputed, and whether FSDP keeps what it has
    gathered. `like` names the layout whose losses it must have.
    """

    name: str
    fsdp: int = 1
    replicas: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    accumulation: int = 1
    segment_len: int = 0
    loss_chunk: int = 0
    recomputes: bool = False
    keeps: bool = False
    family: str = "harmonic"
    flavor: str = "debug"
    overrides: tuple[str, ...] = ()
    like: str = "1 process"

    @property
    def ranks(self) -> int:
        return self.fsdp * self.replicas * self.tensor * self.context * self.pipeline

    @property
    def rows(self) -> int:
        """Rows that a rank reads at a time."""
        return GLOBAL_BATCH // (self.fsdp * self.replicas * self.accumulation)

    def segments(self, tokens: int) -> int:
        """Segments of a sequence."""
        return -(-tokens // self.segment_len) if self.segment_len else 1

    def arguments(self) -> list[str]:
        """Degrees and options on torchtitan's command line."""
        values = {
            "parallelism.data_parallel_shard_degree": self.fsdp,
            "parallelism.data_parallel_replicate_degree": self.replicas,
            "parallelism.tensor_parallel_degree": self.tensor,
            "parallelism.context_parallel_degree": self.context,
            "parallelism.pipeline_parallel_degree": self.pipeline,
            "harmonic.segment_len": self.segment_len,
            "harmonic.loss_chunk_tokens": self.loss_chunk,
            "activation_checkpoint.mode": "full" if self.recomputes else "",
            "parallelism.fsdp_reshard_after_forward": "never" if self.keeps else "",
        }
        return [*(f"--{name}={value}" for name, value in values.items() if value), *self.overrides]

    def job(self, out: Path, steps: int) -> list[str]:
        """torchtitan's command line for a small run."""
        return [
            f"--job.config_file={ROOT / f'titan_configs/{self.family}_debug.toml'}", f"--job.dump_folder={out / self.name}",
            f"--model.flavor={self.flavor}", f"--training.steps={steps}", f"--training.seq_len={SEQ_LEN}",
            f"--training.global_batch_size={GLOBAL_BATCH}", f"--training.local_batch_size={self.rows}",
            "--optimizer.lr=1e-3", "--lr_scheduler.warmup_steps=2", "--metrics.log_freq=1", "--metrics.no_enable_tensorboard",
            "--checkpoint.no_enable", *self.arguments(),
        ]


LAYOUTS = (
    Layout("1 process"),
    Layout("FSDP 2", fsdp=2),
    Layout("FSDP 4", fsdp=4),
    Layout("HSDP 2x2", fsdp=2, replicas=2),
    Layout("DDP 2", replicas=2),
    Layout("TP 2", tensor=2),
    Layout("PP 2", pipeline=2),
    Layout("CP 2", context=2),
    Layout("CP 4", context=4),
    Layout("FSDP 2 x TP 2", fsdp=2, tensor=2),
    Layout("FSDP 2 x CP 2", fsdp=2, context=2),
)


def launch(layouts: Sequence[Layout], steps: int, out: Path, module: str = "benchmarks.parallel") -> None:
    """
    Run `python -m MODULE work JOBS`, once for all layouts with the same number of processes.

    Raises:
        RuntimeError: a run failed.
    """
    for ranks in sorted({layout.ranks for layout in layouts}):
        jobs = [layout.job(out, steps) for layout in layouts if layout.ranks == ranks]
        (out / f"{ranks}.json").write_text(json.dumps(jobs))
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0", "-m", module, "work", str(out / f"{ranks}.json"),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"training on {ranks} processes failed:\n{done.stdout[-20000:]}")


def run(layouts: Sequence[Layout], steps: int, out: Path) -> pd.DataFrame:
    """
    Train in every layout: by name its last loss and gradient norm, and the largest relative differences to its reference over
    all steps.

    Raises:
        RuntimeError: a run failed.
    """
    launch(layouts, steps, out)
    curves = {layout.name: pd.DataFrame(read_lines(out / layout.name / "metrics.jsonl"))[[LOSS, NORM]] for layout in layouts}
    rows = {}
    for layout in layouts:
        curve, reference = curves[layout.name], curves[layout.like]
        if not len(curve) == len(reference) == steps:
            raise RuntimeError(f"{layout.name}: expected {steps} steps in metrics.jsonl, but got {len(curve)}")
        rows[layout.name] = *curve.iloc[-1], *(curve / reference - 1).abs().max(skipna=False)
    return pd.DataFrame.from_dict(rows, orient="index", columns=["loss", "norm", *DIFFERENCES])


def table(rows: pd.DataFrame, steps: int) -> str:
    """The rows in Markdown."""
    return markdown(
        ("layout", f"loss, step {steps}", "gradient norm", "largest relative difference: loss", "gradient norm"),
        ((row.Index, f"{row.loss:.7f}", f"{row.norm:.7f}", f"{row.loss_difference:.1e}", f"{row.norm_difference:.1e}")
         for row in rows.itertuples()))


def far(rows: pd.DataFrame) -> list[str]:
    """Names of the layouts that do not train like their reference."""
    return list(rows.index[~(rows[DIFFERENCES] <= BOUND).all(axis=1)])


def steps_of(jobs: Path) -> Iterator[tuple["Trainer", Callable[[], None]]]:
    """torchtitan's trainer and what trains it, for every step of every job of a launch, in one process group."""
    import torch.distributed as dist
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    init_logger()
    for arguments in json.loads(jobs.read_text()):
        trainer = Trainer(ConfigManager().parse_args(arguments))
        batches = trainer.batch_generator(trainer.dataloader)
        while trainer.should_continue_training():
            trainer.step += 1
            yield trainer, partial(trainer.train_step, batches)
        trainer.close()
        dist.barrier()
    dist.destroy_process_group()


def main(steps: int = 20, out: Path | None = None) -> None:
    """
    Args:
        steps: Steps of each layout.
        out: Folder of the runs. Default: a temporary one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = run(LAYOUTS, steps, folder)
    print(table(rows, steps))
    if worst := far(rows):
        sys.exit(f"more than {BOUND} away from one process: {', '.join(worst)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        for _, step in steps_of(Path(sys.argv[2])):
            step()
    else:
        tyro.cli(main)
