"""The last word of a passage by lm-evaluation-harness."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eval.tasks import lambada
from eval.tasks.lambada import Options, Source, evaluate, main, source_of, table
from eval.tasks.passages import passages
from eval.tasks.whole_words import WholeWords, bos_ids
from fla_harmonic import HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.models.mamba.modeling_mamba import build_mamba
from fla_harmonic.text.tokenizers import ByteTokenizer

LENGTH = 64
KNOWN = "the cat sat on the mat and the dog sat on the log"
TEXTS = (KNOWN, "a dog ate the cat", "the naïve façade — señor", "on the mat the mat", f"{KNOWN} and {KNOWN}")


def llama(vocab_size: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=vocab_size,
        max_position_embeddings=LENGTH, initializer_range=0.3)).double().eval()


@pytest.fixture(scope="module")
def trained() -> LlamaForCausalLM:
    """Knows one sentence by heart, so that it is right somewhere and wrong elsewhere."""
    model = llama()
    ids = torch.tensor([list(f"{KNOWN} and".encode())])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    path = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def word_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A token a word; `template` says what is put around a text."""
    vocab = {word: index for index, word in enumerate(["<s>", "</s>", "?", *sorted(set(" ".join(TEXTS).split()))])}
    found = Tokenizer(models.WordLevel(vocab=vocab, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template is not None:
        found.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>", unk_token="?")


def by_hand(model: LlamaForCausalLM, context: list[int], word: list[int]) -> tuple[float, bool]:
    """Log-likelihood of a word, token by token, and whether greedy decoding would have written it."""
    log_p, is_greedy = 0.0, True
    for number, token in enumerate(word):
        with torch.no_grad():
            last = model(torch.tensor([context + word[:number]]), use_cache=False).logits[0, -1].log_softmax(-1)
        log_p += last[token].item()
        is_greedy &= int(last.argmax()) == token
    return log_p, is_greedy


def check(result: dict[str, Any], expected: list[tuple[float, bool]]) -> None:
    mean = sum(log_p for log_p, _ in expected) / len(expected)
    assert result["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-10)
    assert result["accuracy"] == sum(is_greedy for _, is_greedy in expected) / len(expected)
    assert result["accuracy_low"] <= result["accuracy"] <= result["accuracy_high"]
    assert result["examples"] == len(expected)


# lm-eval asks git for its commit, here and below
@pytest.mark.processes
def test_all_tokens_of_the_last_word_count(trained: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = TEXTS[:4]
    result = evaluate(trained, tokenizer, Source(texts, "here"), batch_size=3)
    pairs = [text.rsplit(" ", 1) for text in texts]
    expected = [by_hand(trained, list(context.encode()), list(f" {word}".encode())) for context, word in pairs]
    check(result, expected)
    # right somewhere and wrong elsewhere, or the test says nothing
    assert {is_greedy for _, is_greedy in expected} == {True, False}
    # every word has a space and letters
    assert result["words_of_one_token"] == 0
    assert not result["bos"]
    assert not result["audit"]["failure"]


@pytest.mark.processes
def test_a_tokenizer_that_adds_a_beginning_of_text_gets_exactly_one() -> None:
    for template, bos in ((None, []), ("<s> $A", [0])):
        words = word_tokenizer(template)
        seen: list[Any] = []
        model = llama(len(words))
        handle = model.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0]))
        result = evaluate(model, words, Source(TEXTS[:4], "here"), batch_size=1)
        handle.remove()
        ids = [words.encode(text, add_special_tokens=False) for text in TEXTS[:4]]
        check(result, [by_hand(model, [*bos, *text[:-1]], text[-1:]) for text in ids])
        assert result["words_of_one_token"] == 4
        assert result["bos"] == bool(bos)
        # all but the last word, in an order of lm-eval's own; what else was seen is the audit's
        assert all([*bos, *text[:-1]] in [row.tolist()[0] for row in seen] for text in ids)


@pytest.mark.parametrize("template", ["<s> <s> $A", "<s> $A </s>", "$A </s>", "</s> $A"])
def test_other_additions_to_a_text_are_refused(template: str) -> None:
    words = word_tokenizer(template)
    with pytest.raises(ValueError, match="or none"):
        bos_ids(words)
    with pytest.raises(ValueError, match="or none"):
        evaluate(llama(len(words)), words, Source(TEXTS, "here"))


@pytest.mark.parametrize(("template", "text"), [(None, "<s> the cat"), ("<s> $A", "<s> <s> the cat"), (None, "the <s>")])
def test_a_beginning_of_text_in_a_text_is_refused(template: str | None, text: str) -> None:
    words = word_tokenizer(template)
    with pytest.raises(ValueError, match="beginning-of-text"):
        evaluate(llama(len(words)), words, Source((text,), "here"))


@pytest.mark.processes
def test_a_long_passage_loses_its_beginning_but_not_the_beginning_of_text() -> None:
    words = word_tokenizer("<s> $A")
    model = llama(len(words))
    ids = [words.encode(text, add_special_tokens=False) for text in TEXTS]
    # seven inputs, one of them the beginning of text
    result = evaluate(model, words, Source(TEXTS, "here"), max_length=7)
    check(result, [by_hand(model, [0, *text[:-1][-6:]], text[-1:]) for text in ids])
    assert result["truncated"] == sum(len(text) > 7 for text in ids) == 2
    assert (result["max_length"], result["trained_length"], result["beyond_trained_length"]) == (7, LENGTH, False)
    assert evaluate(model, words, Source(TEXTS, "here"), max_length=100)["beyond_trained_length"]


@pytest.mark.processes
def test_the_length_is_the_models_own(trained: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    result = evaluate(trained, tokenizer, Source(TEXTS[-1:], "here"))
    assert result["max_length"] == LENGTH
    assert result["truncated"] == 1
    text = list(TEXTS[-1].encode())
    # 64 inputs: the last byte is none
    check(result, [by_hand(trained, text[-65:-4], text[-4:])])
    unknown = build_mamba_without_length()
    with pytest.raises(ValueError, match="`--max_length`"):
        evaluate(unknown, tokenizer, Source(TEXTS, "here"))
    assert evaluate(unknown, tokenizer, Source(TEXTS[:1], "here"), max_length=100)["truncated"] == 0


def build_mamba_without_length() -> Any:
    from transformers import MambaConfig

    return build_mamba(MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=256)).eval()


def test_a_tokenizer_that_joins_word_and_context_is_refused() -> None:
    joined = Tokenizer(models.BPE(vocab={"a": 0, " ": 1, "b": 2, "a ": 3, "</s>": 4}, merges=[("a", " ")]))
    words = PreTrainedTokenizerFast(tokenizer_object=joined, eos_token="</s>")
    with pytest.raises(ValueError, match="joins"):
        evaluate(llama(5), words, Source(("b a b",), "here"))


@pytest.mark.processes
def test_a_killed_run_goes_on(
    trained: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = TEXTS * 5
    whole = evaluate(trained, tokenizer, Source(texts, "here"), batch_size=1)
    asked: list[Any] = []
    answer = HFLM.loglikelihood

    def counted(harness: WholeWords, requests: list[Any], **options: Any) -> Any:
        if len(asked) == kill_at:
            raise KeyboardInterrupt
        asked.append([request.args for request in requests])
        return answer(harness, requests, **options)

    monkeypatch.setattr(HFLM, "loglikelihood", counted)
    kill_at = 2
    with pytest.raises(KeyboardInterrupt):
        evaluate(trained, tokenizer, Source(texts, "here"), batch_size=1, answers=tmp_path / "answers.jsonl")
    kill_at = 4
    resumed = evaluate(trained, tokenizer, Source(texts, "here"), batch_size=1, answers=tmp_path / "answers.jsonl")
    assert [len(block) for block in asked] == [8, 8, 8, 1]
    assert [context + word for block in asked for context, word in block] == list(texts)
    assert resumed.pop("audit")["failure"] == whole.pop("audit")["failure"] == ""
    assert resumed == whole


@pytest.mark.processes
def test_a_model_that_reads_the_future_gets_no_score(tokenizer: PreTrainedTokenizerBase) -> None:
    leak = llama(256)
    leak.lm_head.register_forward_hook(lambda module, args, logits: logits + logits.flip(1))
    with pytest.raises(RuntimeError, match="gets no score"):
        evaluate(leak, tokenizer, Source(TEXTS, "here"))


sentences = st.lists(
    st.lists(st.sampled_from(["cat", "house", "House,", "river", "Mr.", "a", "<b>", "“tree”"]), min_size=1, max_size=7)
    .map(lambda words: " ".join(words) + "."), max_size=40).map("\n".join)


@given(sentences)
def test_passages_end_in_a_word_that_has_occurred(text: str) -> None:
    try:
        found = passages(text, min_words=5, max_words=20)
    except ValueError as error:
        assert "has 0" in str(error)  # noqa: PT017
        return
    flat, position = " ".join(text.split()), 0
    for passage in found:
        words = passage.split()
        assert 5 <= len(words) <= 20
        assert words[-1].lower() in {"house", "river"}
        assert words[-1].lower() in " ".join(words[:-1]).lower()
        assert "<" not in passage
        # one after another, and before a full stop
        position = flat.index(passage, position) + len(passage)
        assert flat[position] == "."


def test_passages_are_spread_over_the_text() -> None:
    text = "".join(f"Chapter {number} is about the house. Who has seen that house? " for number in range(50))
    found = passages(text, 5, min_words=6, max_words=20)
    numbers = [int(passage.split()[1]) for passage in found]
    assert numbers == [0, 10, 20, 30, 40]
    assert found[1] == "Chapter 10 is about the house. Who has seen that house"
    with pytest.raises(ValueError, match="has 50, and 51"):
        passages(text, 51, min_words=6, max_words=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "hf"
    torch.manual_seed(0)
    HarmonicForCausalLM(HarmonicConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=256, max_position_embeddings=LENGTH)).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return path


@pytest.mark.processes
def test_command_scores_a_file_and_does_it_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = Options(model=(folder,), data=data, out=tmp_path / "out")
    main(options)
    record, = [json.loads(line) for line in (tmp_path / "out" / "lambada.jsonl").read_text().splitlines()]
    assert record["source"] == "passages of texts.jsonl"
    assert record["examples"] == len(TEXTS)
    assert record["max_length"] == LENGTH
    assert record["audit"]["failure"] == ""
    assert table([record]) in capsys.readouterr().out
    assert (tmp_path / "out" / "lambada.png").stat().st_size > 0
    assert pd.read_csv(tmp_path / "out" / "lambada.csv")["perplexity"].tolist() == pytest.approx([record["perplexity"]])
    monkeypatch.setattr(lambada, "evaluate", None)
    main(options)
    assert [json.loads(line) for line in (tmp_path / "out" / "lambada.jsonl").read_text().splitlines()] == [record]
    # the same texts in a dataset's folder, as `--hub` would read them: nothing new to score
    (tmp_path / "hub").mkdir()
    data.rename(tmp_path / "hub" / "test.jsonl")
    main(Options(model=(folder,), hub=str(tmp_path / "hub"), out=tmp_path / "out"))
    again, = [json.loads(line) for line in (tmp_path / "out" / "lambada.jsonl").read_text().splitlines()]
    assert again["cell"] == record["cell"]
    assert again["source"].endswith("hub (default), test")


def test_command_makes_passages_of_what_nobody_was_trained_on(tmp_path: Path) -> None:
    main(Options(make_from="novels", examples=20, out=tmp_path))
    file, = tmp_path.glob("passages-*.jsonl")
    made = source_of(Options(data=file))
    assert len(made.texts) == 20
    # the end of Emma, the second of the two
    emma = " ".join((Path(lambada.__file__).parents[2] / "fla_harmonic" / "assets" / "emma.txt").read_text().split())
    assert all(emma.index(text) > 0.85 * len(emma) for text in made.texts)
    assert "not LAMBADA" in source_of(Options(make_from="novels")).name


@pytest.mark.parametrize(("given", "message"), [
    ({}, "got none"), ({"hub": "a", "make_from": "novels"}, "one of"), ({"make_from": "novels", "examples": 0}, "at least 1"),
    ({"make_from": "novels", "examples": 10_000}, "fewer `examples`"),
])
def test_sources_that_are_none_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source_of(Options(**given))


@pytest.mark.parametrize("text", ["word", " word", "two words ", "two words\n", "two\nwords", "more than\ntwo"])
def test_texts_without_a_last_word_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in ("fine text", text)))
    with pytest.raises(ValueError, match="passage 2 of"):
        source_of(Options(data=file))


def test_a_model_is_needed_for_a_score(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": "two words"}))
    with pytest.raises(ValueError, match="--model"):
        main(Options(data=file, out=tmp_path))
