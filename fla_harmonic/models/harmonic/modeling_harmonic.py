from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.models.cache_utils import Cache
from fla.models.configuration_utils import get_attention_spec
from fla.models.generation_utils import FLAGenerationMixin
from fla.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from fla_harmonic.layers.harmonic import HarmonicAttention
from fla_harmonic.models.harmonic.configuration_harmonic import HarmonicConfig
from fla_harmonic.models.harmonic.packing import document_borders, labels_within_documents
from fla_harmonic.models.harmonic.streaming import HarmonicStream
from fla_harmonic.modules import MLP, Attention, GatedMLP, RMSNorm, padding_mask

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

    from fla_harmonic.models.harmonic.stream_state import StreamState


# made once: torch.compile does not trace a module that is made within the graph
_CPU_LOSS = nn.CrossEntropyLoss()


def _norm(config: HarmonicConfig) -> nn.Module:
    norm = RMSNorm if config.fuse_norm else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps, elementwise_affine=config.elementwise_affine)


def _mixer(config: HarmonicConfig, layer_idx: int) -> nn.Module:
    """The layer's `HarmonicAttention`, or the `Attention` that `attn` of the config puts there."""
    spec = get_attention_spec(config.attn, layer_idx=layer_idx)
    if spec is None:
        return HarmonicAttention(
            mode=config.attn_mode,
            hidden_size=config.hidden_size,
            expand_ratio=config.expand_ratio,
            timescales=config.timescales,
            timescale_mode=config.timescale_mode,
            use_prediction_error=config.use_prediction_error,
            gate_ratio=config.gate_ratio,
            gate_rank=config.gate_rank,
            use_output_gate=config.use_output_gate,
            use_output_proj=config.use_output_proj,
            use_short_conv=config.use_short_conv,
            conv_size=config.conv_size,
            conv_bias=config.conv_bias,
            norm_eps=config.norm_eps,
            layer_idx=layer_idx,
        )
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


def _cached_tokens(past_key_values: Cache | None) -> int:
    return 0 if past_key_values is None else past_key_values.get_seq_length()


class HarmonicBlock(GradientCheckpointingLayer):

    def __init__(self, config: HarmonicConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

        self.attn_norm = _norm(config)
        self.attn = _mixer(config, layer_idx)
        self.mlp_norm = _norm(config)
        self.mlp: nn.Module
        if config.gated_mlp:
            self.mlp = GatedMLP(
                hidden_size=config.hidden_size,
                hidden_ratio=config.hidden_ratio,
                intermediate_size=config.intermediate_size,
                hidden_act=config.hidden_act,
                fuse_swiglu=config.fuse_swiglu,
            )
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size or config.hidden_size * (config.hidden_ratio or 4))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        attnres_states: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Cache | None, list[torch.Tensor] | None]:
        residual = hidden_states
        hidden_states, attentions, past_key_values = self.attn(
            hidden_states=self.attn_norm(hidden_states),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            **kwargs,
        )
        if self.config.fuse_norm:
            hidden_states, residual = self.mlp_norm(hidden_states, residual, True)
        else:
            residual = residual + hidden_states
            hidden_states = self.mlp_norm(residual)
        hidden_states = residual + self.mlp(hidden_states, **kwargs)
        return hidden_states, attentions, past_key_values, attnres_states


class HarmonicPreTrainedModel(FLAPreTrainedModel):

    config_class = HarmonicConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HarmonicBlock"]  # noqa: RUF012
    _supports_cache_class = True

    @property
    def state_size(self) -> int:
        """
        Numbers that the Harmonic layers remember of a sequence, whatever its length. The attention layers of a hybrid are
        not counted: they remember keys and values of every token, or of the last `window_size`.
        """
        return sum(module.state_size() for module in self.modules() if isinstance(module, HarmonicAttention))


def _fla_cache(past_key_values: Any) -> Cache | None:
    # an empty list or tuple is transformers' old way to say that there is none
    if past_key_values is None or (isinstance(past_key_values, (list, tuple)) and not past_key_values):
        return None
    if isinstance(past_key_values, Cache):
        return past_key_values
    raise ValueError(
        f"`past_key_values` must be fla's Cache; got {type(past_key_values).__name__}. Leave it out, pass "
        "`fla.models.utils.Cache()`, or make one of states with `Cache.from_legacy_cache(states, seen_tokens=n)`.")


