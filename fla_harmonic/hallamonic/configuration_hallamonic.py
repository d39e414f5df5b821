from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from fla_harmonic.layers import HarmonicAttention

# their decoders pass all keyword arguments on to `self_attn`, with `v_proj` and `o_proj`, behind an `input_layernorm`
SOURCES = ("llama", "mistral", "qwen2")
# for readers who look for a limit and, finding none, take one of their own: lm-eval 2048
UNLIMITED = 2**31 - 1
LAYER_OPTIONS = [name for name in signature(HarmonicAttention).parameters if name not in ("hidden_size", "layer_idx")]


def check_source(model_type: str | None) -> None:
    """Raises a ValueError unless models of this type can be converted."""
    if model_type not in SOURCES:
        raise ValueError(
            f"the source's `model_type` must be one of {', '.join(SOURCES)}; got {model_type!r}. Convert one of these, or add "
            "a model with the same names of layers to `fla_harmonic.hallamonic.configuration_hallamonic.SOURCES`.")


def head_size(config: PreTrainedConfig) -> int:
    """Channels of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class HallamonicConfig(PreTrainedConfig):
    """
    Configuration of a pretrained model some of whose attention layers are Harmonic layers.

    Args:
        source (dict | PreTrainedConfig):
            Configuration of the pretrained model, with its `model_type`: one of `SOURCES`.
        harmonic_layers (Iterable[int]):
            Indices of the replaced layers. Default: none.
        layer_options (dict[str, Any], Optional):
            Options of `HarmonicAttention` that differ from its defaults. Default: none.
        max_position_embeddings (int, Optional):
            The length that the model is made for. It limits nothing. Default: the source's, and `UNLIMITED` where all layers
            are replaced.

    Raises:
        ValueError: for another source, a layer that it does not have, or an impossible option, naming the field.
    """

    model_type = "hallamonic"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    sub_configs = {"source": AutoConfig}  # noqa: RUF012
    # all fields are written: what is left out would be read as another source's default
    has_no_defaults_at_init = True

    def __init__(
        self,
        source: dict[str, Any] | PreTrainedConfig,
        harmonic_layers: Iterable[int] = (),
        layer_options: dict[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        **kwargs: Any,
    ) -> None:
        # a copy: choosing an attention implementation changes it
        fields = dict(source) if isinstance(source, Mapping) else source.to_dict()
        check_source(fields.get("model_type"))
        self.source = source = AutoConfig.for_model(**fields)
        self.harmonic_layers = layers = list(harmonic_layers)
        self.layer_options = dict(layer_options or {})

        count = source.num_hidden_layers
        if any(type(layer) is not int or not 0 <= layer < count or layers.count(layer) > 1 for layer in layers):
            raise ValueError(
                f"`harmonic_layers` must be different layers of the source's {count}, 0 to {count - 1}; got {layers}.")
        if unknown := sorted(self.layer_options.keys() - set(LAYER_OPTIONS)):
            raise ValueError(
                f"`layer_options` must be options of HarmonicAttention, {', '.join(LAYER_OPTIONS)}; got {unknown[0]!r}.")
        with torch.device("meta"):
            # which checks the values
            self.harmonic_attention(0)
        self.harmonic_layers.sort()

        if max_position_embeddings is None:
            max_position_embeddings = UNLIMITED if self.all_harmonic else source.max_position_embeddings
        self.max_position_embeddings = max_position_embeddings
        for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
            kwargs.setdefault(name, getattr(source, name, None))
        super().__init__(**kwargs)

    @property
    def all_harmonic(self) -> bool:
        """Whether no attention layer is left."""
        return len(self.harmonic_layers) == self.source.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.source.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.source.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.source.num_hidden_layers

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The source's, from which transformers takes sizes and makes its cache."""
        return self.source

    def harmonic_attention(self, layer_idx: int) -> HarmonicAttention:
        """The untrained Harmonic layer of a decoder layer."""
        return HarmonicAttention(hidden_size=self.hidden_size, layer_idx=layer_idx, **self.layer_options)
