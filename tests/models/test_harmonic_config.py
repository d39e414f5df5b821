import copy
import inspect
import json
import math
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import VOCAB, config
from transformers import AutoConfig, AutoModelForCausalLM

from fla_harmonic import HarmonicConfig, HarmonicForCausalLM


def count(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def build(**kwargs: Any) -> HarmonicForCausalLM:
    with torch.device("meta"):
        return HarmonicForCausalLM(HarmonicConfig.paper(**kwargs))


@pytest.mark.parametrize(("kwargs", "parameters"), [
    (dict(hidden_size=128, tie_word_embeddings=True), 6_993_024),
    (dict(hidden_size=256, tie_word_embeddings=True), 15_100_160),
    (dict(hidden_size=512, tie_word_embeddings=True), 34_656_768),
    (dict(hidden_size=256), 27_965_952),
    (dict(hidden_size=256, use_prediction_error=False), 27_834_880),
], ids=["H128-tied", "H256-tied", "H512-tied", "H256", "H256-no-error"])
def test_paper_preset_has_the_published_number_of_parameters(kwargs: dict[str, Any], parameters: int) -> None:
    assert count(build(vocab_size=50257, **kwargs)) == parameters
    assert count(build(vocab_size=50257, timescale_mode="init", **kwargs)) == parameters


def test_paper_preset_off_the_meta_device() -> None:
    model = HarmonicForCausalLM(HarmonicConfig.paper(hidden_size=256, vocab_size=50257))
    assert sum(p.numel() for p in model.parameters()) == 27965952


@pytest.mark.parametrize("hidden_size", [1, 16, 48])
def test_paper_preset_body_follows_the_formula(hidden_size: int) -> None:
    lm = build(hidden_size=hidden_size, vocab_size=11)
    assert count(lm) == 34 * hidden_size**2 + 24 * hidden_size + 2 * 11 * hidden_size


def test_preset_fields_can_be_replaced() -> None:
    preset = HarmonicConfig.paper(hidden_size=16, vocab_size=9, num_hidden_layers=3, gate_ratio=None, gated_mlp=True)
    assert (preset.num_hidden_layers, preset.gate_ratio, preset.gated_mlp, preset.intermediate_size) == (3, None, True, 64)


sizes = st.integers(1, 64)
ids = st.none() | st.integers(0, 60)
values = dict(
    hidden_size=sizes, expand_ratio=st.sampled_from([1, 2, 1.5]), hidden_ratio=st.none() | sizes,
    intermediate_size=st.none() | sizes, num_hidden_layers=st.integers(1, 4), conv_size=sizes,
    attn_mode=st.sampled_from(["chunk", "fused_recurrent"]), timescale_mode=st.sampled_from(["bounded", "init"]),
    timescales=st.lists(st.tuples(st.floats(1.5, 9), st.integers(10, 1000)), min_size=1, max_size=4),
    gate_rank=st.none() | sizes, max_position_embeddings=st.none() | sizes,
    norm_eps=st.floats(1e-12, 1), initializer_range=st.floats(0, 1), vocab_size=st.integers(61, 99), pad_token_id=ids,
    bos_token_id=ids, eos_token_id=ids | st.lists(st.integers(0, 60), min_size=1),
    attn=st.none() | st.just({"layers": [0], "num_heads": 1}),
    dtype=st.sampled_from([None, "bfloat16", torch.float32]), id2label=st.just({0: "a", 1: "b", 2: "c"}),
    architectures=st.just(["HarmonicForCausalLM"]),
    **{flag: st.booleans() for flag in (
        "use_prediction_error", "use_output_gate", "use_short_conv", "conv_bias", "gated_mlp", "elementwise_affine",
        "use_cache", "tie_word_embeddings", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "use_l2warp")},
)


@given(st.fixed_dictionaries({}, optional=values))
def test_config_survives_json(given_fields: dict[str, Any]) -> None:
    written = HarmonicConfig(**given_fields)
    for name in given_fields.keys() - {"timescales", "dtype", "attn"}:
        assert getattr(written, name) == given_fields[name]
    with TemporaryDirectory() as folder:
        written.save_pretrained(folder)
        for loaded in (
            AutoConfig.from_pretrained(folder), HarmonicConfig.from_pretrained(folder),
            HarmonicConfig(**json.loads(written.to_json_string())), HarmonicConfig(**written.to_diff_dict()),
            HarmonicConfig.from_dict(written.to_dict()), copy.deepcopy(written),
        ):
            assert type(loaded) is HarmonicConfig
            assert loaded == written
            assert loaded.to_json_string() == written.to_json_string()


@given(st.data())
def test_configs_that_differ_are_unequal(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(values.keys() - {"dtype", "id2label", "architectures"})))
    one, other = (HarmonicConfig(**{"vocab_size": 61, name: data.draw(values[name])}) for _ in range(2))
    assert (one == other) == (getattr(one, name) == getattr(other, name))


