# "Harmonic": three gated linear recurrences at rising timescales, arXiv 2606.24650

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.layers.utils import get_layer_cache, repad_hidden_states, unpad_hidden_states, update_layer_cache

from fla_harmonic.modules import ShortConvolution, padding_mask
from fla_harmonic.ops.harmonic import chunk_harmonic, fused_recurrent_harmonic
from fla_harmonic.ops.harmonic.context_parallel import CPContext, cp_chunk_harmonic, tokens_before

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache

TIMESCALES = ((2.2, 8.3), (10, 40), (125, 1000))
MODES = {"chunk": chunk_harmonic, "fused_recurrent": fused_recurrent_harmonic}
TIMESCALE_MODES = ("bounded", "init")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


# what an option must be, and whether a value is that, by its name or else by its annotation
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("a positive integer", _is_size),
    "int | None": ("a positive integer or None", lambda value: value is None or _is_size(value)),
    "float": ("a positive number", lambda value: _is_number(value) and value > 0),
    "initializer_range": ("a number that is not negative", lambda value: _is_number(value) and value >= 0),
    # indices, not sizes
    **dict.fromkeys(("layer_idx", "pad_token_id", "bos_token_id", "eos_token_id"), ("", lambda value: True)),
}


def check_options(init: Callable[..., None], options: Mapping[str, Any]) -> int:
    """
    Checks the options of a layer or a model's configuration by the annotations of its constructor `init`, and together.

    Returns:
        The number of channels of a level.

    Raises:
        ValueError: for an impossible value, naming the option, or for options that exclude one another.
    """
    for name, parameter in signature(init).parameters.items():
        expected, is_valid = _KINDS.get(name) or _KINDS.get(parameter.annotation, ("", lambda value: True))
        if name in options and not is_valid(options[name]):
            raise ValueError(f"`{name}` must be {expected}; got {options[name]!r}.")
    for name, choices in (("mode", tuple(MODES)), ("attn_mode", tuple(MODES)), ("timescale_mode", TIMESCALE_MODES)):
        if options.get(name, choices[0]) not in choices:
            raise ValueError(f"`{name}` must be one of {choices}; got {options[name]!r}.")
    check_timescales(options["timescales"])
    hidden_size, expand_ratio, gate_ratio, gate_rank = (
        options[name] for name in ("hidden_size", "expand_ratio", "gate_ratio", "gate_rank"))
    if gate_ratio is not None and gate_rank is not None:
        raise ValueError(f"`gate_ratio` and `gate_rank` exclude one another; got {gate_ratio} and {gate_rank}. Drop one.")
    # rounded: 100 * 0.29 is 28.999999999999996
    level_size = round(hidden_size * expand_ratio)
    if level_size < 1 or (level_size != hidden_size and not options["use_output_proj"]):
        raise ValueError(
            f"`expand_ratio` must give at least one channel, and be 1 without `use_output_proj`; got {expand_ratio!r} with "
            f"hidden_size={hidden_size} and use_output_proj={options['use_output_proj']}.")
    return level_size


