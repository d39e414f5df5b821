"""Families of models that can be converted, and what their attention layers look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Attention:
    """
    The linear part of an attention layer: `o = W_o concat_h(sum_s a_h(t, s) v_g(h)(s)) + b_o`, where head h reads the values
    of key-value head `g(h) = h // (heads / kv_heads)`. All in float32.
    """

    value: torch.Tensor
    """W_v of shape `[kv_heads * head_dim, hidden_size]`."""

    value_bias: torch.Tensor | None
    """b_v of shape `[kv_heads * head_dim]`."""

    output: torch.Tensor
    """W_o of shape `[hidden_size, heads * head_dim]`."""

    output_bias: torch.Tensor | None
    """b_o of shape `[hidden_size]`."""

    input_scale: torch.Tensor
    """Weight of the norm before the layer, `[hidden_size]`: the root mean square of each input, up to correlations."""

    head_dim: int
    """Channels of a head."""


@dataclass(frozen=True)
class Family:
    """
    How a family names the parts of its decoder layers. The decoder calls its layers' `self_attn` with keyword arguments, and
    hands all keyword arguments of its own on to it.
    """

    value: str = "self_attn.v_proj"
    """Linear map to the values."""

    output: str = "self_attn.o_proj"
    """Linear map from the heads."""

    norm: str = "input_layernorm"
    """Norm, with weights, before the attention."""

    output_bias: str | None = None
    """Field of the configuration that gives the output map a bias."""

    def attention(self, layer: nn.Module, config: PreTrainedConfig) -> Attention:
        """The linear part of a decoder layer's attention."""

        def copied(x: torch.Tensor) -> torch.Tensor:
            return x.detach().float().clone()

        value, output, norm = (cast(Any, layer.get_submodule(name)) for name in (self.value, self.output, self.norm))
        value_bias, output_bias = (None if x.bias is None else copied(x.bias) for x in (value, output))
        return Attention(
            copied(value.weight), value_bias, copied(output.weight), output_bias, copied(norm.weight), head_size(config))

    def has_output_bias(self, config: PreTrainedConfig) -> bool:
        """Whether the attention's output has a bias."""
        return self.output_bias is not None and bool(getattr(config, self.output_bias))


FAMILIES = {
    "llama": Family(output_bias="attention_bias"),
    "mistral": Family(),
    "qwen2": Family(),
}


def family(model_type: str) -> Family:
    """
    The family of a model type.

    Raises:
        ValueError: it is none of `FAMILIES`.
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"the source's `model_type` must be one of {', '.join(FAMILIES)}; got {model_type!r}. Convert a model of one of "
            "these, or add its family to `fla_harmonic.hallamonic.families.FAMILIES`.")
    return FAMILIES[model_type]


def head_size(config: PreTrainedConfig) -> int:
    """Channels of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
