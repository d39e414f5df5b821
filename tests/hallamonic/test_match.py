import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources import source

from fla_harmonic.hallamonic import HallamonicForCausalLM
from fla_harmonic.hallamonic.convert import convert_model
from fla_harmonic.hallamonic.match import RECORD, Match, Matching, match, windows
from fla_harmonic.text.tokenizers import ByteTokenizer

LAYERS = [0, 2]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Any]:
    """Options that name an original, its conversion, and a text."""
    original = source("llama", vocab_size=256)
    original.save_pretrained(tmp_path / "original")
    convert_model(original, LAYERS).model.save_pretrained(tmp_path / "converted")
    for name in ("original", "converted"):
        ByteTokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 40 + "~" * 160)
    return {"original": str(tmp_path / "original"), "converted": tmp_path / "converted", "text": tmp_path / "text.txt",
            "seq_len": 24, "batch_size": 2, "save_every": 2, "lr": 3e-3}


def test_errors_are_those_of_layers_fed_the_originals_hidden_states() -> None:
    original = source("llama")
    converted: Any = convert_model(original, LAYERS).model
    ids = torch.randint(3, 61, (2, 20))
    with torch.no_grad():
        states = original(ids, output_hidden_states=True).hidden_states
    expected: dict[int, float] = {}
    positions = original.model.rotary_emb(states[0], torch.arange(20)[None])
    for layer in LAYERS:
        block = original.model.layers[layer]
        with torch.no_grad():
            inputs = block.input_layernorm(states[layer])
            wanted = block.self_attn(inputs, position_embeddings=positions, attention_mask=None)[0]
            found = converted.model.layers[layer].self_attn(inputs)[0]
        expected[layer] = ((found - wanted).square().sum() / wanted.square().sum()).item()
    matching = Matching(original, converted)
    assert matching.step(ids) == pytest.approx(expected, rel=1e-4)
    trained = {name for name, p in converted.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in converted.named_parameters() if ".harmonic." in name}


def test_layers_come_closer_and_all_else_stays(folders: dict[str, Any], tmp_path: Path) -> None:
    match(Match(**folders, out=tmp_path / "out", steps=30))
    errors = json.loads((tmp_path / "out" / RECORD).read_text())["errors"]
    assert len(errors) == 30
    for layer in ("0", "2"):
        assert errors[-1][layer] < 0.7 * errors[0][layer]
    before, after = (HallamonicForCausalLM.from_pretrained(folder).state_dict()
                     for folder in (folders["converted"], tmp_path / "out"))
    for name, value in before.items():
        # what no error depends on has no gradient, but the rest has
        assert torch.equal(value, after[name]) or ".harmonic." in name, name
    assert not torch.equal(*(x["model.layers.2.self_attn.harmonic.o_proj.weight"] for x in (before, after)))


def test_a_killed_run_continues_bit_for_bit(
    folders: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    match(Match(**folders, out=tmp_path / "whole", steps=6))
    step, calls = Matching.step, [0]

    def dies(self: Matching, ids: torch.Tensor) -> dict[int, float]:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return step(self, ids)

    monkeypatch.setattr(Matching, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        match(Match(**folders, out=tmp_path / "cut", steps=6))
    assert not (tmp_path / "cut").exists()
    match(Match(**folders, out=tmp_path / "cut", steps=6))
    # five steps before, of which four were saved, and the last two
    assert calls[0] == 8
    whole, cut = (HallamonicForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    match(Match(**folders, out=tmp_path / "cut", steps=6))
    assert calls[0] == 8
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="other content"):
        match(Match(**folders, out=tmp_path / "cut", steps=7))


def test_the_end_of_the_text_is_not_read(folders: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    step = Matching.step
    monkeypatch.setattr(Matching, "step", lambda self, ids: (seen.append(ids), step(self, ids))[1])
    match(Match(**folders, out=tmp_path / "out", steps=40))
    assert ord("~") not in torch.cat(seen)
    # 90% of 1,760 characters
    tokens = np.frombuffer(folders["text"].read_bytes(), dtype=np.uint8)[:1584].astype(np.int64)
    assert torch.equal(seen[3], windows(tokens, 24, 2, 0, 3))


def test_what_does_not_fit_is_refused(folders: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a UTF-8 file"):
        match(Match(**{**folders, "text": tmp_path / "none"}, out=tmp_path / "out"))
    with pytest.raises(ValueError, match="at least 9999 tokens"):
        match(Match(**{**folders, "seq_len": 9999}, out=tmp_path / "out"))
    with pytest.raises(ValueError, match="with replaced layers"):
        Matching(source("llama"), convert_model(source("llama"), []).model)
    with pytest.raises(ValueError, match="vocab_size = 61"):
        Matching(source("llama", vocab_size=99), convert_model(source("llama"), [1]).model)
