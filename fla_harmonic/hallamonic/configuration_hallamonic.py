from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from fla_harmonic.hallamonic.families import family
from fla_harmonic.layers import HarmonicAttention

# what those read who look for a limit and, finding none, take one of their own: lm-eval 2048
UNLIMITED = 2**31 - 1
# set by the model that the layer is in
_FIXED = ("self", "hidden_size", "layer_idx")
LAYER_OPTIONS = tuple(name for name in signature(HarmonicAttention.__init__).parameters if name not in _FIXED)


class HallamonicConfig(PreTrainedConfig):
    """
    Configuration of a pretrained model some of whose attention layers are Harmonic layers.

    Args:
        source (dict | PreTrainedConfig):
            Configuration of the pretrained model, with its `model_type`: one of `families.FAMILIES`.
        harmonic_layers (Iterable[int]):
            Indices of the replaced layers. Default: none.
        layer_options (dict[str, Any], Optional):
            Options of `HarmonicAttention` that differ from its defaults; the sizes are the model's. Default: none.
        max_position_embeddings (int, Optional):
            The length for which the model is made, for those who ask. It limits nothing. Default: the source's, and
            `UNLIMITED` where all layers are replaced.

        **kwargs:
            Fields of transformers' `PreTrainedConfig`.

    Raises:
        ValueError: for a source of another family, a layer that it does not have, or an impossible option, naming the field.
    """

    model_type = "hallamonic"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    sub_configs = {"source": AutoConfig}  # noqa: RUF012
    # all fields are written: what is left out would be read as that of another source
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
        family(str(fields.get("model_type")))
        self.source = source = AutoConfig.for_model(**fields)
        self.harmonic_layers = list(harmonic_layers)
        self.layer_options = dict(layer_options or {})
        self._check()
        self.harmonic_layers.sort()
        if max_position_embeddings is None:
            max_position_embeddings = UNLIMITED if self.all_harmonic else source.max_position_embeddings
        self.max_position_embeddings = max_position_embeddings
        kwargs.setdefault("tie_word_embeddings", source.tie_word_embeddings)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
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
        """The source's configuration, where transformers looks for the sizes of a model and makes its cache from."""
        return self.source

    def harmonic_attention(self, layer_idx: int) -> HarmonicAttention:
        """The untrained Harmonic layer of a decoder layer."""
        return HarmonicAttention(hidden_size=self.hidden_size, layer_idx=layer_idx, **self.layer_options)

    def _check(self) -> None:
        count = self.num_hidden_layers
        bad = [layer for layer in self.harmonic_layers
               if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count]
        if bad or len(set(self.harmonic_layers)) != len(self.harmonic_layers):
            raise ValueError(
                f"`harmonic_layers` must be different layers of the source's {count}, 0 to {count - 1}; got "
                f"{bad or self.harmonic_layers}.")
        if unknown := sorted(self.layer_options.keys() - set(LAYER_OPTIONS)):
            raise ValueError(
                f"`layer_options` must be options of HarmonicAttention, {', '.join(LAYER_OPTIONS)}; got {unknown[0]!r}.")
        with torch.device("meta"):
            self.harmonic_attention(0)
