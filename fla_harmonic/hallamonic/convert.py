"""Conversion of a pretrained model's directory."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import logging

from fla_harmonic.hallamonic.attention_init import AttentionWeights, init_from_attention
from fla_harmonic.hallamonic.configuration_hallamonic import HallamonicConfig, check_source, head_size
from fla_harmonic.hallamonic.modeling_hallamonic import HallamonicForCausalLM
from fla_harmonic.layers.harmonic import TIMESCALES

RECORD = "conversion.json"


@dataclass
class Convert:
    """Write a Hugging Face directory of a pretrained model some of whose attention layers are Harmonic layers."""

    model: str
    """Directory, or name on the hub, of a pretrained Llama, Mistral or Qwen2."""

    out: Path
    """The directory to write."""

    layers: str = "all"
    """The layers to replace: all, none, or numbers and ranges such as 0,2,4-10."""

    init: Literal["attention", "random"] = "attention"
    """Begin as moving averages of the attention's values, or at random."""

    expand_ratio: float | None = None
    """Channels of a level over the hidden size. Default: as many channels as the attention's heads have."""

    gate_rank: int | None = None
    """Rank of the maps to a level's gate and input. Default: the number of values per token, where grouped queries make that
    less than half of the hidden size, else linear maps."""

    timescales: tuple[tuple[float, float], ...] = TIMESCALES
    """Range of each level, in tokens."""

    timescale_mode: Literal["bounded", "init"] = "bounded"
    """Whether timescales stay in their range, or only begin there."""

    seed: int = 0
    """Seed of the random weights."""


@dataclass(frozen=True)
class Conversion:
    """
    A converted model in the source's dtype; names and shapes of its new parameters; names of the source's that are gone; and
    the number of parameters that are the source's, bit for bit.
    """

    model: HallamonicForCausalLM
    new: dict[str, tuple[int, ...]]
    dropped: tuple[str, ...]
    untouched: int


def parse_layers(layers: str, count: int) -> list[int]:
    """
    Layer numbers of `all`, `none`, or a list such as `0,2,4-10`.

    Raises:
        ValueError: for anything else, or a layer that the model does not have.
    """
    if layers in ("all", "none"):
        return list(range(count)) if layers == "all" else []
    found: set[int] = set()
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise ValueError(f"`layers` must be all, none, or numbers and rising ranges such as 0,2,4-10; got {layers!r}.")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if max(found) >= count:
        raise ValueError(f"`layers` must be among the model's {count}, 0 to {count - 1}; got {max(found)} in {layers!r}.")
    return sorted(found)