# each value is one that `json` can write
BAD = [0.5, "1", "no", -1, 0, [], {}, [0], {"a": 1}, "x", None, True, math.inf, math.nan, 10**6]
GOOD = {
    **{field: {10**6} for field in (
        "hidden_size", "num_hidden_layers", "vocab_size", "conv_size")},
    **{field: {None, 10**6} for field in (
        "hidden_ratio", "intermediate_size", "gate_ratio", "gate_rank", "max_position_embeddings")},
    **{field: {True} for field in (
        "use_prediction_error", "use_output_gate", "use_output_proj", "use_short_conv", "conv_bias", "gated_mlp",
        "elementwise_affine", "use_cache", "tie_word_embeddings", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy",
        "use_l2warp")},
    "fuse_linear_cross_entropy": set(),
    "expand_ratio": {0.5, 10**6}, "norm_eps": {0.5, 10**6}, "initializer_range": {0.5, 0, 10**6},
    "pad_token_id": {None, 0}, "bos_token_id": {None, 0}, "eos_token_id": {None, 0},
    "attn": {None}, "timescales": set(), "attn_mode": set(), "timescale_mode": set(), "hidden_act": set(),
}


def is_good(field: str, value: Any) -> bool:
    if (field, value) in [("eos_token_id", [0]), ("attn", [])]:
        return True
    return any(type(value) is type(good) and value == good for good in GOOD[field])


def test_the_table_of_values_has_every_field() -> None:
    own = inspect.signature(HarmonicConfig.__init__).parameters.keys() - {"self", "kwargs"}
    assert own == GOOD.keys()


