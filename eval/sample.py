"""Text from a trained model: `python -m eval.sample --model outputs/harmonic_debug/hf`."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import tyro
from transformers import GenerationMixin

from eval.scoring.models import load


@dataclass
class Options:
    """What to generate."""

    model: Path
    """Hugging Face directory, as `fla_harmonic.titan.export` writes it."""

    prompt: str = "It is a truth universally acknowledged, that "
    """Beginning of the text."""

    max_new_tokens: int = 300
    """Tokens to generate."""

    temperature: float = 0.7
    """Sampling temperature; 0 takes the likeliest token."""

    seed: int = 0
    """Seed of the sampling."""

    out: Path | None = None
    """File for the text, if wanted."""


def sample(options: Options) -> str:
    """The prompt and what the model makes of it."""
    model, tokenizer = load(options.model)
    torch.manual_seed(options.seed)
    prompt = tokenizer(options.prompt, return_tensors="pt").input_ids
    choice = {"do_sample": True, "temperature": options.temperature} if options.temperature > 0 else {"do_sample": False}
    tokens = cast(GenerationMixin, model).generate(prompt, max_new_tokens=options.max_new_tokens, **choice)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def main(options: Options) -> None:
    text = sample(options)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
