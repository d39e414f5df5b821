"""Losses on the same targets with more and more context, and by position."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, PreTrainedModel

from eval.scoring import length
from eval.scoring.context import Losses, buckets, is_recurrent, plain_head, window_starts
from eval.scoring.length import BEYOND, UNKNOWN, Options, Plan, compare, frame, measure, plan_of, table, text_bytes
from eval.scoring.planted_leaks import Table
from eval.scoring.targets import window_losses
from fla_harmonic import HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.models.mamba.modeling_mamba import build_mamba
from fla_harmonic.text import TokenSplit
from fla_harmonic.text.tokenizers import ByteTokenizer, JsonTokenizer

TRAINED = 64


class ScaledLlama(LlamaForCausalLM):
    """Its logits are more than its head on the last states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 3 * output.logits.tanh()
        return output


def harmonic(**more: Any) -> HarmonicForCausalLM:
    return HarmonicForCausalLM(HarmonicConfig(
        hidden_size=16, num_hidden_layers=2, vocab_size=256, max_position_embeddings=TRAINED, initializer_range=0.5, **more))


def llama(of: type[LlamaForCausalLM] = LlamaForCausalLM) -> LlamaForCausalLM:
    return of(LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=256,
        max_position_embeddings=TRAINED, initializer_range=0.5))


def mamba() -> PreTrainedModel:
    return build_mamba(MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=256, initializer_range=0.5))


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    hybrid = harmonic(attn={"layers": [1], "num_heads": 2})
    found = {"harmonic": harmonic(), "hybrid": hybrid, "llama": llama(), "mamba": mamba(), "scaled": llama(ScaledLlama)}
    return {name: model.eval() for name, model in found.items()}


@pytest.fixture(scope="module")
def folders(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in ("harmonic", "llama"):
        models[name].save_pretrained(root / name / "hf")
        ByteTokenizer().save_pretrained(root / name / "hf")
    (root / "text.txt").write_text("".join(f"{number} naïve façades — " for number in range(1000)))
    return {"harmonic": root / "harmonic" / "hf", "llama": root / "llama" / "hf", "text": root / "text.txt"}


def options(folders: dict[str, Path], out: Path, **more: Any) -> tuple[Options, list[str]]:
    given = {"models": (folders["harmonic"], folders["llama"]), "contexts": (32, 64, 128), "targets": 50, "windows": 3, **more}
    return Options(**given, piece=100, out=out), ["--training.dataset=text", f"--training.dataset_path={folders['text']}"]


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "length.jsonl").read_text().splitlines()]


@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 90), st.floats(0, 1), st.integers(1, 50))
def test_losses_in_pieces_are_those_of_one_pass(
    models: dict[str, PreTrainedModel], B: int, T: int, share: float, piece: int,
) -> None:
    ids = torch.randint(256, (B, T + 1), generator=torch.Generator().manual_seed(T))
    scored = max(1, round(share * T))
    for name, model in models.items():
        actual = Losses(model, piece)(model, ids, scored)
        torch.testing.assert_close(
            actual, window_losses(model, ids, scored), rtol=1e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_logits_of_a_long_window_never_exist_as_a_whole(models: dict[str, PreTrainedModel]) -> None:
    ids = torch.randint(256, (1, 201))
    for name in ("harmonic", "hybrid", "llama", "mamba"):
        rows: list[Any] = []
        handle = models[name].get_output_embeddings().register_forward_hook(
            lambda module, inputs, output, rows=rows: rows.append(output.shape[:-1].numel()))
        losses_of = Losses(models[name], 50)
        rows.clear()
        losses_of(models[name], ids, 200)
        handle.remove()
        assert rows == [50] * 4, name


def test_a_model_that_changes_its_logits_is_scored_on_them(models: dict[str, PreTrainedModel]) -> None:
    assert plain_head(models["scaled"]) is None
    assert plain_head(models["llama"]) is models["llama"].lm_head
    assert [is_recurrent(models[name]) for name in ("harmonic", "hybrid", "llama", "mamba")] == [True, False, False, True]


def test_every_target_is_predicted_from_its_context_alone(models: dict[str, PreTrainedModel]) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 300).astype(np.uint8)
    plan = Plan((8, 128), range(260, 300), (0,), 1, 40, "digest")
    for name in ("harmonic", "llama", "mamba"):
        model, losses_of = models[name], Losses(models[name], 64)
        for cell in plan.measurements("weights", None)[:2]:
            result = measure(model, cell, tokens, 40, losses_of, 256)
            expected = 0.0
            for target in plan.targets:
                ids = torch.from_numpy(tokens[target - cell.length:target].astype(np.int64))[None]
                with torch.no_grad():
                    log_p = model(ids, use_cache=False).logits[0, -1].double().log_softmax(-1)
                expected -= log_p[int(tokens[target])].item() / math.log(2)
            assert result["bits_per_token"] == pytest.approx(expected / 40, rel=1e-5)
            assert result["bits_per_byte"] == pytest.approx(expected / 40, rel=1e-5)


