"""The loader of training: windows of the text in an order that does not depend on the ranks."""

import json
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.tools.logging import logger

from fla_harmonic.text.windows import Batch, TokenWindows

# of a loader's state: the entry that says which data its position is in
IDENTITY = "identity"


class WindowLoader(BaseDataLoader):
    """
    Endless batches of windows for one data-parallel rank. Each epoch visits every window once, in an order drawn from the
    seed and the epoch alone, of which the ranks share the next `local_batch_size * dp_world_size` windows in each batch: a
    global step reads the same windows on any number of ranks and with any accumulation, and any of these can resume from the
    state: the number of windows that were read, and of what data.

    Args:
        global_batch_size (int, Optional):
            Windows of a step, all ranks and micro-batches together. Only to notice a resume with another. Default: `None`.
        document_ids (bool):
            Whether batches hold `document_ids`.
        labels_in_inputs (bool):
            Whether the inputs hold the labels too, for a model that computes the loss itself.
    """

    def __init__(
        self,
        windows: TokenWindows,
        *,
        local_batch_size: int,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        global_batch_size: int | None = None,
        seed: int = 0,
        document_ids: bool = False,
        labels_in_inputs: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.windows, self.seed, self.document_ids = windows, seed, document_ids
        self.labels_in_inputs = labels_in_inputs
        self.local_batch_size, self.dp_world_size, self.dp_rank = local_batch_size, dp_world_size, dp_rank
        self.global_batch_size = global_batch_size
        self.pin_memory = pin_memory and torch.accelerator.is_available()
        self.consumed = 0
        # a batch may read from two epochs
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            first = self.consumed + self.dp_rank * self.local_batch_size
            inputs, labels = self._batch(first)
            # before the batch is out: the checkpoint of a step counts the windows that the step has read
            self.consumed += self.local_batch_size * self.dp_world_size
            yield inputs, labels

    def _batch(self, first: int) -> Batch:
        """The batch of the run's samples from `first` on."""
        inputs, labels = self.windows.batch(self._indices(first), self.document_ids)
        if self.pin_memory:
            inputs, labels = {key: value.pin_memory() for key, value in inputs.items()}, labels.pin_memory()
        return inputs | ({"labels": labels} if self.labels_in_inputs else {}), labels

    def _indices(self, first: int) -> np.ndarray:
        """Window indices `[local_batch_size]` of the run's samples from `first` on; they may lie in several epochs."""
        epochs, places = np.divmod(np.arange(first, first + self.local_batch_size), len(self.windows))
        return np.asarray([self._order(epoch)[place] for epoch, place in zip(epochs.tolist(), places, strict=True)])

    def _draw_order(self, epoch: int) -> np.ndarray:
        # numpy takes no negative seed, torchtitan does
        return np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.windows))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the loader reads, in which order: a position in other data means something else."""
        return {
            "seq_len": self.windows.seq_len,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            # without effect on one document
            "reset_documents": self.document_ids and len(self.windows.document_starts) > 1,
            "tokens": len(self.windows.tokens),
            "tokens_sha256": self.windows.split.sha256,
        }

    def state_dict(self) -> dict[str, Any]:
        """`windows`, how many all ranks together have read since the run began, and the `identity` as JSON."""
        # one string: a later version with more fields can still load it
        return {"windows": self.consumed, IDENTITY: json.dumps(self.identity)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A ValueError, which names what differs, for the state of another loader or of other data."""
        # a checkpoint without a data position, as stock loaders accept it
        if not state_dict:
            return
        windows = state_dict.get("windows")
        if not isinstance(windows, int) or windows < 0:
            raise ValueError(
                f'expected the data position as {{"windows": n}} with n >= 0, got {state_dict!r}: the checkpoint comes from '
                "another data loader; leave it out with [checkpoint] exclude_from_loading"
            )
        self._check_identity(state_dict)
        self.consumed = windows

    def _check_identity(self, state_dict: dict[str, Any]) -> None:
        if (stored := state_dict.get(IDENTITY)) is None:
            logger.warning("the checkpoint does not say which data its position is in: it is taken for that of this job")
            return
        found = json.loads(stored)
        different = [name for name, value in self.identity.items() if found.get(name, value) != value]
        if different:
            was, now = (", ".join(f"{name} = {fields[name]}" for name in different) for fields in (found, self.identity))
            raise ValueError(
                f"expected the data that the checkpoint was written with, {was}, but this job has {now}. Remedy: [training], "
                "[data] and [debug] as they were; or, if another phase of training is meant, which reads the data from its "
                'beginning: checkpoint.exclude_from_loading = ["dataloader"], which keeps step and optimizer, or '
                "checkpoint.initial_load_path in a new job.dump_folder, which keeps the weights alone"
            )
