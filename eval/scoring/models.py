"""Models for evaluation: those of Hugging Face directories, and untrained ones by flavor."""

import hashlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fla_harmonic import HarmonicForCausalLM
from fla_harmonic.hallamonic.configuration_hallamonic import UNLIMITED
from fla_harmonic.models.mamba.modeling_mamba import load_mamba
from fla_harmonic.titan.models.flavors import HARMONIC, LLAMA, MAMBA
from fla_harmonic.titan.models.llama import LlamaArgs

FAMILIES: dict[str, Any] = {"harmonic": HARMONIC, "mamba": MAMBA, "llama": LLAMA}


def to_accelerator(model: Any) -> Any:
    """The model on the accelerator, where there is one."""
    return model.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else model


def load(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode and float32, and the tokenizer of a directory that `fla_harmonic.titan.export` wrote."""
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"expected a Hugging Face directory with config.json at {directory}; found none. "
            "Write one with `python -m fla_harmonic.titan.export`.")
    # fla registers a class of its own under the name "mamba"
    is_mamba = AutoConfig.from_pretrained(directory).model_type == "mamba"
    model: Any = load_mamba(directory) if is_mamba else AutoModelForCausalLM.from_pretrained(directory)
    return model.to(torch.float32).eval(), AutoTokenizer.from_pretrained(directory)


def digest(directory: Path) -> str:
    """SHA-256 of the configuration, the tokenizer and the weights in a Hugging Face directory, in hex."""
    found = hashlib.sha256()
    kept = ("config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors", "*.bin")
    for file in sorted(file for pattern in kept for file in directory.glob(pattern)):
        with file.open("rb") as stream:
            found.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()


def trained_length(model: PreTrainedModel) -> int | None:
    """
    Tokens of the longest sequences that a model was trained on, as its configuration says; None where it does not know, as in
    a conversion that was not trained yet.
    """
    length = getattr(model.config, "max_position_embeddings", None)
    return None if length == UNLIMITED else length


def is_beyond(length: int, trained: int | None) -> bool:
    """Whether a length is more than the trained one, where that is known: no fair score of a model with positions."""
    return trained is not None and length > trained


def label_of(directory: Path) -> str:
    """Name of a model: its folder's, or of the folder above one that is called `hf`."""
    return directory.parent.name if directory.name == "hf" else directory.name


def build(flavor: str, vocab_size: int | None = None, longest: int | None = None) -> PreTrainedModel:
    """
    The untrained Hugging Face model of a flavor, `family/flavor`, of the torchtitan plugin, in evaluation mode; with another
    vocabulary, and another limit of a model with positions, where these are given. A ValueError lists the flavors.
    """
    family, _, size = flavor.partition("/")
    if size not in FAMILIES.get(family, {}):
        known = [f"{name}/{size}" for name, flavors in FAMILIES.items() for size in flavors]
        raise ValueError(f"`flavor` must be one of {known}; got {flavor!r}.")
    # torchtitan's arguments are changed as a run changes them, in place: the flavor stays as it is
    args = deepcopy(FAMILIES[family][size])
    if isinstance(args, LlamaArgs):
        args.vocab_size, args.max_seq_len = vocab_size or args.vocab_size, longest or args.max_seq_len
    elif vocab_size is not None:
        args.overrides["vocab_size"] = vocab_size
    return args.build_hf().eval()


def load_recurrent(directory: Path) -> HarmonicForCausalLM:
    """The model of a directory, as `load` gives it, if its memory of a text is constant; a ValueError for others."""
    model, _ = load(directory)
    if not isinstance(model, HarmonicForCausalLM):
        raise ValueError(
            f"streaming needs a model with a constant state, HarmonicForCausalLM; got {type(model).__name__} (model type "
            f"{model.config.model_type!r}) in {directory}. Score it in windows: `python -m eval.score --seq_len N`.")
    return model
