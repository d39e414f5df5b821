"""
Whether a language model is causal: `python -m eval.audit --model outputs/harmonic_debug/hf`, or `--flavor harmonic/debug`.

The checks are those of `eval.scoring.audit`, on random tokens. Exit status 1 and the first offending position if one fails.
Commands that report scores audit their own calls instead (`eval.scoring.in_situ`).
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from eval.scoring.audit import audit
from eval.scoring.models import build, load


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
