"""
Whether a language model is causal: `python -m eval.audit --model outputs/harmonic_debug/hf`, or `--flavor harmonic/debug`.

Four checks, of which a model that reads the future fails at least one:

- Tokens after a split are replaced: the logits before it stay (splits around every border of chunks and blocks).
- The gradient of the logits before a split with respect to the embeddings after it is exactly zero.
- On uniformly random tokens no causal model can be below log2(V) bits a token.
- Documents packed into one row do not see one another (models of fla's kind and converted ones, which know `cu_seqlens`).

Exit status 1 and the first offending position if one fails. Every command that reports a score runs this first.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from fla.models.utils import FLAGenerationMixin
from torch import nn

from eval.scoring.models import build, load
from fla_harmonic import HallamonicForCausalLM

# borders of chunks and blocks are at multiples of this: fla's chunks have 64 or 128 tokens, ours 256
BORDER = 64


@dataclass
class Options:
    """What to audit."""

    model: Path | None = None
    """Hugging Face directory of a causal language model."""

    flavor: str | None = None
    """Untrained model of the torchtitan plugin in place of `model`: family/flavor."""

    length: int = 264
    """Tokens of the sequences that are tried."""

    bound: float = 1e-5
    """Change of a logit that rounding may cause, times the largest logit where that is above 1."""

    out: Path | None = None
    """JSON file for the verdict, if wanted."""


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
    Tries a model; it is left as it was.

    Args:
        model (nn.Module):
            A Hugging Face causal language model, or any module from token ids `[B, T]` to logits `[B, T, V]` with an
            `nn.Embedding` of the tokens.
        length (int):
            Tokens of the sequences that are tried. Default: 264.
        bound (float):
            Change of a logit that rounding may cause, times the largest logit where that is above 1. Default: 1e-5.
        batch_size (int):
            Splits tried at once. Default: 16.

    Raises:
        ValueError: for a length below 2, or a model without an embedding.
    """
    if length < 2:
        raise ValueError(f"`length` must be at least 2, for a token after a split; got {length}.")
    embedding = _embedding(model)
    V = embedding.num_embeddings
    generator = torch.Generator().manual_seed(0)
    tokens, others = torch.randint(V, (2, length), generator=generator)
    # every later token differs
    others = torch.where(others == tokens, (others + 1) % V, others)
    tokens, others = (x.to(embedding.weight.device) for x in (tokens, others))
    tried = splits(length)
    training = model.training
    model.eval()
    try:
        largest, effect, failure = _suffixes(model, tokens, others, tried, bound, batch_size)
        failure = failure or _gradients(model, embedding, tokens, tried)
        bits, error = _random_bits(model, V, length, embedding.weight.device)
        # written so that NaN fails
        if not failure and not bits >= math.log2(V) - 4 * error:
            failure = f"{bits:.4f} bits a token on uniformly random tokens, below log2({V}) = {math.log2(V):.4f}"
        packing = _packing(model, tokens, others, bound)
        if not failure and packing == "leaks":
            failure = f"logits of a packed document change with the document before it, from position {length // 2 + 1} on"
    finally:
        model.train(training)
    return Audit(failure, len(tried), length, largest, effect, bits, math.log2(V), packing)


def check_causal(model: nn.Module) -> Audit:
    """
    The audit of a model that is about to be scored.

    Raises:
        RuntimeError: the model reads the future, or its logits are not finite.
    """
    verdict = audit(model)
    if not verdict.causal:
        raise RuntimeError(
            f"expected a model whose logits depend on earlier tokens alone; found {verdict.failure}. It reads the future (or "
            "computes no numbers), and is not scored.")
    return verdict


def _suffixes(
    model: nn.Module,
    tokens: torch.Tensor,
    others: torch.Tensor,
    tried: list[int],
    bound: float,
    batch_size: int,
) -> tuple[float, float, str]:
    """Largest change of a logit before a split, and at it; and the first failure."""
    positions = torch.arange(len(tokens), device=tokens.device)
    largest, effect, failure = 0.0, 0.0, ""
    with torch.no_grad():
        expected = _logits(model, tokens[None])
        bound *= max(1.0, expected.abs().max().item())
        for some in _batches(tried, batch_size):
            later = positions >= torch.tensor(some, device=tokens.device)[:, None]
            change = (_logits(model, torch.where(later, others, tokens)) - expected).abs().amax(2)
            before = change.masked_fill(later, 0.0)
            largest = max(largest, before.max().item()) if not before.isnan().any() else math.nan
            for row, split in enumerate(some):
                if not failure and not before[row].max() <= bound:
                    position = int((~(before[row] <= bound)).nonzero()[0])
                    failure = f"logits at position {position} that change by {before[row, position].item():.2e} when tokens " \
                              f"from {split} on do"
            effect = max(effect, *(change[row, split].item() for row, split in enumerate(some)))
    return largest, effect, failure


@torch.enable_grad()
def _gradients(model: nn.Module, embedding: nn.Embedding, tokens: torch.Tensor, tried: list[int]) -> str:
    """The first embedding that earlier logits have a gradient for."""
    leaves: list[torch.Tensor] = []

    def make_leaf(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = embedding.register_forward_hook(make_leaf)
    try:
        logits = _logits(model, tokens[None])
    finally:
        handle.remove()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    # borders, and not every split: one backward pass each
    for split in sorted({1, 2, len(tokens) // 2, *(s for s in tried if s % BORDER in (0, 1, BORDER - 1))}):
        loss = (logits[:, :split] * weights[:, :split]).sum()
        gradient, = torch.autograd.grad(loss, leaves, retain_graph=True)
        seen = (gradient[0, split:] != 0).any(-1)
        if seen.any():
            position = split + int(seen.nonzero()[0])
            return f"logits before position {split} with a gradient for the token at {position}"
    return ""


@torch.no_grad()
def _random_bits(model: nn.Module, V: int, length: int, device: torch.device, rows: int = 16) -> tuple[float, float]:
    """Bits a token on uniformly random tokens, and the standard error of that mean."""
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


def _logits(model: nn.Module, tokens: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    call: Callable[..., object] = model
    if hasattr(model, "config"):
        options = {"use_cache": False, **options}  # type: ignore[dict-item]
    output = call(tokens, **options)
    return output if isinstance(output, torch.Tensor) else output.logits  # type: ignore[attr-defined]


def _embedding(model: nn.Module) -> nn.Embedding:
    getter: Callable[[], nn.Module] | None = getattr(model, "get_input_embeddings", None)
    found = getter() if getter else None
    found = found or next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if not isinstance(found, nn.Embedding):
        raise ValueError(f"expected a model with an nn.Embedding of its tokens; {type(model).__name__} has none.")
    return found


def _batches(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start:start + size]


def main(options: Options) -> None:
    if (options.model is None) == (options.flavor is None):
        raise ValueError(f"give one of `model` and `flavor`; got {options.model} and {options.flavor}.")
    model = load(options.model)[0] if options.model is not None else build(options.flavor or "")
    verdict = audit(model, options.length, options.bound)
    text = json.dumps({"causal": verdict.causal, **asdict(verdict)}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    if not verdict.causal:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