def test_default_stride_gives_every_target_half_the_context_or_more() -> None:
    plan = Plan((1, 16, 64, 1000), range(1000, 1100), (0,), None, 100, "digest")
    cells = plan.measurements("weights", None)
    assert [(cell.kind, cell.length, cell.stride) for cell in cells] == [
        ("context", 1, 1), ("context", 16, 8), ("context", 64, 32), ("context", 1000, 100), ("position", 1000, 1000)]
    # up to its length, and at the same first tokens
    assert [(cell.kind, cell.length) for cell in plan.measurements("weights", 64)] == [
        ("context", 1), ("context", 16), ("context", 64), ("position", 64)]
    assert plan.measurements("weights", 64)[-1].starts == cells[-1].starts


@given(st.integers(1, 3), st.integers(1, 70))
def test_buckets_double_and_sum_to_the_whole(windows: int, size: int) -> None:
    losses = torch.rand(windows, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    found = buckets(losses)
    assert sum(bucket["bits"] for bucket in found) == pytest.approx(losses.sum().item() / math.log(2), rel=1e-12)
    assert sum(bucket["targets"] for bucket in found) == losses.numel()
    assert [bucket["first"] for bucket in found] == [0, *(bucket["stop"] for bucket in found[:-1])]
    assert all(bucket["stop"] <= 2 * max(1, bucket["first"]) for bucket in found)
    last = found[-1]
    expected = losses[:, last["first"]:].mean().item() / math.log(2)
    assert last["bits"] / last["targets"] == pytest.approx(expected, rel=1e-12)


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 40))
def test_windows_of_positions_lie_in_the_text(more: int, windows: int, size: int) -> None:
    starts = window_starts(size + more, size, windows)
    assert starts[0] == 0
    assert starts[-1] + size + 1 <= size + more
    assert len(set(starts)) == len(starts) == min(windows, more)


@given(st.text(st.sampled_from("aé—𐍈"), min_size=1, max_size=20), st.integers(0, 80))
def test_bytes_of_targets_that_begin_within_a_character(folders: dict[str, Path], text: str, first: int) -> None:
    data = text.encode()
    ids = list(data)[min(first, len(data) - 1):]
    assert text_bytes(JsonTokenizer(folders["harmonic"]), ids) == len(ids)


