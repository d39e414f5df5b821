import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from eval.recall import PRESETS, Options, accuracy, cells, main, run
from eval.scoring.models import FAMILIES, build
from eval.study.cells import Model
from eval.study.protocol import best_lrs
from eval.tasks import recall_cell
from eval.tasks.recall_cell import SPLITS, RecallCell, score, train
from eval.tasks.recall_tables import frame, table
from eval.tasks.recall_tasks import IGNORED, MQAR, Passkey, Size

mqar_sizes = st.integers(1, 14).flatmap(lambda pairs: st.builds(Size, st.integers(3 * pairs, 80), st.just(pairs)))
passkeys = st.builds(Passkey, st.integers(13, 40), st.integers(1, 5), st.floats(0, 1))


class Planted(nn.Module):
    """Answers by looking the sequence through, or by a guess: `find` gives the tokens `[B, T]` that it names."""

    def __init__(self, find: Any, vocab_size: int) -> None:
        super().__init__()
        self.find, self.head = find, nn.Parameter(torch.eye(vocab_size))

    def forward(self, tokens: torch.Tensor, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        return SimpleNamespace(logits=50 * self.head[self.find(tokens)][:, -logits_to_keep:])


def looked_up(tokens: torch.Tensor) -> torch.Tensor:
    """The token after the first place that has the same token."""
    same = tokens[:, :, None] == tokens[:, None]
    return tokens.roll(-1, 1).gather(1, same.int().argmax(2))


def after_the_mark(tokens: torch.Tensor) -> torch.Tensor:
    """At the n-th token from the question on: the n-th after the mark."""
    mark, question = ((tokens == token).int().argmax(1, keepdim=True) for token in (Passkey.MARK, Passkey.QUESTION))
    return tokens.gather(1, (torch.arange(tokens.shape[1]) - question + mark + 1).clamp(0, tokens.shape[1] - 1))


def cell_of(task: MQAR | Passkey, *sizes: Size, **fields: Any) -> RecallCell:
    return RecallCell(**{
        "model": Model("m", "llama", "debug"), "task": task, "trained": sizes, "tested": sizes, "step_tokens": 64, "steps": 6,
        "seed": 0, "lr": 1e-3, "validation": 8, "test": 500, **fields})


@given(mqar_sizes, st.integers(0, 2**40))
def test_a_dictionary_answers_every_query_of_mqar(size: Size, seed: int) -> None:
    task = MQAR(32)
    for tokens, targets in zip(*task.batch(size, 3, (seed,)), strict=True):
        pairs, rest = tokens[:2 * size.load].reshape(-1, 2), tokens[2 * size.load:]
        known = dict(pairs.tolist())
        assert len(tokens) == size.length
        assert len(known) == len(set(known.values())) == size.load
        asked = targets != IGNORED
        assert not asked[:2 * size.load].any()
        assert sorted(tokens[asked]) == sorted(known)
        assert [known[token] for token in tokens[asked]] == targets[asked].tolist()
        # neither a key that is not asked, nor a value: no answer is to be read after the pairs
        assert all(token < task.fillers for token in rest[~asked[2 * size.load:]])
        assert min(known) >= task.fillers
        assert max(known) < min(known.values())
        assert tokens.max() < task.vocab_size


@given(passkeys, st.integers(0, 60), st.integers(0, 60), st.integers(0, 2**40))
def test_a_passkey_is_marked_once_and_as_far_away_as_it_says(task: Passkey, distance: int, before: int, seed: int) -> None:
    size = Size(before + distance + task.around, distance)
    for tokens, targets in zip(*task.batch(size, 3, (seed,)), strict=True):
        (mark,), (question,) = (np.flatnonzero(tokens == token) for token in (Passkey.MARK, Passkey.QUESTION))
        number = tokens[mark + 1:mark + 1 + task.digits]
        assert mark == before
        assert question - (mark + task.digits) - 1 == distance
        assert number.max() < 10
        assert targets[question:].tolist() == number.tolist()
        assert (targets[:question] == IGNORED).all()
        # a digit of the answer is read after it was asked for
        assert tokens[question + 1:].tolist() == number[:-1].tolist()
        assert tokens.max() < task.vocab_size


def test_a_passkey_anywhere_has_every_distance() -> None:
    task = Passkey(32)
    tokens, _ = task.batch(Size(task.around + 5, Passkey.ANYWHERE), 200, (0,))
    assert set((tokens == Passkey.MARK).argmax(1)) == set(range(6))
    assert 0.05 < (task.batch(Size(400, 0), 20, (0,)).tokens < 10).mean() < 0.15
    assert (Passkey(32, noise=0).batch(Size(400, 0), 20, (0,)).tokens < 10).sum() == 20 * (3 + 2)


def test_most_queries_come_soon_and_some_late() -> None:
    _, targets = MQAR(64).batch(Size(104, 2), 2000, (0,))
    counts = (targets != IGNORED)[:, 4:].sum(0)
    assert counts[:10].sum() > 3 * counts[-50:].sum() > 0
    _, uniform = MQAR(64, power=1.0).batch(Size(104, 2), 2000, (0,))
    assert (uniform != IGNORED)[:, 4:].sum(0)[:10].sum() < 1.3 * 400


@pytest.mark.parametrize(("task", "size"), [(MQAR(32), Size(32, 6)), (Passkey(32), Size(64, Passkey.ANYWHERE))])
def test_seeds_reproduce_and_splits_share_no_sequence(task: MQAR | Passkey, size: Size) -> None:
    drawn = {(split, seed, step): task.batch(size, 50, (split, seed, step))
             for split in SPLITS.values() for seed in (0, 1) for step in (0, 1)}
    for seed, batch in drawn.items():
        again = task.batch(size, 50, seed)
        assert np.array_equal(batch.tokens, again.tokens)
        assert np.array_equal(batch.targets, again.targets)
    rows = np.concatenate([batch.tokens for batch in drawn.values()])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_no_test_sequence_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[int, ...], np.ndarray] = {}
    batch_of = MQAR.batch

    def spy(task: MQAR, size: Size, rows: int, seed: tuple[int, ...]) -> Any:
        batch = batch_of(task, size, rows, seed)
        assert seed not in seen
        seen[seed] = batch.tokens
        return batch

    monkeypatch.setattr(MQAR, "batch", spy)
    cell = cell_of(MQAR(32), Size(32, 6), test=9)
    model = build("llama/debug", 32)
    train(cell, model, Path("nowhere.pt"))
    for split in ("validation", "test"):
        score(cell, model.eval(), Size(32, 6), split)
    assert {seed[0] for seed in seen} == set(SPLITS.values())
    rows = np.concatenate(list(seen.values()))
    assert len(rows) == 6 * 2 + 8 + 9
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize(("task", "size", "find"), [
    (MQAR(32), Size(32, 5), looked_up), (Passkey(32), Size(80, 60), after_the_mark),
    (Passkey(32, digits=1, noise=1.0), Size(50, 0), after_the_mark),
])
def test_an_oracle_is_always_right(task: MQAR | Passkey, size: Size, find: Any) -> None:
    result = score(cell_of(task, Size(40, 0)), Planted(find, task.vocab_size), size, "test")
    assert result["accuracy"] == 1
    assert result["loss"] < 1e-6
    assert result["queries"] == 500 * (size.load if isinstance(task, MQAR) else 1)
    assert result["beyond_trained_length"] == (size.length > 40)


