"""Jobs of the plugin's configs, and their models."""

import copy
from typing import Any, TypeVar

import torch
from runs import ROOT
from torch import nn
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.train_spec import get_train_spec

CONFIGS = ROOT / "titan_configs"
Model = TypeVar("Model", bound=nn.Module)


def job(family: str = "harmonic", *overrides: str, size: str = "debug") -> JobConfig:
    return ConfigManager().parse_args([f"--job.config_file={CONFIGS / f'{family}_{size}.toml'}", *overrides])


def arguments(config: JobConfig) -> Any:
    """Arguments of a job's model."""
    args = copy.deepcopy(get_train_spec(config.model.name).model_args[config.model.flavor])
    args.update_from_config(config)
    return args


def initialised(model: Model) -> Model:
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
    return model


def moved(model: Model, seed: int | None = None) -> Model:
    """At weights that no initialisation gives: no bias or norm is at a value that hides it."""
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def build(config: JobConfig) -> nn.Module:
    return initialised(get_train_spec(config.model.name).model_cls(arguments(config)))


def build_as_trainer(config: JobConfig) -> nn.Module:
    """On the meta device, memory full of NaN, initial weights."""
    with torch.device("meta"):
        model = get_train_spec(config.model.name).model_cls(arguments(config))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(torch.nan)
    return initialised(model)
