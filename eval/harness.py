"""
lm-evaluation-harness on models of this package: its own command line, with their classes registered.

    python -m eval.harness run --model hf --model_args pretrained=outputs/harmonic_debug/hf --include_path DIR --tasks NAME

Inputs longer than the config's `max_position_embeddings`, the trained length, lose their beginning;
`--model_args pretrained=...,max_length=N` scores with N tokens of context instead. Without an accelerator: `--device cpu`.
"""

from lm_eval.__main__ import cli_evaluate

import fla_harmonic  # noqa: F401  (registers its classes with transformers)

if __name__ == "__main__":
    cli_evaluate()
