"""
Whether a language model is causal. Four checks, of which a model that reads the future fails at least one:

- Tokens after a split are replaced: the logits before it stay (splits around every border of chunks and blocks).
- The gradient of the logits before a split with respect to the embeddings after it is exactly zero.
- On uniformly random tokens no causal model can be below log2(V) bits per token.
- Documents packed into one row do not see one another (models of fla's kind and converted ones, which know `cu_seqlens`).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fla.models.utils import FLAGenerationMixin
from torch import nn

from fla_harmonic import HallamonicForCausalLM

# borders of chunks and blocks are at multiples of this: fla's chunks have 64 or 128 tokens, ours 256
BORDER = 64


@dataclass(frozen=True)
class Audit:
    """Verdict on a model; `failure` is empty for a causal one."""

    failure: str
    """The first check that failed, with the position."""
    splits: int
    """Splits that were tried."""
    length: int
    """Tokens of a sequence."""
    largest_change: float
    """Largest change of a logit before a split when the tokens after it changed."""
    largest_effect: float
    """Largest change of a logit at a split: 0 for a model that does not see its input, of which the audit says nothing."""
    random_bits_per_token: float
    """Loss on uniformly random tokens."""
    log2_vocab: float
    """What no causal model can be below on them, up to the sample's error."""
    packing: str
    """`"exact"`, `"leaks"`, or `"not supported"` for a model that does not know `cu_seqlens`."""

    @property
    def causal(self) -> bool:
        return not self.failure


def splits(length: int) -> list[int]:
    """Every split below 66, and those at and beside every multiple of `BORDER`."""
    near = {border + shift for border in range(BORDER, length, BORDER) for shift in (-1, 0, 1)}
    return sorted(split for split in near | set(range(1, 66)) if split < length)


def audit(model: nn.Module, length: int = 264, bound: float = 1e-5, batch_size: int = 16) -> Audit:
    """
    Tries a model, which is left as it was, on sequences of `length` tokens, `batch_size` splits at once: a Hugging Face causal
    language model, or any module from token ids `[B, T]` to logits `[B, T, V]` with an `nn.Embedding` of the tokens. `bound`
    is the change of a logit that rounding may cause, times the largest logit where that is above 1.
    """
    if length < 2:
        raise ValueError(f"`length` must be at least 2, for a token after a split; got {length}.")
    embedding = _embedding(model)
    V, device = embedding.num_embeddings, embedding.weight.device
    tokens, others = torch.randint(V, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    # every later token differs
    others = torch.where(others == tokens, (others + 1) % V, others)
    tried = splits(length)
    training = model.training
    model.eval()
    try:
        largest, effect, failure = _suffixes(model, tokens, others, tried, bound, batch_size)
        failure = failure or _gradients(model, embedding, tokens, tried)
        bits, error = _random_bits(model, V, length, device)
        # written so that NaN fails
        if not failure and not bits >= math.log2(V) - 4 * error:
            failure = f"{bits:.4f} bits per token on uniformly random tokens, below log2({V}) = {math.log2(V):.4f}"
        packing = _packing(model, tokens, others, bound)
        if not failure and packing == "leaks":
            failure = f"logits of a packed document change with the document before it, from position {length // 2 + 1} on"
    finally:
        model.train(training)
    return Audit(failure, len(tried), length, largest, effect, bits, math.log2(V), packing)


def check_causal(model: nn.Module, length: int = 264) -> Audit:
    """The audit of a model that is about to be scored; a RuntimeError if it reads the future, or computes no numbers."""
    verdict = audit(model, length)
    if not verdict.causal:
        raise RuntimeError(
            f"expected a model whose logits depend on earlier tokens alone; found {verdict.failure}. It reads the future (or "
            "computes no numbers), and is not scored.")
    return verdict


@torch.no_grad()
def _suffixes(
    model: nn.Module, tokens: torch.Tensor, others: torch.Tensor, tried: list[int], bound: float, batch_size: int,
) -> tuple[float, float, str]:
    """Largest change of a logit before a split, and at it; and the first failure."""
    positions = torch.arange(len(tokens), device=tokens.device)
    expected = _logits(model, tokens[None])
    bound *= max(1.0, expected.abs().max().item())
    largest, effect, failure = [], [], ""
    for some in torch.tensor(tried, device=tokens.device).split(batch_size):
        later = positions >= some[:, None]
        change = (_logits(model, torch.where(later, others, tokens)) - expected).abs().amax(2)
        before = change.masked_fill(later, 0.0)
        largest.append(before.max())
        effect.append(change.gather(1, some[:, None]).max())
        # written so that NaN fails
        wrong = (~(before <= bound)).nonzero().tolist()
        if wrong and not failure:
            row, position = wrong[0]
            failure = f"logits at position {position} that change by {before[row, position].item():.2e} when tokens " \
                      f"from {some[row].item()} on do"
    return torch.stack(largest).max().item(), torch.stack(effect).max().item(), failure


@torch.enable_grad()
def _gradients(model: nn.Module, embedding: nn.Embedding, tokens: torch.Tensor, tried: list[int]) -> str:
    """The first embedding that earlier logits have a gradient for."""
    leaves: list[torch.Tensor] = []

    def make_leaf(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    with embedding.register_forward_hook(make_leaf):
        logits = _logits(model, tokens[None])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    # borders, and not every split: one backward pass each
    for split in sorted({1, 2, len(tokens) // 2, *(s for s in tried if s % BORDER in (0, 1, BORDER - 1))}):
        gradient, = torch.autograd.grad((logits * weights)[:, :split].sum(), leaves, retain_graph=True)
        if seen := gradient[0, split:].any(-1).nonzero().flatten().tolist():
            return f"logits before position {split} with a gradient for the token at {split + seen[0]}"
    return ""


@torch.no_grad()
def _random_bits(model: nn.Module, V: int, length: int, device: torch.device, rows: int = 16) -> tuple[float, float]:
    """Bits per token on uniformly random tokens, and the standard error of that mean."""
    tokens = torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(2)).to(device)
    losses = F.cross_entropy(_logits(model, tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    bits = losses.double() / math.log(2)
    return bits.mean().item(), bits.std().item() / math.sqrt(len(bits))


@torch.no_grad()
def _packing(model: nn.Module, tokens: torch.Tensor, others: torch.Tensor, bound: float) -> str:
    """Whether the second of two packed documents changes with the first."""
    # transformers' own models swallow any keyword and leave it at that
    if not isinstance(model, FLAGenerationMixin | HallamonicForCausalLM):
        return "not supported"
    cut = len(tokens) // 2 + 1
    borders = torch.tensor([0, cut, len(tokens)], device=tokens.device)
    first, second = (
        _logits(model, torch.cat([head[:cut], tokens[cut:]])[None], cu_seqlens=borders) for head in (tokens, others))
    return "exact" if (first - second)[:, cut:].abs().max() <= bound else "leaks"


def _logits(model: Any, tokens: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    # transformers' models alone have a configuration, and a cache
    output = model(tokens, **({"use_cache": False} if hasattr(model, "config") else {}), **options)
    return output if isinstance(output, torch.Tensor) else output.logits


def _embedding(model: Any) -> nn.Embedding:
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module
    raise ValueError(f"expected a model with an nn.Embedding of its tokens; {type(model).__name__} has none.")
