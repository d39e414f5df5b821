"""The paper's layer written out again, one token after another in float64, from the weights of a HarmonicAttention."""

import torch

from fla_harmonic import HarmonicAttention


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def apply_maps(module: torch.nn.Module, z: torch.Tensor) -> torch.Tensor:
    if isinstance(module, torch.nn.Sequential):
        for part in module:
            z = apply_maps(part, z)
        return z
    if isinstance(module, torch.nn.SiLU):
        return silu(z)
    z = z @ module.weight.T
    return z if module.bias is None else z + module.bias


def reference(layer: HarmonicAttention, hidden_states: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs `[B, T, hidden]` and the last state of each level, `[B, D]`; the layer and its inputs are float64."""
    x = hidden_states
    if layer.use_short_conv:
        W = layer.conv_size
        padded = torch.nn.functional.pad(x, (0, 0, W - 1, 0))
        x = sum(padded[:, i:i + hidden_states.shape[1]] * layer.conv1d.weight[:, 0, i] for i in range(W))
        x = silu(x if layer.conv1d.bias is None else x + layer.conv1d.bias)
    states = [x.new_zeros(x.shape[0], layer.level_size) for _ in layer.levels]
    outputs = []
    for t in range(x.shape[1]):
        below, z, total = x[:, t], x[:, t], 0
        for index, level in enumerate(layer.levels):
            low, high = layer.timescales[index]
            a_min, a_max = (1 - 1 / low, 1 - 1 / high) if layer.timescale_mode == "bounded" else (0, 1)
            u = apply_maps(level.gate_proj, z) + level.timescale.bias
            A = a_min + (a_max - a_min) / (1 + torch.exp(-u))
            states[index] = A * states[index] + (1 - A) * torch.tanh(apply_maps(level.input_proj, z))
            y = normalise(states[index], layer.norm_eps) * level.norm.weight + level.norm.bias
            total = total + y
            if index + 1 < len(layer.levels):
                error = below - y @ layer.predictions[index].weight.T if layer.use_prediction_error else y
                z, below = normalise(error, layer.norm_eps), y
        if layer.use_output_gate:
            total = total * silu(hidden_states[:, t] @ layer.g_proj.weight.T)
        outputs.append(total @ layer.o_proj.weight.T if layer.use_output_proj else total)
    return torch.stack(outputs, 1), states
