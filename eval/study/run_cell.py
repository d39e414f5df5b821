"""What the process of a cell does: train with torchtitan, export, audit, score."""

import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

import fla_harmonic.titan  # noqa: F401  (registers the specs)
from eval.results import read_lines
from eval.scoring.models import load, to_accelerator
from eval.scoring.score import score
from eval.study.cells import ONE_PROCESS, Cell, curve
from fla_harmonic.models.mamba.modeling_mamba import HAS_MAMBA_KERNELS
from fla_harmonic.ops.harmonic import usable_backends
from fla_harmonic.ops.mamba.selective_scan import HAS_LOOPS
from fla_harmonic.text import load_split
from fla_harmonic.titan.components.tokenizer import build_tokenizer
from fla_harmonic.titan.config import data_section
from fla_harmonic.titan.export import export


def measure(cell: Cell, folder: Path) -> dict[str, Any]:
    """
    Trains a cell with torchtitan's trainer, from its checkpoint if there is one, and scores what it exported: `test` and
    `validation` are each an `eval.scoring.score.Score`. A RuntimeError if the run saw another number of tokens, or its model
    is not causal.
    """
    # first: it may refuse the machine
    ran_on = kernels(cell.model.family)
    arguments = cell.arguments(folder)
    train(ConfigManager().parse_args(arguments))
    check_finite(cell, folder)
    steps = curve(folder)
    seen = int(steps["n_tokens_seen"].iloc[-1])
    if seen != cell.tokens:
        raise RuntimeError(f"expected {cell.tokens} tokens in {folder}, trained on {seen}. Remove the folder.")
    job = ConfigManager().parse_args(arguments)
    export(job, folder / "checkpoint", folder / "hf")
    parameters, flops = size(job)
    # without the first logged step, which has the start-up in it
    speed = statistics.median(steps["throughput(tps)"].iloc[min(1, len(steps) - 1):])
    return {
        "parameters": parameters, "flops_per_token": flops, "tokens_seen": seen, "tokens_per_second": speed,
        "peak_memory_gib": float(steps["memory/max_active(GiB)"].max()), "kernels": ran_on,
        **scores(cell, job, folder / "hf"),
    }


def check_finite(cell: Cell, folder: Path) -> None:
    """A RuntimeError for a logged loss that is not finite, which is written as null."""
    for record in read_lines(folder / "metrics.jsonl"):
        if record.get("loss_metrics/global_avg_loss", 0.0) is None:
            raise RuntimeError(
                f"expected finite losses; that of step {record['step']} is not, at the learning rate {cell.lr:g}. Leave that "
                "rate out of the sweep (`--lrs`).")


def train(job: JobConfig) -> None:
    """What `python -m torchtitan.train` does with this job, in this process."""
    os.environ.update(ONE_PROCESS)
    init_logger()
    # not its `main`, which reads the command line that the process began with
    trainer = Trainer(job)
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


def size(job: JobConfig) -> tuple[int, int]:
    """Parameters of a job's model, and floating point operations of a training step on a token."""
    spec = get_train_spec(job.model.name)
    args: Any = spec.model_args[job.model.flavor]
    args.update_from_config(job)
    with torch.device("meta"):
        model = spec.model_cls(args)
    return args.get_nparams_and_flops(model, job.training.seq_len)


def kernels(family: str) -> str:
    """What the model's recurrence or attention ran on; a RuntimeError for Mamba without its own kernels on an accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if family == "llama":
        return "scaled_dot_product_attention"
    if family in ("harmonic", "hallamonic"):
        return f"chunk_harmonic on {usable_backends(torch.empty(0, device=device))[0]}"
    if device.type == "cpu":
        return "selective_scan on numba" if HAS_LOOPS else "linear_scan on torch"
    if not HAS_MAMBA_KERNELS:
        raise RuntimeError(
            "expected Mamba on mamba-ssm's kernels, for a baseline on its slow path is none; mamba-ssm or causal-conv1d "
            "cannot be imported. Install both, or leave Mamba out.")
    return "mamba-ssm"


def scores(cell: Cell, job: JobConfig, directory: Path) -> dict[str, Any]:
    """Losses of an exported model on the targets of the test and the validation split."""
    model = to_accelerator(load(directory)[0])
    tokenizer = build_tokenizer(job)
    found = {}
    for name, number in (("test", cell.text.test), ("validation", cell.text.validation)):
        split = load_split(cell.text.dataset, cell.text.path or None, name, tokenizer, data_section(job))
        targets = range(cell.longest, cell.longest + number)
        ids = split.tokens[targets.start:targets.stop].tolist()
        num_bytes = len(ids) if cell.text.tokenizer == "bytes" else len(tokenizer.decode(ids).encode())
        batch = max(1, 16384 // cell.seq_len)
        found[name] = asdict(score(model, split, cell.seq_len, batch, max(1, cell.seq_len // 2), targets, num_bytes))
    return found
