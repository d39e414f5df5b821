"""Weights of a Harmonic layer that begins as moving averages of an attention layer's values."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from fla_harmonic.hallamonic.families import Attention
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.layers.harmonic import HarmonicLevel

# standard deviation of a level's input logits: tanh is nearly linear for most, and bounds the few large ones
INPUT_STD = 0.5
# standard deviation of what a head returns, over that of its values: a head averages many values, of which some (those of the
# first token) are near zero. Between 0.1 and 0.2 on SmolLM2's layers
OUTPUT_STD = 0.15


@torch.no_grad()
def init_from_attention(layer: HarmonicAttention, attention: Attention) -> None:
    r"""
    Sets the weights of a Harmonic layer from those of the attention layer that it replaces.

    Attention returns `W_o concat_h(c_h) + b_o`, where c_h is an average, over the past, of the values `v = W_v x + b_v` of the
    head's key-value group. A level of Harmonic is `norm(average over its timescales of tanh(W_in z))`. So a level's channels
    become copies of the values, one for each of some query heads, and what is averaged with weights that queries and keys
    choose is averaged over three ranges of timescales instead:

    - Level 1 reads `z = x`: `W_in = (a / s_v) R W_v`, where R repeats the values D / (kv_heads * head_dim) times. One copy has
      all values at the shortest timescales of the level, the next at longer ones, and so on. `s_v` is the standard deviation
      of the values, estimated by `mean_i sum_j (W_v[i, j] g_j)^2` with the weights g of the norm before the layer, and `a`,
      `INPUT_STD`, keeps tanh nearly linear.
    - Predictions begin at zero, so that level 2 reads the normalised x, and has the same `W_in`, times the standard deviation
      of x; level 3 and later read the outputs of the level before the last one below, and begin as their average over the
      copies. Without prediction errors level 2 does so too.
    - Gates begin at zero weights: each channel has the timescale of its bias.
    - `W_o` of the layer is that of the attention, the columns of the query heads that share a copy summed. The norm of a level
      has lost the size of the values, and the levels are added up: times `OUTPUT_STD s_v / levels`.
    - A bias b_v reaches every head as it is, for the weights of an average sum to 1: it becomes the bias of the last level's
      norm, which no other level reads.

    A map of rank r below that of W_v keeps the r directions in which the values vary most (a singular value decomposition of
    `W_v diag(g)`); at the values' own number, which grouped queries make small, the map is exact.

    Args:
        layer (HarmonicAttention):
            The layer, whose weights are replaced. It needs an output projection, and neither an output gate, which no constant
            can be, nor gates that are MLPs, nor a short convolution.
        attention (Attention):
            The attention layer.

    Raises:
        ValueError: the layer has other options, or a number of channels that is not 1, 2, ... values for each query head.
    """
    copies = check_layer(layer, attention)
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
        _last(level.gate_proj).weight.zero_()
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


def check_layer(layer: HarmonicAttention, attention: Attention) -> int:
    """
    Copies of the values that a level has.

    Raises:
        ValueError: the layer cannot begin as the attention.
    """
    mapped = layer.use_output_proj and not layer.use_output_gate and not layer.use_short_conv
    if not mapped or not all(_is_linear(cast(HarmonicLevel, level).input_proj) for level in layer.levels):
        raise ValueError(
            "a layer that begins as attention needs an output projection, linear or low-rank gates, no output gate and no "
            "short convolution; got another one. Pass `use_output_gate=False`, or begin at random.")
    kv_size, size = attention.value.shape[0], layer.level_size
    group = attention.output.shape[1] // kv_size
    copies = size // kv_size
    if size % kv_size or not 1 <= copies <= group:
        fitting = ", ".join(f"{kv_size * n / layer.hidden_size:g}" for n in range(1, group + 1))
        raise ValueError(
            f"a layer that begins as attention needs a multiple of {kv_size} channels a level, one to {group} for each value; "
            f"got {size}. Pass one of these as `expand_ratio`: {fitting}.")
    return copies


def _is_linear(maps: nn.Module) -> bool:
    return isinstance(maps, nn.Linear) or (isinstance(maps, nn.Sequential) and len(maps) == 2)


def _last(maps: nn.Module) -> nn.Linear:
    return cast(nn.Linear, maps[-1] if isinstance(maps, nn.Sequential) else maps)


def _set_map(maps: nn.Module, matrix: torch.Tensor, directions: torch.Tensor, copies: int) -> None:
    """Makes `maps` the matrix `[kv, inputs]`, its outputs repeated, or its part in the first directions, `[kv, kv]`."""
    if isinstance(maps, nn.Linear):
        maps.weight.copy_(matrix.repeat(copies, 1))
        return
    down, up = (cast(nn.Linear, linear) for linear in cast(nn.Sequential, maps))
    kv_size, rank = matrix.shape[0], min(down.out_features, matrix.shape[0])
    basis = torch.eye(kv_size) if rank == kv_size else directions[:, :rank]
    # ranks beyond the values' number keep their inputs, and wait with weights of zero
    down.weight[:rank] = basis.T @ matrix
    up.weight.zero_()
    up.weight[:, :rank] = basis.repeat(copies, 1)
