"""Passages of a text that end in a word which has occurred in them: items like those of LAMBADA, where that is not at hand."""

import re
from collections.abc import Iterator

# a full stop or its like, with what closes a quotation, before a space or the end
_SENTENCE_END = re.compile("[.!?][\"'\u201d\u2019)]*(?=\\s|$)")
# of mark-up and tables: no prose
_MARKUP = re.compile(r"[<>{}\[\]|=&]")
# shorter words are mostly those of grammar, and abbreviations
_MIN_LETTERS = 4


def passages(text: str, number: int | None = None, min_words: int = 40, max_words: int = 120) -> list[str]:
    """
    Passages of whole sentences, without the full stop at the end, so that the last word is the end; spread evenly over the
    text, of which no part is in two of them. By default all that there are.

    Raises:
        ValueError: the text has fewer, or none is asked for.
    """
    found = list(_passages(" ".join(text.split()), min_words, max_words))
    number = len(found) if number is None else number
    if not 1 <= number <= len(found):
        raise ValueError(
            f"expected passages of {min_words} to {max_words} words that end in one of them; the text has {len(found)}, "
            f"and {number} are wanted. Ask for fewer `examples`, or pass a longer text.")
    return [found[index * len(found) // number] for index in range(number)]


def _passages(text: str, min_words: int, max_words: int) -> Iterator[str]:
    # where sentences end, and where the full stops at their ends are
    ends = [(match.end(), match.start()) for match in _SENTENCE_END.finditer(text)]
    begin, taken = 0, -1
    for number, (end, _) in enumerate(ends):
        if number > taken:
            for last in range(number, len(ends)):
                passage = text[begin:ends[last][1]].strip()
                words = passage.split(" ")
                if len(words) > max_words or _MARKUP.search(passage):
                    break
                if len(words) >= min_words and _occurs_before(words):
                    yield passage
                    taken = last
                    break
        begin = end


def _occurs_before(words: list[str]) -> bool:
    word = words[-1]
    before = {re.sub(r"[\W_]", "", other).casefold() for other in words[:-1]}
    return word.isalpha() and len(word) >= _MIN_LETTERS and word.casefold() in before
