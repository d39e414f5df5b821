"""Initial weights that do not depend on how the model is sharded, compiled or checkpointed."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# what activation checkpointing and torch.compile put into the names of what they wrap
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """The name that a parameter, buffer or module has without activation checkpointing and `torch.compile`."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@torch.no_grad()
def init_from_reference(
    model: nn.Module, build: Callable[[], nn.Module], seed: int | None = None, buffer_device: torch.device | None = None
) -> None:
    """
    Copy into `model` the parameters and buffers of the same model, which `build` returns initialised, unsharded on the CPU.

    Stock torchtitan lets every rank draw its own shard, so the numbers depend on the sharding. Here every rank draws the
    whole model from the same seed and keeps its part: one rank, FSDP and HSDP begin with the same bits, by the model's own
    initialisation. The caller's random state stays as it was.

    Args:
        model (nn.Module):
            What `to_empty` left: plain tensors or DTensors on any device. A stage of a pipeline has its own part alone.
        seed (int | None):
            Seed of the draw. Default: `torch.initial_seed()`, on which torchtitan makes all ranks agree.
        buffer_device (torch.device | None):
            Where buffers go. Default: where they are.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(torch.initial_seed() if seed is None else seed)
        reference = build()

    _drop_other_stages(model, reference)
    for target, source in _pairs("parameters", model.named_parameters(), reference.named_parameters()).values():
        if isinstance(target, DTensor):
            shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
            window = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            target.to_local().copy_(source[window])
        else:
            target.copy_(source)

    # a buffer may have to change its device: the module that owns it gets a new one
    owners = {clean_name(name): module for name, module in model.named_modules()}
    for name, (target, source) in _pairs("buffers", model.named_buffers(), reference.named_buffers()).items():
        owner, _, leaf = name.rpartition(".")
        owners[owner]._buffers[leaf] = source.to(buffer_device or target.device)


def _drop_other_stages(model: nn.Module, reference: nn.Module) -> None:
    """Remove what torchtitan takes out of a stage of a pipeline: modules set to None, entries of a `ModuleDict`."""
    for name, module in list(reference.named_children()):
        mine = model._modules.get(name, module)
        if mine is None:
            setattr(reference, name, None)
        elif isinstance(module, nn.ModuleDict) and isinstance(mine, nn.ModuleDict):
            for key in module.keys() - mine.keys():
                del module[key]


def _pairs(
    kind: str, targets: Iterable[tuple[str, torch.Tensor]], sources: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    mine, theirs = ({clean_name(name): tensor for name, tensor in named} for named in (targets, sources))
    if wrong := sorted(
        name for name in mine.keys() | theirs.keys()
        if name not in mine or name not in theirs or mine[name].shape != theirs[name].shape
    ):
        raise RuntimeError(
            f"expected the same {kind} in the model and in its unsharded twin, but these differ in name or shape: "
            f"{', '.join(wrong)}. Remedy: build both from the same arguments"
        )
    return {name: (target, theirs[name]) for name, target in mine.items()}
