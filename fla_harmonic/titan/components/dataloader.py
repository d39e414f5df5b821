"""Token arrays of a corpus, cached on disk, and the windows of them that training and evaluation read."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from filelock import FileLock
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger

from fla_harmonic.text.corpus import load_documents, split_documents, split_ends_inside_document
from fla_harmonic.text.tokenizers import TextTokenizer, tokenize
from fla_harmonic.titan.config import Data, data_section, loss_in_model

# part of the name of a cached array: raise it when the same text gives other arrays
CACHE_VERSION = "1"

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenSplit:
    """
    One split of a corpus as tokens.

    Attributes:
        tokens (np.ndarray):
            `[T]`, the smallest of uint8, uint16 and uint32 that holds the vocabulary: the documents one after another.
            In a corpus of more than one document each is followed by the end-of-text token, unless the split cuts it.
        document_starts (np.ndarray):
            `[N]` int64, ascending: where each document starts in `tokens`. The first is 0.
        num_bytes (int):
            UTF-8 bytes of the split's text, without end-of-text tokens: what bits per byte are counted over.
    """

    tokens: np.ndarray
    document_starts: np.ndarray
    num_bytes: int


def load_split(
    dataset: str,
    path: str | Path | None,
    split: str,
    tokenizer: TextTokenizer,
    data: Data | None = None,
) -> TokenSplit:
    """
    The tokens of one split of a corpus.

    Args:
        dataset, path:
            The corpus, see `fla_harmonic.text.corpus.load_documents`.
        split (str):
            "train", "validation" or "test": 90%, 5% and 5% of the bytes by position.
        tokenizer (TextTokenizer):
            A ByteTokenizer or a JsonTokenizer.
        data (Data | None):
            The `[data]` section: the text's field, the hub dataset's config and split, the cache's folder.

    Raises:
        ValueError: the corpus is not what it should be, or has several documents and the tokenizer no end of text.
        FileNotFoundError: the corpus is not there.
    """
    data = Data() if data is None else data
    hub = {"hub_config": data.hub_config, "hub_split": data.hub_split}
    corpus = load_documents(dataset, path, text_field=data.text_field, **hub)
    documents = split_documents(corpus, split)
    # one document is the text of a language model; several need a sign between them
    append_eos = len(corpus) > 1
    is_cut = split_ends_inside_document(corpus, split)
    num_bytes = sum(map(len, documents))

    def build() -> tuple[np.ndarray, np.ndarray]:
        began = time.perf_counter()
        arrays = tokenize(documents, tokenizer, append_eos=append_eos, is_cut=is_cut)
        logger.info(
            f"{split} split of {dataset}: {len(documents)} documents, {num_bytes:,} bytes, {len(arrays[0]):,} tokens "
            f"in {time.perf_counter() - began:.1f} s"
        )
        return arrays

    if tokenizer.fingerprint is None:
        return TokenSplit(*build(), num_bytes)
    digest = hashlib.sha256(f"{CACHE_VERSION} {split} {append_eos} {is_cut} {tokenizer.fingerprint}".encode())
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return TokenSplit(*_cached(_cache_folder(data.cache_dir) / f"tokens-{digest.hexdigest()}.npz", build), num_bytes)


def _cache_folder(cache_dir: str) -> Path:
    if cache_dir:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fla_harmonic"


def _cached(path: Path, build: Callable[[], tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The arrays in the file, or those that `build` gives, then written there; a cache that fails only costs time."""
    if (arrays := _read_cache(path)) is not None:
        return arrays
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # one of the ranks on a machine tokenizes, the others wait for its file
        with FileLock(f"{path}.lock"):
            if (arrays := _read_cache(path)) is None:
                arrays = build()
                # under a name of its own first: no reader, also on a file system without locks, sees half a file
                scratch = path.with_name(f"{path.stem}-{uuid4().hex}.npz")
                try:
                    np.savez(scratch, tokens=arrays[0], document_starts=arrays[1], digest=_digest(*arrays))
                    os.replace(scratch, path)
                finally:
                    scratch.unlink(missing_ok=True)
    except (OSError, NotImplementedError) as error:
        logger.warning(f"tokens are not cached, {path.parent} cannot be written ({error}): name another [data] cache_dir")
    return build() if arrays is None else arrays