@pytest.mark.parametrize("field", sorted(GOOD))
def test_impossible_value_is_refused_with_the_name_of_its_field(field: str) -> None:
    for value in BAD:
        if is_good(field, value):
            assert getattr(HarmonicConfig(**{field: value}), field) == value
            continue
        with pytest.raises(ValueError, match=rf"`?{field}`?"):
            HarmonicConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [
    *product(("hidden_size", "num_hidden_layers", "vocab_size", "conv_size"), (0, -1, 1.5, None, True)),
    *product(("hidden_ratio", "intermediate_size", "gate_ratio", "gate_rank"), (0, 1.5, True)),
    *product(("timescales",), ([], [(4, 2)], [("2", "4")], ["25"], [(2, math.inf)], [(True, 4)], 5, "ab", [4, 8])),
    ("attn_mode", "parallel"), ("timescale_mode", "free"), ("hidden_act", "gelu"), ("expand_ratio", 0),
    ("expand_ratio", "2"), ("norm_eps", -1), ("use_short_conv", "no"), ("initializer_range", -1), ("pad_token_id", -1),
    ("eos_token_id", [0, 32000]), ("model_type", "llama"),
])
def test_impossible_field_is_named_by_the_config(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must"):
        HarmonicConfig(**{field: value})


@pytest.mark.parametrize("attn", [
    3, "all", {}, {"layers": [0]}, {"num_heads": 2}, {"layers": [0], "num_heads": 0}, {"layers": 0, "num_heads": 2},
    {"layers": [24], "num_heads": 2}, {"layers": [0], "num_heads": 3},
    {"layers": [0], "num_heads": 4, "num_kv_heads": 3}, [{"layers": [0], "num_heads": 2}, {"layers": [0], "num_heads": 2}],
], ids=str)
def test_malformed_attention_is_refused(attn: Any) -> None:
    with pytest.raises(ValueError, match="attn"):
        HarmonicConfig(attn=attn)


# a generic test of fla, a later transformers, what a user notes or takes for a field, and what is nearly a field
@pytest.mark.parametrize(("field", "value", "near"), [
    ("num_heads", 4, None), ("new_in_transformers_6", {"a": [1]}, None), ("my_note", "x", None),
    ("sliding_window", None, None), ("time_scales", 3, "timescales"),
    ("expand_ratios", 3, "expand_ratio"), ("hidden_dim", 3, "hidden_size"),
    ("num_hidden_layer", 3, "num_hidden_layers"), ("vocabsize", 3, "vocab_size"),
])
def test_unknown_field_is_kept_with_a_warning(
    field: str, value: Any, near: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    for written in (HarmonicConfig(**{field: value}), config("paper", **{field: value})):
        assert getattr(written, field) == value
        said = caplog.text
        caplog.clear()
        assert f"`{field}` is not a field of HarmonicConfig" in said
        assert (f"Did you mean `{near}`" in said) if near else ("Did you mean" not in said)
        written.save_pretrained(tmp_path)
        for auto in (AutoConfig, HarmonicConfig):
            assert getattr(auto.from_pretrained(tmp_path), field) == value
            assert auto.from_pretrained(tmp_path) == written
        assert HarmonicForCausalLM(config("paper", **{field: value})).config.to_dict()[field] == value
    plain = config("paper")
    setattr(plain, field, value)
    plain.save_pretrained(tmp_path)
    assert getattr(AutoConfig.from_pretrained(tmp_path), field) == value


def test_a_field_of_generation_is_left_to_transformers(caplog: pytest.LogCaptureFixture) -> None:
    # which does not keep it in a configuration
    assert not hasattr(HarmonicConfig(temperature=0.7), "temperature")
    assert not caplog.text


def test_unknown_field_of_attention_is_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    written = HarmonicConfig(attn={"layers": [0], "num_heads": 2, "windowsize": 8})
    assert "`windowsize` is not a field of attn" in caplog.text
    assert "Did you mean `window_size`?" in caplog.text
    assert written.attn["windowsize"] == 8


# what this and other releases of transformers write into a config.json, or take as keyword arguments
@pytest.mark.parametrize("fields", [
    dict(architectures=["HarmonicForCausalLM"], dtype="bfloat16", transformers_version="5.6.2"),
    dict(torch_dtype="float16", transformers_version="4.57.1", _name_or_path="x", _attn_implementation_autoset=True),
    dict(model_type="harmonic", _commit_hash=None, name_or_path="x"),
    dict(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}, problem_type="regression"),
    dict(num_labels=3, output_hidden_states=True, return_dict=False, chunk_size_feed_forward=0, is_encoder_decoder=False),
    dict(auto_map={"AutoConfig": "m--c.HarmonicConfig"}, custom_pipelines={}, tokenizer_class="PreTrainedTokenizerFast"),
    dict(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
    dict(attn_implementation="eager", output_attentions=False, experts_implementation=None),
], ids=lambda fields: next(iter(fields)))
def test_fields_of_transformers_pass_without_a_warning(
    fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    written = config("stack", **fields)
    assert "is not a field" not in caplog.text
    assert written.vocab_size == VOCAB
    written.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path) == written
    loaded = HarmonicConfig.from_dict({**config("stack").to_dict(), **fields})
    assert {**loaded.to_dict(), "_name_or_path": ""} == {**written.to_dict(), "_name_or_path": ""}


def test_fields_of_two_releases_of_transformers_load() -> None:
    fields = config("stack").to_diff_dict()
    for version in ("5.15.0", "5.24.0"):
        assert HarmonicConfig(**{**fields, "transformers_version": version}) == config("stack")


def test_fields_changed_after_construction_are_checked_before_use(tmp_path: Path) -> None:
    for field, value in (("norm_eps", -1), ("vocab_size", 0), ("use_cache", 2), ("num_hidden_layers", True)):
        written = config("paper")
        setattr(written, field, value)
        with pytest.raises(ValueError, match=f"`{field}`"):
            HarmonicForCausalLM(written)
        with pytest.raises(ValueError, match=f"`{field}`"):
            written.save_pretrained(tmp_path)
    config("paper").save_pretrained(tmp_path)
    for field, value in (("norm_eps", -1), ("vocab_size", 0), ("timescales", [[4, 2]])):
        for auto in (AutoConfig, HarmonicConfig, AutoModelForCausalLM):
            with pytest.raises(ValueError, match=f"`{field}` must"):
                auto.from_pretrained(tmp_path, **{field: value})
    # the attention layer 1 goes with the layers
    written = config("stack", attn={"layers": [1], "num_heads": 2})
    written.num_hidden_layers = 1
    with pytest.raises(ValueError, match="out-of-range layer 1"):
        written.save_pretrained(tmp_path)


def test_fields_can_be_replaced_at_loading(tmp_path: Path) -> None:
    config("paper").save_pretrained(tmp_path)
    loaded, unused = HarmonicConfig.from_pretrained(tmp_path, use_cache=False, foo=1, return_unused_kwargs=True)
    assert (loaded.use_cache, unused) == (False, {"foo": 1})
    assert HarmonicConfig.from_pretrained(tmp_path, use_cache=False) == loaded


def test_a_subclass_may_add_fields(caplog: pytest.LogCaptureFixture) -> None:
    class Wider(HarmonicConfig):
        def __init__(self, width: int = 1, **kwargs: Any) -> None:
            self.width = width
            super().__init__(**kwargs)

    assert (Wider(width=3, hidden_size=16).width, Wider(hidden_size=16).hidden_size) == (3, 16)
    assert not caplog.text
    Wider(widht=3)
    assert "`widht` is not a field of Wider: it is kept, but nothing reads it. Did you mean `width`?" in caplog.text


def test_fields_that_exclude_one_another() -> None:
    with pytest.raises(ValueError, match="`gate_ratio` and `gate_rank` exclude one another"):
        HarmonicConfig(gate_ratio=2, gate_rank=2)
    with pytest.raises(ValueError, match="`expand_ratio` must"):
        HarmonicConfig(expand_ratio=2, use_output_proj=False)
    with pytest.raises(ValueError, match=r"`hidden_act` must be 'swish'.*; got 'powlu'"):
        HarmonicConfig(gated_mlp=False, hidden_act="powlu")
    with pytest.raises(ValueError, match="fuse_linear_cross_entropy"):
        HarmonicConfig(fuse_cross_entropy=True, fuse_linear_cross_entropy=True)
    with pytest.raises(ValueError, match="out-of-range layer 9"):
        HarmonicConfig(num_hidden_layers=2, attn={"layers": [9], "num_heads": 2})
