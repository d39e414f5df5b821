"""Variants of a flavor of Harmonic for `eval.ablation`, at equal parameters."""

import torch

from fla_harmonic.titan.config import parse_fields
from fla_harmonic.titan.models.flavors import HARMONIC
from fla_harmonic.titan.models.hf_model import HFModelArgs

STUDIES: dict[str, dict[str, tuple[str, ...]]] = {
    "ablation": {
        "full": (),
        "other timescale mode": (),
        "no prediction error": ("use_prediction_error=false",),
        "flat, middle range": ("timescales=[[10,40],[10,40],[10,40]]",),
        "flat, slow range": ("timescales=[[125,1000],[125,1000],[125,1000]]",),
        "one level": ("timescales=[[2.2,1000]]",),
        "two levels": ("timescales=[[2.2,8.3],[125,1000]]",),
        "ranges twice as slow": ("timescales=[[4.4,16.6],[20,80],[250,2000]]",),
        "ranges twice as fast": ("timescales=[[1.1,4.15],[5,20],[62.5,500]]",),
        "gates as MLPs": ("gate_ratio=1",),
    },
    "search": {
        "paper's ranges, confined": ("timescale_mode=bounded",),
        "stack": (),
        "convolution": ("use_short_conv=true",),
        "convolution, wider weights": ("use_short_conv=true", "initializer_range=0.06"),
        "twice as wide, low-rank maps, convolution, wider weights": (
            "expand_ratio=2", "gate_rank=16", "use_short_conv=true", "initializer_range=0.06"),
        "convolution, wider weights, fast": (
            "use_short_conv=true", "initializer_range=0.06", "timescales=[[1.01,1.2],[1.2,8],[8,1000]]"),
        # the flavor debug-best
        "convolution, wider weights, fast, 3 blocks": (
            "use_short_conv=true", "initializer_range=0.06", "timescales=[[1.01,1.2],[1.2,8],[8,1000]]",
            "num_hidden_layers=3"),
        "convolution, wider weights, all levels fast, 3 blocks": (
            "use_short_conv=true", "initializer_range=0.06", "timescales=[[1.01,1.2],[1.2,4],[4,100]]",
            "num_hidden_layers=3"),
    },
}


def at_equal_parameters(base: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    """The fields, and the MLP's width that brings the variant to the base's parameters, within 1% (else a ValueError)."""
    target = parameters(base, ())
    narrow, wide = (parameters(base, (*fields, f"intermediate_size={width}")) for width in (1, 2))
    width = max(1, round((target - narrow) / (wide - narrow)) + 1)
    sized = (*fields, f"intermediate_size={width}")
    if abs(parameters(base, sized) - target) > 0.01 * target:
        raise ValueError(
            f"expected a variant of {base} with {target:,} parameters; {' '.join(fields)} has {narrow:,} beside the narrowest "
            "MLP. Choose smaller maps, e.g. a gate_rank, or fewer blocks.")
    return sized


def parameters(base: str, fields: tuple[str, ...]) -> int:
    args = HFModelArgs(family="harmonic", config=HARMONIC[base].config, overrides=parse_fields(fields))
    with torch.device("meta"):
        return sum(p.numel() for p in args.build_hf().parameters())
