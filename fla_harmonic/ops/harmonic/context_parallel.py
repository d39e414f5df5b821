"""
`chunk_harmonic` over a sequence that is cut into contiguous pieces, one per rank of a process group.

A piece is an affine map of the state that enters it. Each rank scans its piece from zero and sums its log-decays, the
ranks exchange these maps (two numbers per channel, whatever the length), and each scans once more from the state that
enters it. The gradient goes the same way back. Products of decays over `[T, D]` never exist.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from fla_harmonic.ops.harmonic import op
from fla_harmonic.ops.harmonic.op import check_decay_range, check_inputs, choose_backend, refuse_double_backward

# tokens whose log-decays are in memory at a time
_SUMMED_AT_ONCE = 4096


class CPContext(NamedTuple):
    """
    Where a rank's piece lies, and which documents cross its borders.

    Args:
        group_name (str):
            Name of the process group whose ranks hold the pieces, in their order.
        rank, size (int):
            This rank's number in the group, and the number of ranks.
        first, last (torch.Tensor, Optional):
            With packed documents: the first and the last local document of each of the B rows, int64 of shape `[B]`.
        enters (torch.Tensor, Optional):
            With packed documents: whether the row's first document began on an earlier rank, bool of shape `[B]`.
    """

    group_name: str
    rank: int
    size: int
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None
    enters: torch.Tensor | None = None


def build_cp_context(
    group: dist.ProcessGroup,
    document_ids: torch.Tensor | None = None,
    local_tokens: int | None = None,
) -> tuple[CPContext, torch.Tensor | None]:
    """
    Args:
        group (dist.ProcessGroup):
            Its ranks hold equal, contiguous pieces of each row, in order.
        document_ids (torch.Tensor, Optional):
            Number of each token's document in its row, for the whole sequence: `[B, T]`. Default: a row is one document.
        local_tokens (int, Optional):
            Tokens of a rank's piece of a row; required with `document_ids`.

    Returns:
        cp_context (CPContext):
            For `cp_chunk_harmonic` and `HarmonicAttention`.
        cu_seqlens (torch.Tensor | None):
            Borders of the local documents when the rank's `[B, T / size]` tokens are flattened into one row, `[N + 1]`.

    Raises:
        ValueError: the pieces do not make up the sequence.
    """
    rank, size, name = dist.get_rank(group), dist.get_world_size(group), group.group_name
    if document_ids is None:
        return CPContext(name, rank, size), None
    B, T = document_ids.shape
    if local_tokens is None or local_tokens * size != T:
        raise ValueError(
            f"`document_ids` must number the tokens of the whole sequence, {size} ranks x {local_tokens} tokens; got {T}. "
            "Pass the ids of all ranks to each of them.")
    start = rank * local_tokens
    ids = document_ids[:, start:start + local_tokens]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([ids.numel()])])
    # documents that begin in each row; a row begins one
    counts = begins.sum(1)
    last = counts.cumsum(0) - 1
    enters = document_ids[:, start - 1] == ids[:, 0] if rank else torch.zeros(B, dtype=torch.bool, device=ids.device)
    return CPContext(name, rank, size, last - counts + 1, last, enters), cu_seqlens


def cp_chunk_harmonic(
    u: torch.Tensor,
    v: torch.Tensor,
    decay_range: tuple[float, float],
    cp_context: CPContext,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """
    `chunk_harmonic` of the whole sequence, of which each rank of a group passes, and gets back, its piece.

    Exact in values and gradients. A forward pass communicates `2 B D` numbers per rank and a backward pass `B D`.

    Args:
        u, v, decay_range, backend:
            As for `chunk_harmonic`; `[B, T / size, D]`, or `[1, B T / size, D]` with `cu_seqlens`.
        cp_context (CPContext):
            From `build_cp_context`.
        cu_seqlens (torch.Tensor, Optional):
            From `build_cp_context`: borders of the local documents. Default: `None`.

    Returns:
        States after each local token, of u's shape and dtype.

    Raises:
        ValueError: as `chunk_harmonic`, or a context without documents with `cu_seqlens`, or the reverse.
    """
    check_inputs(("u", u), ("v", v), None, cu_seqlens, None)
    if (cu_seqlens is None) != (cp_context.first is None):
        raise ValueError(
            "`cp_context` and `cu_seqlens` must be built together from the same documents; got "
            f"{'a context with documents' if cu_seqlens is None else 'cu_seqlens and a context without documents'}. "
            "Pass both results of `build_cp_context`.")
    group_name, rank, size, first, last, enters = cp_context
    return _cp_scan(
        u, v, cu_seqlens, first, last, enters, check_decay_range(decay_range), choose_backend(backend, u), group_name, rank,
        size)[0]


def tokens_before(x: torch.Tensor, count: int, cp_context: CPContext) -> torch.Tensor:
    """
    The `count` tokens of `[B, T, D]` that precede this rank's piece, `[B, count, D]`; zero on the first rank.

    Raises:
        ValueError: a piece is shorter than `count`.
    """
    if x.shape[1] < count:
        raise ValueError(f"a rank's piece must have at least {count} tokens; got {x.shape[1]}. Use fewer ranks.")
    return _tokens_before(x, count, cp_context.group_name, cp_context.rank, cp_context.size)


@torch.library.custom_op("fla_harmonic::cp_harmonic_scan", mutates_args=())
def _cp_scan(
    u: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    enters: torch.Tensor | None,
    decay_range: Sequence[float],
    backend: str,
    group_name: str,
    rank: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States `[B, T, D]`, the documents' initial states `[N, D]`, and the decay of every rank's whole piece `[size, B, D]`."""
    options = (decay_range, backend, False)
    _, reached = op.harmonic_scan(u, v, None, cu_seqlens, None, *options)
    rows = u if first is None else u.view(len(first), -1, u.shape[2])
    decay = _piece_decay(rows, decay_range)
    if enters is not None:
        # where a document begins within the piece, or with it, nothing passes
        decay = torch.where((enters & (first == last)).unsqueeze(1), decay, 0.0)
    maps = _all_gather(torch.stack([decay, reached if last is None else reached[last]]), group_name, size)
    state = torch.zeros_like(decay)
    for piece in maps[:rank]:
        state = _apply(piece[0], piece[1], state)
    initial = _per_document(state, reached, first, enters)
    h, _ = op.harmonic_scan(u, v, initial, cu_seqlens, None, *options)
    return h, initial, maps[:, 0].clone()


