"""
A sequence of any length as segments that pass on their recurrent states, each computed again in the backward pass: the
values and gradients of the whole sequence, in the memory of one segment.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fla.models.utils import Cache
from torch.utils.checkpoint import checkpoint

from fla_harmonic.models.packing import borders_of_starts
from fla_harmonic.titan.components.states import LayerState, States

# None where the C library is another than glibc
_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

# (tokens [B, T], borders of packed documents or None, cache) -> hidden states [B, T, H]
Hidden = Callable[[torch.Tensor, torch.Tensor | None, Cache], torch.Tensor]
# (hidden states [B, T, H], labels [B, T], whether it runs in a checkpointed function) -> summed loss
Loss = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]


class SegmentCache(Cache):
    """
    fla's cache for one segment: what a layer reads is what the segment began with, and what it writes is kept apart. So a
    block that activation checkpointing computes a second time computes the same.
    """

    def __init__(self, before: States) -> None:
        super().__init__()
        self.before = before
        self.after: dict[int, LayerState] = {}

    def __len__(self) -> int:
        return len(self.before)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        levels, conv = self.before[layer_idx]
        return {"recurrent_state": levels, "conv_state": conv}

    def update(
        self, *, layer_idx: int, recurrent_state: tuple[torch.Tensor, ...], conv_state: torch.Tensor | None, **_: Any
    ) -> None:
        self.after[layer_idx] = LayerState(recurrent_state, conv_state)

    def states(self) -> States:
        """What the layers remember when the segment has ended."""
        return [self.after[layer_idx] for layer_idx in range(len(self.before))]


class Packing:
    """The documents of B rows as one packed row, and which of them each row's states enter and leave."""

    def __init__(self, document_ids: torch.Tensor, continues: torch.Tensor) -> None:
        self.continues = continues
        self.cu_seqlens = document_borders(document_ids)
        rows, tokens = document_ids.shape
        starts = torch.arange(rows, device=document_ids.device) * tokens
        self.first = torch.searchsorted(self.cu_seqlens, starts)
        self.last = torch.cat([self.first[1:], self.first.new_tensor([len(self.cu_seqlens) - 1])]) - 1

    def enter(self, states: States) -> States:
        """States of N documents from those of B rows: the rows' own for documents that continue, else zero."""
        documents = len(self.cu_seqlens) - 1

        def spread(rows: torch.Tensor) -> torch.Tensor:
            rows = _keep(rows, self.continues)
            return rows.new_zeros(documents, *rows.shape[1:]).index_copy(0, self.first, rows)

        return [state.map(spread) for state in states]

    def leave(self, states: States) -> States:
        """States of B rows from those of N documents: each row's last document's."""
        return [state.map(lambda documents: documents[self.last]) for state in states]


def document_borders(document_ids: torch.Tensor) -> torch.Tensor:
    """Cumulative lengths `[N + 1]` of the documents in `[B, T]`, read row by row; a document ends with its row."""
    starts = F.pad(document_ids.diff() != 0, (1, 0), value=True)
    return borders_of_starts(starts.flatten()[1:], document_ids.numel())


def run_segments(
    hidden: Hidden,
    loss: Loss,
    states: States,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    document_ids: torch.Tensor | None = None,
    continues: torch.Tensor | None = None,
    segment_len: int = 0,
) -> tuple[torch.Tensor, States]:
    """
    Summed loss of the tokens and labels `[B, T]` from the rows' states on, and the states after them.

    Args:
        document_ids (torch.Tensor, Optional):
            Number of each token's document within its row, of shape `[B, T]`: states start again where it changes.
            Default: each row is one document.
        continues (torch.Tensor, Optional):
            Whether a row continues from its states, `[B]` bool; the others start from zeros. Default: all do.
        segment_len (int):
            Most tokens of a segment; the segments of a sequence are as equal as can be. 0: one segment, whose activations
            are kept.
    """
    rows, length = tokens.shape
    if continues is None:
        continues = torch.ones(rows, dtype=torch.bool, device=tokens.device)
    count = -(-length // segment_len) if segment_len and length else 1
    recomputed = count > 1

    def segment(
        tokens: torch.Tensor, labels: torch.Tensor, document_ids: torch.Tensor | None, continues: torch.Tensor, states: States
    ) -> tuple[torch.Tensor, States]:
        if recomputed and tokens.device.type == "cpu" and _MALLOC_TRIM is not None:
            # what the segment before has left: glibc keeps holes that are a few bytes too small for the next aligned tensor,
            # so that a loop over tensors of one size grows without a tensor being alive
            _MALLOC_TRIM(0)
        if document_ids is None:
            cache = SegmentCache([state.map(lambda x: _keep(x, continues)) for state in states])
            h = hidden(tokens, None, cache)
            after = cache.states()
        else:
            packing = Packing(document_ids, continues)
            cache = SegmentCache(packing.enter(states))
            h = hidden(tokens.reshape(1, -1), packing.cu_seqlens, cache).view(*tokens.shape, -1)
            after = packing.leave(cache.states())
        return loss(h, labels, recomputed), after

    total: torch.Tensor | None = None
    pieces = [
        tokens.tensor_split(count, dim=1),
        labels.tensor_split(count, dim=1),
        [None] * count if document_ids is None else document_ids.tensor_split(count, dim=1),
    ]
    document: torch.Tensor | None = None
    for piece_tokens, piece_labels, piece_ids in zip(*pieces, strict=True):
        if total is not None:
            continues = torch.ones_like(continues) if piece_ids is None else piece_ids[:, 0] == document
        inputs = piece_tokens, piece_labels, piece_ids, continues, states
        piece, states = checkpoint(segment, *inputs, use_reentrant=False) if recomputed else segment(*inputs)
        # added up as they come: the backward pass takes the segments one by one, the last first
        total = piece if total is None else total + piece
        document = None if piece_ids is None else piece_ids[:, -1:].squeeze(1)
    assert total is not None
    return total, states


def _keep(rows: torch.Tensor, continues: torch.Tensor) -> torch.Tensor:
    return torch.where(continues.view(-1, *[1] * (rows.ndim - 1)), rows, 0.0)