@pytest.mark.parametrize(("task", "size"), [(MQAR(32), Size(32, 5)), (Passkey(32, digits=1), Size(40, 9))])
def test_a_guess_is_at_chance(task: MQAR | Passkey, size: Size) -> None:
    def guess(tokens: torch.Tensor) -> torch.Tensor:
        if isinstance(task, MQAR):
            # any of the values that are there
            return tokens.gather(1, 1 + 2 * torch.randint(size.load, tokens.shape))
        return torch.randint(10, tokens.shape)

    result = score(cell_of(task, size), Planted(guess, task.vocab_size), size, "test")
    chance, error = result["chance"], math.sqrt(result["chance"] / result["queries"])
    assert abs(result["accuracy"] - chance) < 4 * error
    assert chance == (0.2 if isinstance(task, MQAR) else 0.1)


def test_a_number_is_right_in_all_its_digits_or_not_at_all() -> None:
    targets = np.array([[IGNORED, 1, 2], [IGNORED, 3, 4]])
    assert Passkey(32, digits=2).right(np.array([[9, 1, 2], [9, 3, 5]]), targets).tolist() == [True, False]
    assert MQAR(32).right(np.array([[9, 1, 2], [9, 3, 5]]), targets).tolist() == [True, True, True, False]
    assert Passkey(32, digits=2).chance(Size(9, 0)) == pytest.approx(0.01)


