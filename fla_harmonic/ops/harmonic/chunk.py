"""The public scans: validation and choice of backend."""

import logging
import math
import os

import torch

from fla_harmonic.ops.harmonic import scan_op

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "numba", "fla", "triton")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def chunk_harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""
    The gated recurrence of one Harmonic level (arXiv 2606.24650), parallel over chunks of the sequence:

        1 - A_t = (1 - a_max) + (a_max - a_min) sigmoid(-u_t)
            h_t = A_t h_{t-1} + (1 - A_t) tanh(v_t)

    Decays and states are float32 whatever the input (float64 for float64 input). Every gradient is exact: of `u`, `v`
    and `initial_state`, through `h` and through `final_state`.

    Args:
        u (torch.Tensor):
            Gate logits of shape `[B, T, D]`; float32, bfloat16, float16 or float64.
        v (torch.Tensor):
            Input logits of shape `[B, T, D]`, of u's dtype and on its device.
        decay_range (tuple[float, float]):
            `(a_min, a_max)` with `0 <= a_min < a_max <= 1`, the range of the decay `A`.
        initial_state (torch.Tensor, Optional):
            States before the first token, of shape `[N, D]`: `N = B`, or the number of documents with `cu_seqlens`.
            Default: zero.
        output_final_state (bool):
            Whether to return the states after the last token. Default: `False`.
        cu_seqlens (torch.Tensor, Optional):
            Borders of packed documents, int32 or int64 of shape `[N + 1]`, from 0 to T; needs `B = 1`. Documents do not
            see one another. Default: `None`.
        backend (str, Optional):
            `"torch"` (anywhere), `"numba"` (CPU), `"triton"` (fused kernels) or `"fla"` (fla's Triton kernels); float64 on
            torch alone. Default: by device and dtype.
        mask (torch.Tensor, Optional):
            0/1 of shape `[B, T]`: at 0 the state stays as it is and the logits get no gradient. Default: all 1.

    Returns:
        h (torch.Tensor):
            States after each token, of shape `[B, T, D]` and u's dtype.
        final_state (torch.Tensor | None):
            States after the last token, float32 of shape `[N, D]`, or `None`.

    Raises:
        ValueError: for a wrong shape, dtype, device, range, border or backend.

    Examples::
        >>> import torch
        >>> from fla_harmonic.ops.harmonic import chunk_harmonic
        >>> u, v = torch.randn(2, 4, 2048, 256)
        >>> h, state = chunk_harmonic(u, v, (0.9, 0.975), output_final_state=True)
        # three documents of 512, 1024 and 512 tokens in one row
        >>> cu_seqlens = torch.tensor([0, 512, 1536, 2048])
        >>> h, states = chunk_harmonic(u[:1], v[:1], (0.9, 0.975), output_final_state=True, cu_seqlens=cu_seqlens)
        >>> states.shape
        torch.Size([3, 256])
    """
    return _harmonic(u, v, decay_range, initial_state, output_final_state, cu_seqlens, backend, mask, recurrent=False)


def fused_recurrent_harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_harmonic`, one token after another: for decoding and short inputs. Same arguments, returns and errors."""
    return _harmonic(u, v, decay_range, initial_state, output_final_state, cu_seqlens, backend, mask, recurrent=True)


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
    mask = _check(("g", g), ("x", x), initial_state, cu_seqlens, mask)
    h, final_state = scan_op.linear_scan(g, x, initial_state, cu_seqlens, mask, _choose(backend, x), False)
    return h, final_state if output_final_state else None


def _harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    backend: str | None,
    mask: torch.Tensor | None,
    recurrent: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    mask = _check(("u", u), ("v", v), initial_state, cu_seqlens, mask)
    a_min, a_max = check_decay_range(decay_range)
    h, final_state = scan_op.harmonic_scan(
        u, v, initial_state, cu_seqlens, mask, a_min, a_max, _choose(backend, u), recurrent)
    return h, final_state if output_final_state else None


def check_decay_range(decay_range: tuple[float, float]) -> tuple[float, float]:
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
    return a_min, a_max


def _check(
    first: tuple[str, torch.Tensor],
    second: tuple[str, torch.Tensor],
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """Checks the arguments of a scan, and returns the mask as booleans."""
    (name_a, a), (name_b, b) = first, second
    if a.ndim != 3:
        raise ValueError(f"`{name_a}` must have shape [B, T, D]; got {tuple(a.shape)}. Add the missing dimensions.")
    if a.dtype not in _DTYPES:
        raise ValueError(f"`{name_a}` must be float32, bfloat16, float16 or float64; got {a.dtype}. Cast it first.")
    if (b.shape, b.dtype, b.device) != (a.shape, a.dtype, a.device):
        raise ValueError(
            f"`{name_b}` must match `{name_a}` in shape, dtype and device: {tuple(a.shape)}, {a.dtype}, {a.device}; "
            f"got {tuple(b.shape)}, {b.dtype}, {b.device}.")
    N = a.shape[0]
    if cu_seqlens is not None:
        if a.shape[0] != 1:
            raise ValueError(f"`cu_seqlens` needs a batch of 1; got {a.shape[0]}. Flatten the documents into one row first.")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "`cu_seqlens` must be int32 or int64 of shape [N + 1]; "
                f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}.")
        if not torch.compiler.is_compiling():
            scan_op.check_cu_seqlens(cu_seqlens, a.shape[1])
        N = cu_seqlens.shape[0] - 1
    if mask is not None and (mask.shape != a.shape[:2] or mask.is_floating_point() or mask.device != a.device):
        raise ValueError(
            f"`mask` must be a 0/1 integer or boolean mask of shape [B, T] = {tuple(a.shape[:2])} on {a.device}; got "
            f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}.")
    # on an accelerator a look at the values would wait for the device; what is not 0 counts as 1 there
    if mask is not None and mask.dtype != torch.bool and mask.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(value) for value in mask.aminmax()) if mask.numel() else (0, 0)
        if low < 0 or high > 1:
            raise ValueError(
                f"`mask` must hold 0 and 1 alone; got values from {low} to {high}. To number the documents of a packed row, "
                "pass their borders as `cu_seqlens`.")
    if initial_state is not None:
        if initial_state.shape != (N, a.shape[2]):
            raise ValueError(
                f"`initial_state` must have shape [N, D] = {(N, a.shape[2])}, one state a sequence; "
                f"got {tuple(initial_state.shape)}.")
        if not initial_state.is_floating_point() or initial_state.device != a.device:
            raise ValueError(
                f"`initial_state` must be floating point on {a.device}; got {initial_state.dtype} on {initial_state.device}.")
    return None if mask is None else mask.bool()


