"""
Loss of a trained model on a split that it was not trained on:
`python -m eval.score --model outputs/harmonic_debug/hf --seq_len 1024`.

Every token of the split but the first is a target exactly once; a window of `seq_len` tokens knows nothing of the text
before it. A model whose early logits depend on later tokens gets no score.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from transformers import PreTrainedModel

from eval.models import load
from fla_harmonic.titan.config import Data
from fla_harmonic.titan.data import TokenSplit, evaluation_batches, load_split
from fla_harmonic.titan.tokenizer import JsonTokenizer


@dataclass
class Options:
    """What to score, and on what."""

    model: Path
    """Hugging Face directory, as `fla_harmonic.titan.export` writes it."""

    seq_len: int = 1024
    """Tokens in a window."""

    batch_size: int = 4
    """Windows scored at once."""

    dataset: str = "novels"
    """As `[training] dataset` in the TOML."""

    dataset_path: str | None = None
    """As `[training] dataset_path` in the TOML."""

    split: str = "test"
    """train, validation or test."""

    out: Path | None = None
    """JSON file for the score, if wanted."""


@dataclass
class Score:
    """Mean loss of a model over a split."""

    targets: int
    """Tokens predicted."""

    num_bytes: int
    """UTF-8 bytes of the text."""

    bits_per_token: float
    """Negative log-likelihood in bits, over `targets`."""

    bits_per_byte: float
    """Negative log-likelihood in bits, over `num_bytes`."""


def check_causal(model: PreTrainedModel, length: int = 96) -> None:
    """
    Raises a RuntimeError if the logits of a prefix change by more than 1e-5 when the tokens after it do.

    Args:
        model (PreTrainedModel):
            Any causal language model.
        length (int):
            Tokens of the sequence that is tried. Default: 96.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, others = torch.randint(model.config.vocab_size, (2, 1, length), generator=generator)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        for split in (1, 2, 3, 31, 32, 33, 63, 64, 65):
            changed = model(torch.cat([tokens[:, :split], others[:, split:]], 1), use_cache=False).logits
            leak = (logits - changed)[:, :split].abs().amax(dim=(0, 2))
            if leak.max() > 1e-5:
                raise RuntimeError(
                    f"expected logits that depend on earlier tokens alone; those at position {int(leak.argmax())} change by "
                    f"{leak.max().item():.2e} when tokens from {split} on do. The model reads the future: not scored.")


@torch.no_grad()
def score(model: PreTrainedModel, split: TokenSplit, seq_len: int, batch_size: int) -> Score:
    """The loss in float32, summed in float64; see `Score`."""
    check_causal(model)
    nll, targets = torch.zeros((), dtype=torch.float64), 0
    for inputs, labels in evaluation_batches(split, seq_len, batch_size):
        logits = model(inputs["input"], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        nll += losses.double().sum()
        targets += int((labels != -100).sum())
    bits = nll.item() / math.log(2)
    return Score(targets, split.num_bytes, bits / targets, bits / split.num_bytes)


def main(options: Options) -> None:
    model, _ = load(options.model)
    split = load_split(options.dataset, options.dataset_path, options.split, JsonTokenizer(options.model), Data())
    result = asdict(score(model, split, options.seq_len, options.batch_size))
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
