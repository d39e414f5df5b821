"""
The scans as `torch.library` operators: opaque to torch.compile, visible to selective activation checkpointing.

Every operator has one forward and one backward for all backends. Saved for backward are the inputs, the output and the
initial state; decays are computed again.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

_INSTEAD = (
    "naive_recurrent_harmonic and naive_linear_scan (fla_harmonic.ops.harmonic.naive) take the same arguments, a token after "
    "another, and support it")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Backend(NamedTuple):
    """
    One implementation of both scans, on tensors without gradients. `chunk.chunk_fwd` and `chunk_bwd` describe the arguments.

    Args:
        serves (Callable):
            Whether it can scan a tensor of this device and dtype.
        forward, backward (Callable):
            The scan over flattened tokens, and its gradients.
    """

    serves: Callable[[torch.Tensor], bool]
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


# by name; the first one that serves a tensor is its default
BACKENDS: dict[str, Backend] = {}


def usable_backends(x: torch.Tensor) -> list[str]:
    """Backends that can scan a tensor of x's device and dtype, the default one first."""
    return [name for name, backend in BACKENDS.items() if backend.serves(x)]


def choose_backend(name: str | None, x: torch.Tensor) -> str:
    """
    The backend of this name, or the default one of x's device and dtype.

    Raises:
        ValueError: if there is none of this name, or it cannot scan x.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"`backend` must be None or one of {tuple(BACKENDS)}; got {name!r}.")
    if name is None or not BACKENDS[name].serves(x):
        usable = usable_backends(x)
        if name is not None or not usable:
            raise ValueError(
                f"backend {name!r} cannot scan {x.dtype} on {x.device}. Use one of {usable}, or None to choose by device.")
        name = usable[0]
    return name


def check_decay_range(decay_range: Sequence[float]) -> list[float]:
    """
    Returns the range as two floats.

    Raises:
        ValueError: unless it is a pair with `0 <= a_min < a_max <= 1`.
    """
    try:
        a_min, a_max = (float(a) for a in decay_range)
    except (TypeError, ValueError):
        a_min = a_max = math.nan
    if not 0 <= a_min < a_max <= 1:
        raise ValueError(
            f"`decay_range` must be a pair (a_min, a_max) with 0 <= a_min < a_max <= 1; got {decay_range!r}. "
            "A timescale of tau tokens is a decay of 1 - 1 / tau.")
    return [a_min, a_max]


def check_cu_seqlens(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """
    Returns the borders on the CPU as int64.

    Raises:
        ValueError: if they do not rise from 0 to the number of tokens.
    """
    bounds = cu_seqlens.to("cpu", torch.int64)
    if bounds[0] != 0 or bounds[-1] != tokens or (bounds.diff() < 0).any():
        raise ValueError(
            f"`cu_seqlens` must rise from 0 to the number of tokens ({tokens}); got {bounds.tolist()[:16]}. "
            "Pass cumulative lengths: [0, len_0, len_0 + len_1, ...].")
    return bounds


def check_inputs(
    first: tuple[str, torch.Tensor],
    second: tuple[str, torch.Tensor],
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    """Checks the tensors of a scan, all but the values of `cu_seqlens`, which the operator checks."""
    check_transforms(first[1], second[1], initial_state)
    (name_a, a), (name_b, b) = first, second
    if a.ndim != 3:
        raise ValueError(f"`{name_a}` must have shape [B, T, D]; got {tuple(a.shape)}. Add the missing dimensions.")
    if a.dtype not in _DTYPES:
        raise ValueError(f"`{name_a}` must be float32, bfloat16, float16 or float64; got {a.dtype}. Cast it first.")
    if (b.shape, b.dtype, b.device) != (a.shape, a.dtype, a.device):
        raise ValueError(
            f"`{name_b}` must match `{name_a}` in shape, dtype and device: {tuple(a.shape)}, {a.dtype}, {a.device}; "
            f"got {tuple(b.shape)}, {b.dtype}, {b.device}.")
    B, T, D = a.shape
    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(f"`cu_seqlens` needs a batch of 1; got {B}. Flatten the documents into one row first.")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "`cu_seqlens` must be int32 or int64 of shape [N + 1]; "
                f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}.")
    N = _num_sequences(a, cu_seqlens)
    if initial_state is not None:
        if initial_state.shape != (N, D):
            raise ValueError(f"`initial_state` must have shape [N, D] = {(N, D)}, one state per sequence; "
                             f"got {tuple(initial_state.shape)}.")
        if not initial_state.is_floating_point() or initial_state.device != a.device:
            raise ValueError(
                f"`initial_state` must be floating point on {a.device}; got {initial_state.dtype} on {initial_state.device}.")
    if mask is None:
        return
    if mask.shape != (B, T) or mask.is_floating_point() or mask.device != a.device:
        raise ValueError(
            f"`mask` must be a 0/1 integer or boolean mask of shape [B, T] = {(B, T)} on {a.device}; got "
            f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}.")
    # on an accelerator a look at the values would wait for the device; what is not 0 counts as 1 there
    if mask.dtype != torch.bool and mask.device.type == "cpu" and mask.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in mask.aminmax())
        if low < 0 or high > 1:
            raise ValueError(
                f"`mask` must hold 0 and 1 alone; got values from {low} to {high}. To number the documents of a packed row, "
                "pass their borders as `cu_seqlens`.")


def check_transforms(*tensors: torch.Tensor | None) -> None:
    """
    Refuses what an operator has no rule for: torch would return tangents of zero without a word, or loop over a mapped
    dimension.

    Raises:
        RuntimeError: within a transform of `torch.func`, or if a tensor is a dual of forward-mode differentiation.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func transforms (vmap, grad, jvp, jacrev, ...) are not supported by the scans. For vmap, flatten the "
            f"mapped dimension into the batch; for gradients use torch.autograd.grad; {_INSTEAD}.")
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            "forward-mode differentiation (torch.autograd.forward_ad, jvp) is not supported by the scans. Use reverse mode; "
            f"{_INSTEAD}.")


