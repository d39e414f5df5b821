"""Hugging Face causal language models behind torchtitan's interface: what torchtitan trains is the HF model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fla.models.utils import Cache
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.protocols import BaseModelArgs, ModelProtocol, StateDictAdapter
from transformers import MambaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.mamba.modeling_mamba import MambaMixer

from fla_harmonic.hallamonic import HallamonicConfig, HallamonicForCausalLM
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.models.harmonic import HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.models.mamba import modeling_mamba as mamba
from fla_harmonic.modules import Attention
from fla_harmonic.ops.harmonic.context_parallel import CPContext, build_cp_context
from fla_harmonic.titan.combinations import Start, check_job
from fla_harmonic.titan.components.hf_import import check_hf_directory
from fla_harmonic.titan.components.init import init_from_reference
from fla_harmonic.titan.components.loss import LossHead, TiedHead
from fla_harmonic.titan.components.optimizer import undecayed_names
from fla_harmonic.titan.components.stateful import RowStates
from fla_harmonic.titan.components.states import LayerLayout, state_layout, zero_states
from fla_harmonic.titan.config import config_overrides, harmonic_section
from fla_harmonic.titan.distributed.segments import document_borders, run_segments
from fla_harmonic.titan.models.flops import matmul_flops


@dataclass(frozen=True)
class HFFamily:
    """How a kind of HF model is built, and where it keeps what torchtitan calls by name."""

    config_class: type[PreTrainedConfig]
    build: Callable[[Any], PreTrainedModel]
    base: str
    norm: str
    embeddings: str = "embeddings"

    @property
    def names(self) -> dict[str, str]:
        """torchtitan's prefixes and the HF prefixes of the same modules."""
        return {
            "tok_embeddings": f"{self.base}.{self.embeddings}",
            "layers": f"{self.base}.layers",
            "norm": f"{self.base}.{self.norm}",
            "output": "lm_head",
        }


HF_FAMILIES = {
    "harmonic": HFFamily(HarmonicConfig, HarmonicForCausalLM, base="model", norm="norm"),
    "mamba": HFFamily(MambaConfig, mamba.build_mamba, base="backbone", norm="norm_f"),
    "hallamonic": HFFamily(HallamonicConfig, HallamonicForCausalLM, base="model", norm="norm", embeddings="embed_tokens"),
}


