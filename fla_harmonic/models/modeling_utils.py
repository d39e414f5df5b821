"""
fla's bases of models under their own names. What they add: documents, pads and labels as transformers' collators give them, a
loss on the CPU, `stream`, and errors for what would otherwise be computed wrongly without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.models import modeling_utils
from fla.models.cache_utils import Cache
from fla.models.configuration_utils import get_attention_spec
from fla.models.modeling_utils import FLAPreTrainedModel

from fla_harmonic.models.packing import document_borders, labels_within_documents
from fla_harmonic.models.streaming import HarmonicStream
from fla_harmonic.modules import Attention, padding_mask

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from transformers import PreTrainedConfig
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

    from fla_harmonic.models.stream_state import StreamState

__all__ = ["FLAForCausalLM", "FLAModel", "FLAPreTrainedModel", "get_attention"]

# made once: torch.compile does not trace a module that is made within the graph
_CPU_LOSS = nn.CrossEntropyLoss()


def get_attention(config: PreTrainedConfig, layer_idx: int) -> Attention | None:
    """The attention that `config.attn` puts into a layer, or `None`."""
    spec = get_attention_spec(config.attn, layer_idx=layer_idx)
    if spec is None:
        return None
    return Attention(
        hidden_size=config.hidden_size,
        num_heads=spec["num_heads"],
        num_kv_heads=spec["num_kv_heads"],
        qkv_bias=spec["qkv_bias"],
        window_size=spec["window_size"],
        rope_theta=spec["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
        layer_idx=layer_idx,
    )


def _fla_cache(past_key_values: Any) -> Cache | None:
    # an empty list or tuple is transformers' old way to say that there is none
    if past_key_values is None or (isinstance(past_key_values, (list, tuple)) and not past_key_values):
        return None
    if isinstance(past_key_values, Cache):
        return past_key_values
    raise ValueError(
        f"`past_key_values` must be fla's Cache; got {type(past_key_values).__name__}. Leave it out, pass "
        "`fla.models.utils.Cache()`, or make one of states with `Cache.from_legacy_cache(states, seen_tokens=n)`.")


class FLAModel(modeling_utils.FLAModel):

    def __init__(self, config: PreTrainedConfig) -> None:
        # fields may have changed since its construction
        config.validate()
        super().__init__(config)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple | BaseModelOutputWithPast:
        """
        fla's arguments, transformers' name `cache` for `past_key_values`, and in `kwargs` the documents of a packed row by any
        name that `document_borders` knows, which win over a mask.

        Raises:
            ValueError: for impossible masks, borders or token ids, or a cache that is not fla's.
        """
        # transformers' `generate` passes the cache under its new name, which fla's bases would drop in silence
        past_key_values = _fla_cache(cache if past_key_values is None else past_key_values)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # the backward pass runs each block again, on a cache that the forward pass has moved on
            if past_key_values is not None:
                raise ValueError(
                    "gradient checkpointing in training excludes a cache; got both. Drop `past_key_values`, or call "
                    "`gradient_checkpointing_disable()`.")
            use_cache = False
        if input_ids is not None:
            self.check_token_ids(input_ids)
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is not None:
            B, T = inputs.shape[:2]
            cu_seqlens = document_borders(kwargs, B, T, attention_mask, past_key_values)
            if cu_seqlens is not None:
                kwargs["cu_seqlens"] = cu_seqlens
                # attention layers keep no cache of packed documents, and nobody asked for one
                if use_cache is None and past_key_values is None and self.config.attn is not None:
                    use_cache = False
            elif attention_mask is not None and (input_ids is None or inputs_embeds is None):
                # nothing that is in a pad, were it NaN, reaches the residual stream, nor a gradient the pad
                attention_mask = padding_mask(attention_mask, B, T)
                if inputs_embeds is None:
                    inputs_embeds = self.embeddings(input_ids)
                input_ids, inputs_embeds = None, inputs_embeds.masked_fill(~attention_mask.unsqueeze(-1), 0)
        return super().forward(input_ids, attention_mask, inputs_embeds, past_key_values, use_cache, **kwargs)

    def check_token_ids(self, input_ids: torch.Tensor) -> None:
        """Raises a ValueError for token ids on the CPU that are outside the vocabulary."""
        # on an accelerator the embedding kernel checks, and a look at the values would wait for the device
        if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or input_ids.numel() == 0:
            return
        low, high = (int(value) for value in input_ids.aminmax())
        # not `self.vocab_size`, which `resize_token_embeddings` leaves as it was
        size = self.embeddings.num_embeddings
        if low < 0 or high >= size:
            raise ValueError(
                f"token ids must be in [0, {size}); got {low if low < 0 else high}. "
                "Use the tokenizer that the model was trained with, or a config with a larger `vocab_size`.")


class FLAForCausalLM(modeling_utils.FLAForCausalLM):

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        # transformers looks for this name before it asks for the last logits alone
        logits_to_keep: int | torch.Tensor | None = 0,
        **kwargs: Any,
    ) -> tuple | CausalLMOutputWithPast:
        """
        The arguments of `HarmonicModel`, and fla's of the loss. `labels` are the inputs themselves, `[B, T]`, with -100 for
        what is not scored: each is the target of the token before it in its document, pads left out, so that the loss is that
        of the sequences one by one.
        """
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and inputs is not None:
            past = _fla_cache(kwargs.get("cache") if past_key_values is None else past_key_values)
            B, T = inputs.shape[:2]
            cu_seqlens = document_borders(dict(kwargs), B, T, attention_mask, past)
            ignore_index = getattr(self.criterion, "ignore_index", -100)
            labels = labels_within_documents(labels, B, T, attention_mask, cu_seqlens, ignore_index)
        return super().forward(
            input_ids, attention_mask, inputs_embeds, past_key_values, labels, use_cache, logits_to_keep=logits_to_keep,
            **kwargs)

    def stream(
        self,
        tokens: Iterable[Any],
        chunk_size: int = 1024,
        state: StreamState | str | os.PathLike | None = None,
    ) -> HarmonicStream:
        """
        Scores a text of any length in constant memory: T tokens give T - 1 losses, those of one pass over the whole text.

        Args:
            tokens (Iterable):
                The text: an iterable of integers, or of pieces of any lengths, ids of shape `[n]`, or `[B, n]` for B texts
                of equal length; or one tensor or array.
            chunk_size (int):
                Tokens that the model reads at once. Sets speed and memory, and changes no loss beyond rounding. Default: 1024.
            state (StreamState | str | PathLike, Optional):
                Where to continue: the `state` of another stream, or the file that its `save` wrote. Default: an empty text.

        Returns:
            HarmonicStream:
                Iterator of negative log-likelihoods in nats, float32, `[n]` or `[B, n]`, one for each token but the first.

        Raises:
            ValueError: for a model with attention layers, whose memory grows, a bad `chunk_size`, or another model's state.

        Examples::
            >>> stream = model.stream(token for line in open("book.txt") for token in tokenizer(line).input_ids)
            >>> nats = sum(losses.sum() for losses in stream)
            >>> stream.save("book.safetensors")
            # in another process
            >>> more = model.stream(second_volume, state="book.safetensors")
        """
        return HarmonicStream(self, tokens, chunk_size, state)

    @property
    def criterion(self) -> nn.Module | None:
        """The loss; `None` stands for the fused one of the config, which does not run on the CPU. Can be assigned."""
        criterion = self._modules["criterion"]
        return _CPU_LOSS if criterion is None and self.lm_head.weight.device.type == "cpu" else criterion

    @criterion.setter
    def criterion(self, criterion: None) -> None:
        # nn.Module files an assigned module among its modules by itself
        self._modules["criterion"] = criterion

    def _compute_logits_and_loss(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if hidden_states.device.type == "cpu":
            kwargs["fuse_linear_cross_entropy"] = False
        return super()._compute_logits_and_loss(hidden_states, *args, **kwargs)
