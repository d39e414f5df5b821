"""Weights of a Harmonic layer that begins as moving averages of an attention layer's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from fla_harmonic.hallamonic.configuration_hallamonic import head_size
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.layers.harmonic import HarmonicLevel

# standard deviation of a level's input logits: tanh is nearly linear for most, and bounds the few large ones
INPUT_STD = 0.5
# standard deviation of a head's outputs over its values': a head averages many values, and the first token's are near zero.
# Between 0.1 and 0.2 on SmolLM2's layers
OUTPUT_STD = 0.15


@dataclass(frozen=True)
class AttentionWeights:
    """
    The linear part of an attention layer, in float32: `o = W_o concat_h(sum_s a_h(t, s) v_g(h)(s)) + b_o`, where head h reads
    the values of key-value head `g(h) = h // (heads / kv_heads)`. `value` is W_v, `[kv_heads * head_dim, hidden_size]`,
    `value_bias` b_v, `output` W_o, `[hidden_size, heads * head_dim]`, and `input_scale` the weight of the norm before the
    layer, `[hidden_size]`: the root mean square of each input, up to correlations.
    """

    value: torch.Tensor
    value_bias: torch.Tensor | None
    output: torch.Tensor
    input_scale: torch.Tensor
    head_dim: int

    @classmethod
    def of(cls, block: nn.Module, config: PreTrainedConfig) -> AttentionWeights:
        """Copies of a decoder layer's weights."""
        attention, norm = cast(Any, block.self_attn), cast(Any, block.input_layernorm)
        bias = attention.v_proj.bias
        value, output, scale = (x.weight.detach().float().clone() for x in (attention.v_proj, attention.o_proj, norm))
        return cls(value, None if bias is None else bias.detach().float().clone(), output, scale, head_size(config))


@torch.no_grad()
def init_from_attention(layer: HarmonicAttention, attention: AttentionWeights) -> None:
    r"""
    Sets the weights of a Harmonic layer from those of the attention layer that it replaces.

    Attention returns `W_o concat_h(c_h) + b_o`, where c_h averages the values `v = W_v x + b_v` of the head's key-value group
    over the past. A level of Harmonic is `norm(average over its timescales of tanh(W_in z))`. So the channels of a level
    become copies of the values, one per query head of a group or per several, averaged over three ranges of timescales
    instead of with weights that queries and keys choose:

    - Level 1 reads `z = x`: `W_in = (a / s_v) R W_v`, where R repeats the values D / (kv_heads * head_dim) times: the first
      copy has all values at the level's shortest timescales, the next at longer ones, and so on. `s_v` is the standard
      deviation of the values, estimated by `mean_i sum_j (W_v[i, j] g_j)^2` with the weights g of the norm before the layer,
      and `a` is `INPUT_STD`.
    - Predictions begin at zero, so level 2 reads the normalised x: the same `W_in`, times the standard deviation of x. Level
      3 and later read the output of the level two below, and begin as its average over the copies. Without prediction errors
      level 2 does so too.
    - Gate weights begin at zero: each channel has the timescale of its bias.
    - `W_o` is attention's, with the columns of the query heads that share a copy summed. The norm of a level has lost the
      size of the values, and the levels are added up: times `OUTPUT_STD s_v / levels`.
    - The weights of an average sum to 1, so a bias b_v reaches every head as it is: it becomes the bias of the last level's
      norm, which no other level reads.

    A map of rank r below that of W_v keeps the r directions in which the values vary most (a singular value decomposition of
    `W_v diag(g)`). At the number of values, which grouped queries make small, the map is exact.

    Raises:
        ValueError: the layer has no output projection, or an output gate (which no constant can be), MLP gates or a short
            convolution, or its channels are not 1, 2, ... per value and at most one per query head.
    """
    copies = _copies(layer, attention)
    kv_size = attention.value.shape[0]
    levels = [cast(HarmonicLevel, level) for level in layer.levels]
    # the map of inputs of unit variance
    scaled = attention.value * attention.input_scale
    value_std = scaled.square().sum(1).mean().sqrt().item()
    directions = torch.linalg.svd(scaled, full_matrices=False)[0]

    input_size_std = attention.input_scale.square().mean().sqrt().item()
    from_copies = torch.eye(kv_size).repeat(1, copies) / copies
    for index, level in enumerate(levels):
        if index == 0:
            matrix = attention.value / value_std
        elif index == 1 and layer.use_prediction_error:
            matrix = attention.value * (input_size_std / value_std)
        else:
            matrix = from_copies
        _set_map(level.input_proj, INPUT_STD * matrix, directions, copies)
        gate = level.gate_proj
        cast(nn.Linear, gate[-1] if isinstance(gate, nn.Sequential) else gate).weight.zero_()
        level.timescale.reset_parameters()
        level.norm.reset_parameters()
    if layer.use_prediction_error:
        for prediction in layer.predictions:
            cast(nn.Linear, prediction).weight.zero_()

    scale = OUTPUT_STD * value_std / len(levels)
    # [hidden_size, kv_heads, heads of a group, head_dim]
    heads = attention.output.unflatten(1, (kv_size // attention.head_dim, -1, attention.head_dim))
    columns = [heads[:, :, copy::copies].sum(2).flatten(1) for copy in range(copies)]
    layer.o_proj.weight.copy_(scale * torch.cat(columns, 1))
    if attention.value_bias is not None:
        levels[-1].norm.bias.copy_(attention.value_bias.repeat(copies) / scale)


def _copies(layer: HarmonicAttention, attention: AttentionWeights) -> int:
    """Copies of the values in a level."""
    maps = cast(HarmonicLevel, layer.levels[0]).input_proj
    has_mlp = isinstance(maps, nn.Sequential) and len(maps) > 2
    if has_mlp or layer.use_output_gate or layer.use_short_conv or not layer.use_output_proj:
        raise ValueError(
            "a layer that begins as attention needs an output projection, linear or low-rank gates, no output gate and no "
            "short convolution; got another one. Pass `use_output_gate=False`, or begin at random.")
    kv_size, size = attention.value.shape[0], layer.level_size
    group = attention.output.shape[1] // kv_size
    copies = size // kv_size
    if size % kv_size or not 1 <= copies <= group:
        fitting = ", ".join(f"{kv_size * n / layer.hidden_size:g}" for n in range(1, group + 1))
        raise ValueError(
            f"a layer that begins as attention needs a multiple of {kv_size} channels per level, one to {group} for each "
            f"value; got {size}. Pass one of these as `expand_ratio`: {fitting}.")
    return copies


def _set_map(maps: nn.Module, matrix: torch.Tensor, directions: torch.Tensor, copies: int) -> None:
    """Makes `maps` the matrix `[kv, inputs]`, its outputs repeated, or its part in the first directions, `[kv, kv]`."""
    if isinstance(maps, nn.Linear):
        maps.weight.copy_(matrix.repeat(copies, 1))
        return
    down, up = (cast(nn.Linear, linear) for linear in cast(nn.Sequential, maps))
    kv_size, rank = matrix.shape[0], min(down.out_features, matrix.shape[0])
    basis = torch.eye(kv_size) if rank == kv_size else directions[:, :rank]
    # ranks beyond the number of values keep their inputs, and wait with weights of zero
    down.weight[:rank] = basis.T @ matrix
    up.weight.zero_()
    up.weight[:, :rank] = basis.repeat(copies, 1)