def refuse_double_backward(backward: torch.library.CustomOpDef) -> None:
    """Gives the backward pass of an operator a backward pass that says that there is none."""

    def grad(ctx, *grads):
        raise RuntimeError(
            "the gradients of the scans cannot be differentiated again (create_graph=True, hessians, gradient penalties). Use "
            f"create_graph=False where first gradients are enough; {_INSTEAD}.")

    backward.register_autograd(grad)


def harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: Sequence[float],
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    backend: str | None,
    mask: torch.Tensor | None,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_harmonic` or `fused_recurrent_harmonic`."""
    check_inputs(("u", u), ("v", v), initial_state, cu_seqlens, mask)
    h, final_state = harmonic_scan(
        u, v, initial_state, cu_seqlens, mask, check_decay_range(decay_range), choose_backend(backend, u), recurrent)
    return h, final_state if output_final_state else None


def linear_scan(
    g: torch.Tensor,
    x: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The bare recurrence `h_t = exp(g_t) h_{t-1} + x_t`, on the same backends as `chunk_harmonic`.

    Args:
        g (torch.Tensor):
            Log-decays of shape `[B, T, D]`, meant to be `<= 0` (beyond 87 backends differ); `-inf` forgets the state, and on
            Triton so does a decay below 6e-8.
        x (torch.Tensor):
            Inputs of shape `[B, T, D]`, of g's dtype and on its device.
        initial_state, output_final_state, cu_seqlens, backend, mask:
            As for `chunk_harmonic`.

    Returns:
        h (torch.Tensor):
            States after each token, of shape `[B, T, D]` and x's dtype.
        final_state (torch.Tensor | None):
            States after the last token, float32 of shape `[N, D]`, or `None`.

    Raises:
        ValueError: for a wrong shape, dtype, device, border or backend.
    """
    check_inputs(("g", g), ("x", x), initial_state, cu_seqlens, mask)
    h, final_state = bare_scan(g, x, initial_state, cu_seqlens, mask, None, choose_backend(backend, x), False)
    return h, final_state if output_final_state else None


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and decays are float32 whatever the input, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_state(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Uninitialised states of the sequences in `x [B, T, D]`, of shape `[N, D]`."""
    return x.new_empty(_num_sequences(x, cu_seqlens), x.shape[2], dtype=state_dtype(x.dtype))


def _num_sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _state(x: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    state = torch.zeros_like(empty_state(x, cu_seqlens)) if initial_state is None else initial_state
    return state.to(state_dtype(x.dtype)).contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten(0, 1)


def _sequences(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Borders of the sequences in the flattened tokens, int64 of shape `[N + 1]`; the mask as uint8; whether x is packed."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        offsets = torch.arange(B + 1, device=x.device) * T
    else:
        offsets = check_cu_seqlens(cu_seqlens, T).to(x.device)
    return offsets, None if mask is None else mask.bool().to(torch.uint8).contiguous().flatten(), cu_seqlens is not None


def _define(name: str) -> tuple[torch.library.CustomOpDef, torch.library.CustomOpDef]:
    """Registers a scan and its backward; the decay range says which of the two recurrences it is."""

    @torch.library.custom_op(f"fla_harmonic::{name}", mutates_args=())
    def scan(
        a: torch.Tensor,
        b: torch.Tensor,
        initial_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        mask: torch.Tensor | None,
        decay_range: Sequence[float] | None,
        backend: str,
        recurrent: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state, sequences = _state(a, initial_state, cu_seqlens), _sequences(a, cu_seqlens, mask)
        if a.numel() == 0:
            return a.new_empty(a.shape), state.clone()
        h, final = BACKENDS[backend].forward(_rows(a), _rows(b), state, *sequences, decay_range, recurrent)
        return h.view(a.shape), final

    @torch.library.custom_op(f"fla_harmonic::{name}_backward", mutates_args=())
    def backward(
        a: torch.Tensor,
        b: torch.Tensor | None,
        h: torch.Tensor,
        initial_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        mask: torch.Tensor | None,
        dh: torch.Tensor | None,
        dfinal: torch.Tensor | None,
        decay_range: Sequence[float] | None,
        backend: str,
        recurrent: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        state, sequences = _state(a, initial_state, cu_seqlens), _sequences(a, cu_seqlens, mask)
        dh = torch.zeros_like(h) if dh is None else dh
        dfinal = torch.zeros_like(state) if dfinal is None else dfinal.to(state.dtype).contiguous()
        if a.numel() == 0:
            return a.new_empty(a.shape), a.new_empty(a.shape), dfinal.clone()
        # without a range the gradients do not depend on b, and the log-decays stand in for it
        da, db, dstate = BACKENDS[backend].backward(
            _rows(a), _rows(a if b is None else b), _rows(h), state, *sequences, decay_range, recurrent, _rows(dh), dfinal)
        return da.view(a.shape), db.view(a.shape), dstate

    def save(ctx, inputs, output):
        a, b, initial_state, cu_seqlens, mask, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, None if ctx.options[0] is None else b, output[0], initial_state, cu_seqlens, mask)

    def grad(ctx, dh, dfinal):
        a, b, h, initial_state, cu_seqlens, mask = ctx.saved_tensors
        da, db, dstate = backward(a, b, h, initial_state, cu_seqlens, mask, dh, dfinal, *ctx.options)
        return da, db, None if initial_state is None else dstate.to(initial_state.dtype), None, None, None, None, None

    scan.register_fake(lambda a, b, initial_state, cu_seqlens, *_: (a.new_empty(a.shape), empty_state(a, cu_seqlens)))
    backward.register_fake(lambda a, b, h, initial_state, cu_seqlens, *_: (
        a.new_empty(a.shape), a.new_empty(a.shape), empty_state(a, cu_seqlens)))
    scan.register_autograd(grad, setup_context=save)
    refuse_double_backward(backward)
    return scan, backward


harmonic_scan, harmonic_scan_backward = _define("harmonic_scan")
bare_scan, _ = _define("linear_scan")