def usable_backends(x: torch.Tensor) -> list[str]:
    """Backends that can scan a tensor of x's device and dtype, the default one first."""
    if x.dtype == torch.float64:
        return ["torch"]
    if x.device.type in ("cuda", "xpu"):
        return ["triton", "fla", "torch"]
    if x.device.type != "cpu":
        return ["torch"]
    usable = ["numba", "torch"] if scan_op.HAS_NUMBA else ["torch"]
    # Triton's interpreter runs the kernels on CPU tensors, for tests
    return [*usable, "triton", "fla"] if os.environ.get("TRITON_INTERPRET") == "1" else usable


def _choose(backend: str | None, x: torch.Tensor) -> str:
    usable = usable_backends(x)
    if backend is None:
        if x.device.type == "cpu" and x.dtype != torch.float64 and not scan_op.HAS_NUMBA:
            _warn_slow_path()
        return usable[0]
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be None or one of {BACKENDS}; got {backend!r}.")
    if backend not in usable:
        raise ValueError(
            f"backend {backend!r} cannot scan {x.dtype} on {x.device}: 'numba' needs a CPU and the package numba, 'triton' "
            f"and 'fla' a device that Triton serves, and all three anything but float64. "
            f"Use one of {usable}, or None to choose by device.")
    return backend


def _warn_slow_path() -> None:
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        logger.warning("numba cannot be imported (%s): the scan runs in plain torch, slower. Install it with "
                       "`pip install numba`.", scan_op.NO_NUMBA)


_warned = False
