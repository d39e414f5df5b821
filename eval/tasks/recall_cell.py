"""
A cell of `eval.recall`: one model trained on one task with one learning rate and seed, and its accuracy at every size.

The sequences are generated and no text is involved, so a plain loop trains; it is the same for every model. Step n sees the
batch that the seed and n give, so a killed run continues from its checkpoint and ends with the same numbers.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from eval.results import draft_of
from eval.scoring.in_situ import InSitu
from eval.scoring.models import build, to_accelerator
from eval.study.cells import Model, folder_name
from eval.study.run_cell import kernels
from eval.tasks.recall_tasks import IGNORED, Batch, Size, Task
from fla_harmonic.titan.components.optimizer import undecayed_names

# the first number of a batch's seed: no split has a sequence of another
SPLITS = {"train": 0, "validation": 1, "test": 2}
_SECONDS_BETWEEN_CHECKPOINTS = 30.0


@dataclass(frozen=True)
class RecallCell:
    """One run: everything that its numbers follow from."""

    model: Model
    task: Task
    trained: tuple[Size, ...]
    """Sizes to train on, in turn."""
    tested: tuple[Size, ...]
    step_tokens: int
    """Tokens of an optimizer step, of whatever size."""
    steps: int
    seed: int
    """Of the initial weights and the training sequences."""
    lr: float
    validation: int
    """Sequences of each trained size in the validation set."""
    test: int
    """Sequences of each tested size in the test set, which is the same for all models and seeds."""
    weight_decay: float = 0.01

    @property
    def record(self) -> dict[str, Any]:
        """The cell as JSON gives it back."""
        return json.loads(json.dumps(asdict(self) | {"task": {"name": self.task.name, **asdict(self.task)}}))

    @property
    def name(self) -> str:
        """Of its folder: readable, and different for different cells."""
        return folder_name(f"{self.task.name}-{self.model.label}-seed{self.seed}-lr{self.lr:g}", self.record)

    def check(self) -> None:
        """A ValueError for no size, step or sequence, or a size that the task cannot have or that does not divide a step."""
        if not (self.trained and self.tested and min(self.steps, self.validation, self.test) >= 1 and self.lr > 0):
            raise ValueError(
                "expected sizes to train and to test, a learning rate above 0, and at least one step and one sequence of each "
                f"size; got {self}.")
        for size in (*self.trained, *self.tested):
            self.task.check(size)
        for size in self.trained:
            if self.step_tokens % size.length:
                raise ValueError(
                    f"expected steps of whole sequences, so that all see as many tokens; got steps of {self.step_tokens} "
                    f"tokens and sequences of {size.length}. Make `step_tokens` a multiple of every trained length.")


def measure(cell: RecallCell, folder: Path) -> dict[str, Any]:
    """
    Trains the model, or continues from its checkpoint, and scores it if it is causal: `validation` and `test` have the scores
    of every size (see `score`).
    """
    # first: it may refuse the machine
    ran_on = kernels(cell.model.family)
    torch.manual_seed(cell.seed)
    name = f"{cell.model.family}/{cell.model.flavor}"
    model: nn.Module = to_accelerator(build(name, cell.task.vocab_size, longest(cell.tested)))
    speed = train(cell, model, folder / "checkpoint" / "state.pt")
    model.eval()
    with InSitu(model) as audit:
        found = {
            "validation": [score(cell, model, size, "validation") for size in cell.trained],
            "test": [score(cell, model, size, "test") for size in cell.tested],
        }
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "tokens_seen": cell.step_tokens * cell.steps,
        "tokens_per_second": speed, "kernels": ran_on, "audit": asdict(audit.verdict.require()), **found,
    }


def train(cell: RecallCell, model: nn.Module, file: Path) -> float:
    """
    Trains a model in place, from the checkpoint in `file` if there is one: AdamW with a warm-up over a tenth of the steps,
    then a cosine to zero; gradients are clipped at 1, matrices alone decay. Returns tokens per second, the median.
    """
    kept = undecayed_names(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in model.named_parameters() if name not in kept], "weight_decay": cell.weight_decay},
        {"params": [p for name, p in model.named_parameters() if name in kept], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cell.lr, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, cell.steps // 10), cell.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if file.is_file():
        state = torch.load(file, weights_only=True)
        first = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
        print(f"continues after step {first}")
    model.train()
    seconds, saved = [], time.monotonic()
    for step in range(first, cell.steps):
        start = time.perf_counter()
        size = cell.trained[step % len(cell.trained)]
        batch = cell.task.batch(size, cell.step_tokens // size.length, (SPLITS["train"], cell.seed, step))
        logits, targets = answers(model, batch)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # `item` waits for the device
        value = loss.item()
        seconds.append(time.perf_counter() - start)
        if (step + 1) % max(1, cell.steps // 20) == 0:
            print(f"step {step + 1} of {cell.steps}, loss {value:.3f}", flush=True)
        if time.monotonic() - saved > _SECONDS_BETWEEN_CHECKPOINTS:
            with draft_of(file) as draft:
                torch.save({"step": step + 1, **{name: part.state_dict() for name, part in parts.items()}}, draft)
            saved = time.monotonic()
    return cell.step_tokens / statistics.median(seconds) if seconds else float("nan")


def answers(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Logits `[B, S, vocab_size]` and targets `[B, S]` of a batch, where S tokens are left from the first query on: no other
    logits are computed.
    """
    device = next(model.parameters()).device
    tokens, targets = (torch.from_numpy(array).to(device) for array in batch)
    left = tokens.shape[1] - int((targets != IGNORED).any(0).nonzero()[0])
    return model(tokens, use_cache=False, logits_to_keep=left).logits, targets[:, -left:]


@torch.no_grad()
def score(cell: RecallCell, model: nn.Module, size: Size, split: str) -> dict[str, Any]:
    """
    Accuracy of a model in evaluation mode at a size of the cell's task.

    Returns:
        `length` and `load` of the size, `accuracy` over `queries`, its `chance` level, `loss` (nats a target) and
        `beyond_trained_length`: whether its sequences are longer than all that the model was trained on.
    """
    sequences = cell.test if split == "test" else cell.validation
    rows = max(1, cell.step_tokens // size.length)
    right, losses = [], []
    for index, begin in enumerate(range(0, sequences, rows)):
        batch = cell.task.batch(
            size, min(rows, sequences - begin), (SPLITS[split], size.length, size.load + 1, index))
        logits, targets = answers(model, batch)
        losses.append(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
                      .masked_select(targets.flatten() != IGNORED).cpu())
        right.append(cell.task.right(logits.argmax(-1).cpu().numpy(), targets.cpu().numpy()))
    found = np.concatenate(right)
    return {
        **asdict(size), "accuracy": float(found.mean()), "queries": len(found), "chance": cell.task.chance(size),
        "loss": torch.cat(losses).double().mean().item(), "beyond_trained_length": size.length > longest(cell.trained),
    }


def longest(sizes: Sequence[Size]) -> int:
    return max(size.length for size in sizes)