@torch.library.custom_op("fla_harmonic::cp_harmonic_scan_backward", mutates_args=())
def _cp_scan_backward(
    u: torch.Tensor,
    v: torch.Tensor,
    h: torch.Tensor,
    initial: torch.Tensor,
    decays: torch.Tensor,
    dh: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    enters: torch.Tensor | None,
    decay_range: Sequence[float],
    backend: str,
    group_name: str,
    rank: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = (decay_range, backend, False)
    *_, dinitial = op.harmonic_scan_backward(u, v, h, initial, cu_seqlens, None, dh, None, *options)
    # the gradient that reaches a piece's entering state from the piece itself; later pieces add theirs, decayed
    own = dinitial if enters is None else torch.where(enters.unsqueeze(1), dinitial[first], 0.0)
    grads = _all_gather(own, group_name, size)
    dstate = torch.zeros_like(own)
    for later in range(size - 1, rank, -1):
        dstate = _apply(decays[later], grads[later], dstate)
    dfinal = _per_document(dstate, dinitial, last, None)
    du, dv, _ = op.harmonic_scan_backward(u, v, h, initial, cu_seqlens, None, dh, dfinal, *options)
    return du, dv


@_cp_scan.register_fake
def _(u, v, cu_seqlens, first, last, enters, decay_range, backend, group_name, rank, size):
    rows = u.shape[0] if first is None else first.shape[0]
    initial = op.empty_state(u, cu_seqlens)
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    return h, initial, initial.new_empty(size, rows, u.shape[2])


@_cp_scan_backward.register_fake
def _(u, v, h, initial, decays, dh, cu_seqlens, first, last, enters, decay_range, backend, group_name, rank, size):
    du, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (u, v))
    return du, dv


