"""How torchtitan's parallelism is applied to the models."""

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list, apply_ddp, apply_fsdp, parallelize_llama
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from fla_harmonic.layers.harmonic import Timescale

# these register torch.ops.fla_harmonic
from fla_harmonic.ops.harmonic import context_parallel  # noqa: F401
from fla_harmonic.ops.mamba import selective_scan  # noqa: F401
from fla_harmonic.titan.config import compiles_model
from fla_harmonic.titan.distributed.tensor_parallel import apply_tensor_parallel
from fla_harmonic.titan.distributed.tied import apply_fsdp_tied, is_tied

# what op-selective activation checkpointing keeps: torchtitan's list and our scans (recomputing one over ranks would
# communicate again). Not Mamba's convolution, which is quick, nor its `linear_scan`, whose states are 16 times as wide as the
# activations and are recomputed chunk by chunk
_SAVED_OPS = {
    *_op_sac_save_list,
    torch.ops.fla_harmonic.harmonic_scan.default,
    torch.ops.fla_harmonic.cp_harmonic_scan.default,
    torch.ops.fla_harmonic.selective_scan.default,
}

# first segment and later ones, one document and several, training and validation: seven to a dozen were seen
_GRAPHS_OF_A_BLOCK = 64


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """
    Tensor and context parallelism, then torchtitan's activation checkpointing, compilation, and FSDP, HSDP or DDP, in this
    order, for an `HFModel` on the meta device, or a pipeline stage of one. It is changed in place, and returned.

    Raises:
        ValueError: the tensor parallel degree does not divide the model's sizes.
    """
    training = job_config.training
    if parallel_dims.tp_enabled:
        apply_tensor_parallel(
            model, parallel_dims.get_mesh("tp"), loss_parallel=not job_config.parallelism.disable_loss_parallel)
    if parallel_dims.cp_enabled:
        cast(Any, model).cp_group = parallel_dims.get_mesh("cp").get_group()
    compiled = compiles_model(job_config)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=_SAVED_OPS,
            base_folder=job_config.job.dump_folder,
        )
    # FSDP rounds what it gathers, and a group within a block breaks the block's graph
    has_wide_groups = parallel_dims.fsdp_enabled and training.mixed_precision_param != "float32"
    if compiled:
        _compile_blocks(model, job_config.compile.backend, fullgraph=not has_wide_groups,
                        apart=bool(getattr(model, "state_layout", ())))
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        mesh = parallel_dims.get_mesh(names)
        if has_wide_groups:
            _keep_timescales_wide(model, mesh, training.enable_cpu_offload)
        shard = apply_fsdp_tied if is_tied(model) else partial(apply_fsdp, pp_enabled=parallel_dims.pp_enabled)
        shard(
            model,
            mesh,
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cpu_offload=training.enable_cpu_offload,
            reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
        )
        _reduce_on_gloo(model)
        logger.info(f"Applied {'HSDP' if parallel_dims.dp_replicate_enabled else 'FSDP'} to the model")
    elif parallel_dims.dp_replicate_enabled:
        # averages, which the loss makes up for (`gradient_scale.replicas_summed`)
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=compiled)
    return model


def parallelize_llama_anywhere(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """torchtitan's `parallelize_llama`, also where gradients are reduced by gloo. Arguments and returns as `parallelize`."""
    if is_tied(model):
        return parallelize(model, parallel_dims, job_config)
    model = parallelize_llama(model, parallel_dims, job_config)
    _reduce_on_gloo(model)
    return model


def _compile_blocks(model: nn.Module, backend: str, fullgraph: bool, apart: bool) -> None:
    """`apart`: blocks that pass states on differ in their index, and together would exceed torch.compile's limit of graphs."""
    layers = cast(nn.ModuleDict, model.layers)
    for name, block in layers.named_children():
        # torch's overloads lack its newest arguments
        compiled = cast(Any, torch.compile)(block, backend=backend, fullgraph=fullgraph, isolate_recompiles=apart,
                                            recompile_limit=_GRAPHS_OF_A_BLOCK if apart else None)
        layers.register_module(name, compiled)
    logger.info("Compiling each block with torch.compile")


def _keep_timescales_wide(model: nn.Module, mesh: DeviceMesh, cpu_offload: bool) -> None:
    """Groups of their own for the biases that set the timescales: FSDP rounds what is in a group to one type."""
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if cpu_offload else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in model.modules():
        if isinstance(module, Timescale):
            fully_shard(module, mesh=mesh, mp_policy=policy, **options)


def _reduce_on_gloo(model: nn.Module) -> None:
    # gloo lacks the premultiplied sum that FSDP reduces with once torchtitan has set its divisor; a plain sum is the same
    if utils.device_type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
