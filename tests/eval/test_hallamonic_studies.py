import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.hallamonic import compare, debug, phase1
from eval.scoring import generation
from eval.scoring.generation import Generation, Subject
from eval.study.cells import Cell
from fla_harmonic.hallamonic.convert import Convert, convert_model
from fla_harmonic.text.tokenizers import ByteTokenizer

LAYERS, KV_HEADS, HEAD, LEVEL = 3, 2, 8, 32


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=LEVEL, intermediate_size=40, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, max_position_embeddings=32, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )).eval()


def model(replaced: list[int]) -> Any:
    return convert_model(llama(), replaced).model if replaced else llama()


@pytest.mark.parametrize("replaced", [[], [1], [0, 1, 2]], ids=["none", "one", "all"])
def test_what_is_kept_is_counted_to_the_byte(replaced: list[int]) -> None:
    for tokens in (5, 40):
        run = Generation(model(replaced))
        run.read(torch.randint(256, (1, tokens)))
        attention = 2 * KV_HEADS * HEAD * tokens * (LAYERS - len(replaced))
        states = 3 * LEVEL * len(replaced)
        assert run.cache_bytes == 4 * (attention + states)


@pytest.mark.parametrize("replaced", [[], [1], [0, 1, 2]], ids=["none", "one", "all"])
def test_reading_in_pieces_and_generating_is_what_generate_does(replaced: list[int]) -> None:
    subject, ids = model(replaced), torch.randint(256, (1, 13))
    run, tokens = Generation(subject), []
    for piece in ids.split(5, 1):
        run.read(piece)
    for _ in range(6):
        tokens.append(run.token.item())
        run.generate(1)
    assert subject.generate(ids, max_new_tokens=6, do_sample=False)[0, 13:].tolist() == tokens


def test_measured_contexts_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = [Subject("original", model([]), "a", 32), Subject("converted", model([0, 1, 2]), "b", None)]
    tokens = np.arange(20, dtype=np.uint8)
    measured: list[int] = []
    measure = generation.measure

    def counted(subjects: Any, tokens: Any, context: int, *rest: Any) -> Any:
        measured.append(context)
        return measure(subjects, tokens, context, *rest)

    monkeypatch.setattr(generation, "measure", counted)
    first = generation.run(subjects, tokens, (16, 48), 2, 2, 20, tmp_path)
    assert generation.run(subjects, tokens, (16, 48), 2, 2, 20, tmp_path) == first
    assert measured == [16, 48]
    # other weights are another cell
    generation.run([subjects[0], Subject("converted", subjects[1].model, "c", None)], tokens, (16,), 2, 2, 20, tmp_path)
    assert measured == [16, 48, 16]
    rows = generation.frame(first).set_index(["context", "model"])
    assert rows["beyond_trained_length"].to_dict() == {
        (16, "original"): False, (16, "converted"): False, (48, "original"): True, (48, "converted"): False}
    keys, states = 4 * 2 * KV_HEADS * HEAD * LAYERS, 4 * 3 * LEVEL * LAYERS
    assert rows.loc[(48, "converted"), "cache_ratio"] == states / (48 * keys)
    seconds = rows["seconds_a_token"]
    assert rows.loc[(16, "converted"), "time_ratio"] == seconds[16, "converted"] / seconds[16, "original"]
    line = generation.table(first).splitlines()[-1]
    assert line.startswith("| 48 |")
    assert line.count("beyond trained length") == 1
    generation.plot(first, tmp_path / "generation.png")
    assert (tmp_path / "generation.png").stat().st_size > 0


def test_the_command_compares_original_and_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, replaced in (("llama", []), ("converted", [0, 1, 2])):
        model(replaced).save_pretrained(tmp_path / name)
        ByteTokenizer().save_pretrained(tmp_path / name)
    options = compare.Options(
        original=tmp_path / "llama", converted=(tmp_path / "converted",), labels=("all layers",), contexts=(16, 64),
        targets=32, generation_contexts=(16, 48), new_tokens=1, rounds=1,
        config_file=Path("titan_configs/hallamonic_debug_phase1.toml"), out=tmp_path / "out")
    compare.main(options, [])
    text = (tmp_path / "out/hallamonic.md").read_text()
    audit, context, _, cost = (part for part in text.split("\n\n") if part.startswith("|"))
    assert [line.split(" | ")[:2] for line in audit.splitlines()[2:]] == [["| original", "yes"], ["| all layers", "yes"]]
    # the original alone is beyond its limit
    assert [line.count("beyond trained length") for line in context.splitlines()[2:]] == [0, 1]
    assert "beyond" in context.splitlines()[-1].split("|")[3]
    assert len(cost.splitlines()) == 4
    lines = [json.loads(line) for line in (tmp_path / "out/generation.jsonl").read_text().splitlines()]
    assert [record["cell"]["context"] for record in lines] == [16, 48]
    capsys.readouterr()
    compare.main(options, [])
    # times too: nothing was measured again
    assert (tmp_path / "out/hallamonic.md").read_text() == text
    with pytest.raises(ValueError, match="different `labels`"):
        compare.main(compare.Options(options.original, options.converted, ("original",)), [])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Cell], list[Convert]]:
    """What would run."""
    cells: list[Cell] = []
    converted: list[Convert] = []

    def run_cells(some: list[Cell], *rest: Any) -> list[dict[str, Any]]:
        cells.extend(some)
        return [{} for _ in some]

    def convert(options: Convert) -> None:
        converted.append(options)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tokenizer.json").write_text("{}")

    for module in (debug, phase1):
        monkeypatch.setattr(module, "run_cells", run_cells)
        monkeypatch.setattr(module, "convert", convert)
    return cells, converted