def _save(ctx, inputs, output):
    u, v, *packing, decay_range, backend, group_name, rank, size = inputs
    ctx.set_materialize_grads(False)
    ctx.options = (decay_range, backend, group_name, rank, size)
    ctx.save_for_backward(u, v, *output, *packing)


def _grad(ctx, dh, dinitial, ddecays):
    u, v, h, initial, decays, *packing = ctx.saved_tensors
    # every rank takes part in the exchange, also one whose outputs nobody reads
    dh = torch.zeros_like(h) if dh is None else dh
    return *_cp_scan_backward(u, v, h, initial, decays, dh, *packing, *ctx.options), *[None] * 9


_cp_scan.register_autograd(_grad, setup_context=_save)
refuse_double_backward(_cp_scan_backward)


@torch.library.custom_op("fla_harmonic::cp_tokens_before", mutates_args=())
def _tokens_before(x: torch.Tensor, count: int, group_name: str, rank: int, size: int) -> torch.Tensor:
    tails = _all_gather(x[:, x.shape[1] - count:].contiguous(), group_name, size)
    return tails[rank - 1].clone() if rank else torch.zeros_like(tails[0])


@torch.library.custom_op("fla_harmonic::cp_tokens_before_backward", mutates_args=())
def _tokens_before_backward(dtail: torch.Tensor, tokens: int, group_name: str, rank: int, size: int) -> torch.Tensor:
    dtails = _all_gather(dtail.contiguous(), group_name, size)
    dx = dtail.new_zeros(dtail.shape[0], tokens, dtail.shape[2])
    if rank + 1 < size:
        dx[:, tokens - dtail.shape[1]:] = dtails[rank + 1]
    return dx


@_tokens_before.register_fake
def _(x, count, group_name, rank, size):
    return x.new_empty(x.shape[0], count, x.shape[2])


@_tokens_before_backward.register_fake
def _(dtail, tokens, group_name, rank, size):
    return dtail.new_empty(dtail.shape[0], tokens, dtail.shape[2])


def _save_tokens(ctx, inputs, output):
    x, _, *ctx.place = inputs
    ctx.tokens = x.shape[1]


def _tokens_grad(ctx, dtail):
    return _tokens_before_backward(dtail, ctx.tokens, *ctx.place), None, None, None, None


_tokens_before.register_autograd(_tokens_grad, setup_context=_save_tokens)
refuse_double_backward(_tokens_before_backward)


def _all_gather(x: torch.Tensor, group_name: str, size: int) -> torch.Tensor:
    # gloo wants the pieces along the first dimension
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_single(gathered, x.contiguous(), group=_resolve_process_group(cast(Any, group_name)))
    return gathered.view(size, *x.shape)


def _apply(decay: torch.Tensor, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    # by selection: a product with zero would keep NaN
    return torch.addcmul(x, decay, torch.where(decay == 0, 0.0, state))


def _piece_decay(u: torch.Tensor, decay_range: Sequence[float]) -> torch.Tensor:
    """Product of the decays of `[B, T, D]` over its tokens, `[B, D]`; as a sum of logarithms, each with all its bits."""
    (a_min, a_max), dtype = decay_range, op.state_dtype(u.dtype)
    total = u.new_zeros(u.shape[0], u.shape[2], dtype=dtype)
    for part in u.split(_SUMMED_AT_ONCE, dim=1):
        complement = (1 - a_max) + (a_max - a_min) * torch.sigmoid(-part.to(dtype))
        total += torch.log1p(-complement).sum(1)
    return total.exp()


def _per_document(
    rows: torch.Tensor,
    like: torch.Tensor,
    documents: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    """Values of the rows `[B, D]` at their documents among `[N, D]`, zero for every other document."""
    if documents is None:
        return rows
    rows = rows if kept is None else torch.where(kept.unsqueeze(1), rows, 0.0)
    return torch.zeros_like(like).index_copy(0, documents, rows)