@dataclass
class HFModelArgs(BaseModelArgs):
    """Arguments of an `HFModel`, as plain as JSON."""

    # a key of `HF_FAMILIES`
    family: str = "harmonic"
    # keyword arguments of the family's HF configuration, and those that `[harmonic] config` sets in their place
    config: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    # of the job: `debug.seed` and the `[harmonic]` section
    seed: int | None = None
    loss_chunk_tokens: int = 0
    segment_len: int = 0
    stateful: bool = False

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "HFModelArgs":
        """The arguments that give this configuration again; its `model_type` is the family."""
        return cls(family=config.model_type, config=config.to_diff_dict())

    def hf_config(self) -> PreTrainedConfig:
        return HF_FAMILIES[self.family].config_class(**self.config | self.overrides)

    def build_hf(self) -> PreTrainedModel:
        """The HF model, initialised by itself."""
        return HF_FAMILIES[self.family].build(self.hf_config())

    def state_layout(self) -> tuple[LayerLayout, ...]:
        """What the model's layers remember of a row."""
        with torch.device("meta"):
            return state_layout(getattr(self.build_hf(), HF_FAMILIES[self.family].base).layers)

    @property
    def vocab_size(self) -> int:
        return self.hf_config().vocab_size

    @property
    def n_layers(self) -> int:
        return self.hf_config().num_hidden_layers

    @property
    def num_levels(self) -> int:
        """Levels of a Harmonic layer; 0 where there is none."""
        return len(self.hf_config().timescales) if self.family == "harmonic" else 0

    def trained_length(self, seq_len: int) -> int:
        """The length that a model was made for, after training on sequences of `seq_len` tokens."""
        return seq_len

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        """Take the seed and the `[harmonic]` section from the job; a ValueError where it asks for what does not combine."""
        self.overrides = config_overrides(job_config) if self.family == "harmonic" else {}
        check_job(self.start(job_config))
        self.seed = job_config.debug.seed
        section = harmonic_section(job_config)
        self.loss_chunk_tokens, self.segment_len = section.loss_chunk_tokens, section.segment_len
        self.stateful = section.stateful
        # it would reorder the sequence
        job_config.parallelism.context_parallel_load_balancer = None

    def start(self, job_config: JobConfig) -> Start:
        """What the table of combinations asks about the model."""
        config: Any = self.hf_config()
        return Start(
            job_config, self.family, config.num_hidden_layers, config.tie_word_embeddings,
            attention_layers=getattr(config, "attn", None) is not None,
            attn_mode=getattr(config, "attn_mode", "chunk"),
            conv_size=config.conv_size if getattr(config, "use_short_conv", False) else 0,
            converted_layers=len(getattr(config, "harmonic_layers", ())),
            mamba_kernels=mamba.HAS_MAMBA_KERNELS,
            unknown_fields=tuple(self.overrides.keys() - HarmonicConfig().to_dict().keys()),
        )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """
        Parameters (a tied table counts once), and floating point operations that training spends per token:

        - those of the matrix products (see `matmul_flops`); biases, norms and activations are left out;
        - 3 times the forward pass of attention layers, which multiply a token with the keys and the values that it sees;
        - 3 times the forward pass of the scan: 2 for each state (multiply by the decay, add the input), and in Mamba 5
          more for what else it does at the width of the state (step times rate, the input's outer product, the
          contraction with C). Exponentials count as nothing.
        """
        scan = attention = 0
        for module in model.modules():
            if isinstance(module, Attention):
                seen = min(module.window_size or seq_len, seq_len)
                # token t sees t keys, and at most `seen`
                keys = seen * (seen + 1) // 2 + (seq_len - seen) * seen
                attention += 4 * module.hidden_size * keys // seq_len
            elif isinstance(module, HarmonicAttention):
                # not `state_size`, which has the inputs of the short convolution too
                scan += 2 * len(module.levels) * module.level_size
            elif isinstance(module, MambaMixer):
                scan += 7 * module.A_log.numel()
        return sum(p.numel() for p in model.parameters()), matmul_flops(model) + 3 * (scan + attention)


