"""
The cross entropy of all families: summed over tokens as torchtitan divides it, and optionally a chunk of tokens at a time, so
that the logits never exist as `[T, vocab_size]`.

torchtitan's loss is a function of what the model returns. A model that computes the loss itself gets the labels as an input
and returns the sum, which the loss function passes on.
"""

from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss
from torchtitan.config import JobConfig

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Head(nn.Module):
    """Returns logits, or the loss if it is given labels: in a module's forward pass, where FSDP has the whole weight."""

    weight: torch.Tensor
    chunk_tokens: int

    def forward(self, input: torch.Tensor, labels: torch.Tensor | None = None, recomputed: bool = False) -> torch.Tensor:
        """Logits `[..., V]` of hidden states `[..., H]`; with labels `[...]` their loss, see `linear_cross_entropy`."""
        if labels is None:
            return F.linear(input, self.weight)
        return linear_cross_entropy(input, self.weight, labels, self.chunk_tokens, recomputed)


class LossHead(_Head, nn.Linear):
    """The output layer of a language model, from a linear layer without bias whose weight it takes over."""

    def __init__(self, linear: nn.Linear, chunk_tokens: int) -> None:
        if linear.bias is not None:
            raise ValueError(f"expected an output layer without bias, but got {linear}. Remedy: build it with bias=False")
        # on "meta": no numbers are drawn, the weight is there already
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.chunk_tokens = chunk_tokens


class TiedHead(_Head):
    """
    The head of a model whose logits are products with its own token embeddings. It has no parameter: the table belongs to
    the embeddings alone, so that `to_empty`, optimizers, gradient norms and checkpoints meet it once.
    """

    def __init__(self, embeddings: nn.Embedding, chunk_tokens: int = 0) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        # in a tuple, where nn.Module does not take it for a submodule of the head
        self._embeddings = (embeddings,)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The table, `[vocab_size, hidden_size]`."""
        return self._embeddings[0].weight

    def extra_repr(self) -> str:
        vocab_size, hidden_size = self.weight.shape
        return f"in_features={hidden_size}, out_features={vocab_size}"


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int = 0, recomputed: bool = False
) -> torch.Tensor:
    """
    Summed cross entropy of the logits `hidden @ weight.T` for hidden states `[..., H]`, a weight `[V, H]` and labels `[...]`,
    of which -100 does not count: float32, and float64 for float64 input.

    Full precision runs on torch's fused operator. Where that rounds sums to half precision, or has no rule for a sharded
    weight, the chunks are computed again in the backward pass; sums and the weight's gradient are float32 there.

    Args:
        chunk_tokens (int):
            Tokens whose logits exist at a time; 0: all.
        recomputed (bool):
            Whether this runs in a function that `torch.utils.checkpoint` repeats: then no gradient is computed ahead, which
            the repeated function would keep.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if not chunk_tokens or not labels.numel():
        return _cross_entropy(hidden, weight, labels)

    half = torch.is_autocast_enabled(hidden.device.type) or not weight.dtype == hidden.dtype in (torch.float32, torch.float64)
    if not half and type(weight) in (torch.Tensor, nn.Parameter):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens, chunking_method=None, acc_policy="compact")
        reduction = "none" if recomputed else "sum"
        return F.linear_cross_entropy(
            hidden, weight, labels, reduction=reduction, ignore_index=IGNORE_INDEX, options=options
        ).sum()

    # autograd adds up the chunks' gradients in the dtype of what all chunks share
    wide = weight.float()
    pieces = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    return reduce(torch.add, (
        checkpoint(_cross_entropy, h, wide, label, use_reentrant=False, preserve_rng_state=False) for h, label in pieces))


def _cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight.to(hidden.dtype))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)


def build_loss(job_config: JobConfig, **kwargs: object) -> LossFunction:
    """`build_loss_fn` of all families: torchtitan's cross entropy of logits; a model's own sum is passed on."""
    of_logits = build_cross_entropy_loss(job_config, **kwargs)

    def loss(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return pred if pred.ndim == 0 else of_logits(pred, labels)

    return loss
