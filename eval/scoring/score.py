"""Mean loss of a model over targets of a text, in bits per token and per byte."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from eval.scoring.in_situ import InSitu, Verdict
from eval.scoring.models import is_beyond, trained_length
from eval.scoring.targets import bits, target_losses
from fla_harmonic.text import TokenSplit


@dataclass
class Score:
    """Mean loss of a model over a split."""

    targets: int
    """Tokens predicted."""
    first_target: int
    """Position of the first of them in the split."""
    seq_len: int
    """Tokens of a window."""
    stride: int
    """Targets of a window."""
    num_bytes: int
    """UTF-8 bytes of the targets' text."""
    bits_per_token: float
    """Negative log-likelihood in bits, over `targets`."""
    bits_per_byte: float
    """Negative log-likelihood in bits, over `num_bytes`."""
    beyond_trained_length: bool
    """Whether a window is longer than the model was trained on: no fair score of a model with positions."""
    audit: Verdict
    """What the audit of these very windows saw."""


def score(
    model: PreTrainedModel, split: TokenSplit, seq_len: int, batch_size: int, stride: int | None = None,
    targets: range | None = None, num_bytes: int | None = None,
) -> Score:
    """
    The loss of a causal language model in evaluation mode, in float32, summed in float64. `targets` are positions in the split
    (by default all but the first), `num_bytes` the UTF-8 bytes of their text; for `stride` see `eval.scoring.targets.windows`.

    Raises:
        RuntimeError: the model is not causal.
        ValueError: the split has no such targets; targets without their bytes.
    """
    if (targets is None) != (num_bytes is None):
        raise ValueError(f"expected `targets` with their `num_bytes`, or neither; got {targets} and {num_bytes}.")
    stride = seq_len if stride is None else stride
    targets = range(1, len(split.tokens)) if targets is None else targets
    num_bytes = split.num_bytes if num_bytes is None else num_bytes
    with InSitu(model) as audit:
        total = bits(target_losses(model, split.tokens, targets.start, targets.stop, seq_len, stride, batch_size))
    return Score(
        len(targets), targets.start, seq_len, stride, num_bytes, total / len(targets), total / num_bytes,
        is_beyond(seq_len, trained_length(model)), audit.verdict.require())
