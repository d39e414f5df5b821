import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import assert_decode_as_without_cache, assert_generate_as_alone, close, in_pieces, left_padded
from fla.models.utils import Cache
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_same_cache, model, nets, tokens
from transformers import DynamicCache, GenerationConfig

from fla_harmonic import HarmonicForCausalLM

Net = Callable[..., HarmonicForCausalLM]
T = 140
every_net = nets(initializer_range=0.2, eos_token_id=None)
presets = pytest.mark.parametrize("preset", ["paper", "stack"])


@every_net
@pytest.mark.parametrize("cuts", [[1], [3], [63], [64], [65], [130], [1, 3, 63, 64, 65, 130]], ids=str)
def test_pieces_equal_the_full_pass(net: Net, cuts: list[int]) -> None:
    lm, x = net(), tokens(2, T)
    logits, cache = in_pieces(lm, x, cuts)
    expected, whole = in_pieces(lm, x, [])
    close(logits, expected)
    assert_same_cache(cache, whole)
    close(lm(x, use_cache=False).logits, expected)


@every_net
def test_token_by_token_equals_the_full_pass(net: Net) -> None:
    lm, x = net(), tokens(2, 70)
    logits, cache = in_pieces(lm, x, list(range(1, 70)))
    expected, whole = in_pieces(lm, x, [])
    close(logits, expected)
    assert_same_cache(cache, whole)


@settings(max_examples=10)
@given(data=st.data())
def test_any_pieces_equal_the_full_pass(data: st.DataObject) -> None:
    preset, mode = data.draw(st.sampled_from(["paper", "stack"])), data.draw(st.sampled_from(["bounded", "init"]))
    lm = model(preset, mode, use_short_conv=data.draw(st.booleans()), attn_mode=data.draw(
        st.sampled_from(["chunk", "fused_recurrent"])), initializer_range=0.2)
    cuts = sorted(data.draw(st.lists(st.integers(0, 30), max_size=5)))
    x = tokens(data.draw(st.integers(1, 3)), 30)
    logits, cache = in_pieces(lm, x, cuts)
    expected, whole = in_pieces(lm, x, [])
    close(logits, expected)
    assert_same_cache(cache, whole)


@every_net
def test_eight_padded_prompts_generate_what_each_generates_alone(net: Net) -> None:
    assert_generate_as_alone(net(), [tokens(1, n) for n in (1, 2, 3, 5, 8, 13, 21, 70)], 6)


@every_net
@pytest.mark.parametrize("options", [
    {"do_sample": False},
    {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 3},
    {"do_sample": True, "num_beams": 3},
], ids=["greedy", "sample", "beams", "beam-sample"])
def test_every_way_to_decode_gives_the_same_without_a_cache(net: Net, options: dict[str, Any]) -> None:
    lm = net()
    x, mask = left_padded([tokens(1, n) for n in (7, 4, 1)])
    assert_decode_as_without_cache(lm, x, mask, 8, **options)


@every_net
def test_generation_continues_from_the_returned_cache(net: Net) -> None:
    lm = net()
    x, mask = left_padded([tokens(1, n) for n in (9, 4)])
    options = dict(do_sample=False, return_dict_in_generate=True)
    whole = lm.generate(x, attention_mask=mask, max_new_tokens=12, **options)
    first = lm.generate(x, attention_mask=mask, max_new_tokens=5, **options)
    mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1)
    second = lm.generate(first.sequences, attention_mask=mask, cache=first.cache, max_new_tokens=7, **options)
    assert torch.equal(second.sequences, whole.sequences)
    assert_same_cache(second.cache, whole.cache)
    # and with more of the user's own text, of several tokens
    more = torch.cat([whole.sequences, tokens(2, 3)], 1)
    mask = torch.cat([mask, torch.ones(2, 10, dtype=torch.long)], 1)
    third = lm.generate(more, attention_mask=mask, cache=second.cache, max_new_tokens=4, **options)
    assert torch.equal(third.sequences, lm.generate(more, attention_mask=mask, max_new_tokens=4, **options).sequences)


@presets
def test_prompt_is_read_in_chunks(preset: str) -> None:
    lm, x = model(preset, eos_token_id=None), tokens(2, 11)
    options = dict(max_new_tokens=5, do_sample=False)
    expected = lm.generate(x, **options)
    assert torch.equal(lm.generate(x, cache=Cache(), prefill_chunk_size=4, **options), expected)


