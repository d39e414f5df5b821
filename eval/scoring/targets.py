"""Loss of a model on a fixed range of target tokens, whatever the length of its windows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

# rows of logits whose loss is computed at a time
_LOSS_ROWS = 4096


@dataclass(frozen=True)
class Window:
    """Input tokens `[begin, end)` of a text, of which the last `scored` predict a target: the token after each."""

    begin: int
    end: int
    scored: int


def windows(first: int, stop: int, seq_len: int, stride: int) -> Iterator[Window]:
    """
    Windows whose targets are the tokens `[first, stop)`, each once: a window has `seq_len` input tokens and predicts the
    last `stride` of their successors, so that a target is predicted from at least `seq_len - stride + 1` tokens, wherever
    the text has so many before it.

    Raises:
        ValueError: the range is empty or begins before token 1, or the stride is not in `[1, seq_len]`.
    """
    if not 1 <= first < stop:
        raise ValueError(f"expected targets [first, stop) with 1 <= first < stop; got [{first}, {stop}).")
    if not 1 <= stride <= seq_len:
        raise ValueError(f"expected a stride in [1, seq_len]; got {stride} with seq_len {seq_len}.")
    for begin in range(first, stop, stride):
        end = min(begin + stride, stop)
        yield Window(max(0, begin + stride - 1 - seq_len), end - 1, end - begin)


@torch.no_grad()
def window_losses(model: PreTrainedModel, ids: torch.Tensor, scored: int) -> torch.Tensor:
    """
    Negative log-likelihoods in nats, float32 `[B, scored]`, of the last tokens of windows `[B, n + 1]` (n inputs and the
    target of the last); their logits are all there at once.
    """
    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=scored).logits
    pairs = zip(logits.flatten(0, 1).split(_LOSS_ROWS), ids[:, -scored:].flatten().split(_LOSS_ROWS), strict=True)
    losses = [F.cross_entropy(some.float(), labels, reduction="none") for some, labels in pairs]
    return torch.cat(losses).view(len(ids), scored)


@torch.no_grad()
def target_losses(
    model: PreTrainedModel,
    tokens: np.ndarray,
    first: int,
    stop: int,
    seq_len: int,
    stride: int,
    batch_size: int = 1,
    progress: Callable[[int], None] | None = None,
    losses_of: Callable[[PreTrainedModel, torch.Tensor, int], torch.Tensor] = window_losses,
) -> torch.Tensor:
    """
    Negative log-likelihoods in nats, float64 `[stop - first]` on the CPU, of the tokens `[first, stop)` of a text; see
    `windows`, of which `batch_size` are computed at once, in float32, by `losses_of`. `progress` is called with the number of
    targets that were done. A ValueError if the text ends before the targets do.
    """
    if stop > len(tokens):
        raise ValueError(f"expected a text of at least {stop:,} tokens for its targets; got {len(tokens):,}. Ask for fewer "
                         "targets, or pass a longer text.")
    device = next(model.parameters()).device
    losses = []
    same_shape = groupby(windows(first, stop, seq_len, stride), key=lambda window: (window.end - window.begin, window.scored))
    for (_, scored), group in same_shape:
        while batch := list(islice(group, batch_size)):
            rows = np.stack([tokens[window.begin:window.end + 1].astype(np.int64) for window in batch])
            losses.append(losses_of(model, torch.from_numpy(rows).to(device), scored).flatten().double().cpu())
            if progress is not None:
                progress(len(batch) * scored)
    return torch.cat(losses)


def bits(nats: torch.Tensor) -> float:
    """The sum in bits."""
    return nats.sum().item() / math.log(2)
