"""Tokenizers of the text models: the UTF-8 bytes themselves, or any `tokenizer.json`."""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

# looked for, in this order, in a tokenizer.json that no tokenizer_config.json explains
EOS_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>")

# a cut is kept if the text this many characters around it has the same tokens in one piece and in two
CUT_CONTEXT = 256
CUT_TRIES = 64
# pieces that are encoded at once, in parallel, at about 1 MB each
BATCH_CHARACTERS = 1 << 24


class TextTokenizer(ABC):
    """
    What the text data needs of a tokenizer.

    Attributes:
        bos_id, eos_id (int | None):
            Ids of the tokens before and after a document, equal in some vocabularies. Never added unless asked for.
        fingerprint (str | None):
            Changes whenever the same text could get other ids; None where encoding is cheaper than a cache.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    fingerprint: str | None = None

    def encode(self, text: str | bytes, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """
        Token ids of a text, with the beginning or end of text only if asked for.

        Raises:
            ValueError: a beginning or end is asked for that the tokenizer does not have.
        """
        ids = self._encode(text)
        if add_bos:
            ids.insert(0, self._special_id("bos_id"))
        if add_eos:
            ids.append(self._special_id("eos_id"))
        return ids

    def _special_id(self, name: str) -> int:
        if (token_id := getattr(self, name)) is None:
            raise ValueError(f"the tokenizer has no {name}: name the token in its tokenizer_config.json, or do not ask for it")
        return token_id

    @abstractmethod
    def _encode(self, text: str | bytes) -> list[int]:
        """Token ids of the text alone."""

    @abstractmethod
    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Token ids of each document, `[tokens]` of the smallest unsigned type: as `encode(document)`, faster."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids."""

    @abstractmethod
    def get_vocab_size(self) -> int:
        """Rows that an embedding needs: the largest id + 1, which is more than the number of tokens if ids are skipped."""

    @abstractmethod
    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write tokenizer.json and tokenizer_config.json, with which transformers' AutoTokenizer gives the same ids."""


