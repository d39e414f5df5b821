"""
Trains each new layer by itself to return what the attention layer that it replaces returns:

    python -m fla_harmonic.hallamonic.match --original DIR --converted DIR --text book.txt --out DIR

Layers need neither each other's gradients nor the output layer, so a step costs a forward pass of the original and the new
layers' own passes: a cheap start for phase 1. A run that was killed continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from fla_harmonic.hallamonic.convert import finished, load_source, options_record
from fla_harmonic.hallamonic.modeling_hallamonic import HallamonicForCausalLM

RECORD = "match.json"
# of a text, as in `fla_harmonic.titan`, so that its validation and test splits stay unseen
TRAIN_SHARE = 0.9


@dataclass
class Match:
    """Train the new layers of a converted model against the attention layers that they replace."""

    original: str
    """Directory, or name on the hub, of the pretrained model."""

    converted: Path
    """Directory that `python -m fla_harmonic.hallamonic convert` wrote from it."""

    text: Path
    """UTF-8 file. Its first 90% are read."""

    out: Path
    """The directory to write."""

    steps: int = 200
    """Optimizer steps."""

    batch_size: int = 1
    """Sequences per step."""

    seq_len: int = 1024
    """Tokens of a sequence."""

    lr: float = 1e-3
    """Highest learning rate: it rises over the first tenth of the steps and falls to a tenth of it as a cosine."""

    save_every: int = 20
    """Steps between two saved states, from which a killed run continues."""

    seed: int = 0
    """Seed of the order of the text."""


class Matching:
    """
    The new layers of a converted model, trained in place, beside the original model, whose hidden states they are fed and
    whose layers after the last replaced one are taken off.

    Raises:
        ValueError: nothing is replaced, or the converted model is of another source.
    """

    def __init__(self, original: PreTrainedModel, converted: HallamonicForCausalLM) -> None:
        layers, expected, found = converted.config.harmonic_layers, converted.config.source, original.config
        if not layers:
            raise ValueError("expected a converted model with replaced layers; it has none. Convert some.")
        for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
            if getattr(found, name) != getattr(expected, name):
                raise ValueError(
                    f"expected the model that was converted, with {name} = {getattr(expected, name)!r}; got "
                    f"{getattr(found, name)!r}. Pass as `--original` what `convert --model` was given.")
        self.decoder: Any = original.get_decoder()
        self.decoder.layers = self.decoder.layers[:layers[-1] + 1]
        found.num_hidden_layers = len(self.decoder.layers)
        original.requires_grad_(False)
        self.mixers: dict[int, nn.Module] = {layer: converted.model.layers[layer].self_attn for layer in layers}
        converted.requires_grad_(False)
        for mixer in self.mixers.values():
            mixer.requires_grad_(True)
        self.parameters = [parameter for mixer in self.mixers.values() for parameter in mixer.parameters()]

    @torch.no_grad()
    def step(self, ids: torch.Tensor) -> dict[int, float]:
        """
        Adds the gradients of the layers' errors on a batch `[B, T]` of token ids to those that are there. The errors, by
        layer, are mean squares of the difference to the attention's outputs, over the mean square of these.
        """
        errors: dict[int, float] = {}
        with ExitStack() as hooks:
            for layer, mixer in self.mixers.items():
                hook = partial(_train, errors, layer, mixer)
                hooks.enter_context(self.decoder.layers[layer].self_attn.register_forward_hook(hook, with_kwargs=True))
            self.decoder(ids, use_cache=False)
        return errors


@torch.enable_grad()
def _train(
    errors: dict[int, float], layer: int, mixer: nn.Module,
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Any, ...],
) -> None:
    inputs, wanted = kwargs.get("hidden_states", args[0] if args else None), outputs[0]
    error = (mixer(inputs)[0] - wanted).square().mean() / wanted.square().mean()
    # here, not after the last layer: nothing of one layer is kept for the next
    error.backward()
    errors[layer] = error.item()


def windows(tokens: np.ndarray, seq_len: int, batch_size: int, seed: int, step: int) -> torch.Tensor:
    """Token ids `[batch_size, seq_len]` at random places, which depend on seed and step alone."""
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - seq_len + 1, batch_size)
    return torch.from_numpy(np.stack([tokens[start:start + seq_len] for start in starts]))


def read_tokens(text: Path, tokenizer: Any, seq_len: int) -> np.ndarray:
    """
    Token ids of the part of a text that is trained on, int64 `[n]`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the text is shorter than a sequence.
    """
    if not text.is_file():
        raise FileNotFoundError(f"expected a UTF-8 file at {text}; found none. Pass a text that the model may learn from.")
    content = text.read_text(encoding="utf-8")
    content = content[:int(TRAIN_SHARE * len(content))]
    tokens = np.asarray(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    if len(tokens) < seq_len:
        raise ValueError(f"expected a text of at least {seq_len} tokens; {text} has {len(tokens)}. Pass a longer text or a "
                         "shorter `--seq_len`.")
    return tokens


def schedule(step: int, steps: int) -> float:
    """Share of the highest learning rate at a step, counted from 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def match(options: Match) -> None:
    """
    Trains, and writes the directory; one that is there already from the same options is left.

    Raises:
        FileExistsError: `out` has other content.
        FileNotFoundError, ValueError: see `load_source`, `read_tokens` and `Matching`.
    """
    record = options_record(options, save_every=None)
    if finished(options.out, RECORD, record):
        return
    logging.disable_progress_bar()
    print(f"loading {options.original} and {options.converted}", flush=True)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    source, tokenizer = load_source(options.original)
    original: Any = source
    converted: Any = HallamonicForCausalLM.from_pretrained(options.converted, dtype=torch.float32)
    matching = Matching(original.to(device, torch.float32).eval(), converted.to(device).train())
    tokens = read_tokens(options.text, tokenizer, options.seq_len)
    optimizer = torch.optim.AdamW(matching.parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)

    # keyed by everything that the state depends on
    name = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:10]
    draft = options.out.with_name(f"{options.out.name}.{name}.draft")
    draft.mkdir(parents=True, exist_ok=True)
    history = _load(draft / "state.pt", matching, optimizer)
    with tqdm(total=options.steps, initial=len(history), unit="step") as bar:
        for step in range(len(history), options.steps):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * schedule(step, options.steps)
            ids = windows(tokens, options.seq_len, options.batch_size, options.seed, step).to(device)
            errors = matching.step(ids)
            optimizer.step()
            optimizer.zero_grad()
            history.append({str(layer): error for layer, error in errors.items()})
            bar.update()
            bar.set_postfix(error=f"{sum(errors.values()) / len(errors):.4f}")
            if (step + 1) % options.save_every == 0:
                _save(draft / "state.pt", matching, optimizer, history)

    print(describe(history))
    converted.requires_grad_(True).cpu().save_pretrained(draft / "hf")
    tokenizer.save_pretrained(draft / "hf")
    (draft / "hf" / RECORD).write_text(json.dumps({"options": record, "errors": history}))
    os.replace(draft / "hf", options.out)
    shutil.rmtree(draft)
    print(f"wrote {options.out}")


