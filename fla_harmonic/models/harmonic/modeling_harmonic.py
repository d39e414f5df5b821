from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fla_harmonic.layers.harmonic import HarmonicAttention
from fla_harmonic.models.generation_utils import FLAGenerationMixin
from fla_harmonic.models.harmonic.configuration_harmonic import HarmonicConfig
from fla_harmonic.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel, get_attention
from fla_harmonic.modules import MLP, GatedMLP, RMSNorm

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache


def _norm(config: HarmonicConfig) -> nn.Module:
    norm = RMSNorm if config.fuse_norm else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps, elementwise_affine=config.elementwise_affine)


class HarmonicBlock(GradientCheckpointingLayer):

    def __init__(self, config: HarmonicConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

        self.attn_norm = _norm(config)
        attn: nn.Module | None = get_attention(config=config, layer_idx=layer_idx)
        if attn is None:
            attn = HarmonicAttention(
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
        self.attn = attn
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
    _keep_in_fp32_modules_strict = ["timescale"]  # noqa: RUF012
    _supports_cache_class = True

    @property
    def state_size(self) -> int:
        """
        Numbers that the Harmonic layers remember of a sequence, whatever its length. The attention layers of a hybrid are
        not counted: they remember keys and values of every token, or of the last `window_size`.
        """
        return sum(module.state_size() for module in self.modules() if isinstance(module, HarmonicAttention))


class HarmonicModel(HarmonicPreTrainedModel, FLAModel):

    def __init__(self, config: HarmonicConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([HarmonicBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = _norm(config)

        self.use_attnres = False
        self.gradient_checkpointing = False

        self.post_init()


class HarmonicForCausalLM(HarmonicPreTrainedModel, FLAForCausalLM, FLAGenerationMixin):

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: HarmonicConfig) -> None:
        super().__init__(config)
        self.model = HarmonicModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion = None

        # Initialize weights and apply final processing
        self.post_init()
