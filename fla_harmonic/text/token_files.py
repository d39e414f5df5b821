"""Token arrays of a corpus, cached on disk."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

import numpy as np
from filelock import FileLock

from fla_harmonic.text.corpus import load_documents, split_documents, split_ends_inside_document
from fla_harmonic.text.tokenizers import TextTokenizer, tokenize

logger = logging.getLogger(__name__)

# part of the name of a cached array: raise it when the same text gives other arrays
CACHE_VERSION = "1"


@dataclass
class TextOptions:
    text_field: str = "text"
    """Field that holds a document's text, in the datasets "jsonl" and "hub", which have one document per row"""

    hub_config: str = ""
    """Configuration name of the hub dataset (`name` of `datasets.load_dataset`); empty is the dataset's default"""

    hub_split: str = "train"
    """Split of the hub dataset that is read; it is then cut 90/5/5 by position like every other text"""

    cache_dir: str = ""
    """
    Folder of the cached token arrays; empty is `fla_harmonic` in `$XDG_CACHE_HOME`, or in `~/.cache` where that is unset
    """


@dataclass(frozen=True)
class TokenSplit:
    """
    One split of a corpus: its tokens `[T]`, of the smallest of uint8, uint16 and uint32 that holds the vocabulary; where each
    document starts in them, `[N]` int64, ascending from 0; and the UTF-8 bytes of its text, over which bits per byte are
    counted. In a corpus of several documents an end-of-text token follows each, unless the split cuts it.
    """

    tokens: np.ndarray
    document_starts: np.ndarray
    num_bytes: int

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the tokens and document starts, with their types and shapes: another text or tokenizer has another."""
        return _digest(self.tokens, self.document_starts).tobytes().hex()


def load_split(
    dataset: str,
    path: str | Path | None,
    split: str,
    tokenizer: TextTokenizer,
    options: TextOptions | None = None,
) -> TokenSplit:
    """
    The tokens of one split of a corpus, see `load_documents` and `split_documents`. They are cached on disk if the tokenizer
    has a fingerprint.

    Raises:
        ValueError: the corpus is not what it should be, or has several documents and the tokenizer no end of text.
        FileNotFoundError: the corpus is not there.
    """
    options = options or TextOptions()
    corpus = load_documents(
        dataset, path, text_field=options.text_field, hub_config=options.hub_config, hub_split=options.hub_split)
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
    folder = Path(options.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fla_harmonic").expanduser()
    return TokenSplit(*_cached(folder / f"tokens-{digest.hexdigest()}.npz", build), num_bytes)


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
        # the zip's own checksum is not looked at when a damaged header makes an array shorter
        if not np.array_equal(digest, _digest(tokens, document_starts)):
            raise ValueError("the digest differs")
    except FileNotFoundError:
        return None
    # what a damaged file raises depends on the byte that is hit
    except Exception as error:
        logger.warning(f"cached tokens {path} are damaged ({error!r}): tokenizing again")
        return None
    return tokens, document_starts


def _digest(*arrays: np.ndarray) -> np.ndarray:
    """sha256 over types, shapes and contents, `[32]` uint8."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return np.frombuffer(digest.digest(), dtype=np.uint8)
