"""
Converted pretrained models behind torchtitan's interface. Shape, tokenizer and weights are those of one directory, which
`python -m fla_harmonic.hallamonic convert` or `python -m fla_harmonic.titan.export` wrote:

    [model]
    name = "hallamonic"
    flavor = "hf"
    hf_assets_path = "outputs/x/converted"

    [checkpoint]
    initial_load_in_hf = true

    [hallamonic]
    train = "harmonic"
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fla.models.utils import Cache
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fla_harmonic.hallamonic import HallamonicConfig
from fla_harmonic.hallamonic.configuration_hallamonic import UNLIMITED, head_size
from fla_harmonic.hallamonic.modeling_hallamonic import HarmonicMixer, positions_in_documents
from fla_harmonic.layers.harmonic import TIMESCALES
from fla_harmonic.ops.harmonic.context_parallel import CPContext
from fla_harmonic.titan.components.loss import TiedHead
from fla_harmonic.titan.components.stateful import RowStates
from fla_harmonic.titan.config import hallamonic_section
from fla_harmonic.titan.models.hf_model import HFModel, HFModelArgs

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


@dataclass
class HallamonicArgs(HFModelArgs):
    """Arguments of an `HFModel`, and the job's `[hallamonic]` section. The teacher computes in `mixed_precision_param`."""

    family: str = "hallamonic"
    train: str = "all"
    teacher_path: str = ""
    teacher_weight: float = 0.5
    teacher_dtype: str = "float32"

    @property
    def num_levels(self) -> int:
        config: Any = self.hf_config()
        return len(config.layer_options.get("timescales", TIMESCALES)) if config.harmonic_layers else 0

    def trained_length(self, seq_len: int) -> int:
        """
        Attention layers that are left have the pretrained model's length. Harmonic layers have no limit: theirs is the longest
        that they were trained on.
        """
        config: Any = self.hf_config()
        length = config.max_position_embeddings
        return seq_len if length == UNLIMITED else max(seq_len, length) if config.all_harmonic else length

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        """As `HFModelArgs`, with the configuration of `model.hf_assets_path` and the `[hallamonic]` section."""
        directory = job_config.model.hf_assets_path
        self.config = _config_json(directory)
        if (kind := self.config.get("model_type")) != HallamonicConfig.model_type:
            raise ValueError(
                f"hallamonic: expected the directory of a converted model in model.hf_assets_path, but {directory!r} has "
                f"{f'model_type = {kind!r}' if self.config else 'no config.json'}. Remedy: write one with `python -m "
                "fla_harmonic.hallamonic convert`"
            )
        super().update_from_config(job_config, **kwargs)
        section = hallamonic_section(job_config)
        self.train = section.train
        self.teacher_path, self.teacher_weight = section.teacher_path, section.teacher_weight
        self.teacher_dtype = job_config.training.mixed_precision_param
        if self.teacher_path:
            self._check_teacher()

    def _check_teacher(self) -> None:
        values = _config_json(self.teacher_path)
        vocab_size = values.get("vocab_size", values.get("source", {}).get("vocab_size"))
        if vocab_size != self.vocab_size:
            found = f"vocab_size = {vocab_size}" if values else "no config.json"
            raise ValueError(
                f"hallamonic: expected a model of the same {self.vocab_size} tokens in hallamonic.teacher_path, but "
                f"{self.teacher_path!r} has {found}. Remedy: name the directory of the original"
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """
        As `HFModelArgs`, with the attention layers that are left. A weight that is not trained has no gradient: 4 operations
        on a token in place of 6.
        """
        parameters, flops = super().get_nparams_and_flops(model, seq_len)
        config: Any = self.hf_config()
        source, attention = config.source, 0
        for index, kind in enumerate(layer_kinds(source)):
            if index not in config.harmonic_layers:
                seen = min(source.sliding_window, seq_len) if kind == "sliding_attention" else seq_len
                keys = seen * (seen + 1) // 2 + (seq_len - seen) * seen
                attention += 4 * head_size(source) * source.num_attention_heads * keys // seq_len
        maps = (m.weight for m in model.modules() if isinstance(m, nn.Linear | TiedHead))
        frozen = sum(weight.numel() for weight in maps if not weight.requires_grad)
        return parameters, flops + 3 * attention - 2 * frozen


class Hallamonic(HFModel):
    """
    An `HFModel` whose blocks are those of a pretrained model's own class, Harmonic layers in the place of some attention
    layers. With `train = "harmonic"` the parameters of those alone need gradients.
    """

    model_args: HallamonicArgs

    def __init__(self, model_args: HallamonicArgs) -> None:
        hf_model: Any = model_args.build_hf()
        super().__init__(model_args, hf_model)
        self.rotary_emb = hf_model.model.rotary_emb
        # the one that has attention's implementation, which masks depend on
        self.source = hf_model.config.source
        # loaded when it is first asked; in a tuple, where it is no part of the model
        self.teacher: tuple[nn.Module, ...] = ()
        self.kinds = [] if hf_model.config.all_harmonic else layer_kinds(self.source)
        if model_args.train == "harmonic":
            self.requires_grad_(False)
            for module in self.modules():
                if isinstance(module, HarmonicMixer):
                    module.requires_grad_(True)

    def forward(
        self,
        tokens: torch.Tensor,
        attention_masks: None = None,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        carried: RowStates | None = None,
    ) -> torch.Tensor:
        """As `HFModel`; in training with a teacher, the sum of the losses with both."""
        if labels is None or not (self.training and self.model_args.teacher_path):
            return super().forward(tokens, attention_masks, positions, document_ids, labels, carried)
        logits = super().forward(tokens).flatten(0, 1).float()
        with torch.no_grad():
            wanted = self._teacher(tokens.device)(tokens, use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)
        labels, weight = labels.flatten(), self.model_args.teacher_weight
        text = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
        divergence = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
        return weight * divergence[labels != IGNORE_INDEX].sum() + (1 - weight) * text

    def _teacher(self, device: torch.device) -> Any:
        if not self.teacher:
            args = self.model_args
            teacher: Any = AutoModelForCausalLM.from_pretrained(args.teacher_path, dtype=TORCH_DTYPE_MAP[args.teacher_dtype])
            self.teacher = (teacher.to(device).eval(),)
        return self.teacher[0]

    def _hidden(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        cache: Cache | None = None,
        cp_context: CPContext | None = None,
    ) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        options: dict[str, Any] = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        masks: dict[str, torch.Tensor | None] = {}
        if self.kinds:
            # transformers' masks start again where positions do
            length = tokens.shape[1]
            position_ids = torch.arange(length, device=tokens.device)[None]
            if cu_seqlens is not None:
                position_ids = positions_in_documents(cu_seqlens, length)
            options |= {"position_ids": position_ids, "position_embeddings": self.rotary_emb(h, position_ids)}
            masks = {kind: _MASKS[kind](self.source, h, None, None, position_ids) for kind in set(self.kinds)}
        for index, layer in self.layers.items():
            h = layer(h, attention_mask=masks[self.kinds[int(index)]] if masks else None, **options)
        return self.norm(h).to(self.output.weight.dtype)


def layer_kinds(source: PreTrainedConfig) -> list[str]:
    """`"full_attention"` or `"sliding_attention"` for each layer of a pretrained model."""
    if (kinds := getattr(source, "layer_types", None)) is not None:
        return list(kinds)
    sliding = getattr(source, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * source.num_hidden_layers


def _config_json(directory: str) -> dict[str, Any]:
    """The fields of a directory's config.json; none where there is no such file."""
    return PreTrainedConfig.get_config_dict(directory)[0] if (Path(directory) / "config.json").is_file() else {}


HALLAMONIC = {"hf": HallamonicArgs()}
