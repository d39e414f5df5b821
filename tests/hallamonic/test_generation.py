from typing import Any

import pytest
import torch
from decoding import assert_decode_as_without_cache, assert_generate_as_alone, cache_of, close, in_pieces, left_padded
from fla.models.utils import Cache
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import converted, tokens
from transformers import DynamicCache, StaticCache

from fla_harmonic.hallamonic import HallamonicForCausalLM

# the first layer decides what transformers takes for the length, and a mask is made for the attention layers
LAYERS: tuple[list[int], ...] = ([], [0], [1, 2], [0, 1, 2])
models = pytest.mark.parametrize(("name", "layers"), [
    pytest.param(name, layers, id=f"{name}-{layers}") for name in ("llama", "qwen2") for layers in LAYERS]
    + [pytest.param("mistral", [1], id="mistral-[1]")])


def model(name: str, layers: list[int]) -> HallamonicForCausalLM:
    return converted(name, layers).model


PROMPTS = (12, 7, 1)


@settings(max_examples=25)
@given(data=st.data())
def test_any_pieces_equal_the_full_pass(data: st.DataObject) -> None:
    layers = sorted(data.draw(st.sets(st.integers(0, 2))))
    lm = model(data.draw(st.sampled_from(["llama", "llama-bias", "qwen2", "mistral"])), layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, 29), max_size=5)))
    x = tokens(2, 30)
    expected = lm(x, use_cache=False).logits
    close(in_pieces(lm, x, cuts, data.draw(st.sampled_from([None, DynamicCache()])))[0], expected, 2e-4)


@models
def test_padded_prompts_generate_what_each_generates_alone(name: str, layers: list[int]) -> None:
    assert_generate_as_alone(model(name, layers), [tokens(1, n) for n in PROMPTS], 8, 2e-4)


@models
@pytest.mark.parametrize("options", [
    {"do_sample": False},
    {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
], ids=["greedy", "sample", "beams"])
def test_every_way_to_decode_gives_the_same_without_a_cache(name: str, layers: list[int], options: dict[str, Any]) -> None:
    lm = model(name, layers)
    x, mask = left_padded([tokens(1, n) for n in PROMPTS])
    assert_decode_as_without_cache(lm, x, mask, 8, **options)


@models
def test_generation_continues_from_the_returned_cache(name: str, layers: list[int]) -> None:
    lm = model(name, layers)
    x, mask = left_padded([tokens(1, n) for n in PROMPTS])
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
    close(lm(x, past_key_values=cache).logits, lm(x).logits, 2e-4)
