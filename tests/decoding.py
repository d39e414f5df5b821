"""What decoding with a cache must give, in any model."""

from typing import Any

import torch
from transformers import PreTrainedModel


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def cache_of(output: Any) -> Any:
    """The cache of a model's output, by the name that this version of transformers has for it."""
    return output["cache" if "cache" in output else "past_key_values"]


@torch.no_grad()
def in_pieces(lm: PreTrainedModel, x: torch.Tensor, cuts: list[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Logits of tokens that are read in pieces, and the cache behind them."""
    parts = []
    for i, j in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        out = lm(x[:, i:j], past_key_values=cache, use_cache=True)
        parts.append(out.logits)
        cache = cache_of(out)
        assert cache.get_seq_length() == j
    return torch.cat(parts, 1), cache


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of prompts of one row each, and its mask."""
    lengths = [prompt.shape[1] for prompt in prompts]
    S = max(lengths)
    x = torch.cat([torch.cat([torch.zeros(1, S - n, dtype=torch.long), p], 1) for n, p in zip(lengths, prompts, strict=True)])
    return x, torch.tensor([[0] * (S - n) + [1] * n for n in lengths])


def assert_generate_as_alone(lm: Any, prompts: list[torch.Tensor], n: int, atol: float = 1e-5) -> None:
    """Padded prompts generate the n tokens, with the scores, that each generates alone."""
    x, mask = left_padded(prompts)
    options = dict(max_new_tokens=n, do_sample=False, return_dict_in_generate=True, output_scores=True)
    batch = lm.generate(x, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = lm.generate(prompt, **options)
        assert torch.equal(batch.sequences[row, -n:], alone.sequences[0, -n:])
        for scores, expected in zip(batch.scores, alone.scores, strict=True):
            close(scores[row], expected[0], atol)
    assert cache_of(batch).get_seq_length() == x.shape[1] + n - 1


def assert_decode_as_without_cache(lm: Any, x: torch.Tensor, mask: torch.Tensor, n: int, **options: Any) -> None:
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(lm.generate(x, attention_mask=mask, max_new_tokens=n, use_cache=use_cache, **options))
    assert torch.equal(*results)
    assert results[0].shape == (len(x) * options.get("num_return_sequences", 1), x.shape[1] + n)
