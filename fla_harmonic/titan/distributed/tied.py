"""Parallelism of a model that has one table for token embeddings and head."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division

from fla_harmonic.titan.components.loss import TiedHead


def is_tied(model: nn.Module) -> bool:
    """Whether the model's head is a `TiedHead`."""
    return isinstance(model.output, TiedHead)


def apply_fsdp_tied(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
) -> None:
    """
    torchtitan's `apply_fsdp` for a model whose head is a `TiedHead`: embeddings, last norm and head are one group, whose
    table is gathered once for both uses, and whose gradient is reduced once with both parts in it. Arguments as there.
    """
    policies: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    if cpu_offload:
        policies["offload_policy"] = CPUOffloadPolicy()
    reshard = reshard_after_forward_policy != "never"
    for block in cast(nn.ModuleDict, model.layers).values():
        fully_shard(block, mesh=dp_mesh, reshard_after_forward=reshard, **policies)
    # kept after the head, whose backward pass comes at once
    fully_shard(
        [cast(nn.Module, module) for module in (model.tok_embeddings, model.norm, model.output)], mesh=dp_mesh,
        reshard_after_forward=reshard_after_forward_policy == "always", **policies,
    )
    fully_shard(model, mesh=dp_mesh, **policies)
    disable_fsdp_gradient_division(model)
