import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import decoding
import pytest
import torch
from decoding import cache_of
from sources import CONFIGS, VOCAB, converted, source, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from eval.scoring.audit import audit
from fla_harmonic import HallamonicConfig, HallamonicForCausalLM
from fla_harmonic.hallamonic.configuration_hallamonic import UNLIMITED
from fla_harmonic.hallamonic.convert import layer_options

LAYERS: tuple[list[int], ...] = ([], [0], [1, 2], [0, 1, 2])
every_model = pytest.mark.parametrize(("name", "layers"), [
    pytest.param(name, layers, id=f"{name}-{layers}") for name in CONFIGS for layers in LAYERS])


close = partial(decoding.close, atol=2e-4)


@every_model
def test_no_logit_depends_on_a_later_token(name: str, layers: list[int]) -> None:
    verdict = audit(converted(name, layers).model, length=70, bound=1e-4)
    assert verdict.causal, verdict.failure
    assert verdict.packing == "exact"
    assert verdict.largest_effect > 1e-2


@every_model
@torch.no_grad()
def test_packed_documents_are_those_one_by_one(name: str, layers: list[int]) -> None:
    lm, x, borders = converted(name, layers).model, tokens(1, 30), [0, 9, 10, 30]
    pairs = list(itertools.pairwise(borders))
    expected = torch.cat([lm(x[:, i:j]).logits for i, j in pairs], 1)
    positions = torch.cat([torch.arange(j - i) for i, j in pairs]).unsqueeze(0)
    for packing in ({"cu_seqlens": torch.tensor(borders)}, {"position_ids": positions}):
        out = lm(x, labels=x, **packing)
        close(out.logits, expected)
        # the document of one token has no target
        losses = [(j - i - 1) * lm(x[:, i:j], labels=x[:, i:j]).loss for i, j in pairs if j - i > 1]
        close(out.loss, sum(losses) / 27)


@pytest.mark.parametrize("layers", LAYERS[1:], ids=str)
@pytest.mark.parametrize("side", ["left", "right", "interior"])
@torch.no_grad()
def test_pads_change_nothing(side: str, layers: list[int]) -> None:
    lm, x = converted("llama", layers).model, tokens(2, 20)
    kept = {"left": range(6, 20), "right": range(14), "interior": [*range(5), *range(11, 20)]}[side]
    mask = torch.zeros(2, 20, dtype=torch.long).index_fill(1, torch.tensor(list(kept)), 1)
    # attention layers go by the positions that they are given
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    out = lm(x, attention_mask=mask, position_ids=positions, labels=x)
    alone = x[:, list(kept)]
    expected = lm(alone, labels=alone)
    close(out.logits[:, list(kept)], expected.logits)
    close(out.loss, expected.loss)


def test_packed_documents_with_a_cache_are_refused_beside_attention() -> None:
    lm, x, borders = converted("llama", [1]).model, tokens(1, 9), torch.tensor([0, 4, 9])
    cache = cache_of(lm(x, use_cache=True))
    with pytest.raises(ValueError, match=r"no cache of packed documents; got both\. Pass"):
        lm(x, cu_seqlens=borders, past_key_values=cache)


@torch.no_grad()
def test_nothing_limits_the_length_without_attention() -> None:
    lm = converted("llama", [0, 1, 2]).model
    assert lm.config.max_position_embeddings == UNLIMITED
    assert not any("rotary" in name or "inv_freq" in name for name, _ in [*lm.named_buffers(), *lm.named_parameters()])
    # the source was made for 64 positions
    x, positions = tokens(1, 100), torch.arange(100).unsqueeze(0)
    assert torch.equal(lm(x, position_ids=positions + 10**6).logits, lm(x, position_ids=positions).logits)


@pytest.mark.parametrize("layers", LAYERS[:3], ids=str)
def test_attention_layers_keep_the_limit_of_the_source(layers: list[int]) -> None:
    assert converted("llama", layers).model.config.max_position_embeddings == 64


