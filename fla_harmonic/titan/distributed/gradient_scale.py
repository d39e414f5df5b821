"""
Gradients divided by the global token count exactly once, where stock torchtitan 0.2.2 divides too often or not at all.

The trainer divides the summed loss by the global number of labels. DDP then averages over its replicas on top, and
pipeline parallelism leaves the division to a value that is only logged. Both are put right where the loss begins.
"""

from collections.abc import Callable
from typing import Any

import torch
from torchtitan.components.loss import LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims


class _ScaleGradient(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        # the schedules of pipeline parallelism detach the loss in place, which a view forbids
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(loss_fn: LossFunction, factor: float) -> LossFunction:
    """The loss function with the same values, and `factor` times its gradients."""
    def scaled(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _ScaleGradient.apply(loss_fn(pred, labels), factor)
    return scaled if factor != 1 else loss_fn


def replicas_summed(build_loss_fn: Callable[..., LossFunction]) -> Callable[..., LossFunction]:
    """
    A `build_loss_fn` whose gradients DDP adds up where it alone would average them.

    Not a communication hook that sums: with gradient accumulation DDP reduces what it has reduced already along with what
    is new, which an average leaves as it is and a sum counts once a replica.
    """
    def build(job_config: JobConfig, parallel_dims: ParallelDims, **kwargs: Any) -> LossFunction:
        loss_fn = build_loss_fn(job_config, parallel_dims=parallel_dims, **kwargs)
        is_ddp = parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled
        return scale_gradient(loss_fn, parallel_dims.dp_replicate if is_ddp else 1)
    return build
