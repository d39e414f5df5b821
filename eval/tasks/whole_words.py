"""lm-evaluation-harness' model class, which checks what it is about to score and keeps its answers while they come."""

from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.results import read_lines, write_lines

# batches whose answers are kept at a time
_BATCHES = 8
# context, word; their ids
Request = tuple[tuple[str, str], list[int], list[int]]


class WholeWords(HFLM):
    """
    `HFLM` for the log-likelihood of words after a context, with a beginning of text where the tokenizer adds one. Answers go
    to the file `answers`, from which another instance continues. `truncated` counts texts whose context lost its beginning.

    Raises:
        ValueError: the tokenizer adds anything but one beginning of text; while scoring: a text has it otherwise, the
            tokenizer joins the word with its context, or the word is longer than the model reads.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int, batch_size: int,
        answers: Path | None = None,
    ) -> None:
        self.bos = bos_ids(tokenizer)
        self.answers = answers
        self.truncated = self.words_of_one_token = 0
        self._counts: list[dict[str, Any]] = []
        super().__init__(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=batch_size)  # type: ignore[arg-type]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(Log-likelihood in nats, whether every token is the likeliest) of each text; those in the file are read."""
        known = read_lines(self.answers) if self.answers is not None else []
        block = _BATCHES * int(self.batch_size)
        if len(known) == len(requests):
            # the last ones again, so that there are calls to audit
            del known[-block:]
        with tqdm(total=len(requests), initial=len(known), unit="passage", disable=disable_tqdm) as bar:
            for start in range(len(known), len(requests), block):
                some, self._counts = requests[start:start + block], []
                for (log_p, is_greedy), counts in zip(
                        super().loglikelihood(some, disable_tqdm=True), self._counts, strict=True):
                    known.append({"log_likelihood": log_p, "is_greedy": is_greedy, **counts})
                if self.answers is not None:
                    write_lines(self.answers, known)
                bar.update(len(some))
        self.truncated = sum(answer["truncated"] for answer in known)
        self.words_of_one_token = sum(answer["tokens"] == 1 for answer in known)
        return [(answer["log_likelihood"], answer["is_greedy"]) for answer in known]

    def _loglikelihood_tokens(self, requests: list[Request], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        return super()._loglikelihood_tokens([self._checked(request) for request in requests], *args, **kwargs)

    def _checked(self, request: Request) -> Request:
        (context, word), context_ids, word_ids = request
        begin = len(self.bos)
        bos_id = self.tokenizer.bos_token_id
        if context_ids[:begin] != self.bos or context_ids[begin:begin + 1] == [bos_id] or bos_id in word_ids:
            raise ValueError(
                f"expected {begin} beginning-of-text tokens before a text and none in it; got {context_ids[:4]} for "
                f"{context[:40]!r}. Take them out of the text.")
        if context_ids + word_ids != self.tok_encode(context + word) or not word_ids:
            raise ValueError(
                f"expected a tokenizer that parts texts before the last word; it joins {word!r} with {context[-20:]!r}. Its "
                "tokens have no likelihood of their own.")
        room = self.max_length + 1 - len(word_ids)
        if room <= begin:
            raise ValueError(
                f"expected words shorter than the {self.max_length} tokens that the model reads; got {word!r} of "
                f"{len(word_ids)}. Pass a larger `max_length`, or leave this text out.")
        is_cut = len(context_ids) > room
        if is_cut:
            # the harness would cut the beginning of text too
            context_ids = self.bos + context_ids[len(context_ids) - room + begin:]
        self._counts.append({"tokens": len(word_ids), "truncated": is_cut})
        return (context, word), context_ids, word_ids


def bos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a tokenizer puts before a text: its beginning of text, or nothing; a ValueError for anything else."""
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for bos in ([], [tokenizer.bos_token_id]):
        if full == bos + plain:
            return bos
    raise ValueError(
        f"expected a tokenizer that adds one beginning-of-text token ({tokenizer.bos_token_id}) to a text, or none; it makes "
        f"{full} of {plain}. Mend the post-processor in its tokenizer.json.")
