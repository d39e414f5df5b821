"""Token ids of a text file of any size, in constant memory."""

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path

from fla_harmonic.text.tokenizers import CUT_CONTEXT, JsonTokenizer

_BLOCK_BYTES = 1 << 16


class TextPieces:
    """
    Iterable of the token ids of a UTF-8 file in pieces of about `piece_characters`, which joined are the ids of the whole
    text, without beginning or end of text. `num_bytes` counts the bytes that were given out, or skipped.

    Raises:
        ValueError: while iterating: the file is not UTF-8, or has no place to cut for `max_characters`.
    """

    def __init__(
        self, path: Path, tokenizer: JsonTokenizer, piece_characters: int = 1 << 14, max_characters: int = 1 << 24,
    ) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.piece_characters, self.max_characters = piece_characters, max_characters
        self.num_bytes = 0
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of those bytes."""
        return self._digest.hexdigest()

    def skip(self, num_bytes: int, digest: str) -> None:
        """Leaves out the beginning, of this length and SHA-256, which an earlier run has read; a ValueError for another."""
        with open(self.path, "rb") as file:
            while self.num_bytes < num_bytes and (block := file.read(min(_BLOCK_BYTES, num_bytes - self.num_bytes))):
                self._digest.update(block)
                self.num_bytes += len(block)
        if (self.num_bytes, self.digest) != (num_bytes, digest):
            raise ValueError(
                f"expected {self.path} to begin with the {num_bytes:,} bytes that were read before (SHA-256 {digest[:12]}); "
                f"got {self.num_bytes:,} bytes with {self.digest[:12]}. Pass the same file, or drop `--same_text` if this is "
                "the text that follows.")

    def __iter__(self) -> Iterator[list[int]]:
        for piece in self._pieces():
            encoded = piece.encode("utf-8")
            self._digest.update(encoded)
            self.num_bytes += len(encoded)
            yield self.tokenizer.encode(piece)

    def _pieces(self) -> Iterator[str]:
        held = ""
        for block in self._decoded():
            held += block
            # what is not far from the end of the block may be cut otherwise when more of the text is there
            if len(held) <= self.piece_characters + CUT_CONTEXT:
                continue
            stop = 0
            for piece in self.tokenizer.cut(held, self.piece_characters)[:-1]:
                if stop + len(piece) > len(held) - CUT_CONTEXT:
                    break
                stop += len(piece)
                yield piece
            held = held[stop:]
            if len(held) > self.max_characters:
                raise ValueError(
                    f"{self.path}: expected a line break where the tokenizer parts within {self.max_characters:,} characters, "
                    f"found none in {len(held):,} after byte {self.num_bytes:,}. Break the lines of the text, so that it can "
                    "be read in constant memory.")
        if held:
            yield held

    def _decoded(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open(self.path, "rb") as file:
            # a pipe cannot seek
            if self.num_bytes:
                file.seek(self.num_bytes)
            read, block = self.num_bytes, b"-"
            while block:
                block = file.read(_BLOCK_BYTES)
                read += len(block)
                try:
                    yield decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    # the object is this block and what was pending of the one before
                    position = read - len(error.object) + error.start
                    raise ValueError(
                        f"{self.path}: expected UTF-8; got byte 0x{error.object[error.start]:02x} at byte {position:,} "
                        f"({error.reason}). Convert the file to UTF-8.") from error