def _read_cache(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens, document_starts, digest = arrays["tokens"], arrays["document_starts"], arrays["digest"]
    except FileNotFoundError:
        return None
    # what a damaged file raises depends on the byte that is hit
    except Exception as error:
        logger.warning(f"cached tokens {path} cannot be read ({error!r}): tokenizing again")
        return None
    # the zip's own checksum is not looked at when a damaged header makes an array shorter
    if not np.array_equal(digest, _digest(tokens, document_starts)):
        logger.warning(f"cached tokens {path} are damaged: tokenizing again")
        return None
    return tokens, document_starts


def _digest(*arrays: np.ndarray) -> np.ndarray:
    """sha256 over types, shapes and contents, `[32]` uint8."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return np.frombuffer(digest.digest(), dtype=np.uint8)


class TokenWindows:
    """
    Windows of a token array: window i reads tokens `[i L, i L + L]`, the first L of them as input and the last L as labels,
    so that every token but the first is a label exactly once.

    Args:
        split (TokenSplit):
            The tokens and where their documents start.
        seq_len (int):
            L, the tokens of a window.
        tail (bool):
            Whether a last, shorter window is counted. Its missing inputs read 0, their labels are ignored.

    Raises:
        ValueError: the tokens do not fill one window, or with `tail` hold no label.
    """

    def __init__(self, split: TokenSplit, seq_len: int, *, tail: bool = False) -> None:
        if seq_len < 1:
            raise ValueError(f"expected seq_len to be at least 1, got {seq_len}")
        self.tokens, self.document_starts, self.seq_len = split.tokens, split.document_starts, seq_len
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
        The windows of the given indices `[B]`.

        Returns:
            `{"input": [B, L] int64}`, with `document_ids` also `{"document_ids": [B, L] int32}`: the document of each input
            token, counted from 0 within the window; and the labels, `[B, L]` int64. A window beyond the last has only
            ignored labels.
        """
        positions = indices.astype(np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        is_missing = (positions >= len(self.tokens)) | (indices >= self.count)[:, None]
        positions = np.where(is_missing, 0, positions)
        rows = np.where(is_missing, 0, self.tokens[positions].astype(np.int64))
        inputs = {"input": torch.from_numpy(rows[:, :-1].copy())}
        if document_ids:
            documents = np.searchsorted(self.document_starts, positions[:, :-1], side="right")
            # what is missing goes on with the document before it
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
    The same batches each time, in order: over all ranks every token but the first is a label exactly once, the shorter
    last window included. Each rank gets the same number of batches, all of shape `[batch_size, seq_len]`; what is missing
    in the last ones has ignored labels.

    Yields:
        Batches as `TokenWindows.batch` returns them.
    """
    windows = TokenWindows(split, seq_len, tail=True)
    for first in range(0, len(windows), batch_size * dp_world_size):
        yield windows.batch(first + dp_rank * batch_size + np.arange(batch_size), document_ids)


class WindowLoader(BaseDataLoader):
    """
    Endless batches of windows for one data-parallel rank. Each epoch visits every window once, in an order drawn from the
    seed and the epoch alone. Batch after batch the ranks share out the next `local_batch_size * dp_world_size` windows of
    that order, so that a global step reads the same windows on any number of ranks and with any accumulation, and the state
    is one number that any of these can resume from.

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
            Whether the labels are in the model's inputs too, for a model that computes the loss itself.
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
        if local_batch_size < 1 or not 0 <= dp_rank < dp_world_size:
            raise ValueError(
                "expected local_batch_size >= 1 and 0 <= dp_rank < dp_world_size, got "
                f"local_batch_size {local_batch_size}, dp_rank {dp_rank}, dp_world_size {dp_world_size}"
            )
        self.windows, self.seed, self.document_ids = windows, seed, document_ids
        self.labels_in_inputs = labels_in_inputs
        self.local_batch_size, self.dp_world_size, self.dp_rank = local_batch_size, dp_world_size, dp_rank
        self.pin_memory = pin_memory and torch.accelerator.is_available()
        self.consumed = 0
        self._orders: dict[int, np.ndarray] = {}

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
        needed = set(epochs.tolist())
        self._orders = {epoch: order for epoch, order in self._orders.items() if epoch in needed}
        for epoch in needed - self._orders.keys():
            # numpy takes no negative seed, torchtitan does
            generator = np.random.default_rng([self.seed % 2**64, epoch])
            self._orders[epoch] = generator.permutation(len(self.windows))
        return np.asarray([self._orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)])

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


def check_vocabulary(tokens: np.ndarray, tokenizer: TextTokenizer, job_config: Any) -> None:
    """
    Compare the tokens that occur with the vocabulary of the job's model.

    Raises:
        ValueError: a token has no row in the model's embedding, or the model's flavor is unknown.
    """
    model = job_config.model
    flavors = get_train_spec(model.name).model_args
    if model.flavor not in flavors:
        raise ValueError(f"expected [model] flavor of {model.name} to be one of {', '.join(flavors)}, got {model.flavor!r}")
    vocab_size, largest = flavors[model.flavor].vocab_size, int(tokens.max())
    if largest >= vocab_size:
        raise ValueError(
            f"token {largest} ({tokenizer.decode([largest])!r}) occurs in the text, and {model.name} {model.flavor} has "
            f"vocab_size {vocab_size}: choose a flavor with at least {tokenizer.get_vocab_size()}, or a smaller tokenizer"
            ' ([data] tokenizer = "bytes" has 256)'
        )


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: TextTokenizer,
    job_config: Any,
    make_loader: Callable[..., WindowLoader] = WindowLoader,
) -> WindowLoader:
    """
    The training batches of a torchtitan job, from the train split of `[training] dataset`.

    The loader never ends: steps x global batch x seq_len label tokens are always delivered, and the log says how many
    epochs that makes.

    Raises:
        ValueError: the corpus, the batch sizes or the model's vocabulary do not fit together; the message says which.
        FileNotFoundError: the corpus is not there.
    """
    training, data = job_config.training, data_section(job_config)
    if training.dataloader.num_workers != 0:
        raise ValueError(
            f"expected [training.dataloader] num_workers = 0, got {training.dataloader.num_workers}: the tokens are in "
            "memory, where no worker is of use; leave it out"
        )
    batch_size = training.local_batch_size * dp_world_size
    global_batch_size = training.global_batch_size if training.global_batch_size > 0 else batch_size
    if global_batch_size % batch_size:
        raise ValueError(
            f"expected [training] global_batch_size to be a multiple of local_batch_size x data-parallel degree = "
            f"{training.local_batch_size} x {dp_world_size}, got {global_batch_size}"
        )
    split = load_split(training.dataset, training.dataset_path, "train", tokenizer, data)
    check_vocabulary(split.tokens, tokenizer, job_config)
    # for the metrics, which torchtitan builds from the configuration alone
    job_config.train_bytes_per_token = split.num_bytes / len(split.tokens)
    windows = TokenWindows(split, training.seq_len)
    loader = make_loader(
        windows,
        local_batch_size=training.local_batch_size,
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        seed=job_config.debug.seed or 0,
        document_ids=data.reset_documents,
        labels_in_inputs=loss_in_model(job_config),
        pin_memory=training.dataloader.pin_memory,
    )
    if data.reset_documents and len(split.document_starts) == 1:
        logger.warning("[data] reset_documents has no effect: the train split is one document")
    needed = training.steps * global_batch_size
    logger.info(
        f"token budget: {training.steps:,} steps x {global_batch_size:,} windows x {training.seq_len:,} tokens = "
        f"{needed * training.seq_len:,} tokens; {needed / len(windows):.2f} epochs of {len(windows):,} windows"
    )
    return loader
