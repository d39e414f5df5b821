"""
Loss of a trained model on a split that it was not trained on:
`python -m eval.score --model outputs/harmonic_debug/hf --seq_len 1024`.

Every token of the split but the first is a target exactly once; a window of `seq_len` tokens knows nothing of the text
before it. A model whose early logits depend on later tokens gets no score, and a score beyond the trained length says so.
With `--config_file` the text is that of a torchtitan job, and what follows these options overrides the TOML.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torchtitan.config import ConfigManager
from transformers import PreTrainedModel

from eval.audit import Audit, check_causal
from eval.models import load
from fla_harmonic.titan.config import data_section
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

    config_file: Path = Path("titan_configs/harmonic_debug.toml")
    """The job whose `[training] dataset` and `[data]` name the text."""

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

    beyond_trained_length: bool
    """Whether a window is longer than the model was trained on: no fair score of a model with positions."""

    audit: Audit
    """The verdict on the model's causality."""


@torch.no_grad()
def score(model: PreTrainedModel, split: TokenSplit, seq_len: int, batch_size: int) -> Score:
    """The loss in float32, summed in float64; see `Score`."""
    verdict = check_causal(model)
    nll, targets = torch.zeros((), dtype=torch.float64), 0
    for inputs, labels in evaluation_batches(split, seq_len, batch_size):
        logits = model(inputs["input"], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        nll += losses.double().sum()
        targets += int((labels != -100).sum())
    bits = nll.item() / math.log(2)
    trained = getattr(model.config, "max_position_embeddings", None)
    beyond = trained is not None and seq_len > trained
    return Score(targets, split.num_bytes, bits / targets, bits / split.num_bytes, beyond, verdict)


def main(options: Options, overrides: list[str]) -> None:
    model, _ = load(options.model)
    job = ConfigManager().parse_args([f"--job.config_file={options.config_file}", *overrides])
    data = data_section(job)
    if data.reset_documents:
        raise ValueError(
            "scoring with states that start anew at each document is not supported, but data.reset_documents = true. "
            "Remedy: --data.no-reset_documents, which scores the documents as one text")
    tokenizer = JsonTokenizer(options.model)
    split = load_split(job.training.dataset, job.training.dataset_path, options.split, tokenizer, data)
    result = asdict(score(model, split, options.seq_len, options.batch_size))
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
