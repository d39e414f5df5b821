"""Metrics in full precision: torchtitan's own, and one JSON object per line in `{dump_folder}/metrics.jsonl`."""

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools.logging import logger

from fla_harmonic.titan.components.dataloader import bytes_per_token
from fla_harmonic.titan.components.state_metrics import StateMonitor
from fla_harmonic.titan.config import compiles_model, global_batch_size


class JSONLLogger(BaseLogger):
    """
    Appends `{"step": ..., metric: value, ...}` for every logged step and every validation. Floats keep all their digits; what
    is not finite is null, as JSON has no NaN. What the file holds stays until `truncate`.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self._open()

    def _open(self) -> TextIO:
        # line-buffered, so that a killed run keeps them; closed by `close`
        return open(self.path, "a", buffering=1)

    def truncate(self, step: int) -> None:
        """
        Drop the lines of `step` and later, and a line that a killed run left unfinished: they will be written again. A run
        that begins at step 1 in the folder of another keeps the other's lines in `metrics.jsonl.old`.
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
        self.file.write(json.dumps(record, allow_nan=False) + "\n")

    def close(self) -> None:
        self.file.close()


class JSONLMetricsProcessor(MetricsProcessor):
    """
    `build_metrics_processor_fn` of all families: torchtitan's processor with a `JSONLLogger` beside the configured loggers,
    on the rank that logs metrics, and with more metrics: `bits_per_token`; `bits_per_byte`, at the mean bytes per token of
    the train split; and for Harmonic the states and timescales of its levels (see `StateMonitor`).
    """

    logger: BaseLogger

    def __init__(
        self,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        model_args: BaseModelArgs | None = None,
        tag: str | None = None,
    ) -> None:
        self.states: StateMonitor | None = None
        # of a Harmonic layer; other families have none
        self.num_levels: int = getattr(model_args, "num_levels", 0)
        # a pipeline's passes over shapes and microbatches are not those of the step alone: measured 1e-3 off one process
        if self.num_levels and (compiles_model(job_config) or parallel_dims.pp_enabled):
            reason = "not supported in a pipeline" if parallel_dims.pp_enabled else "compiled blocks call no hooks"
            logger.info(f"states and timescales of the levels are not logged: {reason}")
            self.num_levels = 0
        super().__init__(job_config, parallel_dims, tag)
        self.jsonl: JSONLLogger | None = None
        self.started = False
        if torch.distributed.get_rank() == _get_metrics_rank(parallel_dims, job_config):
            self.jsonl = JSONLLogger(os.path.join(job_config.job.dump_folder, "metrics.jsonl"))
            container = LoggerContainer()
            container.add_logger(self.logger)
            container.add_logger(self.jsonl)
            self.logger = container

    @property
    def model_parts(self) -> list[nn.Module] | None:
        """The models, which the trainer sets once they are built."""
        return self._model_parts

    @model_parts.setter
    def model_parts(self, model_parts: list[nn.Module] | None) -> None:
        self._model_parts = model_parts
        if model_parts and self.num_levels:
            self.states = StateMonitor(model_parts, self.num_levels)
            # the first step may be one that is logged
            self.states.arm()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """As torchtitan's, with the tokens of all steps: its own count is wrong after a resume on other ranks."""
        dims, bits = self.parallel_dims, global_avg_loss / math.log(2)
        tokens = global_batch_size(self.job_config, dims.dp_replicate * dims.dp_shard) * self.job_config.training.seq_len
        metrics = {**(extra_metrics or {}), "n_tokens_seen": step * tokens, "bits_per_token": bits}
        if (num_bytes := bytes_per_token(self.job_config)) is not None:
            metrics["bits_per_byte"] = bits / num_bytes
        if self.states is not None:
            metrics |= self.states.collect()
        super().log(step, global_avg_loss, global_max_loss, grad_norm, metrics)
        self._arm_for(step + 1)

    def should_log(self, step: int) -> bool:
        # the trainer asks at every step: the first one is where the run starts or resumes, and replaces the steps from there
        if not self.started and self.jsonl is not None:
            self.jsonl.truncate(step)
        self.started = True
        logged = super().should_log(step)
        if not logged:
            self._arm_for(step + 1)
        return logged

    def _arm_for(self, step: int) -> None:
        """Watch the states in the coming step, if that is one to log."""
        if self.states is not None and super().should_log(step):
            self.states.arm()
        elif self.states is not None:
            self.states.disarm()


def _number(value: Any) -> Any:
    value = value.item() if isinstance(value, torch.Tensor) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        # not a line of ours, or one that a killed run left unfinished
        return math.inf