class HarmonicModel(HarmonicPreTrainedModel, FLAModel):

    use_attnres = False

    def __init__(self, config: HarmonicConfig) -> None:
        # fields may have changed since its construction
        config.validate()
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([HarmonicBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = _norm(config)

        self.gradient_checkpointing = False

        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple | BaseModelOutputWithPast:
        """
        fla's arguments, and transformers' name `cache` for `past_key_values`.

        Args:
            attention_mask (torch.Tensor, Optional):
                0/1 mask of shape `[B, S]`, S >= T, whose last T columns belong to the inputs: states pass masked tokens
                unchanged, whatever is in them. Default: `None`.
            cu_seqlens, position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k (torch.Tensor, Optional):
                In `kwargs`: documents of a packed row, see `document_borders`. They win over a mask. Positions that rise by
                1 over each row's unmasked tokens say nothing, and change nothing.

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
            cu_seqlens = document_borders(kwargs, B, T, attention_mask, _cached_tokens(past_key_values))
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
        return super().forward(
            input_ids, attention_mask, inputs_embeds, past_key_values, use_cache, output_attentions, output_hidden_states,
            return_dict, **kwargs)

    def check_token_ids(self, input_ids: torch.Tensor) -> None:
        """
        Looks at token ids that are on the CPU.

        Raises:
            ValueError: one is outside the vocabulary.
        """
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


class HarmonicForCausalLM(HarmonicPreTrainedModel, FLAForCausalLM, FLAGenerationMixin):

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: HarmonicConfig) -> None:
        super().__init__(config)
        self.model = HarmonicModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # among the modules, where nn.Module's __setattr__ files an assigned criterion before any property sees it
        self._modules["criterion"] = None

        # Initialize weights and apply final processing
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | torch.Tensor | None = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple | CausalLMOutputWithPast:
        """
        The arguments of `HarmonicModel`, and those of the loss.

        Args:
            labels (torch.Tensor, Optional):
                Token ids of shape `[B, T]`, the inputs themselves; each is the target of the token before it. The first
                token of a packed document is nobody's target, and pads are neither target nor scored, whatever their
                labels: the loss is that of the sequences one by one. -100 leaves out more. Default: no loss.
            num_items_in_batch (int | torch.Tensor, Optional):
                Divisor of the summed loss. Default: the number of targets.
        """
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is not None:
            past = kwargs.get("cache") if past_key_values is None else past_key_values
            B, T = inputs.shape[:2]
            cu_seqlens = document_borders(kwargs, B, T, attention_mask, _cached_tokens(_fla_cache(past)))
            if cu_seqlens is not None:
                kwargs["cu_seqlens"] = cu_seqlens
            if labels is not None:
                ignore_index = getattr(self.criterion, "ignore_index", -100)
                labels = labels_within_documents(labels, B, T, attention_mask, cu_seqlens, ignore_index)
        return super().forward(
            input_ids, attention_mask, inputs_embeds, past_key_values, labels, use_cache, output_attentions,
            output_hidden_states, return_dict, logits_to_keep, num_items_in_batch, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor | None = None,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # not fla's, which hands the cache on under the name that transformers has given up
        return GenerationMixin.prepare_inputs_for_generation(
            self, input_ids, next_sequence_length=next_sequence_length,
            cache=past_key_values if cache is None else cache, attention_mask=attention_mask, inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration, **kwargs)

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
                Where to go on: the `state` of another stream, or the file that its `save` wrote. Default: an empty text.

        Returns:
            HarmonicStream:
                Iterator of negative log-likelihoods in nats, float32, `[n]` or `[B, n]`, one for each token but the first;
                its `state` can be kept, and its `save` writes it to a file.

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
        if criterion is None and self.lm_head.weight.device.type == "cpu":
            return _CPU_LOSS
        return criterion

    def _compute_logits_and_loss(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if hidden_states.device.type == "cpu":
            kwargs["fuse_linear_cross_entropy"] = False
        return super()._compute_logits_and_loss(hidden_states, *args, **kwargs)
