"""
lm-evaluation-harness on models of this package: its own command line, with their classes registered.

    python -m eval.harness run --model hf --model_args pretrained=outputs/harmonic_debug/hf --include_path DIR --tasks NAME

Log-likelihoods are audited in place: a model that reads the future in them gets no result. Inputs longer than the config's
`max_position_embeddings`, the trained length, lose their beginning; `--model_args pretrained=...,max_length=N` scores with N
tokens of context instead. Without an accelerator: `--device cpu`.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.models.huggingface import HFLM

import fla_harmonic  # noqa: F401  (registers its classes with transformers)
from eval.scoring.in_situ import InSitu

logger = logging.getLogger(__name__)


def audited(ask: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `HFLM` that answers only if the model did not read the future in the very calls that answer."""
    @wraps(ask)
    def answer(self: HFLM, requests: list[Any], *args: Any, **kwargs: Any) -> Any:
        with InSitu(self.model) as audit:
            answers = ask(self, requests, *args, **kwargs)
        logger.warning("audit: %s", audit.verdict.require())
        return answers
    return answer


def main() -> None:
    # what is generated has no tokens behind it that could be read
    for name in ("loglikelihood", "loglikelihood_rolling"):
        setattr(HFLM, name, audited(getattr(HFLM, name)))
    cli_evaluate()


if __name__ == "__main__":
    main()
