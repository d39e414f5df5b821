"""Metrics in full precision: torchtitan's own, and one JSON object a line in `{dump_folder}/metrics.jsonl`."""

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

import torch
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs

_LOSS = "loss_metrics/global_avg_loss"


class JSONLLogger(BaseLogger):
    """
    Appends `{"step": ..., metric: value, ..., "bits_per_token": loss / ln 2}` for every logged step.

    Floats are written with all their digits, and what is not finite as null (JSON has no NaN).

    Args:
        path (str | os.PathLike):
            The file. Its folder is made; what the file holds already stays, until `truncate`.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self._open()

    def _open(self) -> TextIO:
        # a line at a time, so that a killed run keeps them; closed by `close`
        return open(self.path, "a", buffering=1)

    def truncate(self, step: int) -> None:
        """
        Drop the lines of `step` and later, and a line that a killed run left unfinished: they are written anew. A run that
        begins at step 1 in the folder of another keeps the other's lines in `metrics.jsonl.old`.
        """
        self.file.close()
        lines = self.path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if _step(line) < step]
        if lines and not kept:
            os.replace(self.path, self.path.with_name(self.path.name + ".old"))
        # the old file stays whole until the new one is complete
        draft = self.path.with_name(self.path.name + ".draft")
        draft.write_text("".join(kept))
        os.replace(draft, self.path)
        self.file = self._open()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        record = {"step": step} | {name: _number(value) for name, value in metrics.items()}
        if record.get(_LOSS) is not None:
            record["bits_per_token"] = record[_LOSS] / math.log(2)
        self.file.write(json.dumps(record, allow_nan=False) + "\n")

    def close(self) -> None:
        self.file.close()


class JSONLMetricsProcessor(MetricsProcessor):
    """torchtitan's processor with a `JSONLLogger` beside the configured loggers, on the rank that logs metrics."""

    logger: BaseLogger

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.jsonl: JSONLLogger | None = None
        self.started = False
        if torch.distributed.get_rank() == _get_metrics_rank(parallel_dims, job_config):
            self.jsonl = JSONLLogger(os.path.join(job_config.job.dump_folder, "metrics.jsonl"))
            container = LoggerContainer()
            container.add_logger(self.logger)
            container.add_logger(self.jsonl)
            self.logger = container

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """As torchtitan's, with the tokens of all steps: its own count is wrong after a resume on other ranks."""
        training, dims = self.job_config.training, self.parallel_dims
        batch = training.global_batch_size
        if batch < 0:
            batch = training.local_batch_size * dims.dp_replicate * dims.dp_shard
        tokens = {"n_tokens_seen": step * batch * training.seq_len}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **tokens})

    def should_log(self, step: int) -> bool:
        # the trainer asks at every step: the first one is where the run starts or resumes, and from there the steps of
        # an earlier run are done anew
        if not self.started and self.jsonl is not None:
            self.jsonl.truncate(step)
        self.started = True
        return super().should_log(step)


def build_metrics_processor(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: BaseModelArgs | None = None,
    tag: str | None = None,
) -> JSONLMetricsProcessor:
    """`build_metrics_processor_fn` of all three families, with torchtitan's signature."""
    return JSONLMetricsProcessor(job_config, parallel_dims, tag)


def _number(value: Any) -> Any:
    value = value.item() if isinstance(value, torch.Tensor) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        # not a line of ours, or one that a killed run left unfinished
        return math.inf
