"""fla's base of configurations under its own name. What it adds: a warning for unknown fields, and checks of `attn`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from fla.models import configuration_utils
from fla.models.configuration_utils import AttentionConfig, AttentionSpec, validate_loss_config
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

__all__ = ["AttentionConfig", "AttentionConfigBase", "validate_loss_config"]

logger = logging.get_logger(__name__)

# transformers' own fields: declared ones, those of generation, and those that it adds to a configuration as it goes
_TRANSFORMERS_FIELDS = {field.name for field in fields(PreTrainedConfig)} | vars(GenerationConfig()).keys() | {
    "attn_implementation", "auto_map", "custom_pipelines", "experts_implementation", "quantization_config",
    "task_specific_params", "tokenizer_class", "transformers_weights"}


class AttentionConfigBase(configuration_utils.AttentionConfigBase):
    """Base of a configuration, before `PreTrainedConfig`; a subclass sets its fields first, and then calls this."""

    def __init__(self, **kwargs: Any) -> None:
        if (model_type := kwargs.pop("model_type", self.model_type)) != self.model_type:
            raise ValueError(f"`model_type` must be {self.model_type!r}; got {model_type!r}. Load it with AutoConfig.")
        own = {
            parameter.name for base in type(self).__mro__ if issubclass(base, AttentionConfigBase)
            for parameter in signature(base.__init__).parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD}
        _warn_of_unknown(type(self).__name__, kwargs.keys() - _TRANSFORMERS_FIELDS, own)
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        loaded = super().from_dict(config_dict, **kwargs)
        # transformers assigns the fields in `kwargs` after construction
        (loaded[0] if isinstance(loaded, tuple) else loaded).validate()
        return loaded

    def validate(self) -> None:
        # the setter checks layers against the current number of layers
        self.attn = vars(self)["attn"]
        super().validate()

    def _parse_attention_config(self, attn: AttentionConfig) -> AttentionConfig:
        attn = super()._parse_attention_config(attn)
        for spec in [attn] if isinstance(attn, dict) else attn or []:
            _warn_of_unknown("attn", spec.keys(), AttentionSpec.__annotations__)
            heads, kv_heads = spec["num_heads"], spec["num_kv_heads"]
            if self.hidden_size % heads or heads % kv_heads:
                raise ValueError(
                    "`attn` must have a `num_heads` that divides `hidden_size` and a `num_kv_heads` that divides "
                    f"`num_heads`; got {heads} and {kv_heads} with hidden_size={self.hidden_size}.")
        return attn


def _warn_of_unknown(owner: str, given: Iterable[str], own: Iterable[str]) -> None:
    for name in sorted(set(given) - set(own)):
        if name.startswith("_") or hasattr(PreTrainedConfig, name):
            continue
        close = get_close_matches(name, own, n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        logger.warning(f"`{name}` is not a field of {owner}: it is kept, but nothing reads it.{hint}")
