"""The Transformer baseline: torchtitan's own Llama, with initial weights that do not depend on the sharding."""

from dataclasses import asdict, dataclass, field
from typing import cast

import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.model import FeedForward
from torchtitan.protocols.model import AttentionMasksType
from transformers import LlamaConfig, LlamaForCausalLM

from fla_harmonic.titan.combinations import Start, check_job
from fla_harmonic.titan.components.hf_import import check_hf_directory
from fla_harmonic.titan.components.init import init_from_reference
from fla_harmonic.titan.components.loss import LossHead, TiedHead
from fla_harmonic.titan.config import harmonic_section
from fla_harmonic.titan.models.flops import matmul_flops


@dataclass
class LlamaArgs(TransformerModelArgs):
    """
    torchtitan's arguments with plain RoPE (stock torchtitan stretches it for 8,192 tokens and more), the seed, whether
    embeddings and head are one table, and how the loss is computed.
    """

    rope_scaling_args: RoPEScalingArgs = field(default_factory=lambda: RoPEScalingArgs(scaling_factor=1.0))
    seed: int | None = None
    tie_word_embeddings: bool = False
    loss_chunk_tokens: int = 0

    def trained_length(self, seq_len: int) -> int:
        """The length that a model was made for, after training on sequences of `seq_len` tokens."""
        return seq_len

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        """Take sequence length, seed and `[harmonic]` from the job; a ValueError where it asks for what does not combine."""
        check_job(Start(job_config, "llama", self.n_layers, self.tie_word_embeddings))
        super().update_from_config(job_config, **kwargs)
        self.seed = job_config.debug.seed
        self.loss_chunk_tokens = harmonic_section(job_config).loss_chunk_tokens

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """
        Parameters (a tied table counts once), and floating point operations that training spends per token: those of the
        matrix products (see `matmul_flops`), and 3 times the forward pass of causal attention, which multiplies a token
        with (T + 1) / 2 keys and as many values on average, not with all T.
        """
        attention = 6 * self.n_layers * self.dim * (seq_len + 1)
        return sum(p.numel() for p in model.parameters()), matmul_flops(model) + attention

    def hf_config(self) -> LlamaConfig:
        """transformers' configuration of the same model; its length limit is the trained length."""
        with torch.device("meta"):
            mlp = FeedForward(self.dim, 4 * self.dim, self.multiple_of, self.ffn_dim_multiplier)
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.dim,
            intermediate_size=mlp.w1.out_features,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads or self.n_heads,
            max_position_embeddings=self.max_seq_len,
            rms_norm_eps=self.norm_eps,
            rope_parameters=self._rope_parameters(),
            tie_word_embeddings=self.tie_word_embeddings,
            # ids of the tokenizer, not of Llama's vocabulary: none is assumed
            bos_token_id=None,
            eos_token_id=None,
        )

    def build_hf(self) -> LlamaForCausalLM:
        """transformers' model of the same architecture; its weights are named and its heads laid out otherwise."""
        return LlamaForCausalLM(self.hf_config())

    def _rope_parameters(self) -> dict[str, object]:
        scaling = asdict(self.rope_scaling_args)
        plain = {"rope_type": "default", "rope_theta": float(self.rope_theta)}
        factor = scaling.pop("scaling_factor")
        return plain if factor == 1 else plain | {"rope_type": "llama3", "factor": factor, **scaling}


class Llama(Transformer):
    """
    torchtitan's `Transformer`, that computes the loss itself where it is given labels. Tied tables are one parameter,
    `tok_embeddings.weight`, drawn as in transformers' Llama.
    """

    model_args: LlamaArgs
    output: nn.Module

    def __init__(self, model_args: LlamaArgs) -> None:
        super().__init__(model_args)
        chunk_tokens = model_args.loss_chunk_tokens
        self.output = (
            TiedHead(self.tok_embeddings, chunk_tokens) if model_args.tie_word_embeddings
            else LossHead(cast(nn.Linear, self.output), chunk_tokens)
        )

    def forward(
        self,
        tokens: torch.Tensor,
        attention_masks: AttentionMasksType | None = None,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As torchtitan's; with labels `[B, T]`, of which -100 does not count, the sum of the cross entropies, a scalar."""
        if labels is None:
            return super().forward(tokens, attention_masks, positions)
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis, attention_masks=attention_masks, positions=positions)
        return self.output(self.norm(h), labels)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """The stock initialisation of the whole model, of which every rank takes its shard."""
        init_from_reference(self, self._initialized, self.model_args.seed, buffer_device)

    def _initialized(self) -> Transformer:
        model = Llama(self.model_args)
        Transformer.init_weights(model)
        if self.model_args.tie_word_embeddings:
            # torchtitan has no tied tables. At its head's deviation, dim ** -0.5, a token would begin by predicting itself:
            # a loss of 14 with GPT-2's vocabulary and 256 channels, where the uniform distribution has 10.8
            nn.init.normal_(model.tok_embeddings.weight, std=LlamaConfig.initializer_range)
        return model


class LlamaStateDictAdapter(Llama3StateDictAdapter):
    """torchtitan's adapter, for directories of the same model only."""

    model_args: LlamaArgs

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        check_hf_directory(path, self.model_args.hf_config())
        return super().get_hf_storage_reader(path, from_quantized)