def test_each_run_of_the_study_begins_with_the_one_before(recorded: tuple[list[Cell], list[Convert]], tmp_path: Path) -> None:
    cells, converted = recorded
    found = debug.study(debug.Options(
        seeds=(3, 5), phase_steps=(7, 2), control=True, out=tmp_path))
    assert {label: len(folders) for label, folders in found.items()} == dict.fromkeys([
        "Llama", "attention, converted", "random, converted", "attention, phase 1", "random, phase 1", "attention, phase 2",
        "random, phase 2", "Llama, trained on"], 2)
    assert len({cell.name for cell in cells}) == len(cells) == 2 + 4 + 4 + 2
    assert len({folder for folders in found.values() for folder in folders}) == 2 * 8
    by_label: Callable[[str], list[Cell]] = lambda label: [cell for cell in cells if cell.model.label == label]  # noqa: E731
    for index, seed in enumerate((3, 5)):
        begun = converted[2 * index]
        assert (begun.model, begun.init, begun.seed) == (str(found["Llama"][index]), "attention", seed)
        first, second = by_label("attention-phase1")[index], by_label("attention-phase2")[index]
        assert (first.text.assets, first.seed, first.steps) == (str(begun.out), seed, 7)
        assert (second.text.assets, second.seed, second.steps) == (str(found["attention, phase 1"][index]), seed, 2)
        control = by_label("llama-on")[index]
        assert (control.text.assets, control.seed, control.steps) == (str(found["Llama"][index]), seed, 9)
    # another beginning is another run, wherever it lies
    other = debug.study(debug.Options(seeds=(3,), llama_steps=1, phase_steps=(7, 2), out=tmp_path))
    assert not set(other["attention, phase 2"]) & set(found["attention, phase 2"])


def test_phase_1_is_drawn_beside_the_original(
    recorded: tuple[list[Cell], list[Convert]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pandas as pd

    cells, converted = recorded
    llama().save_pretrained(tmp_path / "llama")
    score = {"test": {"bits_per_token": 2.5, "audit": {"random_bits_per_token": 9.0, "log2_vocab": 8.0}}}
    scored: list[Path] = []
    monkeypatch.setattr(phase1, "scores", lambda cell, job, directory: (scored.append(directory), score)[1])
    monkeypatch.setattr(phase1, "step_losses", lambda directory, job: [3.25, 3.125])
    monkeypatch.setattr(phase1, "run_cells", lambda some, *rest: (cells.extend(some), [score] * len(some))[1])
    monkeypatch.setattr(phase1, "curve", lambda folder: pd.DataFrame(
        {"step": [1, 2], "bits_per_token": [5.0, 4.0] if folder.name.startswith("attention") else [7.0, 6.0]}))
    options = phase1.Options(model=tmp_path / "llama", layers="1", steps=2, out=tmp_path / "out")
    phase1.main(options)
    phase1.main(options)
    # the original is scored once
    assert scored == [tmp_path / "llama"]
    assert [(begun.init, begun.layers) for begun in converted[:2]] == [("attention", "1"), ("random", "1")]
    assert [cell.text.assets for cell in cells[:2]] == [str(begun.out) for begun in converted[:2]]
    rows = [line.split(" | ") for line in (tmp_path / "out/phase1.md").read_text().splitlines()[2:]]
    assert [row[:4] for row in rows] == [
        ["| original", "3.250", "3.125", "2.500"], ["| attention, phase 1", "5.000", "4.000", "2.500"],
        ["| random, phase 1", "7.000", "6.000", "2.500"]]
    assert (tmp_path / "out/phase1.png").stat().st_size > 0
