from __future__ import annotations

from inspect import signature
from typing import Any, cast

import torch
import torch.nn as nn
from fla.models.cache_utils import FLALayer
from fla.models.utils import Cache
from transformers import MODEL_MAPPING, DynamicCache, PreTrainedModel
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from fla_harmonic.hallamonic.configuration_hallamonic import HallamonicConfig
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.layers.harmonic import Timescale
from fla_harmonic.models.generation_utils import check_not_assisted
from fla_harmonic.models.packing import document_borders, labels_within_documents
from fla_harmonic.modules import padding_mask


def layer_states(cache: DynamicCache, layer_idx: int) -> Cache:
    """
    transformers' cache as fla's, with the same layers. An empty one at `layer_idx` is replaced by one that holds states.

    Raises:
        ValueError: the layer of the cache is an attention layer's.
    """
    layers: Any = cache.layers
    while len(layers) <= layer_idx:
        layers.append(FLALayer())
    if not isinstance(layers[layer_idx], FLALayer):
        if cached := layers[layer_idx].get_seq_length():
            raise ValueError(
                f"`past_key_values` must hold states of Harmonic in layer {layer_idx}; got keys and values of {cached} tokens."
                " Pass a cache that this model made, or an empty one.")
        layers[layer_idx] = FLALayer()
    states = Cache()
    states.layers = layers
    return states


class HarmonicMixer(nn.Module):
    """A Harmonic layer in the place of a decoder layer's `self_attn`; `bias`: whether the attention's output has one."""

    def __init__(self, config: HallamonicConfig, layer_idx: int, bias: bool) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.harmonic = config.harmonic_attention(layer_idx)
        self.bias = nn.Parameter(torch.zeros(config.hidden_size)) if bias else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: DynamicCache | None = None,
        past_key_values: DynamicCache | None = None,
        padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """
        Outputs `[B, T, hidden_size]` for `hidden_states [B, T, hidden_size]`, and no attentions. transformers' cache comes
        under its new or its old name; `padding_mask [B, S]` is 0/1 with S >= T; `cu_seqlens [N + 1]` are borders of documents.
        """
        past = past_key_values if cache is None else cache
        o, _, _ = self.harmonic(
            hidden_states, attention_mask=padding_mask, cu_seqlens=cu_seqlens,
            past_key_values=None if past is None else layer_states(past, self.layer_idx))
        return (o if self.bias is None else o + self.bias), None


