"""What packed and padded batches mean: where documents begin, and which tokens are scored."""

from typing import Any

import torch
import torch.nn.functional as F

from fla_harmonic.modules import padding_mask
from fla_harmonic.ops.harmonic.op import check_cu_seqlens


def document_borders(
    options: dict[str, Any],
    batch: int,
    tokens: int,
    attention_mask: torch.Tensor | None = None,
    past: Any = None,
) -> torch.Tensor | None:
    """
    Borders `[N + 1]` of the documents of a packed row, or `None` if each row of the inputs `[batch, tokens]` is one sequence.

    They come under any of these names, which are taken out of `options` and must agree: fla's `cu_seqlens`, and what
    transformers' `DataCollatorWithFlattening` makes: `position_ids` (a document begins where they do not rise; those of a
    padded row number its unmasked tokens), `seq_idx`, `cu_seq_lens_q` and `cu_seq_lens_k`, `max_length_q` and `max_length_k`.

    Raises:
        ValueError: for borders that are impossible or contradict one another, and for packed positions in more than one
            row, beside pads or after a cache, `past`.
    """
    given = {name: options.pop(name, None) for name in (
        "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "seq_idx", "max_length_q", "max_length_k")}
    position_ids, seq_idx = given["position_ids"], given["seq_idx"]
    found = {name: _checked(name, given[name], batch, tokens)
             for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k") if given[name] is not None}
    if seq_idx is not None:
        if tuple(seq_idx.shape) != (1, tokens) or batch != 1:
            raise ValueError(
                f"`seq_idx` must number the documents of one row, [1, {tokens}]; got {tuple(seq_idx.shape)} with {batch} "
                "rows.")
        found["seq_idx"] = borders_of_starts(seq_idx[0].diff() != 0, tokens)
    if position_ids is not None:
        starts = _restarts(position_ids, batch, tokens, attention_mask, past.get_seq_length() if past else 0)
        if starts is not None:
            found["position_ids"] = borders_of_starts(starts, tokens)
    if not found:
        return None
    (name, cu_seqlens), *others = found.items()
    if others:
        # as sets, for documents without tokens show in borders alone
        documents = {name: check_cu_seqlens(borders, tokens).unique().tolist() for name, borders in found.items()}
        for other, _ in others:
            if documents[other] != documents[name]:
                raise ValueError(
                    f"`{name}` and `{other}` must give the same documents; they begin at {documents[name][:-1][:16]} and "
                    f"{documents[other][:-1][:16]}. Pass one of them.")
    return cu_seqlens


def _checked(name: str, borders: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    if batch != 1:
        raise ValueError(f"`{name}` needs a batch of 1; got {batch}. Flatten the documents into one row first.")
    if borders.ndim != 1 or borders.shape[0] < 1 or borders.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"`{name}` must be int32 or int64 of shape [N + 1]; got {borders.dtype} of shape {tuple(borders.shape)}.")
    if not torch.compiler.is_compiling():
        check_cu_seqlens(borders, tokens)
    return borders


def borders_of_starts(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[N + 1]` from whether each token but the first begins a document, `[T - 1]`."""
    return F.pad(F.pad(starts.nonzero().flatten() + 1, (1, 0)), (0, 1), value=tokens)


def _restarts(
    position_ids: torch.Tensor,
    batch: int,
    tokens: int,
    attention_mask: torch.Tensor | None,
    past_tokens: int,
) -> torch.Tensor | None:
    """Whether each token but the first begins a document, `[T - 1]`; `None` if each row is one sequence."""
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != tokens:
        raise ValueError(
            f"`position_ids` must have shape [{batch}, {tokens}] or [1, {tokens}]; got {tuple(position_ids.shape)}.")
    padded = False
    if attention_mask is not None:
        mask = padding_mask(attention_mask, batch, tokens)
        padded = not bool(mask.all())
    if padded:
        rows, columns = mask.nonzero().unbind(1)
        step = position_ids.expand(batch, -1)[rows, columns].diff()[rows.diff() == 0]
    else:
        step = position_ids.diff()
    if bool((step == 1).all()):
        return None
    restarts = step < 1
    if not bool(restarts.any()) and padded:
        # positions that count the pads too
        return None
    if not bool((restarts | (step == 1)).all()):
        raise ValueError(
            f"`position_ids` must rise by 1 within a document; got a step of {int(step.max())}. Tokens are read in their "
            "order: leave `position_ids` out, or give borders as `cu_seqlens`.")
    if batch != 1 or padded or past_tokens:
        raise ValueError(
            f"`position_ids` that begin again mean packed documents, in one row without pads and without a past; got {batch} "
            f"rows, {'' if padded else 'no '}pads and {past_tokens} tokens in the cache. For padded sequences pass "
            "`attention_mask`, for packed ones a single row, for a cached past neither positions nor borders.")
    return restarts[0]


def labels_within_documents(
    labels: torch.Tensor,
    batch: int,
    tokens: int,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    ignore_index: int,
) -> torch.Tensor:
    """
    The labels `[B, T]`, in which no token is the target of another document's token or of a pad, and no pad is a target.

    A loss that moves the labels one to the left then scores each sequence as if it were alone: the target of a token is
    the next unmasked token of its document, however many pads lie between.

    Raises:
        ValueError: for labels of another shape than the inputs.
    """
    if tuple(labels.shape) != (batch, tokens):
        raise ValueError(
            f"`labels` must have the shape of the inputs, {(batch, tokens)}; got {tuple(labels.shape)}. Pass the inputs "
            "themselves, with -100 for what is not scored; the model moves them.")
    if cu_seqlens is not None:
        # one place more, for documents without tokens at the end
        first = torch.zeros(labels.shape[1] + 1, dtype=torch.bool, device=labels.device)
        first = first.index_fill(0, cu_seqlens.to(labels.device, torch.int64), True)[:-1]
        return labels.masked_fill(first, ignore_index)
    if attention_mask is None:
        return labels
    mask = padding_mask(attention_mask, *labels.shape).to(labels.device)
    kept = mask.flatten().nonzero().flatten()
    rows = kept // max(labels.shape[1], 1)
    flat = labels.flatten()
    targets = torch.where(rows[1:] == rows[:-1], flat[kept[1:]], ignore_index)
    return torch.full_like(flat, ignore_index).index_copy(0, kept[:-1] + 1, targets).view_as(labels)
