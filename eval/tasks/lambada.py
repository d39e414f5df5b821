"""
LAMBADA by lm-evaluation-harness: can a model guess the last word of a passage?

    python -m eval.lambada --model outputs/harmonic_debug/hf --data lambada.jsonl
    python -m eval.lambada --model outputs/harmonic_debug/hf --hub EleutherAI/lambada_openai

The target is the whole last word, with the space before it, whatever its number of tokens: accuracy counts the passages of
which all these tokens are the model's first choice, perplexity is exp of the mean negative log-likelihood of a word (not of a
token). The context is all before it, with a beginning of text if the model's tokenizer adds one, and then exactly one. Where
a passage is longer than the model takes, the context loses its beginning, and the result says how often.

Without the data set, `--make_from TEXT.txt` makes passages of a text of one's own, of its test split, which models that were
trained on this text have not seen. The result is labelled as that, and is not comparable with LAMBADA.

A model whose early logits depend on later tokens gets no score. Answers are kept while they come, so a killed run continues
where it stopped. Other tasks: `python -m eval.harness`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.results import Record, finished, keep_command, machine, record_digest, write, write_lines
from eval.scoring.in_situ import InSitu
from eval.scoring.models import digest, is_beyond, label_of, load, to_accelerator
from eval.tables import markdown, save
from eval.tasks.passages import passages
from eval.tasks.whole_words import WholeWords, bos_ids
from fla_harmonic.text.corpus import load_documents, split_documents


@dataclass
class Options:
    """Which models, on which passages."""

    model: tuple[Path, ...] = ()
    """Hugging Face directories. None: the passages of `make_from` are written, and that is all."""

    data: Path | None = None
    """JSONL file; each line's "text" is a passage up to its last word."""

    hub: str | None = None
    """In place of it a dataset on the Hugging Face hub, e.g. EleutherAI/lambada_openai, or a local folder."""

    hub_config: str = "default"
    """Its configuration."""

    make_from: str | None = None
    """In place of both a UTF-8 file whose last 5% are made into passages; `novels` is the text that comes with the package."""

    examples: int | None = None
    """How many passages: the first ones of `data` or `hub`, or to make, spread over the text. Default: all."""

    max_length: int | None = None
    """Tokens that the model reads. Default: its config's `max_position_embeddings`."""

    batch_size: int = 8
    """Passages computed at once."""

    out: Path = Path("outputs/lambada")
    """Folder for passages, answers, results and plot."""


@dataclass(frozen=True)
class Source:
    """Passages, and what they are."""

    texts: tuple[str, ...]
    name: str

    @property
    def digest(self) -> str:
        return record_digest(self.texts, 64)


def source_of(options: Options) -> Source:
    """The passages; a ValueError for more or less than one source, or a text that does not end in a word after others."""
    given = [name for name in ("data", "hub", "make_from") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give one of `data`, `hub` and `make_from`; got {given or 'none'}.")
    if options.examples is not None and options.examples < 1:
        raise ValueError(f"`examples` must be at least 1; got {options.examples}.")
    if options.make_from is not None:
        dataset = ("novels", None) if options.make_from == "novels" else ("text", options.make_from)
        text = b"\n".join(split_documents(load_documents(*dataset), "test")).decode()
        made = tuple(passages(text, options.examples))
        return Source(made, f"passages made from the test split of {Path(options.make_from).name}, not LAMBADA")
    if options.data is not None:
        name, documents = f"passages of {options.data.name}", load_documents("jsonl", options.data)
    else:
        name = f"{options.hub} ({options.hub_config}), test"
        documents = load_documents("hub", options.hub, hub_config=options.hub_config, hub_split="test")
    texts = [document.decode() for document in documents[:options.examples]]
    for number, text in enumerate(texts, start=1):
        context, _, word = text.rpartition(" ")
        # a published data set is scored as others score it: after its last space
        if not context.strip() or not word.strip() or (options.hub is None and word.split() != [word]):
            raise ValueError(
                f"expected passages of words parted by spaces, without a space at the end; passage {number} of {name} ends in "
                f"{text[-40:]!r}. Strip the texts, and part the last word from the others by a space.")
    return Source(tuple(texts), name)


def task_of(source: Source) -> ConfigurableTask:
    """lm-eval's task, with the templates of its `lambada_openai`."""
    return ConfigurableTask(config={
        "task": "lambada",
        "custom_dataset": lambda: {"test": Dataset.from_dict({"text": list(source.texts)})},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    })


def length_of(model: PreTrainedModel, max_length: int | None) -> int:
    """Tokens that the model reads; a ValueError where neither option nor config gives them."""
    length = max_length or getattr(model.config, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"expected a length: the config of {type(model).__name__} has no `max_position_embeddings`. Pass "
                         "`--max_length`, the tokens that the model was trained on.")
    return length


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Source, max_length: int | None = None,
    batch_size: int = 8, answers: Path | None = None,
) -> Record:
    """
    lm-eval's numbers for a model; `answers` is a file for those of this model to these passages at this length, from which a
    later call continues.

    Returns:
        `accuracy` with its 95% interval, `perplexity` of a word, `examples`, `words_of_one_token`, `truncated` (passages that
        lost their beginning), `max_length`, `trained_length`, `beyond_trained_length`, `bos` and the `audit`.

    Raises:
        RuntimeError: the model is not causal.
        ValueError: the tokenizer adds more than one beginning of text, or parts a passage otherwise than before its last word.
    """
    length, trained = length_of(model, max_length), getattr(model.config, "max_position_embeddings", None)
    # with a cache transformers' Mamba walks token by token
    model.config.use_cache = False
    harness = WholeWords(model, tokenizer, length, batch_size, answers)
    with InSitu(model) as audit:
        found = simple_evaluate(harness, tasks=[task_of(source)], task_manager=TaskManager(include_defaults=False),
                                bootstrap_iters=0, log_samples=False)
    metrics = found["results"]["lambada"]
    number = len(source.texts)
    interval = stats.binomtest(round(metrics["acc,none"] * number), number).proportion_ci(method="wilson")
    return {
        "source": source.name, "accuracy": metrics["acc,none"], "accuracy_low": interval.low,
        "accuracy_high": interval.high, "perplexity": metrics["perplexity,none"],
        "examples": number, "words_of_one_token": harness.words_of_one_token, "truncated": harness.truncated,
        "max_length": length, "trained_length": trained, "beyond_trained_length": is_beyond(length, trained),
        "bos": bool(bos_ids(tokenizer)), "audit": asdict(audit.verdict.require()),
    }