class HFModel(ModelProtocol):
    """
    An HF causal language model with its modules under torchtitan's names: `tok_embeddings`, `layers` (by string keys),
    `norm` and `output`. The blocks, and with them all values and gradients, are those of the HF class. Tied tables are one
    parameter, `tok_embeddings.weight`. The HF model that is taken apart is `hf_model`, or built.
    """

    def __init__(self, model_args: HFModelArgs, hf_model: PreTrainedModel | None = None) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        # before FSDP and DDP make the type another
        self.model_class = type(self)
        # the ranks that hold the pieces of a sequence; set where the model is parallelized
        self.cp_group: ProcessGroup | None = None
        family = HF_FAMILIES[model_args.family]
        model = model_args.build_hf() if hf_model is None else hf_model
        base = getattr(model, family.base)
        self.tok_embeddings = getattr(base, family.embeddings)
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(base.layers)})
        self.norm = getattr(base, family.norm)
        chunk_tokens = model_args.loss_chunk_tokens
        self.output: LossHead | TiedHead = (
            TiedHead(self.tok_embeddings, chunk_tokens) if model.config.tie_word_embeddings
            else LossHead(model.lm_head, chunk_tokens)
        )
        # now, before activation checkpointing and compilation wrap the blocks
        self.state_layout = state_layout(base.layers) if model_args.segment_len or model_args.stateful else ()
        # flags on parameters do not survive `to_empty` and FSDP: keep their names
        self.undecayed = undecayed_names(self.named_parameters())

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """The HF class's own initialisation of the whole model, of which every rank takes its shard, and buffers."""
        init_from_reference(self, lambda: self.model_class(self.model_args), self.model_args.seed, buffer_device)

    def get_attention_masks(self, input_batch: torch.Tensor, tokenizer: BaseTokenizer, extra_inputs: Any = None) -> None:
        # torchtitan takes the error for "this model has none"
        raise TypeError(f"{self.model_args.family} has no attention masks")

    def forward(
        self,
        tokens: torch.Tensor,
        attention_masks: None = None,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        carried: RowStates | None = None,
    ) -> torch.Tensor:
        """
        Args:
            tokens (torch.Tensor):
                Token ids of shape `[B, T]`; in a later stage of a pipeline the hidden states `[B, T, D]` of the one before.
            document_ids (torch.Tensor, Optional):
                Number of each token's document within its row, of shape `[B, T]`: the state starts again where it
                changes. With context parallelism these are the ids of the whole sequence. Default: each row is one document.
            labels (torch.Tensor, Optional):
                Token ids to predict, of shape `[B, T]`; those of -100 do not count. With context parallelism these are the
                labels of the whole sequence. Default: `None`.
            carried (RowStates, Optional):
                The states that the rows begin with; they are replaced by those that the rows end with. Needs labels.
                Default: each row begins with zeros.

        Returns:
            Logits of shape `[B, T, vocab_size]`; with labels the sum of the cross entropies, a scalar; in an earlier stage
            of a pipeline the hidden states.
        """
        if labels is None and carried is not None:
            raise ValueError("carried states need labels, but got none. Remedy: pass labels, or no `carried`")
        if labels is None or (carried is None and not self.model_args.segment_len):
            h = self._whole(tokens, document_ids)
            if self.output is None:
                return h
            if labels is not None:
                if self.cp_group is not None:
                    labels = labels.chunk(self.cp_group.size(), dim=1)[self.cp_group.rank()]
                # by name: of positions the hooks of tensor parallelism know the first
                return self.output(h, labels=labels if document_ids is None else labels.reshape(1, -1))
            logits = self.output(h)
            return logits if document_ids is None else logits.reshape(*tokens.shape[:2], -1)

        if carried is None:
            states, continues = zero_states(self.state_layout, len(tokens), tokens.device), None
        else:
            states, continues = carried.read(tokens.device)
        loss, states = run_segments(
            self._hidden, self.output, states, tokens, labels, document_ids, continues, self.model_args.segment_len
        )
        if carried is not None:
            carried.write(states)
        return loss

    def _whole(self, tokens: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
        """Hidden states `[B, T, H]` of the rows, from their first token on; `[1, B T, H]` with documents."""
        cp_context = cu_seqlens = None
        if self.cp_group is not None:
            cp_context, cu_seqlens = build_cp_context(self.cp_group, document_ids, tokens.shape[1])
        elif document_ids is not None:
            cu_seqlens = document_borders(document_ids)
        return self._hidden(tokens if document_ids is None else tokens.reshape(1, -1), cu_seqlens, None, cp_context)

    def _hidden(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        cache: Cache | None = None,
        cp_context: CPContext | None = None,
    ) -> torch.Tensor:
        options = {"cu_seqlens": cu_seqlens, "past_key_values": cache, "cp_context": cp_context}
        options = {name: value for name, value in options.items() if value is not None}
        # the stages of a pipeline lack modules: a later one gets hidden states, an earlier one returns them
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, **options)
            # fla's blocks return their cache along with the hidden states, Mamba's the hidden states alone
            h = h[0] if isinstance(h, tuple) else h
        if self.norm is not None:
            h = self.norm(h)
        return h if self.output is None else h.to(self.output.weight.dtype)


class HFStateDictAdapter(StateDictAdapter):
    """Names of the HF model from those of torchtitan, and back. The tensors are the same."""

    def __init__(self, model_args: HFModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.model_args = model_args
        self.names = HF_FAMILIES[model_args.family].names

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {_rename(name, self.names): value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {hf: titan for titan, hf in self.names.items()}
        return {_rename(name, names): value for name, value in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        check_hf_directory(path, self.model_args.hf_config())
        return super().get_hf_storage_reader(path, from_quantized)


def _rename(name: str, prefixes: dict[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old + "."):
            return new + name[len(old):]
    raise KeyError(f"expected a name that begins with one of {sorted(prefixes)}, but got {name}")