@presets
def test_generation_begins_with_embeddings(preset: str) -> None:
    lm, x = model(preset, eos_token_id=None), tokens(2, 11)
    options = dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(lm.generate(inputs_embeds=lm.model.embeddings(x), **options), lm.generate(x, **options)[:, 11:])


@presets
@pytest.mark.parametrize("ids", ["arange", "generate"])
def test_positions_of_generation_change_nothing(preset: str, ids: str) -> None:
    lm = model(preset, eos_token_id=None)
    x, mask = left_padded([tokens(1, n) for n in (9, 4)])
    # as transformers numbers the tokens of left-padded prompts, with zeros at pads
    position_ids = torch.arange(9).expand(2, 9) if ids == "arange" else (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(lm.generate(x, position_ids=position_ids, **options), lm.generate(x, **options))


@presets
def test_generation_warns_of_nothing(preset: str) -> None:
    lm, x = model(preset), tokens(1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate(x, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("implementation", ["static", "dynamic", "offloaded", "quantized", "sliding_window", "hybrid"])
def test_other_cache_implementations_are_not_used(implementation: str) -> None:
    lm, x = model("stack"), tokens(1, 5)
    options = dict(max_new_tokens=4, do_sample=False)
    out = lm.generate(x, cache_implementation=implementation, return_dict_in_generate=True, **options)
    assert isinstance(out.cache, Cache)
    assert torch.equal(out.sequences, lm.generate(x, **options))


@pytest.mark.parametrize("option", ["assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"])
@pytest.mark.parametrize("place", ["arguments", "config", "model"])
def test_decoding_that_rolls_the_state_back_is_refused(option: str, place: str) -> None:
    lm, x, options = model("stack"), tokens(1, 5), {}
    if option == "assistant_model":
        options = {option: lm}
    elif place == "arguments":
        options = {option: 2}
    elif place == "config":
        options = {"generation_config": GenerationConfig(max_new_tokens=4)}
        setattr(options["generation_config"], option, 2)
    else:
        setattr(lm.generation_config, option, 2)
    with pytest.raises(ValueError, match=f"assisted generation .`{option}`. is not supported .*state.*Leave `{option}` out"):
        lm.generate(x, max_new_tokens=4, **options)


@pytest.mark.parametrize("make", [lambda lm, x: DynamicCache(), lambda lm, x: lm(x, use_cache=True).cache.to_legacy_cache()],
                         ids=["dynamic", "legacy"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_cache_that_is_not_flas_is_refused(make: Callable[..., Any], use_cache: bool) -> None:
    lm, x = model("paper"), tokens(1, 5)
    with pytest.raises(ValueError, match="`past_key_values` must be fla's Cache; got"):
        lm(x, past_key_values=make(lm, x), use_cache=use_cache)


@every_net
def test_a_cache_of_other_rows_is_refused(net: Net) -> None:
    lm = net()
    cache = lm(tokens(3, 5), use_cache=True).cache
    for x in (tokens(2, 4), tokens(1, 1)):
        with pytest.raises(ValueError, match=rf"`past_key_values` must hold 3 states of shape \({len(x)}, 16\) for layer 0"):
            lm(x, past_key_values=cache)
    assert cache.get_seq_length() == 5


@presets
def test_a_reset_cache_begins_again(preset: str) -> None:
    lm, x = model(preset), tokens(2, 9)
    expected = lm(x, use_cache=True)
    cache = lm(tokens(2, 20), use_cache=True).cache
    cache.reset()
    assert torch.equal(lm(x, past_key_values=cache).logits, expected.logits)
    assert_same_cache(cache, expected.cache, 0)


@presets
def test_states_of_a_bfloat16_model_are_float32(preset: str) -> None:
    lm, x = model(preset).bfloat16(), tokens(2, 40)
    with torch.no_grad():
        cache = lm(x[:, :20], use_cache=True).cache
        lm(x[:, 20:], past_key_values=cache)
        expected = lm(x, use_cache=True).cache
    # of which a narrow state would keep two to three digits, over 20 steps
    assert_same_cache(Cache.from_legacy_cache([{**s, "conv_state": None} for s in cache.to_legacy_cache()], 40),
                      Cache.from_legacy_cache([{**s, "conv_state": None} for s in expected.to_legacy_cache()], 40), 2e-2)
