from typing import Any

import pytest
import torch
from fla.models.utils import Cache
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import cache_of, converted, tokens
from transformers import DynamicCache, StaticCache

from fla_harmonic.hallamonic import HallamonicForCausalLM

# the first layer decides what transformers takes for the length, and a mask is made for the attention layers
LAYERS: tuple[list[int], ...] = ([], [0], [1, 2], [0, 1, 2])
models = pytest.mark.parametrize(("name", "layers"), [
    pytest.param(name, layers, id=f"{name}-{layers}") for name in ("llama", "qwen2") for layers in LAYERS]
    + [pytest.param("mistral", [1], id="mistral-[1]")])


def model(name: str, layers: list[int]) -> HallamonicForCausalLM:
    return converted(name, layers).model


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


def left_padded() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Prompts, one row each, and their batch with its mask."""
    prompts = [tokens(1, n) for n in (12, 7, 1)]
    x = torch.cat([torch.cat([torch.zeros(1, 12 - p.shape[1], dtype=torch.long), p], 1) for p in prompts])
    return prompts, x, torch.tensor([[0] * (12 - p.shape[1]) + [1] * p.shape[1] for p in prompts])


@torch.no_grad()
def in_pieces(lm: HallamonicForCausalLM, x: torch.Tensor, cuts: list[int], cache: Any = None) -> torch.Tensor:
    parts = []
    for i, j in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        out = lm(x[:, i:j], past_key_values=cache, use_cache=True)
        parts.append(out.logits)
        cache = cache_of(out)
        assert cache.get_seq_length() == j
    return torch.cat(parts, 1)


@settings(max_examples=25)
@given(data=st.data())
def test_any_pieces_equal_the_full_pass(data: st.DataObject) -> None:
    layers = sorted(data.draw(st.sets(st.integers(0, 2))))
    lm = model(data.draw(st.sampled_from(["llama", "llama-bias", "qwen2", "mistral"])), layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, 29), max_size=5)))
    x = tokens(2, 30)
    expected = lm(x, use_cache=False).logits
    close(in_pieces(lm, x, cuts, data.draw(st.sampled_from([None, DynamicCache()]))), expected)


@models
def test_padded_prompts_generate_what_each_generates_alone(name: str, layers: list[int]) -> None:
    lm = model(name, layers)
    prompts, x, mask = left_padded()
    options = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_scores=True)
    batch = lm.generate(x, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = lm.generate(prompt, **options)
        assert torch.equal(batch.sequences[row, -8:], alone.sequences[0, -8:])
        for scores, expected in zip(batch.scores, alone.scores, strict=True):
            close(scores[row], expected[0])
    assert cache_of(batch).get_seq_length() == 19


@models
@pytest.mark.parametrize("options", [
    {"do_sample": False},
    {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
], ids=["greedy", "sample", "beams"])
def test_every_way_to_decode_gives_the_same_without_a_cache(name: str, layers: list[int], options: dict[str, Any]) -> None:
    lm = model(name, layers)
    _, x, mask = left_padded()
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        results.append(lm.generate(x, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **options))
    assert torch.equal(*results)


@models
def test_generation_continues_from_the_returned_cache(name: str, layers: list[int]) -> None:
    lm = model(name, layers)
    _, x, mask = left_padded()
    options = dict(do_sample=False, return_dict_in_generate=True)
    whole = lm.generate(x, attention_mask=mask, max_new_tokens=10, **options)
    first = lm.generate(x, attention_mask=mask, max_new_tokens=5, **options)
    longer = torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], 1)
    second = lm.generate(first.sequences, attention_mask=longer, past_key_values=cache_of(first), max_new_tokens=5, **options)
    assert torch.equal(second.sequences, whole.sequences)


@torch.no_grad()
def test_memory_of_a_fully_converted_model_does_not_grow() -> None:
    lm = model("llama", [0, 1, 2])
    sizes = []
    for length in (5, 300):
        cache = cache_of(lm(tokens(2, length), use_cache=True))
        states = [state for layer in cache.layers for state in layer.state["recurrent_state"]]
        assert all(layer.keys is None for layer in cache.layers)
        sizes.append(sum(state.numel() for state in states))
    # 300 tokens are more than the source's positions
    assert sizes == [2 * lm.state_size, 2 * lm.state_size]
    assert lm.state_size == 3 * 3 * 32


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("make", [
    lambda lm: StaticCache(config=lm.config, max_cache_len=16), lambda lm: Cache(),
    lambda lm: cache_of(model("llama", [])(tokens(2, 5), use_cache=True)),
], ids=["static", "fla", "attention"])
def test_other_caches_are_refused(make: Any, layers: list[int]) -> None:
    lm = model("llama", layers)
    with pytest.raises(ValueError, match=r"`past_key_values` must .* got .* [Pp]ass"):
        lm(tokens(2, 5), past_key_values=make(lm))


def test_a_static_cache_is_refused_in_generation() -> None:
    with pytest.raises(ValueError, match="must be transformers' DynamicCache; got StaticCache"):
        model("llama", [0, 1, 2]).generate(tokens(1, 5), max_new_tokens=4, cache_implementation="static")


def test_decoding_that_rolls_states_back_is_refused() -> None:
    for layers, refused in (([1], True), ([], False)):
        lm = model("llama", layers)
        options = dict(max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
        if refused:
            with pytest.raises(ValueError, match=r"`prompt_lookup_num_tokens`. is not supported with HallamonicForCausalLM"):
                lm.generate(tokens(1, 9), **options)
        else:
            lm.generate(tokens(1, 9), **options)


@torch.no_grad()
def test_a_reset_cache_starts_again() -> None:
    lm, x = model("llama", [0, 1, 2]), tokens(2, 9)
    cache = cache_of(lm(tokens(2, 20), use_cache=True))
    cache.reset()
    close(lm(x, past_key_values=cache).logits, lm(x).logits)
