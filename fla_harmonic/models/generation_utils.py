"""
fla's generation mixin under its own name. What it adds: the name under which transformers passes the cache, and a refusal of
decoding that takes tokens back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fla.models import generation_utils
from transformers.generation import GenerationMixin

if TYPE_CHECKING:
    import torch
    from fla.models.cache_utils import Cache
    from transformers import GenerationConfig, PreTrainedModel

# what makes transformers propose several tokens and take back those that the model rejects
_ASSISTED = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")


def check_not_assisted(model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]) -> None:
    """
    Look at the arguments of `generate`. Versions of transformers differ in what they refuse, when and how.

    Raises:
        ValueError: they ask for assisted generation, or prompt lookup.
    """
    config = model.generation_config if generation_config is None else generation_config
    for name in _ASSISTED:
        if options.get(name, getattr(config, name, None)):
            raise ValueError(
                f"assisted generation (`{name}`) is not supported with {type(model).__name__}: it takes back tokens that are "
                f"rejected, and a recurrent state cannot forget them. Leave `{name}` out.")


class FLAGenerationMixin(generation_utils.FLAGenerationMixin):

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        check_not_assisted(self, generation_config, kwargs)
        return super().generate(inputs, generation_config, *args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor | None = None,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        # transformers looks for this name before it begins with embeddings
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # not fla's, which passes the cache on under a name that transformers has given up
        return GenerationMixin.prepare_inputs_for_generation(
            self, input_ids, next_sequence_length, cache=past_key_values if cache is None else cache,
            attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