def test_a_killed_run_goes_on_and_ends_with_the_same_numbers(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:
    compare(*options(folders, tmp_path / "whole"))
    assert table(records(tmp_path / "whole")) in capsys.readouterr().out
    measured: list[Any] = []

    def counted(model: Any, cell: Any, *rest: Any) -> dict[str, Any]:
        if len(measured) == kill_at:
            raise KeyboardInterrupt
        measured.append(cell)
        return measure(model, cell, *rest)

    monkeypatch.setattr(length, "measure", counted)
    kill_at = 3
    with pytest.raises(KeyboardInterrupt):
        compare(*options(folders, tmp_path / "killed"))
    assert len(measured) == 3
    # four of Harmonic, three contexts and positions, and three of Llama, which has no context of 128
    kill_at = 7
    compare(*options(folders, tmp_path / "killed"))
    assert len(measured) == len(set(measured)) == 7
    keys = ("model", "cell", "bits_per_token", "bits_per_byte", "buckets", "trained_length", "audit")
    whole, resumed = (
        [{key: record.get(key) for key in keys} for record in records(tmp_path / name)] for name in ("whole", "killed"))
    for record in (*whole, *resumed):
        # a time
        assert record["audit"].pop("share") > 0
    assert whole == resumed
    assert all(record["audit"]["failure"] == "" for record in whole)
    assert (tmp_path / "killed" / "length.png").stat().st_size > 0
    rows = pd.read_csv(tmp_path / "killed" / "length.csv")
    assert list(rows[rows["kind"] == "context"]["context_to"]) == [32, 64, 128, 32, 64]
    # bytes are tokens
    contexts = rows[rows["kind"] == "context"]
    assert np.allclose(contexts["bits_per_token"], contexts["bits_per_byte"])
    # nothing is left to do, and the labels may be others
    compare(*options(folders, tmp_path / "killed", labels=("a", "a")))
    assert {record["model"] for record in records(tmp_path / "killed")} == {"a"}


def test_what_is_longer_than_trained_is_labelled_and_never_the_best(folders: dict[str, Path], tmp_path: Path) -> None:
    compare(*options(folders, tmp_path, beyond=True))
    found = records(tmp_path)
    rows = frame(found)
    assert {model: set(mine["context_to"]) for model, mine in rows.groupby("model")}["llama"] >= {32, 64, 128}
    assert (rows["label"] == BEYOND).equals(rows["context_to"] > TRAINED)
    lines = [line for line in table(found).splitlines() if line.startswith("| ") and line[2].isdigit()]
    for line in lines:
        is_beyond = int(line.split("|")[1].split(" to ")[-1].replace(",", "")) > TRAINED
        assert line.count("**") == (0 if is_beyond else 2)
        assert line.count(BEYOND) == (2 if is_beyond else 0)
    # a recurrent model that nobody knows the trained length of wins nothing either
    unknown = [{**record, "trained_length": None if record["model"] == "harmonic" else TRAINED} for record in found]
    assert "**" not in table(unknown)
    assert table(unknown).count(UNKNOWN) == (frame(found)["model"] == "harmonic").sum()


def test_seeds_are_averaged_and_their_spread_is_shown(folders: dict[str, Path], tmp_path: Path) -> None:
    compare(*options(folders, tmp_path, labels=("one", "one"), contexts=(32,)))
    values = frame(records(tmp_path)).query("kind == 'context'")["bits_per_token"]
    assert f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})" in table(records(tmp_path))


def test_a_model_that_reads_the_future_gets_no_score(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(length, "load", lambda directory: (Table(mix="pool 4"), None))
    with pytest.raises(RuntimeError, match="gets no score"):
        compare(*options(folders, tmp_path))
    assert not list(tmp_path.rglob("*.json*"))


@pytest.mark.parametrize(("more", "message"), [
    ({"contexts": (64, 32)}, "rise"), ({"targets": 0}, "positive"), ({"contexts": (32, 10_000)}, "Ask for shorter"),
    ({"stride": 33}, "shortest context"), ({"windows": 0}, "0 windows"), ({"labels": ("a",)}, "as many"),
    ({"models": ()}, "0 models"),
])
def test_what_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(*options(folders, tmp_path, **more))


def test_contexts_end_where_the_text_does(folders: dict[str, Path]) -> None:
    split = TokenSplit(np.zeros(5000, np.uint8), np.zeros(1, np.int64), 5000)
    tokenizer = JsonTokenizer(folders["harmonic"])
    plan = plan_of(Options(models=(), targets=1000), split, tokenizer)
    assert plan.contexts == (256, 512, 1024, 2048)
    assert plan.targets == range(4000, 5000)
    with pytest.raises(ValueError, match="256 more"):
        plan_of(Options(models=(), targets=4800), split, tokenizer)


def test_models_of_other_tokens_are_not_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    harmonic().save_pretrained(other)
    ByteTokenizer().save_pretrained(other)
    file = other / "tokenizer.json"
    vocab = json.loads(file.read_text())
    ids = vocab["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(vocab))
    with pytest.raises(ValueError, match="the same tokens for every model"):
        compare(*options(folders, tmp_path / "out", models=(folders["harmonic"], other)))
