"""fla's generation mixin under its own name. What it adds: the name under which transformers passes the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fla.models import generation_utils
from transformers.generation import GenerationMixin

if TYPE_CHECKING:
    import torch
    from fla.models.cache_utils import Cache


class FLAGenerationMixin(generation_utils.FLAGenerationMixin):

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
