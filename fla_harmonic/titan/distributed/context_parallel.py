"""Context parallelism of `HFModel`: each rank holds a contiguous piece of every sequence."""

from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.titan.config import data_section


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, job_config: JobConfig) -> None:
    """
    Let the recurrences of an `HFModel`, or of a pipeline stage of one, run over the ranks of a mesh.

    Raises:
        ValueError: a block would not see what precedes its piece, or the pieces are too short.
    """
    said = f"parallelism.context_parallel_degree = {mesh.size()}"
    remedy = "Remedy: parallelism.context_parallel_degree = 1, or a flavor without it"
    for block in cast(nn.ModuleDict, model.layers).values():
        attn = block.attn
        if not isinstance(attn, HarmonicAttention) or attn.mode != "chunk":
            part = f"attn_mode {attn.mode!r}" if isinstance(attn, HarmonicAttention) else f"a block of {type(attn).__name__}"
            raise ValueError(f"harmonic: context parallelism does not support {part}, but {said}. {remedy}")
        if attn.use_short_conv and data_section(job_config).reset_documents:
            raise ValueError(
                "harmonic: context parallelism does not support `use_short_conv` with data.reset_documents = true, but "
                f"{said}. {remedy}, or data.reset_documents = false"
            )
        if attn.use_short_conv and job_config.training.seq_len // mesh.size() < attn.conv_size - 1:
            raise ValueError(
                f"harmonic: expected pieces of at least conv_size - 1 = {attn.conv_size - 1} tokens, but {said} cuts "
                f"training.seq_len = {job_config.training.seq_len} into shorter ones. Remedy: a longer sequence or fewer ranks"
            )
    cast(Any, model).cp_group = mesh.get_group()
    logger.info("Applied context parallelism to the model")
