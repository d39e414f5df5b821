"""The loader of training: windows of the text in an order that does not depend on the ranks."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader

from fla_harmonic.text.windows import Batch, TokenWindows


class WindowLoader(BaseDataLoader):
    """
    Endless batches of windows for one data-parallel rank. Each epoch visits every window once, in an order drawn from the
    seed and the epoch alone, of which the ranks share the next `local_batch_size * dp_world_size` windows in each batch: a
    global step reads the same windows on any number of ranks and with any accumulation, and the state is one number that any
    of these can resume from.

    Args:
        windows (TokenWindows):
            The windows of the training split.
        local_batch_size (int):
            Windows of a batch on one rank.
        dp_world_size, dp_rank (int):
            The data-parallel degree, and which of its ranks this is.
        seed (int):
            Seed of the order.
        document_ids (bool):
            Whether batches hold `document_ids`.
        labels_in_inputs (bool):
            Whether the inputs hold the labels too, for a model that computes the loss itself.
        pin_memory (bool):
            Whether batches are copied to pinned memory, where there is an accelerator.
    """

    def __init__(
        self,
        windows: TokenWindows,
        *,
        local_batch_size: int,
        dp_world_size: int = 1,
        dp_rank: int = 0,
        seed: int = 0,
        document_ids: bool = False,
        labels_in_inputs: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.windows, self.seed, self.document_ids = windows, seed, document_ids
        self.labels_in_inputs = labels_in_inputs
        self.local_batch_size, self.dp_world_size, self.dp_rank = local_batch_size, dp_world_size, dp_rank
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

    def state_dict(self) -> dict[str, Any]:
        """`{"windows": n}`, the windows that all ranks together have read since the run began."""
        return {"windows": self.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # a checkpoint without a data position, as stock loaders accept it
        if not state_dict:
            return
        windows = state_dict.get("windows")
        if not isinstance(windows, int) or windows < 0:
            raise ValueError(
                f'expected the data position as {{"windows": n}} with n >= 0, got {state_dict!r}: the checkpoint comes from '
                "another data loader; leave it out with [checkpoint] exclude_from_loading"
            )
        self.consumed = windows
