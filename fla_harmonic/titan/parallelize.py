"""What of torchtitan's parallelism the three families support, and how it is applied to them."""

import os

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp, parallelize_llama
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from fla_harmonic.ops.harmonic import scan_op  # noqa: F401  (registers torch.ops.fla_harmonic)
from fla_harmonic.titan import mamba
from fla_harmonic.titan.config import data_section

# what op-selective activation checkpointing keeps. Mamba's `linear_scan` is not here: its states are 16 times as wide as
# the activations, and are computed anew chunk by chunk
_SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.fla_harmonic.harmonic_scan.default,
}


def check_job(job_config: JobConfig, family: str) -> None:
    """
    Refuse at start-up what would fail later, or train something else in silence.

    Args:
        job_config (JobConfig):
            The job, with or without the sections of `fla_harmonic.titan.config`.
        family (str):
            `"harmonic"`, `"mamba"` or `"llama"`.

    Raises:
        ValueError: says what is not supported, what is configured, and the remedy.
    """
    parallelism = job_config.parallelism
    fsdp = "Remedy: shard over the data, parallelism.data_parallel_shard_degree = -1 (FSDP) and all other degrees 1"
    degrees = {
        "context parallelism": "context_parallel_degree",
        "tensor parallelism": "tensor_parallel_degree",
        "pipeline parallelism": "pipeline_parallel_degree",
        "expert parallelism": "expert_parallel_degree",
    }
    for kind, field in degrees.items():
        if (degree := getattr(parallelism, field)) > 1:
            raise ValueError(f"{family}: {kind} is not supported, but parallelism.{field} = {degree}. {fsdp}")

    replicas, shards = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    if shards == -1:
        shards = int(os.environ.get("WORLD_SIZE", replicas)) // replicas
    if replicas > 1 and shards == 1:
        # torchtitan 0.2.2 divides by the global token count and DDP averages on top
        raise ValueError(
            f"{family}: replicas without shards (DDP) are not supported, because gradients would be divided twice, but "
            f"parallelism.data_parallel_replicate_degree = {replicas} with {shards} shard. {fsdp}, or both degrees > 1 (HSDP)"
        )

    if job_config.validation.enable:
        raise ValueError(
            f"{family}: validation during training is not supported, but validation.enable = true. "
            "Remedy: validation.enable = false, and evaluate the exported checkpoint"
        )
    if job_config.optimizer.early_step_in_backward:
        raise ValueError(
            f"{family}: optimizer steps in the backward pass are not supported (no clipping, no parameter groups), but "
            "optimizer.early_step_in_backward = true. Remedy: set it to false"
        )
    if job_config.fault_tolerance.enable:
        raise ValueError(
            f"{family}: torchft is not supported, but fault_tolerance.enable = true. Remedy: fault_tolerance.enable = false"
        )
    if job_config.model.converters:
        raise ValueError(
            f"{family}: model converters are not supported, but model.converters = {job_config.model.converters}. "
            "Remedy: model.converters = []"
        )
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if family == "mamba" and compiled and utils.device_type == "cuda" and mamba.HAS_MAMBA_KERNELS:
        raise ValueError(
            "mamba: torch.compile is not supported with mamba-ssm's kernels, which do not trace as one graph, but "
            f"compile.enable = true with compile.components = {job_config.compile.components}. "
            "Remedy: compile.enable = false, or compile.components = [\"loss\"]"
        )
    if family != "harmonic" and data_section(job_config).reset_documents:
        raise ValueError(
            f"{family}: documents of one window cannot be kept apart, but data.reset_documents = true. "
            "Remedy: data.reset_documents = false, or model.name = \"harmonic\""
        )


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """
    torchtitan's activation checkpointing, compilation and FSDP or HSDP, in this order, for an `HFModel`.

    Args:
        model (nn.Module):
            The model with torchtitan's names, on the meta device. It is changed in place.
        parallel_dims (ParallelDims):
            Meshes; only data parallelism is used (see `check_job`).
        job_config (JobConfig):
            The job.

    Returns:
        The model.
    """
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=_SAVED_OPS,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile)
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        apply_fsdp(
            model,
            parallel_dims.get_mesh(names),
            param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
            pp_enabled=False,
            cpu_offload=job_config.training.enable_cpu_offload,
            reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
        )
        _reduce_on_gloo(model)
        logger.info(f"Applied {'HSDP' if parallel_dims.dp_replicate_enabled else 'FSDP'} to the model")
    return model


def parallelize_llama_anywhere(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """torchtitan's `parallelize_llama`, also where gradients are reduced by gloo. Arguments and returns as `parallelize`."""
    model = parallelize_llama(model, parallel_dims, job_config)
    _reduce_on_gloo(model)
    return model


def _reduce_on_gloo(model: nn.Module) -> None:
    # gloo lacks the premultiplied sum that FSDP reduces with once torchtitan has set its divisor; a plain sum is the same
    if utils.device_type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
