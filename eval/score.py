"""
Loss of a trained model on a split that it was not trained on:
`python -m eval.score --model outputs/harmonic_debug/hf --seq_len 1024`.

Every token of the split but the first is a target exactly once; a window of `seq_len` tokens knows nothing of the text
before it, and with `--stride` predicts the last tokens of its own alone. A model whose early logits depend on later tokens
gets no score, and a score beyond the trained length says so. With `--config_file` the text is that of a torchtitan job, and
what follows these options overrides the TOML.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from torchtitan.config import ConfigManager
from transformers import PreTrainedModel

from eval.audit import Audit, check_causal
from eval.scoring.models import load
from eval.scoring.targets import bits, target_losses
from fla_harmonic.text.tokenizers import JsonTokenizer
from fla_harmonic.titan.components.dataloader import TokenSplit, load_split
from fla_harmonic.titan.config import data_section


@dataclass
class Options:
    """What to score, and on what."""

    model: Path
    """Hugging Face directory, as `fla_harmonic.titan.export` writes it."""

    seq_len: int = 1024
    """Tokens in a window."""

    stride: int | None = None
    """Targets of a window, its last ones: seq_len / 2 leaves each at least as many tokens of context. Default: all."""

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

    audit: Audit
    """The verdict on the model's causality."""


def score(
    model: PreTrainedModel,
    split: TokenSplit,
    seq_len: int,
    batch_size: int,
    stride: int | None = None,
    targets: range | None = None,
    num_bytes: int | None = None,
    verdict: Audit | None = None,
) -> Score:
    """
    The loss in float32, summed in float64.

    Args:
        model (PreTrainedModel):
            A causal language model in evaluation mode.
        split (TokenSplit):
            The text.
        seq_len (int):
            Tokens of a window.
        batch_size (int):
            Windows computed at once.
        stride (int, Optional):
            Targets of a window, the last ones; see `eval.scoring.targets.windows`. Default: all of them.
        targets (range, Optional):
            Positions of the targets in the split. Default: every token but the first.
        num_bytes (int, Optional):
            UTF-8 bytes of the text of `targets`. Default: those of the whole split.
        verdict (Audit, Optional):
            What the audit of this model said. Default: it is made.

    Raises:
        RuntimeError: the model is not causal.
        ValueError: the split has no such targets; targets without their bytes.
    """
    if (targets is None) != (num_bytes is None):
        raise ValueError(f"expected `targets` with their `num_bytes`, or neither; got {targets} and {num_bytes}.")
    verdict = check_causal(model) if verdict is None else verdict
    stride = seq_len if stride is None else stride
    targets = range(1, len(split.tokens)) if targets is None else targets
    num_bytes = split.num_bytes if num_bytes is None else num_bytes
    losses = target_losses(model, split.tokens, targets.start, targets.stop, seq_len, stride, batch_size)
    total = bits(losses)
    trained = getattr(model.config, "max_position_embeddings", None)
    beyond = trained is not None and seq_len > trained
    return Score(
        len(targets), targets.start, seq_len, stride, num_bytes, total / len(targets), total / num_bytes, beyond, verdict)


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
    result = asdict(score(model, split, options.seq_len, options.batch_size, options.stride))
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
