"""Pipeline parallelism over blocks: torchtitan's own, with gradients of the right size."""

import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineSchedule, get_schedule_class
from torchtitan.components.loss import LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import BaseModelArgs, ParallelizeFunction

from fla_harmonic.titan.config import global_batch_size
from fla_harmonic.titan.distributed.gradient_scale import scale_gradient


def check_stages(job_config: JobConfig, n_layers: int) -> None:
    """
    Raises:
        ValueError: the model has fewer blocks than the pipeline has stages.
    """
    parallelism = job_config.parallelism
    if (degree := parallelism.pipeline_parallel_degree) == 1:
        return
    is_single = issubclass(get_schedule_class(parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    stages = degree * (1 if is_single else 2)
    if n_layers < stages:
        raise ValueError(
            f"{job_config.model.name}: expected a block for each pipeline stage, but flavor {job_config.model.flavor!r} has "
            f"{n_layers} and parallelism.pipeline_parallel_degree = {degree} with pipeline_parallel_schedule = "
            f"{parallelism.pipeline_parallel_schedule!r} makes {stages} stages. Remedy: a lower degree, "
            "a schedule with one stage a rank (1F1B), or a flavor with more blocks"
        )


def pipeline(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: BaseModelArgs,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    """
    torchtitan's `pipeline_llm`, whose gradients are divided by the labels of a step: every window of the loader is full of
    them, so their number is known before the run. Arguments and returns as there.
    """
    rows = global_batch_size(job_config, parallel_dims.dp_replicate * parallel_dims.dp_shard)
    loss_fn = scale_gradient(loss_fn, 1 / (rows * job_config.training.seq_len))
    return pipeline_llm(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn)