class ByteTokenizer(TextTokenizer):
    """
    The UTF-8 bytes of the text, 256 ids. NUL, which does not occur in text, is both the beginning and the end of text.
    """

    bos_id = eos_id = 0

    def _encode(self, text: str | bytes) -> list[int]:
        return list(text.encode("utf-8") if isinstance(text, str) else text)

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        return (np.frombuffer(document, dtype=np.uint8) for document in documents)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD. An id that is not a byte is a ValueError."""
        return bytes(np.asarray(ids, dtype=np.int64).tolist()).decode("utf-8", errors="replace")

    def get_vocab_size(self) -> int:
        return 256

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        # a BPE without merges over GPT-2's printable stand-ins for bytes; NUL is named by itself, so that the special
        # token cannot be mistaken for a character of the text
        vocab = {character if byte else "\0": byte for byte, character in sorted(bytes_to_unicode().items())}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken("\0", special=True, normalized=False)])
        _write_pretrained(directory, tokenizer, {"bos_token": "\0", "eos_token": "\0"})


class JsonTokenizer(TextTokenizer):
    """
    Any tokenizer of the `tokenizers` library. Special tokens that are spelt out in a text are read as such, as
    transformers does; truncation, padding and the tokens that a post-processor adds are off.

    Args:
        path (str | PathLike):
            A tokenizer.json, or its folder. A tokenizer_config.json beside it names the beginning and end of text (null is
            none); without, they are recognised by their usual names, or are None.

    Raises:
        FileNotFoundError: no tokenizer.json is there.
        ValueError: a file is not readable as what it should be, or names a token that the vocabulary lacks.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {str(file)!r} (from {str(Path.cwd())!r}): put a tokenizer.json there, name its folder in "
                '[model] hf_assets_path, or train on bytes with [data] tokenizer = "bytes"'
            )
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        # the library raises plain Exception
        except Exception as error:
            raise ValueError(f"{file} is not a tokenizer.json of the tokenizers library: {error}") from error
        # a file saved from a model of fixed length would silently cut or pad each document
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.config: dict[str, Any] = {}
        if (config := file.with_name("tokenizer_config.json")).is_file():
            try:
                self.config = {**json.loads(config.read_text(encoding="utf-8"))}
            except (ValueError, TypeError) as error:
                raise ValueError(f"{config} is not a JSON object: {error}; repair or remove it") from error
        self.bos_token, self.bos_id = self._special_token("bos_token", BOS_TOKENS)
        self.eos_token, self.eos_id = self._special_token("eos_token", EOS_TOKENS)
        identity = f"{tokenizers.__version__} {self.eos_id} {self.tokenizer.to_str()}"
        self.fingerprint = hashlib.sha256(identity.encode("utf-8")).hexdigest()

    def _special_token(self, key: str, usual: tuple[str, ...]) -> tuple[str | None, int | None]:
        if key in self.config:
            token = self.config[key]
            token = token.get("content") if isinstance(token, dict) else token
        else:
            special = {token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special}
            token = next((token for token in usual if token in special), None)
        if token is None:
            return None, None
        if not isinstance(token, str) or (token_id := self.tokenizer.token_to_id(token)) is None:
            raise ValueError(
                f"tokenizer_config.json: expected {key} to be a token of the vocabulary of tokenizer.json, got {token!r}; the "
                "two files do not belong together"
            )
        return token, token_id

    def _encode(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_documents(self, documents: Iterable[bytes], piece_characters: int = 1 << 20) -> Iterator[np.ndarray]:
        dtype = np.min_scalar_type(self.get_vocab_size() - 1)
        parts: list[np.ndarray] = []
        for batch in _batches(self.cut(document.decode("utf-8"), piece_characters) for document in documents):
            encodings = self.tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
            for encoding, (_, is_last) in zip(encodings, batch, strict=True):
                parts.append(np.asarray(encoding.ids, dtype=dtype))
                if is_last:
                    yield np.concatenate(parts)
                    parts.clear()

    def cut(self, text: str, piece_characters: int) -> list[str]:
        """
        Cut a text into pieces of about the given length whose token ids concatenated are those of the text: before a line
        break after a character that is not a space, where the pre-tokenizers of GPT-2 and its successors nearly always
        part. The tokenizer is asked whether it does at each place; one that parts at none gets the text whole.
        """
        pieces, start = [], 0
        while len(text) - start > piece_characters:
            breaks = re.compile(r"(?<=\S)\n").finditer(text, start + piece_characters)
            places = (found.start() for found in islice(breaks, CUT_TRIES))
            stop = next((place for place in places if self._parts_at(text, start, place)), None)
            if stop is None:
                break
            pieces.append(text[start:stop])
            start = stop
        return [*pieces, text[start:]]

    def _parts_at(self, text: str, start: int, stop: int) -> bool:
        left, right = text[max(stop - CUT_CONTEXT, start) : stop], text[stop : stop + CUT_CONTEXT]
        return self._encode(left + right) == self._encode(left) + self._encode(right)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of some ids, special tokens spelt out unless they are to be skipped."""
        return self.tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=skip_special_tokens)

    def get_vocab_size(self) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        saved = Tokenizer.from_str(self.tokenizer.to_str())
        # a model that never saw a beginning of text must not get one from the tokenizer that is saved with it
        if saved.num_special_tokens_to_add(False) > 0:
            saved.post_processor = None
        kept = ("unk_token", "pad_token", "model_max_length", "chat_template")
        config = {key: self.config[key] for key in kept if self.config.get(key) is not None}
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        _write_pretrained(directory, saved, config | {key: token for key, token in tokens.items() if token is not None})


def _batches(documents: Iterable[list[str]]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of documents, and whether each is its document's last, `BATCH_CHARACTERS` at a time."""
    batch, size = [], 0
    for pieces in documents:
        for number, piece in enumerate(pieces, start=1):
            batch.append((piece, number == len(pieces)))
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    yield batch


def tokenize(
    documents: list[bytes], tokenizer: TextTokenizer, *, append_eos: bool, is_cut: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """
    The tokens of UTF-8 documents concatenated, `[T]` of an unsigned type, and where each starts, `[N]` int64. With
    `append_eos` an end-of-text token follows each document, but not the last one where it continues elsewhere (`is_cut`).

    Raises:
        ValueError: end of text is asked for and the tokenizer has none, or a document holds NUL, the bytes' end of text.
    """
    if append_eos and tokenizer.eos_id is None:
        raise ValueError(
            f"a corpus of several documents ({len(documents)} in this split) needs an end-of-text token between them, and "
            "the tokenizer has none: name its eos_token in tokenizer_config.json, or join the documents into one text"
        )
    if append_eos and isinstance(tokenizer, ByteTokenizer):
        for number, document in enumerate(documents):
            if (position := document.find(b"\0")) >= 0:
                raise ValueError(
                    f"document {number} holds NUL at byte {position}, which is the end of text of the bytes tokenizer: "
                    'remove it, or choose [data] tokenizer = "hf"'
                )
    parts = []
    for number, ids in enumerate(tokenizer.encode_documents(documents), start=1):
        if append_eos and not (is_cut and number == len(documents)):
            ids = np.append(ids, np.asarray(tokenizer.eos_id, dtype=ids.dtype))
        # a tokenizer may drop every character of a short document
        if len(ids):
            parts.append(ids)
    if not parts:
        raise ValueError(f"the tokenizer gives no token for {sum(map(len, documents))} bytes of text: check tokenizer.json")
    starts = np.cumsum([0, *map(len, parts[:-1])], dtype=np.int64)
    # bytes of one document need no copy
    return parts[0] if len(parts) == 1 else np.concatenate(parts), starts


def _write_pretrained(directory: str | os.PathLike, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    # the class that takes tokenizer.json as it is: classes of single models rebuild parts of it
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
