from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

import torch
from fla.models.configuration_utils import AttentionConfig, AttentionConfigBase, AttentionSpec, validate_loss_config
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from fla_harmonic.layers.harmonic import (
    MODES,
    TIMESCALE_MODES,
    TIMESCALES,
    check_choice,
    check_sizes,
    check_timescales,
    check_widths,
)

# what transformers takes in a configuration, or writes into one, beyond the fields of `PreTrainedConfig`
TRANSFORMERS_FIELDS = frozenset({
    "attn_implementation", "auto_map", "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan",
    "base_model_tp_plan", "compile_config", "custom_pipelines", "distributed_config", "experts_implementation",
    "fusion_config", "model_type", "name_or_path", "num_labels", "output_attentions", "quantization_config",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_weights",
})


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _check_dtypes(given: Mapping[str, Any]) -> None:
    for name in ("dtype", "torch_dtype"):
        dtype = given.get(name)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"`{name}` must be None or a dtype of torch, such as 'bfloat16'; got {dtype!r}.")


class HarmonicConfig(AttentionConfigBase, PreTrainedConfig):
    """
    Configuration of `HarmonicModel`: blocks of norm, `HarmonicAttention`, norm, gated MLP.

    The layer's options (`expand_ratio` to `conv_bias`) are those of `HarmonicAttention`; the others are fla's. Beyond them:

    Args:
        elementwise_affine (bool):
            Whether the norms of the blocks have weights. Default: `True`.
        gated_mlp (bool):
            SwiGLU MLP, or a plain MLP of the same `intermediate_size`. Default: `True`.
        max_position_embeddings (int):
            The length in training, for those who ask: lm-eval's window, the end of a `generate` without `max_new_tokens`. It
            limits nothing, a recurrence has no positions. Default: 2048, as fla's other models.

        **kwargs:
            Fields of transformers' `PreTrainedConfig`.

    Raises:
        ValueError: for an unknown field or an impossible value, naming the field.
    """

    model_type = "harmonic"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_ratio: float = 1,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 24,
        attn_mode: str = "chunk",
        timescales: Sequence[Sequence[float]] = TIMESCALES,
        timescale_mode: str = "bounded",
        use_prediction_error: bool = True,
        gate_ratio: int | None = None,
        gate_rank: int | None = None,
        use_output_gate: bool = True,
        use_output_proj: bool = True,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        gated_mlp: bool = True,
        hidden_act: str = "swish",
        max_position_embeddings: int = 2048,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        attn: AttentionConfig = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 32000,
        **kwargs: Any,
    ) -> None:
        self._check_names(kwargs)
        kwargs.pop("model_type", None)
        self.hidden_size = hidden_size
        self.expand_ratio = expand_ratio
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.attn_mode = attn_mode
        self.timescales = timescales
        self.timescale_mode = timescale_mode
        self.use_prediction_error = use_prediction_error
        self.gate_ratio = gate_ratio
        self.gate_rank = gate_rank
        self.use_output_gate = use_output_gate
        self.use_output_proj = use_output_proj
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.gated_mlp = gated_mlp
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.elementwise_affine = elementwise_affine
        self.norm_eps = norm_eps
        self.use_cache = use_cache
        self.initializer_range = initializer_range
        self.fuse_norm = fuse_norm
        self.fuse_swiglu = fuse_swiglu
        self.fuse_cross_entropy = fuse_cross_entropy
        self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        self.use_l2warp = use_l2warp
        self.vocab_size = vocab_size
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.tie_word_embeddings = tie_word_embeddings

        self._check_values()
        _check_dtypes(kwargs)
        self.timescales = [[float(low), float(high)] for low, high in timescales]
        # its setter looks up the number of layers
        self.attn = attn
        self._check_attention()
        # a dataclass whose generated signature the type checker does not see
        super().__init__(  # type: ignore[call-arg]
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def __eq__(self, other: object) -> bool:
        """Whether both describe one model: all fields but the folder that one may have been loaded from."""
        # transformers makes a dataclass of each configuration, whose generated comparison looks at its own fields alone
        if not isinstance(other, HarmonicConfig):
            return NotImplemented
        return {**self.to_dict(), "_name_or_path": ""} == {**other.to_dict(), "_name_or_path": ""}

    def validate(self) -> None:
        """
        Checks all fields once more. transformers calls it before it writes a configuration; fields can change until then.

        Raises:
            ValueError: for an unknown field or an impossible value, naming the field.
        """
        self._check_names(vars(self))
        self._check_values()
        # assigned anew, as its setter looks up the number of layers
        self.attn = self.attn
        self._check_attention()
        super().validate()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """
        As in transformers: the configuration in a folder or file, with fields replaced by those of `kwargs`.

        Raises:
            ValueError: for an unknown field or an impossible value, naming the field.
        """
        return_unused = kwargs.pop("return_unused_kwargs", False)
        config, unused = super().from_pretrained(pretrained_model_name_or_path, *args, return_unused_kwargs=True, **kwargs)
        if return_unused:
            return config, unused
        cls._check_names({name: value for name, value in unused.items() if name != "code_revision"})
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """
        As in transformers: the configuration of a dictionary, with fields replaced by those of `kwargs`.

        Raises:
            ValueError: for an unknown field or an impossible value, naming the field.
        """
        loaded = super().from_dict(config_dict, **kwargs)
        # fields of `kwargs` are assigned after construction
        (loaded[0] if isinstance(loaded, tuple) else loaded).validate()
        return loaded

    @classmethod
    def _check_names(cls, given: Mapping[str, Any]) -> None:
        own = {
            parameter.name for base in cls.__mro__ if issubclass(base, HarmonicConfig)
            for parameter in signature(base.__init__).parameters.values()
            if parameter.name != "self" and parameter.kind is not Parameter.VAR_KEYWORD}
        known = own | TRANSFORMERS_FIELDS | {field.name for field in fields(PreTrainedConfig)}
        for name in given:
            # transformers keeps its own books under private names
            if name.startswith("_") or name in known:
                continue
            if name in GenerationConfig._get_default_generation_params():
                remedy = "It belongs in the model's `generation_config`."
            elif close := get_close_matches(name, own, n=1):
                remedy = f"Did you mean `{close[0]}`?"
            else:
                remedy = f"Remove it; the fields are {', '.join(sorted(own))}."
            raise ValueError(f"`{name}` is not a field of {cls.__name__}; got {given[name]!r}. {remedy}")
        if given.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(
                f"`model_type` must be {cls.model_type!r}; got {given['model_type']!r}. "
                "Load the configuration of another model with its own class, or with AutoConfig.")

    def _check_values(self) -> None:
        check_sizes(
            {name: getattr(self, name) for name in ("hidden_size", "num_hidden_layers", "conv_size", "vocab_size")},
            {name: getattr(self, name) for name in (
                "hidden_ratio", "intermediate_size", "gate_ratio", "gate_rank", "max_position_embeddings")})
        for name in (
            "use_prediction_error", "use_output_gate", "use_output_proj", "use_short_conv", "conv_bias", "gated_mlp",
            "elementwise_affine", "use_cache", "tie_word_embeddings", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy",
            "fuse_linear_cross_entropy", "use_l2warp",
        ):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False; got {value!r}.")
        for name in ("expand_ratio", "norm_eps"):
            if not _is_number(value := getattr(self, name)) or value <= 0:
                raise ValueError(f"`{name}` must be a positive number; got {value!r}.")
        if not _is_number(self.initializer_range) or self.initializer_range < 0:
            raise ValueError(f"`initializer_range` must be a number that is not negative; got {self.initializer_range!r}.")
        check_widths(self.hidden_size, self.expand_ratio, self.gate_ratio, self.gate_rank, self.use_output_proj)
        check_choice("attn_mode", self.attn_mode, tuple(MODES))
        check_choice("timescale_mode", self.timescale_mode, TIMESCALE_MODES)
        # fla's gated MLP knows both activations, the plain one has SiLU
        check_choice("hidden_act", self.hidden_act, ("swish", "powlu") if self.gated_mlp else ("swish",))
        if not isinstance(self.timescales, list | tuple) or not all(
                isinstance(pair, list | tuple) and all(map(_is_number, pair)) for pair in self.timescales):
            raise ValueError(f"`timescales` must be a list of pairs (low, high) of numbers; got {self.timescales!r}.")
        check_timescales(self.timescales)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            # a text may end in several ways
            several = name == "eos_token_id" and isinstance(value, list | tuple) and len(value) > 0
            ids: Iterable[Any] = value if several else [value]
            if value is not None and not all(_is_integer(i) and 0 <= i < self.vocab_size for i in ids):
                raise ValueError(
                    f"`{name}` must be None or a token id in [0, {self.vocab_size}), which `vocab_size` sets; "
                    f"got {value!r}.")
        validate_loss_config(
            fuse_cross_entropy=self.fuse_cross_entropy, fuse_linear_cross_entropy=self.fuse_linear_cross_entropy)

    def _check_attention(self) -> None:
        # fla checks the types of what it knows, and lets the rest pass
        for spec in [self.attn] if isinstance(self.attn, dict) else self.attn or []:
            if unknown := sorted(spec.keys() - AttentionSpec.__annotations__.keys()):
                raise ValueError(
                    f"`attn` must have the fields {', '.join(AttentionSpec.__annotations__)}; got {unknown[0]!r} in {spec!r}.")
            heads, kv_heads = spec["num_heads"], spec["num_kv_heads"]
            if self.hidden_size % heads or heads % kv_heads:
                raise ValueError(
                    "`attn` must have a `num_heads` that divides `hidden_size` and a `num_kv_heads` that divides "
                    f"`num_heads`; got {heads} and {kv_heads} with hidden_size={self.hidden_size}.")

    @classmethod
    def paper(cls, hidden_size: int = 256, vocab_size: int = 50257, **kwargs: Any) -> HarmonicConfig:
        """
        The paper's model: one layer of three levels whose gate and input are MLPs, and a plain MLP; only the levels' norms
        have weights. Parameters: `34 H^2 + 24 H` and one (tied) or two tables of `vocab_size x H`.

        Args:
            hidden_size (int):
                H. Default: 256.
            vocab_size (int):
                Entries of the vocabulary. Default: 50257 (GPT-2).
            **kwargs:
                Any field of `HarmonicConfig`, in place of the paper's.
        """
        paper: dict[str, Any] = dict(
            num_hidden_layers=1,
            gate_ratio=2,
            use_output_gate=False,
            use_output_proj=False,
            gated_mlp=False,
            intermediate_size=4 * hidden_size,
            elementwise_affine=False,
        )
        return cls(hidden_size=hidden_size, vocab_size=vocab_size, **{**paper, **kwargs})
