"""Planted leaks in a model that torchtitan trains, in some modes or on some ranks."""

import os

import torch

import fla_harmonic.titan  # noqa: F401  (registers the families)
from fla_harmonic.titan.models.hf_model import HFModel

_stock = HFModel.forward
KIND = os.environ["LEAK"]


def forward(self: HFModel, tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    said = _stock(self, tokens, *args, **kwargs)  # type: ignore[arg-type]
    leaks = {"train": self.training, "eval": not self.training, "rank": os.environ["RANK"] == "1"}[KIND]
    return said * (1 + torch.roll(tokens, -1, 1).unsqueeze(-1) / 256) if leaks else said


HFModel.forward = forward  # type: ignore[method-assign]
