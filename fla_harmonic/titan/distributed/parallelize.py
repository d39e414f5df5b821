"""What of torchtitan's parallelism the three families support, and how it is applied to them."""

import os
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
from fla_harmonic.models.mamba import modeling_mamba as mamba
from fla_harmonic.ops.harmonic import context_parallel, scan_op  # noqa: F401  (register torch.ops.fla_harmonic)
from fla_harmonic.titan.config import data_section
from fla_harmonic.titan.distributed.context_parallel import apply_context_parallel
from fla_harmonic.titan.distributed.tensor_parallel import apply_tensor_parallel
from fla_harmonic.titan.distributed.tied import apply_fsdp_tied, is_tied

# what op-selective activation checkpointing keeps: torchtitan's list and our scans (over ranks, computing one anew would
# communicate anew). Not Mamba's convolution, which is quick, nor its `linear_scan`, whose states are 16 times as wide as the
# activations, and are computed anew chunk by chunk
_SAVED_OPS = {
    *_op_sac_save_list,
    torch.ops.fla_harmonic.harmonic_scan.default,
    torch.ops.fla_harmonic.cp_harmonic_scan.default,
    torch.ops.fla_harmonic.selective_scan.default,
}

# first segment and later ones, one document and several, training and validation: seven to a dozen were seen
_GRAPHS_OF_A_BLOCK = 64

# the schedules that were compared with one process
_SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")


def check_job(job_config: JobConfig, family: str) -> None:
    """
    Refuse at start-up what would fail later, or train something else in silence.

    Args:
        job_config (JobConfig):
            The job, with or without the sections of `fla_harmonic.titan.config`.
        family (str):
            `"harmonic"`, `"mamba"`, `"llama"` or `"hallamonic"`.

    Raises:
        ValueError: says what is not supported, what is configured, and the remedy.
    """
    _check_degrees(job_config, family)
    _check_combinations(job_config, family)
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
    if family in ("mamba", "llama") and data_section(job_config).reset_documents:
        raise ValueError(
            f"{family}: documents of one window cannot be kept apart, but data.reset_documents = true. "
            "Remedy: data.reset_documents = false, or model.name = \"harmonic\""
        )


