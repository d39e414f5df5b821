"""The windows of a token array that training and evaluation read."""

from collections.abc import Iterator

import numpy as np
import torch

from fla_harmonic.text.token_files import TokenSplit

# of a label that does not count, as torch's cross entropy and torchtitan have it
IGNORE_INDEX = -100

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TokenWindows:
    """
    Windows of a token array: window i reads tokens `[i L, i L + L]`, the first L of them as input and the last L as labels,
    so that every token but the first is a label exactly once.

    With `tail`, a last, shorter window counts: its missing inputs read 0, their labels are ignored.

    Raises:
        ValueError: the tokens do not fill one window, or with `tail` hold no label.
    """

    def __init__(self, split: TokenSplit, seq_len: int, *, tail: bool = False) -> None:
        if seq_len < 1:
            raise ValueError(f"expected seq_len to be at least 1, got {seq_len}")
        self.split, self.seq_len = split, seq_len
        self.tokens, self.document_starts = split.tokens, split.document_starts
        labels = len(self.tokens) - 1
        self.count = -(-labels // seq_len) if tail else labels // seq_len
        if self.count < 1:
            raise ValueError(
                f"the split has {len(self.tokens)} tokens, and a window of seq_len {seq_len} needs "
                f"{2 if tail else seq_len + 1}: use a longer text or a shorter seq_len"
            )

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray, document_ids: bool) -> Batch:
        """
        The windows of the given indices `[B]`: `{"input": [B, L] int64}`, with `document_ids` also `{"document_ids": [B, L]
        int32}`, the document of each input token, counted from 0 within the window; and the labels, `[B, L]` int64. A window
        beyond the last has only ignored labels.
        """
        positions = indices.astype(np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        is_missing = (positions >= len(self.tokens)) | (indices >= self.count)[:, None]
        positions = np.where(is_missing, 0, positions)
        rows = np.where(is_missing, 0, self.tokens[positions].astype(np.int64))
        inputs = {"input": torch.from_numpy(rows[:, :-1].copy())}
        if document_ids:
            documents = np.searchsorted(self.document_starts, positions[:, :-1], side="right")
            # what is missing continues the document before it
            documents = np.maximum.accumulate(documents, axis=1)
            inputs["document_ids"] = torch.from_numpy((documents - documents[:, :1]).astype(np.int32))
        return inputs, torch.from_numpy(np.where(is_missing, IGNORE_INDEX, rows)[:, 1:].copy())


def evaluation_batches(
    split: TokenSplit,
    seq_len: int,
    batch_size: int,
    *,
    dp_world_size: int = 1,
    dp_rank: int = 0,
    document_ids: bool = False,
) -> Iterator[Batch]:
    """
    The same batches each time, in order, as `TokenWindows.batch` returns them: over all ranks every token but the first is
    a label exactly once. Each rank gets the same number of batches, all of shape `[batch_size, seq_len]`; what the last ones
    lack has ignored labels.
    """
    windows = TokenWindows(split, seq_len, tail=True)
    for first in range(0, len(windows), batch_size * dp_world_size):
        yield windows.batch(first + dp_rank * batch_size + np.arange(batch_size), document_ids)
