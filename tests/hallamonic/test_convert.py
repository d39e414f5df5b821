import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sources import CONFIGS, VOCAB, converted, source, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

from fla_harmonic.hallamonic.convert import (
    RECORD,
    Convert,
    convert,
    convert_model,
    describe,
    layer_options,
    load_source,
    number_ranges,
    parse_layers,
)

every_source = pytest.mark.parametrize("name", list(CONFIGS))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    source("llama").save_pretrained(path)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(path)
    return path


@every_source
@torch.no_grad()
def test_zero_layers_are_the_source_bit_for_bit(name: str) -> None:
    original, result = source(name), converted(name, [])
    x, mask = tokens(2, 20), torch.tensor([[0] * 5 + [1] * 15, [1] * 20])
    assert torch.equal(result.model(x).logits, original(x).logits)
    assert torch.equal(result.model(x, attention_mask=mask).logits, original(x, attention_mask=mask).logits)
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


def test_the_source_stays_as_it_was() -> None:
    original, x = source("qwen2"), tokens(1, 9)
    before, settings = original(x).logits, original.config.to_dict()
    model = convert_model(original, [0, 1, 2]).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(original(x).logits, before)
    assert original.config.to_dict() == settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_is_the_source_s_but_for_timescales(dtype: torch.dtype) -> None:
    result = convert_model(source("llama").to(dtype), [1])
    for name, parameter in result.model.named_parameters():
        assert parameter.dtype == (torch.float32 if "timescale" in name else dtype), name
    assert result.model.config.dtype == dtype
    assert result.model(tokens(1, 9)).logits.isfinite().all()


def test_the_description_counts_every_parameter() -> None:
    result = converted("llama-bias", [0, 1, 2])
    lines = describe(result).splitlines()
    counted = sum(int(line.rsplit(": ", 1)[1].replace(",", "")) for line in lines if line.startswith("  layers 0-2: "))
    assert lines[0] == f"new: {counted:,} parameters in {len(result.new)} tensors"
    assert counted + result.untouched == result.model.num_parameters()
    assert "  layers 0-2: self_attn.bias [32]: 96" in lines
    assert lines[-2:] == [f"untouched: {result.untouched:,} parameters", "gone: 24 tensors of the replaced attention layers"]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_layers_are_read_as_they_are_written(numbers: set[int]) -> None:
    assert parse_layers(number_ranges(sorted(numbers)), 41) == sorted(numbers)


def test_layers_by_name() -> None:
    assert parse_layers("all", 4) == [0, 1, 2, 3]
    assert parse_layers("none", 4) == []
    assert parse_layers("3, 0-1,1", 4) == [0, 1, 3]


@pytest.mark.parametrize("layers", ["", "1,", "-1", "2-1", "first", "1.5", "0-"])
def test_what_names_no_layers_is_refused(layers: str) -> None:
    with pytest.raises(ValueError, match=r"`layers` must be all, none, or numbers and rising ranges such as 0,2,4-10; got"):
        parse_layers(layers, 4)


def test_layers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="`layers` must be among the model's 4, 0 to 3; got 7 in '2-7'"):
        parse_layers("2-7", 4)


def test_ranks_are_those_of_the_values() -> None:
    few, many = (CONFIGS["llama"](num_key_value_heads=heads) for heads in (1, 2))
    assert layer_options(few)["gate_rank"] == 8
    assert layer_options(many)["gate_rank"] is None
    assert layer_options(CONFIGS["llama"](head_dim=16))["expand_ratio"] == 2
    assert layer_options(few, 0.5, 4) == {"expand_ratio": 0.5, "gate_rank": 4, "use_output_gate": False}


@pytest.mark.parametrize("options", [{}, {"layers": "0,2", "init": "random"}, {"layers": "none"}], ids=str)
def test_the_command_writes_a_directory(
    options: dict[str, Any], directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    command = Convert(str(directory), tmp_path / "out", **options)
    # what a killed run left
    (tmp_path / "out.draft").mkdir()
    (tmp_path / "out.draft" / "half").write_text("")
    convert(command)
    assert "untouched: " in capsys.readouterr().out
    assert not (tmp_path / "out.draft").exists()
    assert not (tmp_path / "out" / "half").exists()
    lm, original, x = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), source("llama"), tokens(1, 9)
    torch.manual_seed(0)
    expected = convert_model(original, parse_layers(command.layers, 3), command.init).model
    assert torch.equal(lm(x).logits, expected(x).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("5 7").input_ids == [5, 7]
    assert json.loads((tmp_path / "out" / RECORD).read_text())["model"] == str(directory)

    convert(command)
    assert "is there already, from the same options" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match=r"it has other content\. Remove it, or pass another `--out`"):
        convert(Convert(str(directory), tmp_path / "out", **{**options, "seed": 1}))


def test_a_directory_of_others_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other content"):
        convert(Convert(str(directory), tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_files_are_named(missing: str, directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        if file.name != missing:
            (tmp_path / file.name).symlink_to(file)
    name = {"model.safetensors": r"\*.safetensors or"}.get(missing, missing)
    with pytest.raises(FileNotFoundError, match=f"found no {name}.*Download"):
        load_source(str(tmp_path))


def test_other_families_are_refused_before_weights_are_read(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    GPT2Config(vocab_size=VOCAB).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`model_type` must be one of llama, mistral, qwen2; got 'gpt2'"):
        load_source(str(tmp_path))


def test_the_command_line(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fla_harmonic.hallamonic.__main__ import main

    monkeypatch.setattr(sys, "argv", [
        "hallamonic", "convert", "--model", str(directory), "--out", str(tmp_path / "out"), "--layers", "1",
        "--gate-rank", "4", "--timescales", "2", "9", "20", "90"])
    main()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["harmonic_layers"] == [1]
    assert config["layer_options"]["gate_rank"] == 4
    assert config["layer_options"]["timescales"] == [[2, 9], [20, 90]]