def test_a_killed_training_ends_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(MQAR(32), Size(16, 2), Size(32, 4))
    models = [build("harmonic/debug", 32) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    monkeypatch.setattr(recall_cell, "_SECONDS_BETWEEN_CHECKPOINTS", 1e9)
    train(cell, models[0], tmp_path / "never.pt")
    assert not (tmp_path / "never.pt").exists()

    monkeypatch.setattr(recall_cell, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    batch_of, steps = MQAR.batch, []

    def killed(task: MQAR, size: Size, rows: int, seed: tuple[int, ...]) -> Any:
        steps.append(seed[-1])
        if len(steps) == 4:
            raise KeyboardInterrupt
        return batch_of(task, size, rows, seed)

    monkeypatch.setattr(MQAR, "batch", killed)
    with pytest.raises(KeyboardInterrupt):
        train(cell, models[1], tmp_path / "state.pt")
    # another process builds the model anew
    train(cell, models[2], tmp_path / "state.pt")
    assert steps == [0, 1, 2, 3, 3, 4, 5]
    for one, other in zip(models[0].parameters(), models[2].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("preset", PRESETS)
def test_models_of_a_preset_have_equal_budgets(preset: str) -> None:
    study = PRESETS[preset]
    assert all(flavor in FAMILIES[family] for family, flavor in (name.split("/") for name in study.models))
    for task in ("mqar", "passkey"):
        planned = cells(study, task, study.seeds, dict.fromkeys(study.models, study.lrs))
        assert len({cell.name for cell in planned}) == len(study.models) * len(study.seeds) * len(study.lrs)
        of_a_model = [[(cell.lr, cell.seed, cell.steps, cell.step_tokens, cell.trained, cell.tested)
                       for cell in planned if cell.model.label == name] for name in study.models]
        assert all(budget == of_a_model[0] for budget in of_a_model)
        beyond = [size.length > max(size.length for size in planned[0].trained) for size in planned[0].tested]
        assert any(beyond)
        assert not all(beyond)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"mqar_sizes": ((16, 6),)}, "take three"), ({"mqar_tested": ((999, 30),)}, "1 to 14 pairs"),
    ({"passkey_length": 6}, "passkey"), ({"passkey_vocab": 12}, "vocabulary"), ({"step_tokens": 100}, "whole sequences"),
    ({"test": 0}, "at least one step"), ({"seeds": (0, 0)}, "`seeds`"), ({"models": ()}, "`models`"),
])
def test_a_study_that_cannot_be_is_refused_before_it_runs(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(replace(PRESETS["cpu-small"], out=tmp_path, **wrong))
    assert not list(tmp_path.iterdir())


def test_the_best_learning_rate_has_the_highest_accuracy_then_the_lowest_loss() -> None:
    results = [{"cell": {"model": {"label": label}, "lr": lr}, "validation": [{"accuracy": a, "loss": loss}]}
               for label, lr, a, loss in (("x", 1, 0.5, 0.1), ("x", 2, 0.6, 9.0), ("y", 1, 0.5, 2.0), ("y", 2, 0.5, 1.0))]
    assert best_lrs(results, accuracy) == {"x": 2, "y": 2}


def test_a_flavor_keeps_its_vocabulary() -> None:
    for family in ("harmonic", "mamba", "llama"):
        small, full = build(f"{family}/debug", 32, 4096), build(f"{family}/debug")
        assert (small.config.vocab_size, full.config.vocab_size) == (32, 256)
    assert (small.config.max_position_embeddings, full.config.max_position_embeddings) == (4096, 131072)


@pytest.mark.processes
def test_a_study_has_its_files_and_runs_what_is_missing_alone(tmp_path: Path) -> None:
    options = Options(
        models=("llama/debug",), tasks=("passkey",), seeds=(0,), lrs=(1e-3, 1e-2), passkey_steps=3, passkey_length=64,
        passkey_distances=(0, 100), step_tokens=64, test=8, validation=8, processes=1, out=tmp_path)
    main(options)
    records = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    assert [(record["stage"], record["cell"]["lr"]) for record in records[:2]] == [("sweep", 1e-3), ("sweep", 1e-2)]
    # the best of the sweep is a cell of it, and is not run again
    assert records[2] in [{**record, "stage": "best"} for record in records[:2]]
    assert len(list((tmp_path / "cells").iterdir())) == 2
    assert all(record["tokens_seen"] == 3 * 64 and not record["audit"]["failure"] for record in records)
    assert list(frame(records)["beyond_trained_length"]) == [False, True]
    text = table(records)
    assert "| chance | queries a seed | llama/debug |" in text
    assert "| 0 in 64 | 0.001 | 8 | " in text
    assert "| 100 in 107 (beyond trained length) | 0.001 | 8 | " in text
    assert "Each trained on 192 tokens: llama/debug 574,336 parameters" in text
    assert (tmp_path / "table.md").read_text() == text + "\n"
    assert (tmp_path / "recall.png").stat().st_size > 0

    # killed before it was written
    kept, lost = (tmp_path / "cells").glob("*/result.json")
    changed = kept.stat().st_mtime_ns
    lost.unlink()
    again = run(options)
    assert kept.stat().st_mtime_ns == changed
    assert [record["test"] for record in again] == [record["test"] for record in records]
