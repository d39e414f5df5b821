"""What Harmonic's levels do on the data: the size of their states and their timescales, on logged steps."""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.layers.harmonic import HarmonicLevel


class StateMonitor:
    """
    Averages over what the levels of a model compute in training while it is armed:

    - `harmonic/level_1/state_rms`: root mean square of the states h over tokens, channels, layers and ranks;
    - `harmonic/level_1/mean_timescale`: mean of `1 / (1 - A)`, in tokens, over the same.

    Its hooks are there only while it is armed, so that other steps cost nothing. What the backward pass recomputes does not
    count, as checkpointing may choose some layers and not others. Compiled blocks call no hooks.
    """

    def __init__(self, model_parts: list[nn.Module], num_levels: int) -> None:
        self.layers = [module for part in model_parts for module in part.modules() if isinstance(module, HarmonicAttention)]
        # of each level: sum and number of the timescales, and of the squared states
        self.sums = torch.zeros(num_levels, 4, dtype=torch.float64, device=utils.device_type)
        self.handles: list[RemovableHandle] = []
        self.is_silent = False

    def arm(self) -> None:
        """Start again from nothing."""
        self.disarm()
        self.sums.zero_()
        for layer in self.layers:
            for index, level in enumerate(cast(Iterable[HarmonicLevel], layer.levels)):
                self.handles.append(level.register_forward_hook(partial(self._see_timescales, index)))
                self.handles.append(level.norm.register_forward_pre_hook(partial(self._see_states, index)))

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def collect(self) -> dict[str, float]:
        """The averages over all ranks, each of which must call; nothing, and one line in the log, where no hook was called."""
        self.disarm()
        if dist.is_initialized():
            dist.all_reduce(self.sums)
        metrics = {}
        for index, (tau, taus, square, squares) in enumerate(self.sums.tolist(), start=1):
            if taus and squares:
                metrics[f"harmonic/level_{index}/state_rms"] = (square / squares) ** 0.5
                metrics[f"harmonic/level_{index}/mean_timescale"] = tau / taus
        if not metrics and not self.is_silent:
            logger.info("states and timescales of the levels are not logged: the layers call no hooks in this job")
            self.is_silent = True
        return metrics

    @torch.no_grad()
    def _add(self, level: int, column: int, values: torch.Tensor) -> None:
        self.sums[level, column] += values.sum(dtype=torch.float64)
        self.sums[level, column + 1] += values.numel()

    def _see_timescales(self, index: int, level: nn.Module, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        if _counts(level):
            a_min, a_max = cast(HarmonicLevel, level).decay_range
            u = _local(outputs[0]).detach().float()
            self._add(index, 0, 1 / ((1 - a_max) + (a_max - a_min) * torch.sigmoid(-u)))

    def _see_states(self, index: int, norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if _counts(norm):
            self._add(index, 2, _local(inputs[0]).detach().float().square())


def _counts(module: nn.Module) -> bool:
    """Whether a module runs in a forward pass of training: no validation, and no recomputation in a backward pass."""
    return module.training and torch._C._current_graph_task_id() == -1


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
