"""transformers' Trainer on a Harmonic model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import config
from transformers import EvalPrediction, Trainer, TrainingArguments, default_data_collator

from fla_harmonic import HarmonicForCausalLM
from fla_harmonic.text.corpus import load_documents

presets = pytest.mark.parametrize("preset", ["paper", "stack"])
LENGTH, STEPS = 48, 12
Rows = list[dict[str, list[int]]]


def text(rows: int, start: int = 10_000) -> Rows:
    """Windows of a novel as bytes."""
    data = load_documents("novels")[0][start:start + rows * LENGTH]
    return [{"input_ids": list(data[i:i + LENGTH]), "labels": list(data[i:i + LENGTH])} for i in range(0, len(data), LENGTH)]


def lm(preset: str) -> HarmonicForCausalLM:
    torch.manual_seed(0)
    return HarmonicForCausalLM(config(preset, vocab_size=256, eos_token_id=0, bos_token_id=0))


def trainer(model: HarmonicForCausalLM, folder: Path, rows: Rows, **options: Any) -> Trainer:
    extra = {key: options.pop(key) for key in ("eval_dataset", "compute_metrics", "data_collator") if key in options}
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, seed=1, logging_steps=1,
        **{"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", **options},
    )
    return Trainer(model=model, args=args, train_dataset=rows, **{"data_collator": default_data_collator, **extra})


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def mean_loss(model: HarmonicForCausalLM, rows: Rows) -> tuple[float, float]:
    """Mean loss and accuracy over all targets, without the Trainer."""
    x = torch.tensor([row["input_ids"] for row in rows])
    with torch.no_grad():
        logits = model.eval()(x).logits[:, :-1].flatten(0, 1).double()
    targets = x[:, 1:].flatten()
    return F.cross_entropy(logits, targets).item(), (logits.argmax(-1) == targets).double().mean().item()


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    assert isinstance(logits, np.ndarray), "the cache must not be among the predictions"
    assert isinstance(labels, np.ndarray)
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


@presets
def test_training_lowers_the_loss_and_evaluation_equals_a_direct_computation(preset: str, tmp_path: Path) -> None:
    model, held_out = lm(preset), text(8, start=50_000)
    before, _ = mean_loss(model, held_out)
    run = trainer(model, tmp_path, text(32), eval_dataset=held_out, per_device_eval_batch_size=4, compute_metrics=accuracy)
    assert run.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-5)
    run.train()
    metrics = run.evaluate()
    after, right = mean_loss(model, held_out)
    assert metrics["eval_loss"] == pytest.approx(after, rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(right, abs=1e-6)
    assert losses(run)[0] == pytest.approx(before, abs=0.3)
    assert after < before - 1


@presets
def test_saved_models_load_again(preset: str, tmp_path: Path) -> None:
    model = lm(preset)
    run = trainer(model, tmp_path, text(8), max_steps=2)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    again = HarmonicForCausalLM.from_pretrained(tmp_path / "saved").eval()
    x = torch.tensor([row["input_ids"] for row in text(2)])
    assert torch.equal(again(x).logits, model.eval()(x).logits)


@presets
def test_resumed_training_ends_at_the_same_weights(preset: str, tmp_path: Path) -> None:
    whole = lm(preset)
    run = trainer(whole, tmp_path / "whole", text(32), save_strategy="steps", save_steps=STEPS // 2)
    run.train()
    resumed = lm(preset)
    second = trainer(resumed, tmp_path / "resumed", text(32))
    second.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{STEPS // 2}"))
    assert second.state.global_step == STEPS
    assert losses(second)[STEPS // 2:] == losses(run)[STEPS // 2:]
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q), name


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of rows of unequal length, padded on the right."""
    lengths = [len(row["input_ids"]) for row in rows]
    batch = {"input_ids": torch.zeros(len(rows), max(lengths), dtype=torch.long)}
    batch |= {"attention_mask": torch.zeros_like(batch["input_ids"]), "labels": torch.full_like(batch["input_ids"], -100)}
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        batch["input_ids"][i, :length] = batch["labels"][i, :length] = torch.tensor(row["input_ids"])
        batch["attention_mask"][i, :length] = 1
    return batch


@presets
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("options", [
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    {"gradient_checkpointing": True},
], ids=["accumulation", "checkpointing"])
def test_batches_in_pieces_and_checkpointing_train_the_same_model(preset: str, options: dict, tmp_path: Path) -> None:
    # rows of unequal length: a mean of means would weigh their tokens unequally
    rows: Rows = [{"input_ids": row["input_ids"][:7 + 5 * (i % 8)]} for i, row in enumerate(text(16))]
    results = []
    for extra in ({}, options):
        model = lm(preset)
        run = trainer(model, tmp_path, rows, max_steps=4, data_collator=padded, remove_unused_columns=False, **extra)
        run.train()
        assert model.model.gradient_checkpointing == ("gradient_checkpointing" in extra)
        results.append((losses(run), [p.detach() for p in model.parameters()]))
    (expected, weights), (actual, others) = results
    assert actual == pytest.approx(expected, rel=1e-4)
    start = list(lm(preset).parameters())
    for p, q, s in zip(weights, others, start, strict=True):
        # over the distance travelled, since AdamW turns a rounding error in a small gradient into a step of full size
        assert (p - q).norm() < 1e-2 * (p - s).norm()