def run(directory: Path, source: Source, options: Options) -> Record:
    """The record of a model: read, if it is in `out`, else measured."""
    model, tokenizer = load(directory)
    cell = {"weights": digest(directory), "passages": source.digest, "max_length": length_of(model, options.max_length),
            "lm_eval": version("lm_eval")}
    file = options.out / "cells" / f"{record_digest(cell)}.json"
    record = finished(file, lambda: {
        "cell": cell,
        **evaluate(to_accelerator(model), tokenizer, source, options.max_length, options.batch_size,
                   file.with_suffix(".answers.jsonl")),
        "machine": machine()})
    return {"model": label_of(directory), "directory": str(directory), **record, "source": source.name}


def table(records: Sequence[Record]) -> str:
    """Lines of `lambada.jsonl` as Markdown."""
    columns = ["model", "passages", "accuracy, % (95% interval)", "perplexity of a word", "context, tokens", "cut", "source"]
    return markdown(columns, (
        [record["model"], f"{record['examples']:,}",
         "{:.1f} ({:.1f} to {:.1f})".format(*(100 * record[name] for name in ("accuracy", "accuracy_low", "accuracy_high"))),
         f"{record['perplexity']:,.1f}",
         f"{record['max_length']:,}" + " (beyond trained length)" * record["beyond_trained_length"],
         f"{record['truncated']:,}", record["source"]] for record in records))


def plot(records: Sequence[Record], file: Path) -> None:
    """Accuracy with its interval, and perplexity, by model."""
    rows = pd.DataFrame(records)
    figure, axes = plt.subplots(1, 2, figsize=(10, 1.5 + 0.5 * len(rows)), sharey=True)
    axes[0].barh(rows.index, 100 * rows["accuracy"], xerr=[
        100 * (rows["accuracy"] - rows["accuracy_low"]), 100 * (rows["accuracy_high"] - rows["accuracy"])], capsize=3)
    axes[1].barh(rows.index, rows["perplexity"], color="C1")
    axes[0].set_yticks(rows.index, rows["model"])
    axes[0].invert_yaxis()
    axes[0].set(xlabel="accuracy of the last word, %, with 95% interval")
    axes[1].set(xlabel="perplexity of the last word", xscale="log")
    figure.suptitle(rows["source"].iloc[0])
    save(figure, file)


def main(options: Options) -> None:
    keep_command(options.out)
    source = source_of(options)
    if options.make_from is not None:
        file = options.out / f"passages-{source.digest[:16]}.jsonl"
        write(file, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in source.texts))
        print(f"{len(source.texts)} passages: {file}")
    elif not options.model:
        raise ValueError("expected a model to score; got none. Pass `--model DIR`.")
    records: list[Record] = []
    for directory in options.model:
        records.append(run(directory, source, options))
        write_lines(options.out / "lambada.jsonl", records)
    if records:
        rows = pd.DataFrame(records).drop(columns=["cell", "audit", "machine"])
        write(options.out / "lambada.csv", rows.to_csv(index=False))
        plot(records, options.out / "lambada.png")
        files = ", ".join(str(options.out / f"lambada.{kind}") for kind in ("csv", "jsonl", "png"))
        write(options.out / "table.md", table(records) + "\n")
        print(f"{table(records)}\n\n{files}")
