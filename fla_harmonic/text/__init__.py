"""Text as tokens: corpora, tokenizers, token files and the windows that training reads. Without torchtitan."""

from fla_harmonic.text.corpus import load_documents, split_documents
from fla_harmonic.text.token_files import TextOptions, TokenSplit, load_split
from fla_harmonic.text.tokenizers import ByteTokenizer, JsonTokenizer, TextTokenizer
from fla_harmonic.text.windows import TokenWindows, evaluation_batches

__all__ = [
    "ByteTokenizer", "JsonTokenizer", "TextOptions", "TextTokenizer", "TokenSplit", "TokenWindows", "evaluation_batches",
    "load_documents", "load_split", "split_documents",
]
