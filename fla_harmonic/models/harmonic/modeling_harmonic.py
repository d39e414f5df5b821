from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.models.generation_utils import FLAGenerationMixin
from fla.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel, get_attention
from transformers.modeling_layers import GradientCheckpointingLayer

from fla_harmonic.layers.harmonic import HarmonicAttention
from fla_harmonic.models.harmonic.configuration_harmonic import HarmonicConfig
from fla_harmonic.modules import MLP, GatedMLP, RMSNorm

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache
    from transformers.modeling_outputs import BaseModelOutputWithPast


# made once: torch.compile does not trace a module that is made within the graph
_CPU_LOSS = nn.CrossEntropyLoss()


def _norm(config: HarmonicConfig) -> nn.Module:
    norm = RMSNorm if config.fuse_norm else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps, elementwise_affine=config.elementwise_affine)


class HarmonicBlock(GradientCheckpointingLayer):

    def __init__(self, config: HarmonicConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

        self.attn_norm = _norm(config)
        self.attn = get_attention(config=config, layer_idx=layer_idx)
        if self.attn is None:
            self.attn = HarmonicAttention(
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
        """Numbers that the model remembers of a sequence, whatever its length (attention layers not counted)."""
        return sum(module.state_size() for module in self.modules() if isinstance(module, HarmonicAttention))


class HarmonicModel(HarmonicPreTrainedModel, FLAModel):

    use_attnres = False

    def __init__(self, config: HarmonicConfig) -> None:
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
        *args: Any,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple | BaseModelOutputWithPast:
        # transformers' `generate` passes the cache under its new name, which fla's bases would drop in silence
        if cache is not None and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # the backward pass runs each block again, on a cache that the forward pass has moved on
            if kwargs.get("past_key_values") is not None:
                raise ValueError(
                    "gradient checkpointing in training excludes a cache; got both. Drop `past_key_values`, or call "
                    "`gradient_checkpointing_disable()`.")
            kwargs["use_cache"] = False
        if input_ids is not None:
            self._check_token_ids(input_ids)
        return super().forward(input_ids, *args, **kwargs)

    def _check_token_ids(self, input_ids: torch.LongTensor) -> None:
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

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # fla's mixin knows the cache by its old name alone
        cache = past_key_values if cache is None else cache
        return super().prepare_inputs_for_generation(input_ids, past_key_values=cache, **kwargs)

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
