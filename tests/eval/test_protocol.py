import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from eval.study.cells import Model, Text
from eval.study.paired import differences, paired, table
from eval.study.protocol import Protocol, best_lrs, check_overrides, low_loss, share, text_of

TEXT = Text("text", "", "0", "bytes", ".", 64, 32)
MODELS = (Model("harmonic/debug", "harmonic", "debug"), Model("llama/debug", "llama", "debug"))
PROTOCOL = Protocol(MODELS, (64, 128), (0, 1, 2), 1e-3, (1e-3, 2e-3), 128, 1024, 256, 0, TEXT,
                    "titan_configs/harmonic_debug.toml")


def test_every_cell_sees_the_same_tokens() -> None:
    PROTOCOL.check()
    cells = [*PROTOCOL.shared(), *PROTOCOL.sweep(), *PROTOCOL.grid({"harmonic/debug": 1e-3, "llama/debug": 2e-3})]
    assert {cell.tokens for cell in cells} == {1024}
    assert len(PROTOCOL.shared()) == 12
    assert len(PROTOCOL.sweep()) == 4
    # the sweep's runs at the shared rate are those of the grid: made once
    assert len({cell.name for cell in (*PROTOCOL.shared(), *PROTOCOL.sweep())}) == 14


@pytest.mark.parametrize("wrong", [
    {"tokens": 1000}, {"tokens": 0}, {"seq_lens": (64, 96)}, {"seq_lens": (64, 64, 128)}, {"seq_lens": (512, 128)},
    {"seeds": ()}, {"seeds": (1, 1)}, {"lrs": (2e-3,)}, {"sweep_seq_len": 256}, {"models": (MODELS[0], MODELS[0])},
])
def test_study_whose_cells_cannot_be_compared_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"must be|expected"):
        replace(PROTOCOL, **wrong).check()


@pytest.mark.parametrize("option", ["--training.steps=7", "--optimizer.lr=1", "--debug.seed=3", "--model.flavor=7M"])
def test_options_that_make_cells_comparable_cannot_be_overridden(option: str) -> None:
    with pytest.raises(ValueError, match="leave"):
        check_overrides(("--optimizer.eps=1e-6", option))
    check_overrides(("--optimizer.eps=1e-6",))


@given(items=st.lists(st.integers(), max_size=20), count=st.integers(1, 6))
def test_parts_are_the_whole(items: list[int], count: int) -> None:
    parts = [share(items, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted(item for part in parts for item in part) == sorted(items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="i/n"):
        share([1, 2], part)


def result(label: str, lr: float, validation: float) -> dict:
    return {"cell": {"model": {"label": label}, "lr": lr}, "validation": {"bits_per_token": validation},
            "test": {"bits_per_token": -validation}}


def test_learning_rate_is_chosen_on_the_validation_split() -> None:
    of_a = [result("a", 1.0, 3.0), result("a", 2.0, 2.0), result("a", 3.0, 2.5)]
    results = [*of_a, result("b", 1.0, 1.0), result("b", 2.0, 4.0)]
    assert best_lrs(results, low_loss) == {"a": 2.0, "b": 1.0}


def rows_of(values: dict[str, list[float]], seq_len: int = 64) -> pd.DataFrame:
    return pd.DataFrame([
        {"model": model, "seed": seed, "seq_len": seq_len, "lr": 1e-3, "bits_per_byte": value, "beyond_trained_length": False}
        for model, losses in values.items() for seed, value in enumerate(losses)])


@given(st.lists(st.tuples(st.floats(1, 5), st.floats(1, 5)), min_size=2, max_size=6))
def test_interval_is_that_of_the_differences_by_seed(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(values) for values in zip(*pairs, strict=True))
    d = a - b
    # of equal differences scipy's interval is rounding
    assume(d.std() > 1e-6)
    found = paired(rows_of({"a": list(a), "b": list(b)}), "a", "b").iloc[0]
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5
    assert found["difference"] == pytest.approx(d.mean(), abs=1e-12)
    assert (found["low"], found["high"]) == pytest.approx((d.mean() - half, d.mean() + half), rel=1e-6)
    assert (found["seeds"], found["wins"]) == (len(d), (d < 0).sum())


def test_seed_that_one_model_lacks_is_no_pair() -> None:
    rows = pd.concat([rows_of({"a": [2.0, 2.2, 2.4], "b": [3.0, 3.1]}), rows_of({"a": [1.0], "b": [0.5]}, 128)])
    found = paired(rows, "a", "b").set_index("seq_len")
    assert found.loc[64, "seeds"] == 2
    assert found.loc[64, "difference"] == pytest.approx(-0.95)
    # one seed has no interval
    assert np.isnan(found.loc[128, "low"])
    assert "| 64 | a - b | -0.950 |" in differences(rows)
    assert "| 128 | a - b | +0.500 | one seed | 0 of 1 |" in differences(rows)
    assert "| a | 0.001 | 2.200 (2.000 to 2.400) | 1.000 (1.000 to 1.000) |" in table(rows)


def test_score_beyond_the_trained_length_is_labelled() -> None:
    rows = rows_of({"a": [2.0]}).assign(beyond_trained_length=True)
    assert "2.000 (2.000 to 2.000) (beyond trained length)" in table(rows)


def test_text_is_known_by_what_it_holds(tmp_path: Path) -> None:
    for name, words in (("a", "one text"), ("b", "one text"), ("c", "another")):
        (tmp_path / name).write_text(words * 100)
    read = {name: text_of("text", str(tmp_path / name), "bytes", ".", 8, 8) for name in "abc"}
    texts = {name: text.digest for name, text in read.items()}
    assert texts["a"] == texts["b"] != texts["c"]
    content = (tmp_path / "a").read_bytes()
    assert texts["a"] == hashlib.sha256(len(content).to_bytes(8, "little") + content).hexdigest()
    assert read["a"].file_digest == hashlib.sha256(content).hexdigest()
    assert text_of("novels", "", "bytes", ".", 8, 8).file_digest == ""
    with pytest.raises(FileNotFoundError):
        text_of("text", str(tmp_path / "d"), "bytes", ".", 8, 8)
