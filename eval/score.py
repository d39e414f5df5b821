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

from eval.scoring.models import load
from eval.scoring.score import score
from eval.scoring.texts import job_of, split_of


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


def main(options: Options, overrides: list[str]) -> None:
    split = split_of(job_of(options.config_file, overrides), options.split, options.model)
    result = asdict(score(load(options.model)[0], split, options.seq_len, options.batch_size, options.stride))
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
