"""
Generated tasks of recall: sequences whose targets were said earlier in the sequence, and are nowhere else to be found.

- MQAR, multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): keys and their values come first; then every
  key is asked once, between filler, at positions drawn from a power law: most soon, some late. The target is its value.
- Passkey: one number between filler, which has other digits in it; a mark tells where. At the end it is asked for.

A batch follows from a task, a size and a few integers that seed it, so that train, validation and test never share a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

IGNORED = -100
DIGITS = 10


class Batch(NamedTuple):
    """Inputs `[B, T]`, int64, and targets of that shape: the next token where a query asks for it, else `IGNORED`."""

    tokens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Size:
    """How hard a task is."""

    length: int
    """Tokens of a sequence."""
    load: int
    """What has to be held: MQAR's pairs; a passkey's tokens between number and question, or `Passkey.ANYWHERE`."""


@dataclass(frozen=True)
class MQAR:
    """Multi-query associative recall."""

    vocab_size: int
    """Tokens in all: an eighth is filler, the rest are keys and values in equal parts."""
    power: float = 0.01
    """A query is `i` tokens after the pairs with a weight of `i ** (power - 1)`."""

    name: ClassVar[str] = "mqar"

    @property
    def fillers(self) -> int:
        """Ids below this one are filler."""
        return self.vocab_size - 2 * self.num_keys

    @property
    def num_keys(self) -> int:
        """Different keys; there are as many values, whose ids come after those of the keys."""
        return self.vocab_size * 7 // 16

    def check(self, size: Size) -> None:
        """A ValueError where the sequence has no place for the pairs and queries, or the vocabulary no keys for them."""
        if not (1 <= size.load <= self.num_keys and 3 * size.load <= size.length and self.fillers > 0):
            raise ValueError(
                f"mqar: expected 1 to {self.num_keys} pairs (vocab_size {self.vocab_size}) in at least three times as many "
                f"tokens, for a pair and a query take three; got {size.load} pairs in {size.length} tokens.")

    def chance(self, size: Size) -> float:
        """Accuracy of one who names any of the values that the sequence has."""
        return 1 / size.load

    def batch(self, size: Size, rows: int, seed: Sequence[int]) -> Batch:
        """Draws sequences of a size that passes `check`."""
        rng = np.random.default_rng(list(seed))
        pairs, room = size.load, size.length - 2 * size.load
        keys, values = (_distinct(rng, np.zeros(self.num_keys), rows, pairs) for _ in range(2))
        keys, values = keys + self.fillers, values + self.fillers + self.num_keys
        tokens = rng.integers(self.fillers, size=(rows, size.length))
        targets = np.full_like(tokens, IGNORED)
        tokens[:, 0:2 * pairs:2], tokens[:, 1:2 * pairs:2] = keys, values
        # the n-th key is asked at the n-th draw: draws without replacement come in no order
        places = 2 * pairs + _distinct(rng, (self.power - 1) * np.log(np.arange(1, room + 1)), rows, pairs)
        np.put_along_axis(tokens, places, keys, axis=1)
        np.put_along_axis(targets, places, values, axis=1)
        return Batch(tokens, targets)

    def right(self, found: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Whether each query `[...]` of sequences `[B, T]` got its value."""
        asked = targets != IGNORED
        return found[asked] == targets[asked]


@dataclass(frozen=True)
class Passkey:
    """A number of some digits in filler."""

    vocab_size: int
    """Tokens in all: the ten digits, a mark before the number, a question mark, and filler."""
    digits: int = 3
    noise: float = 0.1
    """Share of the filler that is digits, which no mark is before."""

    name: ClassVar[str] = "passkey"
    ANYWHERE: ClassVar[int] = -1
    MARK: ClassVar[int] = DIGITS
    QUESTION: ClassVar[int] = DIGITS + 1

    @property
    def around(self) -> int:
        """Tokens of a sequence that are not filler: the mark, the number, the question, the answer but for its last digit."""
        return 2 * self.digits + 1

    def check(self, size: Size) -> None:
        """A ValueError where the sequence has no place for such a distance, or the vocabulary no filler."""
        longest = size.length - self.around
        if not (self.ANYWHERE <= size.load <= longest and longest >= 0 and self.vocab_size > self.QUESTION + 1
                and self.digits >= 1):
            raise ValueError(
                f"passkey: expected a distance of at most {longest} in {size.length} tokens, of which {self.around} are no "
                f"filler, and more than {self.QUESTION + 1} tokens in the vocabulary; got a distance of {size.load} and "
                f"{self.vocab_size} tokens.")

    def chance(self, size: Size) -> float:
        """Chance to guess every digit."""
        return float(DIGITS) ** -self.digits

    def batch(self, size: Size, rows: int, seed: Sequence[int]) -> Batch:
        """Draws sequences of a size that passes `check`; `ANYWHERE` draws every distance of the length alike."""
        rng = np.random.default_rng(list(seed))
        tokens = rng.integers(self.QUESTION + 1, self.vocab_size, size=(rows, size.length))
        tokens = np.where(rng.random(tokens.shape) < self.noise, rng.integers(DIGITS, size=tokens.shape), tokens)
        targets = np.full_like(tokens, IGNORED)
        number = rng.integers(DIGITS, size=(rows, self.digits))
        longest = size.length - self.around
        distances = rng.integers(longest + 1, size=rows) if size.load == self.ANYWHERE else np.full(rows, size.load)
        question = size.length - self.digits
        tokens[:, question] = self.QUESTION
        tokens[:, question + 1:] = number[:, :-1]
        targets[:, question:] = number
        marks = question - distances - self.digits - 1
        np.put_along_axis(tokens, marks[:, None], self.MARK, axis=1)
        np.put_along_axis(tokens, marks[:, None] + np.arange(1, self.digits + 1), number, axis=1)
        return Batch(tokens, targets)

    def right(self, found: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Whether the number `[B]` of each sequence `[B, T]` is right in all its digits."""
        return ((found == targets) | (targets == IGNORED)).all(1)


Task = MQAR | Passkey


def _distinct(rng: np.random.Generator, log_weights: np.ndarray, rows: int, count: int) -> np.ndarray:
    """`count` different indices a row, drawn one after the other by their weights: the largest keys of Gumbel noise."""
    keys = log_weights + rng.gumbel(size=(rows, len(log_weights)))
    return np.argsort(-keys, axis=1)[:, :count]