def check_timescales(timescales: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    """
    Returns the timescales as pairs of floats.

    Raises:
        ValueError: unless they are one or more pairs `1 < low < high < inf`, in tokens.
    """
    try:
        pairs = [(low, high) for low, high in timescales]
    except (TypeError, ValueError):
        pairs = []
    if not pairs or not all(_is_number(low) and _is_number(high) and 1 < low < high for low, high in pairs):
        raise ValueError(
            "`timescales` must be one or more pairs (low, high) in tokens, 1 < low < high, one per level; "
            f"got {timescales!r}. The default is {TIMESCALES}.")
    return tuple((float(low), float(high)) for low, high in pairs)


class Timescale(nn.Module):
    """
    Bias of a level's gate logits: the timescale of each channel at zero input.

    A module of its own, not the bias of the gate's last linear map: the weight initialisation of Hugging Face models sets
    those to zero, and optimizers and parallelism find it by its name. The bias is float32 in a narrow model too, so FSDP
    needs a group for it.

    Args:
        size (int):
            Number of channels D.
        timescale (tuple[float, float]):
            Range of the timescale `tau = 1 / (1 - A)` in tokens, over which the channels spread at initialisation.
        decay_range (tuple[float, float]):
            `(a_min, a_max)`, the range that a gate logit maps to.
    """

    def __init__(self, size: int, timescale: tuple[float, float], decay_range: tuple[float, float]) -> None:
        super().__init__()
        self.timescale = timescale
        self.decay_range = decay_range
        # transformers builds models under their narrow dtype
        self.bias = nn.Parameter(torch.empty(size, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))
        self.reset_parameters()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Timescale:
        def widely(x: torch.Tensor) -> torch.Tensor:
            applied = fn(x)
            # of `half()` and its like only the move: a bias rounded to bfloat16 is a timescale that is off by up to 1.6%
            narrow = applied.is_floating_point() and applied.element_size() < 4
            return x.to(applied.device, torch.float32) if narrow else applied

        super()._apply(widely, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _mark(self) -> None:
        # optimizers look for the mark on the parameter, which loading, casting and copying replace
        bias = self._parameters.get("bias")
        if bias is not None:
            bias._no_weight_decay = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Spreads the channels log-uniformly over the range of timescales."""
        if self.bias.is_meta:
            return
        low, high = (math.log(tau) for tau in self.timescale)
        a_min, a_max = self.decay_range
        quantile = (torch.arange(self.bias.shape[0], dtype=torch.float64) + 0.5) / self.bias.shape[0]
        tau = torch.exp(low + (high - low) * quantile)
        with torch.no_grad():
            self.bias.copy_(torch.logit((1 - 1 / tau - a_min) / (a_max - a_min)))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        # the rounding of the sum to narrow logits changes from token to token
        return (u + self.bias).to(u.dtype)

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}, timescale={self.timescale}, decay_range={self.decay_range}"


class HarmonicLevel(nn.Module):
    """
    One recurrence of the hierarchy: gate and input maps from `[B, T, input_size]` to `[B, T, state_size]`, and the norm of its
    states; the scan is the layer's. The options are those of `HarmonicAttention`.
    """

    def __init__(
        self,
        input_size: int,
        state_size: int,
        timescale: tuple[float, float],
        timescale_mode: str,
        gate_ratio: int | None,
        gate_rank: int | None,
        norm_eps: float,
    ) -> None:
        super().__init__()
        low, high = timescale
        self.decay_range = (1 - 1 / low, 1 - 1 / high) if timescale_mode == "bounded" else (0.0, 1.0)

        def maps(bias: bool) -> nn.Module:
            if gate_ratio is not None:
                inner = gate_ratio * input_size
                return nn.Sequential(nn.Linear(input_size, inner), nn.SiLU(), nn.Linear(inner, state_size, bias=bias))
            if gate_rank is not None:
                down = nn.Linear(input_size, gate_rank, bias=False)
                return nn.Sequential(down, nn.Linear(gate_rank, state_size, bias=False))
            return nn.Linear(input_size, state_size, bias=False)

        self.gate_proj = maps(bias=False)
        self.timescale = Timescale(state_size, timescale, self.decay_range)
        self.input_proj = maps(bias=True)
        self.norm = nn.LayerNorm(state_size, eps=norm_eps)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate logits u and input logits v, `[B, T, D]`, of the input z `[B, T, input_size]`."""
        return self.timescale(self.gate_proj(z)), self.input_proj(z)


class HarmonicAttention(nn.Module):
    r"""
    Harmonic (arXiv 2606.24650): a hierarchy of gated linear recurrences, in fla's layer interface. For levels l = 1, 2, ...

        h_l = scan(gate_l(z_l), input_l(z_l)),  y_l = norm_l(h_l)
        z_1 = y_0 = x,  z_{l+1} = norm(y_{l-1} - P_l y_l)
        o = W_o ((y_1 + y_2 + ...) * silu(W_g x))

    The norm of the prediction error has no parameters. Cost and memory are linear in the length; the state is constant.

    Args:
        mode (str):
            `"chunk"` (parallel over time) or `"fused_recurrent"` (token by token). Default: `"chunk"`.
        hidden_size (int):
            Size of inputs and outputs. Default: 1024.
        expand_ratio (float):
            Channels of a level over `hidden_size`; anything but 1 needs the output projection. Default: 1.
        timescales (Sequence[tuple[float, float]]):
            Range of `tau = 1 / (1 - A)` in tokens, one pair per level. Default: the paper's three.
        timescale_mode (str):
            `"bounded"`: A stays in the range. `"init"`: A is free in (0, 1) and starts in the range. Default: `"bounded"`.
        use_prediction_error (bool):
            Whether a level reads the error that the level below left (else that level's output). Default: `True`.
        gate_ratio (int, Optional):
            Gate and input are MLPs `H -> gate_ratio H -> D` instead of linear maps. Default: `None`.
        gate_rank (int, Optional):
            Gate and input are maps of this rank; excludes `gate_ratio`. Default: `None`.
        use_output_gate (bool):
            Whether the output is gated by `silu(W_g x)`. Default: `True`.
        use_output_proj (bool):
            Whether the output is projected. Default: `True`.
        use_short_conv (bool):
            Whether a causal depthwise convolution (with SiLU) precedes the first level. Default: `False`.
        conv_size (int):
            Width of that convolution. Default: 4.
        conv_bias (bool):
            Whether it has a bias. Default: `False`.
        norm_eps (float):
            Epsilon of the norms. Default: 1e-5.
        layer_idx (int, Optional):
            Index of the layer; required with a cache. Default: `None`.

    Raises:
        ValueError: for an impossible option, naming it.

    Examples::
        >>> layer = HarmonicAttention(hidden_size=256)
        >>> o, _, _ = layer(torch.randn(2, 1000, 256))
        # three documents of 100, 500 and 400 tokens in one row
        >>> o, _, _ = layer(torch.randn(1, 1000, 256), cu_seqlens=torch.tensor([0, 100, 600, 1000]))
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_ratio: float = 1,
        timescales: Sequence[Sequence[float]] = TIMESCALES,
        timescale_mode: str = "bounded",
        use_prediction_error: bool = True,
        gate_ratio: int | None = None,
        gate_rank: int | None = None,
        use_output_gate: bool = True,
        use_output_proj: bool = True,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.mode = mode
        self.hidden_size = hidden_size
        self.expand_ratio = expand_ratio
        self.timescales = check_timescales(timescales)
        self.timescale_mode = timescale_mode
        self.use_prediction_error = use_prediction_error
        self.gate_ratio = gate_ratio
        self.gate_rank = gate_rank
        self.use_output_gate = use_output_gate
        self.use_output_proj = use_output_proj
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.norm_eps = norm_eps
        self.layer_idx = layer_idx
        self.level_size = state_size = check_options(HarmonicAttention.__init__, vars(self))

        if use_short_conv:
            self.conv1d = ShortConvolution(hidden_size, conv_size, bias=conv_bias, activation="silu")
        # the error of the first level lives in the input space, every other one in the state space
        sizes = [hidden_size if level == 0 or (level == 1 and use_prediction_error) else state_size
                 for level in range(len(self.timescales))]
        self.levels = nn.ModuleList([
            HarmonicLevel(size, state_size, timescale, timescale_mode, gate_ratio, gate_rank, norm_eps)
            for size, timescale in zip(sizes, self.timescales, strict=True)
        ])
        if use_prediction_error:
            self.predictions = nn.ModuleList([nn.Linear(state_size, size, bias=False) for size in sizes[1:]])
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, state_size, bias=False)
        if use_output_proj:
            self.o_proj = nn.Linear(state_size, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Cache | None]:
        """
        fla's interface: from inputs to outputs `[B, T, hidden_size]`.

        States pass the tokens that the 0/1 mask `[B, S]`, S >= T, leaves out, and the outputs there are zero; the borders of
        packed documents, `cu_seqlens` in `kwargs`, `[N + 1]` with B = 1, win over it. A given cache is always read and
        updated; it holds one sequence for each row or document. With `cp_context` in `kwargs` the inputs are one rank's piece
        of a longer sequence (see `build_cp_context`).

        Raises:
            ValueError: for a wrong shape of inputs, mask, borders or cache, or what excludes `cp_context`.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"`hidden_states` must have shape [B, T, {self.hidden_size}]; got {tuple(hidden_states.shape)}.")
        B, T, _ = hidden_states.shape
        cu_seqlens = kwargs.get("cu_seqlens")
        cp_context = kwargs.get("cp_context")
        if cp_context is not None and not (attention_mask is None and past_key_values is None and self.mode == "chunk"):
            raise ValueError(
                "`cp_context` excludes `attention_mask`, `past_key_values` and any mode but 'chunk'; got one of them, or mode "
                f"{self.mode!r}. Number documents in `build_cp_context`, and use one rank with a cache.")
        if attention_mask is not None and cu_seqlens is None:
            # fla's helpers do not know a batch without rows
            attention_mask = padding_mask(attention_mask, B, T) if B else None
        hidden_states, indices, cu_seqlens = unpad_hidden_states(hidden_states, cu_seqlens, attention_mask, T)

        last_state = get_layer_cache(self, past_key_values)
        states = [None] * len(self.levels) if last_state is None else self._cached_states(
            last_state, B if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        keep_states = past_key_values is not None
        x, conv_state = hidden_states, None
        if self.use_short_conv and cp_context is not None:
            x = self._conv_over_ranks(x, cp_context)
        elif self.use_short_conv:
            x, conv_state = self.conv1d(
                x, cache=None if last_state is None else last_state["conv_state"],
                output_final_state=keep_states, cu_seqlens=cu_seqlens)

        scan = MODES[self.mode]
        new_states, outputs = [], []
        below, z = x, x
        for index, level in enumerate(cast(Iterable[HarmonicLevel], self.levels)):
            u, v = level(z)
            if cp_context is not None:
                h, state = cp_chunk_harmonic(u, v, level.decay_range, cp_context, cu_seqlens=cu_seqlens), None
            else:
                h, state = scan(u, v, level.decay_range, initial_state=states[index], output_final_state=keep_states,
                                cu_seqlens=cu_seqlens)
            new_states.append(state)
            y = level.norm(h)
            outputs.append(y)
            if index + 1 < len(self.levels):
                error = below - self.predictions[index](y) if self.use_prediction_error else y
                z = F.layer_norm(error, error.shape[-1:], eps=self.norm_eps)
                below = y

        update_layer_cache(self, past_key_values, recurrent_state=tuple(new_states), conv_state=conv_state, offset=T)
        o = sum(outputs[1:], outputs[0])
        if self.use_output_gate:
            o = o * F.silu(self.g_proj(hidden_states))
        if self.use_output_proj:
            o = self.o_proj(o)
        return repad_hidden_states(o, indices, B, T), None, past_key_values

    def _cached_states(self, last_state: dict[str, Any], sequences: int) -> tuple[torch.Tensor, ...]:
        states = last_state["recurrent_state"]
        expected = [(sequences, self.level_size)] * len(self.levels)
        held = [tuple(state.shape) for state in states or ()]
        if held != expected or (last_state["conv_state"] is None) is self.use_short_conv:
            raise ValueError(
                f"`past_key_values` must hold {len(self.levels)} states of shape {expected[0]} for layer {self.layer_idx}, "
                f"one row a sequence, and {'a' if self.use_short_conv else 'no'} state of the convolution; it holds {held}. "
                "Pass a cache that this model made of as many sequences, or a new one.")
        return states

    def _conv_over_ranks(self, x: torch.Tensor, cp_context: CPContext) -> torch.Tensor:
        if cp_context.first is not None:
            raise ValueError(
                "`use_short_conv` with packed documents does not work over ranks; got `cp_context` with documents. "
                "Drop the documents, or use one rank.")
        halo = tokens_before(x, self.conv_size - 1, cp_context)
        return self.conv1d(torch.cat([halo, x], dim=1))[0][:, halo.shape[1]:]

    def state_size(self, **kwargs: Any) -> int:
        """Numbers that the layer remembers of a sequence, whatever its length."""
        return len(self.levels) * self.level_size + self.use_short_conv * self.hidden_size * self.conv_size

    def extra_repr(self) -> str:
        return f"mode={self.mode}, timescales={self.timescales}, timescale_mode={self.timescale_mode}"
