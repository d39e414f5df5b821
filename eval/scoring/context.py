"""Losses of a model by how many tokens stand before a target, at lengths whose logits do not fit memory."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MambaForCausalLM, PreTrainedModel

from eval.scoring.targets import bits, window_losses
from fla_harmonic import HallamonicForCausalLM, HarmonicForCausalLM
from fla_harmonic.layers.harmonic import HarmonicAttention


class Losses:
    """
    Losses of windows, as `eval.scoring.targets.window_losses` gives them; only a piece of them has logits at a time. A
    Harmonic without attention reads a window that is longer than a piece in pieces too, so that its memory is constant.
    `piece` counts the tokens of all rows; it sets memory, and changes no loss beyond rounding.
    """

    def __init__(self, model: PreTrainedModel, piece: int) -> None:
        if piece < 1:
            raise ValueError(f"`piece` must be at least 1 token; got {piece}.")
        self.piece = piece
        self.streams = isinstance(model, HarmonicForCausalLM) and is_recurrent(model)
        self.head = plain_head(model)

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, ids: torch.Tensor, scored: int) -> torch.Tensor:
        B, T = ids.shape[0], ids.shape[1] - 1
        if isinstance(model, HarmonicForCausalLM) and self.streams and self.piece < B * T:
            return torch.cat(list(model.stream(ids, max(1, self.piece // B))), 1)[:, -scored:]
        if self.head is None:
            return window_losses(model, ids, scored)
        states = model.base_model(ids[:, :-1], use_cache=False).last_hidden_state[:, -scored:]
        pairs = zip(states.flatten(0, 1).split(self.piece), ids[:, -scored:].flatten().split(self.piece), strict=True)
        losses = [F.cross_entropy(self.head(some).float(), labels, reduction="none") for some, labels in pairs]
        return torch.cat(losses).view(B, scored)


def is_recurrent(model: nn.Module) -> bool:
    """Whether a model is known to have a state and no attention: Harmonic or Hallamonic without attention layers, or Mamba."""
    if isinstance(model, HarmonicForCausalLM):
        return all(isinstance(block.attn, HarmonicAttention) for block in model.model.layers)
    if isinstance(model, HallamonicForCausalLM):
        return model.config.all_harmonic
    return isinstance(model, MambaForCausalLM)


@torch.no_grad()
def plain_head(model: PreTrainedModel) -> nn.Module | None:
    """
    The output embedding, if the logits are nothing but this on the last states; `None` for a model that does more to them,
    whose logits then have to be there for a whole window.
    """
    base: Any = getattr(model, "base_model", model)
    if base is model:
        return None
    head: Any = model.get_output_embeddings()
    ids = torch.arange(min(8, model.config.vocab_size), device=head.weight.device)[None]
    logits = model(ids, use_cache=False).logits
    states = base(ids, use_cache=False).last_hidden_state
    return head if torch.allclose(head(states), logits, rtol=1e-4, atol=1e-5 * logits.abs().max().item()) else None


def window_starts(num_tokens: int, length: int, windows: int) -> list[int]:
    """First tokens of windows of `length` inputs, spread evenly over a text, whose last target is in it; no two are equal."""
    if windows < 1 or num_tokens <= length:
        raise ValueError(f"expected a window or more, of {length} tokens and a target, in the text; got {windows} windows and "
                         f"{num_tokens} tokens of text. Pass a longer text or a shorter context.")
    return np.unique(np.linspace(0, num_tokens - 1 - length, windows).round().astype(int)).tolist()


def buckets(losses: torch.Tensor) -> list[dict[str, Any]]:
    """
    Losses in nats, `[windows, length]`, by position in buckets that double: after 1, 2, 3 to 4, 5 to 8, ... tokens. Every
    target is in one of them.

    Returns:
        For each bucket the positions `[first, stop)`, of which p is predicted from p + 1 tokens, the number of `targets`, and
        the sum of their losses in `bits`.
    """
    length = losses.shape[1]
    edges = [0, *(2 ** power for power in range(length.bit_length()) if 2 ** power < length), length]
    return [{"first": first, "stop": stop, "targets": losses[:, first:stop].numel(), "bits": bits(losses[:, first:stop])}
            for first, stop in pairwise(edges)]
