"""What a stream of tokens leaves in a model's memory, and its file."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from fla.models.cache_utils import Cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fla_harmonic.layers.harmonic import HarmonicAttention
from fla_harmonic.models.harmonic.configuration_harmonic import HarmonicConfig

if TYPE_CHECKING:
    from fla_harmonic.models.harmonic.modeling_harmonic import HarmonicForCausalLM

FORMAT = "fla_harmonic.stream"
VERSION = "1"
# fields of the config that change no state: special tokens, initialisation, and which of two equal kernels runs
_IRRELEVANT = {
    "self", "kwargs", "attn_mode", "max_position_embeddings", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
    "initializer_range", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy",
}
_COUNTERS = ("scored", "tokens", "targets")


class ModelIdentity(NamedTuple):
    """Which model a state belongs to: the fields of its config that change states, as JSON gives them, and its weights."""

    config: dict[str, Any]
    weights: str


@dataclass(frozen=True)
class StreamState:
    """
    What a stream remembers: a constant number of values, however many tokens it has read.

    Attributes:
        cache (Cache | None):
            States after the tokens before `pending`; `None` if there are none.
        pending (torch.Tensor):
            The last tokens, `[B, n]` int64 on the CPU, which are not in the cache. The very last is the next one's context.
        scored (int):
            Targets among `pending` whose loss has been given out.
        tokens (int):
            Tokens read of each row, `pending` included.
        targets (int):
            Targets scored, over all rows.
        nll (float):
            Their summed negative log-likelihood in nats.
        is_batch (bool | None):
            Whether tokens come as `[B, n]`, not `[n]`; `None` before the first.
        metadata (dict[str, str]):
            Whatever the caller wants to keep with it.
        model (ModelIdentity | None):
            The model that read the tokens; `None` if there are none.
    """

    cache: Cache | None = None
    pending: torch.Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.long))
    scored: int = 0
    tokens: int = 0
    targets: int = 0
    nll: float = 0.0
    is_batch: bool | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    model: ModelIdentity | None = None


def fingerprint(model: HarmonicForCausalLM) -> str:
    """SHA-256 of the names, types, shapes and values of a model's weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        # bytes whatever the type: numpy knows no bfloat16
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def identity(model: HarmonicForCausalLM) -> ModelIdentity:
    """Which model this is. Reads all weights."""
    return ModelIdentity(_architecture(model.config), fingerprint(model))


def save_state(path: str | os.PathLike, state: StreamState, model: HarmonicForCausalLM) -> None:
    """
    Writes a state as a safetensors file: all levels of all layers, convolutions, pending tokens and counts, with the identity
    of its model (`model` where the state does not say so). An interrupted write leaves the file that was there.
    """
    tensors = {"pending": state.pending.clone(), **_tensors(state.cache)}
    config, weights = state.model or identity(model)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(config),
        "weights": weights,
        "shape": json.dumps(list(state.pending.shape)),
        # exact, unlike a decimal number
        "nll": state.nll.hex(),
        "is_batch": json.dumps(state.is_batch),
        "metadata": json.dumps(state.metadata),
        **{name: str(getattr(state, name)) for name in _COUNTERS},
    }
    path = Path(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, draft, metadata)
        with open(draft, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load_state(path: str | os.PathLike, model: HarmonicForCausalLM) -> StreamState:
    """
    Reads a state that `save_state` wrote, for the model that continues, on its device.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no whole state, or belongs to a model of another architecture or with other weights.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected the state of a stream at {path}; found no file. `HarmonicStream.save` writes one.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}). Stream the text again.") from error
    found = (metadata.get("format"), metadata.get("version"))
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{path}: expected a state of format {FORMAT!r}, version {VERSION}; got format {found[0]!r}, version {found[1]}. "
            "Pass a file that `HarmonicStream.save` of this version wrote.")
    try:
        owner = ModelIdentity(json.loads(metadata["config"]), metadata["weights"])
        check_model(f"{path}: ", owner, model)
        rows, length = json.loads(metadata["shape"])
        state = StreamState(
            cache=_cache(tensors, int(metadata["tokens"]) - length, model),
            pending=tensors["pending"],
            nll=float.fromhex(metadata["nll"]),
            is_batch=json.loads(metadata["is_batch"]),
            metadata=json.loads(metadata["metadata"]),
            model=owner,
            **{name: int(metadata[name]) for name in _COUNTERS},
        )
    except KeyError as error:
        raise ValueError(f"{path}: expected {error} in the state of a stream, found none. Stream the text again.") from error
    expected, got = rows * (length + (model.state_size if state.cache else 0)), sum(x.numel() for x in tensors.values())
    if got != expected:
        raise ValueError(f"{path}: expected {expected} numbers in the state of a stream, got {got}. Stream the text again.")
    return state


def _architecture(config: HarmonicConfig) -> dict[str, Any]:
    names = [name for name in inspect.signature(HarmonicConfig.__init__).parameters if name not in _IRRELEVANT]
    # as JSON gives it back: tuples become lists
    return json.loads(json.dumps({name: getattr(config, name) for name in names}))


def check_model(where: str, owner: ModelIdentity, model: HarmonicForCausalLM) -> None:
    """Raises a ValueError, which begins with `where`, unless a state's model is the one that continues. Reads all weights."""
    remedy = "Load the model that wrote the state, or stream the text again."
    config, weights = owner
    own = _architecture(model.config)
    differing = [name for name in {**own, **config} if own.get(name) != config.get(name)]
    if differing:
        expected, got = (", ".join(f"{name}={fields.get(name)!r}" for name in differing) for fields in (own, config))
        raise ValueError(f"{where}expected the state of a model with {expected}; got one of a model with {got}. {remedy}")
    if weights != (expected := fingerprint(model)):
        raise ValueError(
            f"{where}expected the state of a model with weights {expected[:12]}; got one of the same architecture with "
            f"weights {weights[:12]} (SHA-256). {remedy}")


def _tensors(cache: Cache | None) -> dict[str, torch.Tensor]:
    tensors = {}
    for index, layer in enumerate([] if cache is None else cache):
        for level, state in enumerate(layer["recurrent_state"]):
            tensors[f"layers.{index}.recurrent_state.{level}"] = state
        if layer["conv_state"] is not None:
            tensors[f"layers.{index}.conv_state"] = layer["conv_state"]
    # clones: a file holds no two views of one memory
    return {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}


def _cache(tensors: dict[str, torch.Tensor], tokens: int, model: HarmonicForCausalLM) -> Cache | None:
    if tokens == 0:
        return None
    cache = Cache()
    for index, block in enumerate(model.model.layers):
        layer, prefix = cast(HarmonicAttention, block.attn), f"layers.{index}"
        device = next(layer.parameters()).device
        recurrent = tuple(
            tensors[f"{prefix}.recurrent_state.{level}"].to(device) for level in range(len(layer.levels)))
        conv = tensors[f"{prefix}.conv_state"].to(device) if layer.use_short_conv else None
        cache.update(layer_idx=index, recurrent_state=recurrent, conv_state=conv, offset=tokens)
    return cache
