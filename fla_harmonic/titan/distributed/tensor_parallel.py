"""
Tensor parallelism of `HFModel` with Harmonic blocks.

Between the maps each rank holds a part of the tokens, within a level's recurrence a part of its channels:

    z [tokens] -gather-> gate, input (column-wise) -> scan of the rank's channels -all-to-all-> norm, P [tokens]

So a norm sees whole levels, a prediction map P is applied to whole tokens, and the scan to whole sequences. Norms and P are
on every rank, each with the gradients of its own tokens, which are added up. The output projection is row-wise.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torchtitan.tools.logging import logger

from fla_harmonic.layers.harmonic import HarmonicAttention, HarmonicLevel

_TOKENS, _CHANNELS = Shard(1), Shard(2)


def check_sizes(block: nn.Module, degree: int) -> None:
    """A ValueError where the block has a size that the degree does not divide."""
    attn = cast(HarmonicAttention, block.attn)
    mlp = cast(nn.Module, block.mlp)
    sizes = {"channels of a level": attn.level_size, "`intermediate_size`": cast(nn.Linear, mlp.up_proj).out_features}
    gates = cast(HarmonicLevel, attn.levels[0]).gate_proj
    if isinstance(gates, nn.Sequential):
        sizes["inner size of a gate"] = cast(nn.Linear, gates[0]).out_features
    if wrong := {name: size for name, size in sizes.items() if size % degree}:
        listed = ", ".join(f"{name} = {size}" for name, size in wrong.items())
        raise ValueError(
            f"harmonic: tensor parallelism cuts channels into equal parts, but parallelism.tensor_parallel_degree = "
            f"{degree} does not divide {listed}. Remedy: a degree that does"
        )


class LocalParameters(ParallelStyle):
    """
    Parameters are DTensors outside a module's forward and the rank's plain tensors within, so that the module, and any
    kernel in it, computes on local tensors. `grad_placement` is how the gradient that a rank computes lies on the mesh.
    """

    def __init__(self, placement: Placement, grad_placement: Placement) -> None:
        self.placement, self.grad_placement = placement, grad_placement

    def prepare(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The local input that the module's forward takes, from the one that its caller has."""
        return x

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, p in module.named_parameters(recurse=False):
            placed = distribute_tensor(p, mesh, [self.placement])
            module.register_parameter(name, nn.Parameter(placed, requires_grad=p.requires_grad))
        whole_forward = module.forward

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            x = self.prepare(x, mesh)
            placed = {name: p for name, p in module._parameters.items() if p is not None}
            try:
                for name, p in placed.items():
                    module._parameters[name] = self._local(p)  # type: ignore[assignment]
                return whole_forward(x, *args, **kwargs)
            finally:
                module._parameters.update(placed)

        module.forward = forward  # type: ignore[method-assign]
        return module

    def _local(self, p: nn.Parameter) -> torch.Tensor:
        # the redistribution, of nothing in the forward pass, adds partial gradients up in the backward pass
        placed = cast(DTensor, p).redistribute(placements=[self.placement])
        return placed.to_local(grad_placements=[self.grad_placement])


class TokenParallel(LocalParameters):
    """Whole weights on every rank, applied to the rank's tokens."""

    def __init__(self) -> None:
        super().__init__(Replicate(), Partial())


class LevelNorm(TokenParallel):
    """The norm of a level's states: from the rank's channels of all tokens to all channels of the rank's tokens."""

    def prepare(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(x, mesh, [_CHANNELS], run_check=False).redistribute(placements=[_TOKENS]).to_local()


class ChannelParallel(LocalParameters):
    """A parameter a channel, applied to the rank's channels."""

    def __init__(self) -> None:
        super().__init__(Shard(0), Shard(0))


class SynchronousRowwise(RowwiseParallel):
    """`RowwiseParallel` whose reduction is waited for: AOTAutograd of torch 2.13 fails on the asynchronous result."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):  # type: ignore[no-untyped-def]
        if outputs.placements != output_layouts:
            outputs = outputs.redistribute(placements=output_layouts, async_op=False)
        return outputs.to_local() if use_local_output else outputs


class VocabularyParallel(ColwiseParallel):
    """`ColwiseParallel` of a head that returns logits, or the loss, which is every rank's alike."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):  # type: ignore[no-untyped-def]
        if outputs.ndim == 0:
            return outputs
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, loss_parallel: bool) -> None:
    """
    Shard an `HFModel` of Harmonic blocks on the meta device, or a pipeline stage of one, in place. With `loss_parallel`
    logits stay sharded over the vocabulary.

    Raises:
        ValueError: the mesh does not fit the model (see `check_sizes`).
    """
    blocks = cast(nn.ModuleDict, model.layers).values()
    for block in blocks:
        check_sizes(block, mesh.size())
    whole: dict[str, ParallelStyle] = {
        "tok_embeddings": SynchronousRowwise(input_layouts=Replicate(), output_layouts=_TOKENS),
        "norm": TokenParallel(),
        "output": VocabularyParallel(
            input_layouts=_TOKENS,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    # a pipeline stage lacks some of these
    plan = {name: style for name, style in whole.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, plan)
    for block in blocks:
        parallelize_module(block, mesh, _block_plan(block))
        # fla's fused product of activation and down projection reads the projection's weight itself
        cast(Any, block.mlp).fuse_swiglu = False
    logger.info("Applied tensor parallelism to the model")


def _block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    attn = cast(HarmonicAttention, block.attn)
    to_whole = PrepareModuleInput(input_layouts=(_TOKENS,), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "attn_norm": TokenParallel(),
        "mlp_norm": TokenParallel(),
        "mlp": to_whole,
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": SynchronousRowwise(output_layouts=_TOKENS),
    }
    if hasattr(block.mlp, "gate_proj"):
        plan["mlp.gate_proj"] = ColwiseParallel()
    for i, level in enumerate(cast(list[HarmonicLevel], attn.levels)):
        name = f"attn.levels.{i}"
        plan[name] = to_whole
        plan[f"{name}.timescale"] = ChannelParallel()
        plan[f"{name}.norm"] = LevelNorm()
        for maps in ("gate_proj", "input_proj"):
            if isinstance(getattr(level, maps), nn.Linear):
                plan[f"{name}.{maps}"] = ColwiseParallel()
            else:
                last = len(getattr(level, maps)) - 1
                plan[f"{name}.{maps}.0"] = ColwiseParallel()
                plan[f"{name}.{maps}.{last}"] = SynchronousRowwise(output_layouts=_CHANNELS)
        if attn.use_prediction_error and i + 1 < len(attn.levels):
            plan[f"attn.predictions.{i}"] = TokenParallel()
    if attn.use_output_gate:
        plan["attn.g_proj"] = ColwiseParallel(input_layouts=_TOKENS, output_layouts=_TOKENS)
    if attn.use_output_proj:
        plan["attn.o_proj"] = SynchronousRowwise(input_layouts=_TOKENS, output_layouts=_TOKENS)
    return plan
