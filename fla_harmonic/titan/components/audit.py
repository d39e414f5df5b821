"""
Whether a training or validation loss reads the future: the batch at hand again, with other tokens behind a split in each row.

The loss of the tokens before the splits, computed by the job's own step (its mode, precision, compilation and parallelism),
must not change with the tokens behind them, nor with those of other documents of a row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX

from fla_harmonic.titan.components.stateful import RowStates

Inputs = dict[str, Any]
# (inputs, labels) -> this rank's share of the loss
Loss = Callable[[Inputs, torch.Tensor], torch.Tensor]


def audit_batch(loss_of: Loss, inputs: Inputs, labels: torch.Tensor, vocab_size: int, seed: tuple[int, ...], what: str) -> str:
    """
    Compare the loss of a batch before random splits with what it is when everything behind them is replaced.

    All ranks call it together. Those that share a batch must pass the same seed.

    Args:
        inputs (dict[str, Any]):
            `input`, token ids `[B, T]`, and what else the model gets: `labels`, `document_ids`, `carried`.
        what (str):
            What is audited, for the message.

    Returns:
        What was tried, for the log.

    Raises:
        RuntimeError: on all ranks, if the loss changed on one.
    """
    others, kept, splits = replaced(inputs, labels, vocab_size, seed)
    expected = _run(loss_of, inputs, kept)
    change = (_run(loss_of, others, kept) - expected).abs()
    bound = 2 * torch.finfo(torch.float32).eps * expected.abs().clamp_min(1.0)
    if _anywhere(~(change <= bound)):
        # kernels that add in any order differ from run to run
        noise = (_run(loss_of, inputs, kept) - expected).abs()
        if _anywhere(~(change <= bound + 4 * noise)):
            raise RuntimeError(
                f"expected the loss of {what} to depend on earlier tokens alone; the loss before a split changes (by "
                f"{change.item():.2e} on this rank) with the tokens behind it, in other documents or in other rows. The model "
                "reads the future, or computes no numbers. Remedy: correct it; audit.interval = 0 trains without asking"
            )
    return f"{len(splits)} rows, splits {min(splits)} to {max(splits)} of {labels.shape[1]}, change {change.item():.1e}"


def replaced(
    inputs: Inputs, labels: torch.Tensor, vocab_size: int, seed: tuple[int, ...]
) -> tuple[Inputs, torch.Tensor, list[int]]:
    """
    Inputs whose rows have other tokens behind a split, and in all documents but the split's; the labels that are left, those
    before the split in its document; and the splits.
    """
    rng = np.random.default_rng(seed)
    tokens = inputs["input"].cpu().numpy()
    rows, length = tokens.shape
    documents = np.zeros_like(tokens) if (ids := inputs.get("document_ids")) is None else ids.cpu().numpy()
    others, keeps, splits = tokens.copy(), np.zeros(tokens.shape, dtype=bool), []
    for row in range(rows):
        # anywhere, and near the end every other time, where most of the row is compared
        split = length - int((length - 1) ** rng.random()) if row % 2 else int(rng.integers(1, length))
        positions = np.arange(length)
        keeps[row] = (positions < split) & (documents[row] == documents[row, split - 1])
        kind = int(rng.integers(3))
        if kind == 0:
            other = np.roll(tokens[(row + 1) % rows], int(rng.integers(1, length)))
        elif kind == 1:
            other = np.full(length, rng.choice(tokens[row]))
        else:
            other = rng.integers(vocab_size, size=length)
        other = np.where(other == tokens[row], (other + 1) % vocab_size, other)
        others[row] = np.where(keeps[row], tokens[row], other)
        splits.append(split)
    kept = torch.where(torch.from_numpy(keeps).to(labels.device), labels, IGNORE_INDEX)
    return inputs | {"input": torch.from_numpy(others).to(inputs["input"])}, kept, splits


def _anywhere(is_so: torch.Tensor) -> bool:
    """Whether it is so on any rank."""
    is_so = is_so.float()
    if dist.is_initialized():
        dist.all_reduce(is_so, op=dist.ReduceOp.MAX)
    return bool(is_so)


def _run(loss_of: Loss, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
    """The loss, with carried states left as they are and dropout on the same elements each time."""
    inputs = dict(inputs)
    if "labels" in inputs:
        inputs["labels"] = labels
    if isinstance(states := inputs.get("carried"), RowStates):
        inputs["carried"] = RowStates(dict(states.store), states.streams, states.continues)
    with torch.random.fork_rng():
        loss = loss_of(inputs, labels).detach()
    # a loss over sharded logits is a DTensor
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).float().reshape(())