def describe(history: list[dict[str, float]]) -> str:
    """First and last errors of each layer, each a mean over a tenth of the steps."""
    some = max(1, len(history) // 10)
    lines = ["mean square of the difference to the attention's outputs, over that of these:"]
    for layer in history[0]:
        first, last = (sum(errors[layer] for errors in part) / len(part) for part in (history[:some], history[-some:]))
        lines.append(f"  layer {layer}: {first:.4f} -> {last:.4f}")
    return "\n".join(lines)


def _save(file: Path, matching: Matching, optimizer: torch.optim.Optimizer, history: list[dict[str, float]]) -> None:
    draft = file.with_suffix(".draft")
    layers = {layer: mixer.state_dict() for layer, mixer in matching.mixers.items()}
    torch.save({"layers": layers, "optimizer": optimizer.state_dict(), "history": history}, draft)
    os.replace(draft, file)


def _load(file: Path, matching: Matching, optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The errors of the steps that are done."""
    if not file.is_file():
        return []
    state = torch.load(file, weights_only=True)
    for layer, weights in state["layers"].items():
        matching.mixers[layer].load_state_dict(weights)
    optimizer.load_state_dict(state["optimizer"])
    return state["history"]


if __name__ == "__main__":
    match(tyro.cli(Match, description=__doc__))
