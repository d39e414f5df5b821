"""
`[audit]`: the batch at hand is audited before a training step.

torchtitan 0.2's trainer has no hook between a batch and its step, so `Trainer.train_step` is wrapped.
"""

import itertools
import sys
from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.logging import logger

from fla_harmonic.titan.components.audit import audit_batch
from fla_harmonic.titan.config import audit_section


def install_training_audit() -> None:
    """Wrap the trainer's step, once."""
    trainer = _trainer_module().Trainer
    stock = trainer.train_step
    if getattr(stock, "is_audited", False):
        return

    @wraps(stock)
    def train_step(self: Any, data_iterator: Iterator[Any]) -> None:
        interval = audit_section(self.job_config).interval
        if interval and (self.step == 1 or self.step % interval == 0):
            batch = next(data_iterator)
            _audit(self, *batch)
            data_iterator = itertools.chain([batch], data_iterator)
        stock(self, data_iterator)

    train_step.is_audited = True  # type: ignore[attr-defined]
    trainer.train_step = train_step


def _trainer_module() -> ModuleType:
    """`torchtitan.train`, which is named `__main__` where it is the program."""
    main, spec = sys.modules["__main__"], find_spec("torchtitan.train")
    if spec is not None and getattr(main, "__file__", None) == spec.origin:
        return main
    return import_module("torchtitan.train")


def _audit(trainer: Any, inputs: dict[str, Any], labels: torch.Tensor) -> None:
    dims, states = trainer.parallel_dims, getattr(trainer.metrics_processor, "states", None)
    inputs = {name: value.to(trainer.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}

    def loss_of(inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        # the step of training itself, whose gradients are dropped
        valid = (labels != IGNORE_INDEX).sum().clamp_min(1).float()
        loss = trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=valid)
        trainer.optimizers.zero_grad()
        return loss

    rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    tried = audit_batch(
        loss_of, inputs, labels.to(trainer.device), trainer.model_args.vocab_size,
        (trainer.job_config.debug.seed or 0, trainer.step, rank), f"training step {trainer.step}")
    if states is not None and states.handles:
        # it watches what trains
        states.arm()
    logger.info(f"audit of step {trainer.step}: causal; {tried}")