def layer_options(
    source: PreTrainedConfig,
    expand_ratio: float | None = None,
    gate_rank: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Options of Harmonic layers with the defaults of `Convert`, and no output gate, which cannot begin as attention."""
    values = head_size(source) * source.num_key_value_heads
    if expand_ratio is None:
        expand_ratio = head_size(source) * source.num_attention_heads / source.hidden_size
    if gate_rank is None and 2 * values < source.hidden_size:
        gate_rank = values
    return {"expand_ratio": expand_ratio, "gate_rank": gate_rank, "use_output_gate": False, **options}


def load_source(model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    A pretrained model, in the dtype of its files, and its tokenizer.

    Raises:
        FileNotFoundError: the directory has no config.json, weights, or tokenizer.
        ValueError: models of its type cannot be converted.
    """
    path = Path(model)
    if path.is_dir():
        for files in (("config.json",), ("*.safetensors", "*.bin"), ("tokenizer.json", "tokenizer.model", "vocab.json")):
            if not any(found for file in files for found in path.glob(file)):
                raise FileNotFoundError(
                    f"expected a Hugging Face directory with configuration, weights and tokenizer at {path}; found no "
                    f"{' or '.join(files)}. Download all of the model, or add its parts with `save_pretrained`.")
    # before gigabytes are read
    check_source(AutoConfig.from_pretrained(model).model_type)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return AutoModelForCausalLM.from_pretrained(model, dtype="auto"), tokenizer


def convert_model(
    source: PreTrainedModel,
    layers: list[int],
    init: str = "attention",
    options: dict[str, Any] | None = None,
) -> Conversion:
    """
    Replaces attention layers of a pretrained model, which stays as it is.

    Args:
        source (PreTrainedModel):
            The pretrained causal language model.
        layers (list[int]):
            Indices of the layers to replace.
        init (str):
            `"attention"` (see `init_from_attention`) or `"random"`. Default: `"attention"`.
        options (dict[str, Any], Optional):
            Options of the Harmonic layers. Default: those of `layer_options`.

    Raises:
        ValueError: for another source, layer or init, or options with which a layer cannot begin as attention.
    """
    if init not in ("attention", "random"):
        raise ValueError(f"`init` must be 'attention' or 'random'; got {init!r}.")
    options = layer_options(source.config) if options is None else options
    config = HallamonicConfig(source.config, layers, options, dtype=source.dtype)
    model = cast(Any, HallamonicForCausalLM(config)).to(source.dtype)
    tensors, own = source.state_dict(), model.state_dict()
    found = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    for index in layers if init == "attention" else ():
        block, mixer = source.get_decoder().layers[index], model.model.layers[index].self_attn
        init_from_attention(mixer.harmonic, AttentionWeights.of(block, source.config))
        if mixer.bias is not None:
            mixer.bias.data.copy_(block.self_attn.o_proj.bias)
    if source.generation_config is not None:
        model.generation_config = source.generation_config
    untouched = sum(parameter.numel() for name, parameter in model.named_parameters() if name in tensors)
    new = {name: tuple(own[name].shape) for name in found.missing_keys}
    return Conversion(model.eval(), new, tuple(found.unexpected_keys), untouched)


def describe(conversion: Conversion) -> str:
    """The new parameters, one line for those of equal name and shape in several layers, and the number of the others."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for name, shape in conversion.new.items():
        _, layer, rest = re.split(r"\blayers\.(\d+)\.", name, maxsplit=1)
        groups[rest, shape].append(int(layer))
    return "\n".join([
        f"new: {sum(map(math.prod, conversion.new.values())):,} parameters in {len(conversion.new)} tensors",
        *(f"  layers {number_ranges(layers)}: {name} {list(shape)}: {len(layers) * math.prod(shape):,}"
          for (name, shape), layers in groups.items()),
        f"untouched: {conversion.untouched:,} parameters",
        f"gone: {len(conversion.dropped)} tensors of the replaced attention layers"])


def number_ranges(numbers: list[int]) -> str:
    """Rising numbers as `parse_layers` reads them: 0,2,4-10."""
    parts = []
    # within a range numbers rise as their places do
    for _, places in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        part = [number for _, number in places]
        parts.append(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]))
    return ",".join(parts)


def convert(options: Convert) -> None:
    """
    Writes the directory; one that is there already from the same options is left.

    Raises:
        FileExistsError: `out` has other content.
        FileNotFoundError, ValueError: see `load_source`, `parse_layers` and `convert_model`.
    """
    record = options_record(options)
    if finished(options.out, RECORD, record):
        return
    logging.disable_progress_bar()
    print(f"loading {options.model}", flush=True)
    source, tokenizer = load_source(options.model)
    layers = parse_layers(options.layers, source.config.num_hidden_layers)
    torch.manual_seed(options.seed)
    conversion = convert_model(source, layers, options.init, layer_options(
        source.config, options.expand_ratio, options.gate_rank,
        timescales=options.timescales, timescale_mode=options.timescale_mode))
    print(describe(conversion), flush=True)

    # beside the target, and renamed when it is complete
    draft = options.out.with_name(options.out.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    conversion.model.save_pretrained(draft)
    if conversion.model.config.all_harmonic:
        tokenizer.model_max_length = VERY_LARGE_INTEGER
    tokenizer.save_pretrained(draft)
    (draft / RECORD).write_text(json.dumps(record, indent=1))
    os.replace(draft, options.out)
    print(f"wrote {options.out}")


def options_record(options: Any, **changes: Any) -> dict[str, Any]:
    """Options of a command as JSON has them, but for the directory that it writes."""
    return json.loads(json.dumps({**asdict(options), "out": None, **changes}, default=str))


def finished(out: Path, file: str, record: dict[str, Any]) -> bool:
    """
    Whether a directory was written with these options, which `file` in it records.

    Raises:
        FileExistsError: the directory has other content.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    written = json.loads((out / file).read_text()) if (out / file).is_file() else {}
    if written.get("options", written) != record:
        raise FileExistsError(
            f"expected no directory, an empty one, or one from the same options at {out}; it has other content. Remove it, or "
            "pass another `--out`.")
    print(f"{out} is there already, from the same options")
    return True
