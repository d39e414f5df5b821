"""Adam and AdamW with weight decay on matrices alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims

from fla_harmonic.titan.components.init import clean_name

_CLASSES = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
_IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
# log-decays of Mamba: a matrix in shape, a table of timescales in meaning
_TIMESCALES = ("A_log",)


def undecayed_names(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> frozenset[str]:
    """
    Names of the parameters without weight decay: all of fewer than two dimensions (biases, norms, timescales), Mamba's
    `A_log`, and what its layer flagged with `_no_weight_decay`.

    `to_empty` and FSDP replace parameters and drop such flags, so a model that has any asks when it is built and keeps the
    answer as `undecayed`, where the optimizer reads it.
    """
    return frozenset(
        clean_name(name) for name, p in named_parameters
        if p.ndim < 2 or name.rpartition(".")[2] in _TIMESCALES or getattr(p, "_no_weight_decay", False)
    )


class DecayGroupsContainer(OptimizersContainer):
    """
    torchtitan's container with two parameter groups per model part: matrices with weight decay, the rest without, which stay
    as they are, bit for bit, where they have no gradient. Checkpoints are torchtitan's: state is stored by parameter name.
    A model that has `undecayed` (names) excludes these as well.
    """

    def __init__(
        self, model_parts: list[nn.Module], optimizer_cls: type[torch.optim.Optimizer], optimizer_kwargs: dict[str, Any],
    ) -> None:
        self.optimizers, self.model_parts = [], model_parts
        all_params: list[nn.Parameter] = []
        for model in model_parts:
            undecayed = undecayed_names(model.named_parameters()) | getattr(model, "undecayed", frozenset())
            params = {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}
            groups: list[dict[str, Any]] = [
                {"params": [p for name, p in params.items() if name not in undecayed]},
                {"params": [p for name, p in params.items() if name in undecayed], "weight_decay": 0.0},
            ]
            self.optimizers.append(optimizer_cls([group for group in groups if group["params"]], **optimizer_kwargs))
            all_params.extend(params.values())
        self._validate_length(len(model_parts))
        self._post_init(all_params, optimizer_kwargs)


def build_optimizers(
    model_parts: list[nn.Module], optimizer_config: OptimizerConfig, parallel_dims: ParallelDims, ft_manager: None = None
) -> DecayGroupsContainer:
    """`build_optimizers_fn` of all families."""
    for field, known in {"name": tuple(_CLASSES), "implementation": _IMPLEMENTATIONS}.items():
        if (value := getattr(optimizer_config, field)) not in known:
            raise ValueError(f"expected optimizer.{field} in {known}, but got {value!r}")
    return DecayGroupsContainer(model_parts, _CLASSES[optimizer_config.name], {
        "lr": optimizer_config.lr,
        "betas": (optimizer_config.beta1, optimizer_config.beta2),
        "eps": optimizer_config.eps,
        "weight_decay": optimizer_config.weight_decay,
        "fused": optimizer_config.implementation == "fused",
        "foreach": optimizer_config.implementation == "foreach",
    })
