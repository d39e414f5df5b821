"""Pipeline parallelism over blocks: torchtitan's own, with gradients of the right size."""

import torch
from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torchtitan.components.loss import LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import BaseModelArgs, ParallelizeFunction

from fla_harmonic.titan.config import global_batch_size
from fla_harmonic.titan.distributed.gradient_scale import scale_gradient


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