@every_model
def test_a_saved_model_is_the_same(name: str, layers: list[int], tmp_path: Path) -> None:
    lm, x = converted(name, layers).model, tokens(2, 20)
    lm.config.max_position_embeddings = 2048
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, HallamonicForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == {**lm.config.to_dict(), "_name_or_path": str(tmp_path)} \
        | {"architectures": ["HallamonicForCausalLM"]}
    for key, tensor in lm.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[key])
    # and trains alike
    for net in (lm, loaded):
        net(x, labels=x).loss.backward()
    for parameter, other in zip(lm.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    hidden = AutoModel.from_pretrained(tmp_path)(x).last_hidden_state
    assert torch.equal(hidden, lm.model(x).last_hidden_state)


@pytest.mark.processes
def test_a_new_process_generates_the_same(tmp_path: Path) -> None:
    lm, x = converted("qwen2", [0, 2]).model, tokens(1, 9)
    lm.save_pretrained(tmp_path)
    program = (
        "import sys, torch, fla_harmonic\n"
        "from transformers import AutoModelForCausalLM\n"
        f"lm = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        f"print(lm.generate(torch.tensor({x.tolist()}), max_new_tokens=12, do_sample=False).tolist())\n")
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip().splitlines()[-1] == str(lm.generate(x, max_new_tokens=12, do_sample=False).tolist())


@pytest.mark.usefixtures("poisoned_memory")
def test_a_source_directory_loads_with_new_layers_initialised(tmp_path: Path) -> None:
    original = source("llama")
    original.save_pretrained(tmp_path)
    config = HallamonicConfig(original.config, [0, 2], layer_options(original.config))
    lm = HallamonicForCausalLM.from_pretrained(tmp_path, config=config)
    own, fresh = lm.state_dict(), HallamonicForCausalLM(config).state_dict()
    for key, tensor in own.items():
        if ".harmonic." not in key:
            assert torch.equal(tensor, original.state_dict()[key])
        elif "timescale" in key or "norm" in key:
            assert torch.equal(tensor, fresh[key])
        else:
            assert 0.2 < tensor.std() < 0.4


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]], ids=str)
def test_checkpointing_changes_nothing(layers: list[int]) -> None:
    lm, x = converted("llama", layers).model.train(), tokens(2, 20)
    gradients = []
    for enable in (False, True):
        lm.zero_grad()
        if enable:
            lm.gradient_checkpointing_enable()
        lm(x, labels=x).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in lm.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("fields", "message"), [
    ({"source": {"model_type": "gpt2"}}, "`model_type` must be one of llama, mistral, qwen2; got 'gpt2'"),
    ({"source": {}}, "`model_type` must be one of llama, mistral, qwen2; got None"),
    ({"harmonic_layers": [3]}, r"`harmonic_layers` must be different layers of the source's 3, 0 to 2; got \[3\]"),
    ({"harmonic_layers": [-1]}, r"got \[-1\]"),
    ({"harmonic_layers": [1, 1]}, r"got \[1, 1\]"),
    ({"harmonic_layers": ["1"]}, r"got \['1'\]"),
    ({"layer_options": {"hidden_size": 8}}, "`layer_options` must be options of HarmonicAttention, .* got 'hidden_size'"),
    ({"layer_options": {"expand_ratio": 0}}, "`expand_ratio` must be .* got 0"),
], ids=str)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HallamonicConfig(**{"source": CONFIGS["llama"](), **fields})


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    config = HallamonicConfig(CONFIGS["llama"](), [1], of_a_later_version={"a": 1})
    config.my_note = "x"
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.of_a_later_version, loaded.my_note) == ({"a": 1}, "x")


def test_sizes_are_those_of_the_source() -> None:
    lm = converted("llama", [1]).model
    lm.resize_token_embeddings(VOCAB + 3)
    assert (lm.config.vocab_size, lm.config.hidden_size, lm.config.num_hidden_layers) == (VOCAB + 3, 32, 3)
    assert lm(tokens(1, 4)).logits.shape == (1, 4, VOCAB + 3)