class NoPositions(nn.Module):
    """In the place of the rotary embedding, which Harmonic layers do not need."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> None:
        return None


class HallamonicPreTrainedModel(PreTrainedModel):

    config_class = HallamonicConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ["timescale"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def initialize_weights(self) -> None:
        # the source's class initialises what is within it, and does not know these
        for module in self.modules():
            if isinstance(module, Timescale) and not getattr(module, "_is_hf_initialized", False):
                module.reset_parameters()
        super().initialize_weights()

    @property
    def state_size(self) -> int:
        """
        Numbers that the Harmonic layers remember of a sequence, whatever its length. The keys and values of attention layers
        are not counted.
        """
        return sum(module.state_size() for module in self.modules() if isinstance(module, HarmonicAttention))


class HallamonicModel(HallamonicPreTrainedModel):
    """
    The source's own decoder, `model`, in which Harmonic layers are in the place of some layers' `self_attn`. All other
    parameters have the names of the source's causal language model.
    """

    def __init__(self, config: HallamonicConfig) -> None:
        super().__init__(config)
        self.model: Any = cast(Any, MODEL_MAPPING[type(config.source)])(config.source)
        for layer_idx in config.harmonic_layers:
            block = self.model.layers[layer_idx]
            block.self_attn = HarmonicMixer(config, layer_idx, bias=block.self_attn.o_proj.bias is not None)
        if config.all_harmonic:
            self.model.rotary_emb = NoPositions()
        # "cache" since transformers renamed it
        self._cache_name = "cache" if "cache" in signature(type(self.model).forward).parameters else "past_key_values"
        # a state cannot be rolled back
        self._is_stateful = bool(config.harmonic_layers)
        if type(self) is HallamonicModel:
            self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        cache: DynamicCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """
        The source's arguments. States pass tokens unchanged that the 0/1 `attention_mask [B, S]`, S >= T, leaves out. The
        cache holds keys and values of attention layers and states of Harmonic layers. `cu_seqlens`, `position_ids`, `seq_idx`
        or `cu_seq_lens_q` and `cu_seq_lens_k` give the documents of a packed row, see `document_borders`, and win over a mask.

        Raises:
            ValueError: for impossible masks or borders, a cache of another kind, and packed documents with a cache where
                attention layers are left.
        """
        past = past_key_values if cache is None else cache
        if (input_ids is None) is (inputs_embeds is None):
            raise ValueError("expected either `input_ids` or `inputs_embeds`; got both or neither. Pass one of them.")
        if self.config.harmonic_layers and past is not None and not isinstance(past, DynamicCache):
            raise ValueError(
                f"`past_key_values` must be transformers' DynamicCache; got {type(past).__name__}. Leave it (and "
                "`cache_implementation`) out, or pass `DynamicCache()`.")
        inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
        B, T = inputs.shape[:2]
        position_ids = kwargs.get("position_ids")
        cu_seqlens = document_borders(kwargs, B, T, _padding(attention_mask), 0 if past is None else past.get_seq_length())
        if cu_seqlens is not None:
            if past is not None and not self.config.all_harmonic:
                raise ValueError(
                    "attention layers keep no cache of packed documents; got both. Pass `use_cache=False`, or the documents "
                    "as rows of a padded batch.")
            attention_mask, position_ids = None, positions_in_documents(cu_seqlens, T)
            if past is None:
                kwargs["use_cache"] = False
            kwargs["cu_seqlens"] = cu_seqlens
        elif self.config.harmonic_layers and attention_mask is not None:
            mask = padding_mask(attention_mask, B, T)
            # looked at once and not in every layer, which would pack the rows
            if torch.compiler.is_compiling() or not bool(mask.all()):
                kwargs["padding_mask"] = mask
        if self.config.all_harmonic:
            # masks of four dimensions are taken as they are: without one, a mask of [T, S] is made that no layer reads
            attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device)
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds,
            **{self._cache_name: past}, **kwargs)


class HallamonicForCausalLM(HallamonicModel, GenerationMixin):
    """
    A pretrained causal language model some of whose attention layers are Harmonic layers.

    Examples::
        >>> import fla_harmonic
        >>> model = AutoModelForCausalLM.from_pretrained(directory)     # that `fla_harmonic.hallamonic convert` wrote
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: HallamonicConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """transformers' own, without assistants where a layer has a state."""
        if self.config.harmonic_layers:
            check_not_assisted(self, generation_config, kwargs)
        return super().generate(inputs, generation_config, *args, **kwargs)

    @can_return_tuple
    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        cache: DynamicCache | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        The arguments of `HallamonicModel`, and those of the loss.

        Args:
            labels (torch.Tensor, Optional):
                The inputs `[B, T]`; each is the target of the token before it in its document, pads and -100 left out.
                Default: no loss.
            logits_to_keep (int | torch.Tensor):
                Number of last positions, or indices, whose logits are wanted; 0 for all. Default: 0.
            num_items_in_batch (int | torch.Tensor, Optional):
                Divisor of the summed loss. Default: the number of targets.
        """
        if labels is not None:
            inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
            past, (B, T), mask = past_key_values if cache is None else cache, inputs.shape[:2], _padding(attention_mask)
            cu_seqlens = document_borders(dict(kwargs), B, T, mask, 0 if past is None else past.get_seq_length())
            labels = labels_within_documents(labels, B, T, mask, cu_seqlens, -100)
        outputs = super().forward(input_ids, attention_mask, inputs_embeds, past_key_values, cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(cast(torch.Tensor, outputs.last_hidden_state)[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions,
            **{self._cache_name: outputs.get(self._cache_name)})


def _padding(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    # attention layers alone take masks of other kinds too
    return attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 else None


def positions_in_documents(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Positions of the tokens in their documents, `[1, T]`."""
    positions = torch.arange(tokens, device=cu_seqlens.device)
    documents = torch.bucketize(positions, cu_seqlens, right=True) - 1
    return (positions - cu_seqlens[documents]).unsqueeze(0)