def _shards(job_config: JobConfig) -> int:
    """Ranks that share one copy of the parameters, as torchtitan reckons them: shards of the data and of the sequence."""
    parallelism = job_config.parallelism
    shards, context = parallelism.data_parallel_shard_degree, parallelism.context_parallel_degree
    if shards == -1:
        others = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
        others *= parallelism.pipeline_parallel_degree * context
        shards = max(1, int(os.environ.get("WORLD_SIZE", others)) // others)
    return shards * context


def _check_degrees(job_config: JobConfig, family: str) -> None:
    parallelism = job_config.parallelism
    shard = "parallelism.data_parallel_shard_degree = -1 (FSDP)"
    unsupported = {"expert": "there are no experts"}
    if family == "mamba":
        unsupported["tensor"] = "the projections of its mixer mix what the ranks would hold"
        unsupported["context"] = "its mixer starts every rank's piece from an empty state"
    elif family == "llama" and utils.device_type == "cpu":
        unsupported["context"] = "torch's ring attention has no CPU kernels"
    elif family == "hallamonic":
        unsupported |= dict.fromkeys(("tensor", "context", "pipeline"), "its layers are those of the pretrained model's class")
    for kind, reason in unsupported.items():
        if (degree := getattr(parallelism, f"{kind}_parallel_degree")) > 1:
            raise ValueError(
                f"{family}: {kind} parallelism is not supported ({reason}), but parallelism.{kind}_parallel_degree = "
                f"{degree}. Remedy: set it to 1 and shard over the data, {shard}"
            )
    if (degree := parallelism.expert_tensor_parallel_degree) > 1:
        raise ValueError(
            f"{family}: expert parallelism is not supported (there are no experts), but "
            f"parallelism.expert_tensor_parallel_degree = {degree}. Remedy: set it to 1"
        )
    replicas, tensor = parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree
    pipeline, context = parallelism.pipeline_parallel_degree, parallelism.context_parallel_degree
    if replicas > 1 and _shards(job_config) == 1 and tensor * pipeline > 1:
        raise ValueError(
            f"{family}: replicas without shards (DDP) do not combine with tensor or pipeline parallelism, but "
            f"parallelism.data_parallel_replicate_degree = {replicas} with tensor_parallel_degree = {tensor} and "
            f"pipeline_parallel_degree = {pipeline}. Remedy: data_parallel_replicate_degree = 1 and {shard}"
        )
    if (length := job_config.training.seq_len) % (tensor * context):
        raise ValueError(
            f"{family}: expected training.seq_len to be a multiple of tensor x context parallel degree = {tensor} x "
            f"{context}, but got {length}. Remedy: a length that is one"
        )
    if family == "harmonic" and context > 1 and parallelism.context_parallel_load_balancer == "ptrr":
        raise ValueError(
            "harmonic: a recurrence needs contiguous pieces of the sequence, but parallelism.context_parallel_load_balancer = "
            "'ptrr'. Remedy: leave it out; it is switched off"
        )


def _check_combinations(job_config: JobConfig, family: str) -> None:
    parallelism, training, compile_ = job_config.parallelism, job_config.training, job_config.compile
    tensor, pipeline = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    is_sharded = _shards(job_config) > 1
    if tensor * pipeline > 1 and not is_sharded and training.mixed_precision_param != training.dtype:
        raise ValueError(
            f"{family}: tensor or pipeline parallelism without FSDP trains in training.dtype alone, {training.dtype}, but "
            f"training.mixed_precision_param = {training.mixed_precision_param!r}. Remedy: make both equal, or add FSDP "
            "(parallelism.data_parallel_shard_degree > 1)"
        )
    if family != "llama" and training.dtype != "float32":
        raise ValueError(
            f"{family}: timescales need parameters in float32 (rounded to bfloat16 they are off by up to 2% for good), but "
            f"training.dtype = {training.dtype!r}. Remedy: training.dtype = \"float32\", and bfloat16 by "
            "training.mixed_precision_param"
        )
    if training.enable_cpu_offload and not (is_sharded and utils.device_type != "cpu"):
        raise ValueError(
            f"{family}: parameters are offloaded to the CPU by FSDP on an accelerator, but training.enable_cpu_offload = true "
            f"{'without FSDP' if utils.device_type != 'cpu' else 'on the CPU'}. Remedy: training.enable_cpu_offload = false"
        )
    if tensor > 1 and compile_.enable and "loss" in compile_.components and not parallelism.disable_loss_parallel:
        raise ValueError(
            f"{family}: a loss over sharded logits must not be compiled (wrong values, torch 2.13), but "
            f"parallelism.tensor_parallel_degree = {tensor} with compile.components = {compile_.components}. Remedy: "
            "compile.components = [\"model\"], or parallelism.disable_loss_parallel = true"
        )
    if family == "harmonic" and tensor > 1 and parallelism.enable_async_tensor_parallel:
        raise ValueError(
            "harmonic: asynchronous tensor parallelism is not supported, but parallelism.enable_async_tensor_parallel = true. "
            "Remedy: set it to false"
        )
    if pipeline > 1 and (
        parallelism.pipeline_parallel_schedule not in _SCHEDULES or parallelism.pipeline_parallel_schedule_csv
    ):
        raise ValueError(
            f"{family}: expected parallelism.pipeline_parallel_schedule in {_SCHEDULES} (others were not compared with one "
            f"process) and no pipeline_parallel_schedule_csv, but got {parallelism.pipeline_parallel_schedule!r} and "
            f"{parallelism.pipeline_parallel_schedule_csv!r}. Remedy: one of these, and no file"
        )
    if pipeline > 1 and data_section(job_config).reset_documents:
        raise ValueError(
            f"{family}: torchtitan hands document_ids to the first stage of a pipeline alone, but data.reset_documents = true "
            f"with parallelism.pipeline_parallel_degree = {pipeline}. Remedy: data.reset_documents = false, or no pipeline"
        )


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """
    Tensor and context parallelism, then torchtitan's activation checkpointing, compilation, and FSDP, HSDP or DDP, in this
    order, for an `HFModel` or a pipeline stage of one.

    Args:
        model (nn.Module):
            The model with torchtitan's names, on the meta device. It is changed in place.
        parallel_dims (ParallelDims):
            Meshes; `check_job` says which may be larger than 1.
        job_config (JobConfig):
            The job.

    Returns:
        The model.

    Raises:
        ValueError: the tensor or context parallel degree does not fit the model.
    """
    training = job_config.training
    if parallel_dims.tp_enabled:
        apply_tensor_parallel(
            model, parallel_dims.get_mesh("tp"), loss_parallel=not job_config.parallelism.disable_loss_parallel)
    if parallel_dims.cp_enabled:
        apply_context_parallel(model, parallel_dims.get_mesh("cp"), job_config)
    compiled = job_config.compile.enable and "model" in job_config.compile.components
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
    """`apart`: blocks that hand states on differ in their index, and together would exceed torch.compile's limit of graphs."""
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
