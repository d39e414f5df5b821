"""
Mamba's selective scan with what surrounds it. On the CPU it is one `torch.library` operator: opaque to torch.compile,
visible to selective activation checkpointing. Saved for backward are the inputs and the states that enter each chunk of
tokens; the others are computed again.
"""

import torch

from fla_harmonic.ops.mamba.torch_scan import chunked_selective_scan

try:
    from fla_harmonic.ops.mamba import numba_loops as loops
except ImportError:
    loops = None  # type: ignore[assignment]

HAS_LOOPS = loops is not None


def usable_backends(x: torch.Tensor) -> list[str]:
    """Backends that can scan a tensor of x's device and dtype, the default one first."""
    return ["numba", "torch"] if HAS_LOOPS and x.device.type == "cpu" and x.dtype != torch.float64 else ["torch"]


def selective_scan(
    x: torch.Tensor,
    v: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """
    `y = (scan + D x) silu(z)` of the scan `h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`, `scan_t = C_t h_t`, with
    `dt = softplus(v)`, in one pass over the tokens.

    Every tensor is read as fp32, and may be a view. On "numba" values and gradients do not depend on the
    number of threads.

    Args:
        x (torch.Tensor):
            Inputs of shape `[batch, T, D]`.
        v (torch.Tensor):
            Logits of the steps, of shape `[batch, T, D]`.
        A (torch.Tensor):
            Negative rates of shape `[D, N]`.
        B (torch.Tensor):
            Input weights of shape `[batch, T, N]`.
        C (torch.Tensor):
            Output weights of shape `[batch, T, N]`.
        D (torch.Tensor):
            Weights of the inputs in the output, of shape `[D]`.
        z (torch.Tensor):
            Logits of the output's gate, of shape `[batch, T, D]`.

        backend (str, Optional):
            `"numba"` (CPU, one pass over the tokens) or `"torch"` (chunks on `linear_scan`). Default: by device and dtype.

    Returns:
        Outputs of shape `[batch, T, D]`, fp32.

    Raises:
        ValueError: for a wrong shape, or a backend that cannot scan x.
    """
    if x.dim() != 3 or A.dim() != 2:
        raise ValueError(
            f"expected `x` of shape [batch, T, D] and `A` of shape [D, N], but got {list(x.shape)} and {list(A.shape)}. "
            "Remedy: pass one axis for each of these letters")
    states = [*x.shape[:2], A.shape[1]]
    expected = {"v": list(x.shape), "A": [x.shape[2], A.shape[1]], "B": states, "C": states, "D": [x.shape[2]],
                "z": list(x.shape)}
    for (name, shape), given in zip(expected.items(), (v, A, B, C, D, z), strict=True):
        if list(given.shape) != shape:
            raise ValueError(
                f"expected `{name}` of shape {shape} beside `x` of shape {list(x.shape)} and `A` of shape {list(A.shape)}, "
                f"but got {list(given.shape)}. Remedy: pass it in this shape")
    usable = usable_backends(x)
    if backend is not None and backend not in usable:
        raise ValueError(
            f"expected a `backend` that scans {x.dtype} on {x.device}: one of {usable}, but got {backend!r}. Remedy: None, or "
            "`pip install numba` for the CPU")
    if (backend or usable[0]) == "torch":
        return chunked_selective_scan(x, v, A, B, C, D, z)
    return selective_scan_op(*(w.float() for w in (x, v, A, B, C, D, z)))[0]


@torch.library.custom_op("fla_harmonic::selective_scan", mutates_args=(), device_types="cpu")
def selective_scan_op(
    x: torch.Tensor,
    v: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The "numba" backend, and the states `[batch, chunks, N, D]` that enter the chunks."""
    return loops.scan_forward((x, v, A, B, C, D, z))


@torch.library.custom_op("fla_harmonic::selective_scan_backward", mutates_args=(), device_types="cpu")
def selective_scan_backward(
    x: torch.Tensor,
    v: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    states: torch.Tensor,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the seven inputs, each of its input's shape."""
    return loops.scan_backward((x, v, A, B, C, D, z), states, dy)


@selective_scan_op.register_fake
def _(x, v, A, B, C, D, z):
    batch, T, width = x.shape
    return x.new_empty(x.shape), x.new_empty(batch, (T + loops.CHUNK - 1) // loops.CHUNK, A.shape[1], width)


@selective_scan_backward.register_fake
def _(x, v, A, B, C, D, z, states, dy):
    return tuple(w.new_empty(w.shape) for w in (x, v, A, B, C, D, z))


def _save(ctx, inputs, output):
    _, states = output
    ctx.mark_non_differentiable(states)
    ctx.save_for_backward(*inputs, states)


def _grad(ctx, dy, _):
    return selective_scan_backward(*ctx.saved_tensors, dy)


selective_scan_op.register_autograd(_grad, setup_context=_save)
