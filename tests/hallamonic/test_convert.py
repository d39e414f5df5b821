import pytest
import torch
from sources import CONFIGS, converted, source, tokens

every_source = pytest.mark.parametrize("name", list(CONFIGS))


@every_source
@torch.no_grad()
def test_zero_layers_are_the_source_bit_for_bit(name: str) -> None:
    original, result = source(name), converted(name, [])
    x = tokens(2, 20)
    assert torch.equal(result.model(x).logits, original(x).logits)
    assert not result.new
    assert not result.dropped


@every_source
@pytest.mark.parametrize("init", ["attention", "random"])
@pytest.mark.parametrize("layers", [[1], [0, 2], [0, 1, 2]], ids=str)
def test_untouched_tensors_are_the_source_bit_for_bit(name: str, layers: list[int], init: str) -> None:
    original, result = source(name), converted(name, layers, init)
    before, after = original.state_dict(), result.model.state_dict()
    assert set(result.new) == after.keys() - before.keys()
    assert set(result.dropped) == before.keys() - after.keys()
    places = {name.split(".self_attn.")[0] for name in [*result.new, *result.dropped]}
    assert places == {f"model.layers.{i}" for i in layers}
    for key in before.keys() & after.keys():
        assert torch.equal(before[key], after[key])
    assert result.untouched + sum(torch.Size(shape).numel() for shape in result.new.values()) == result.model.num_parameters()
    assert (result.model.lm_head.weight is result.model.model.embed_tokens.weight) == original.config.tie_word_embeddings
