"""lm-evaluation-harness (`lm_eval`) on a Harmonic model with the byte tokenizer."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from fla_harmonic import HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.text.tokenizers import ByteTokenizer

ROOT = Path(__file__).parents[2]
LENGTH = 40
SENTENCES = ["the cat sat on the mat", "to be", "it was a truth universally acknowledged", "naïve façade — señor"]
TASK = """
task: last_word
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of trained length 40 with its tokenizer."""
    path = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    HarmonicForCausalLM(HarmonicConfig(
        hidden_size=16, num_hidden_layers=2, vocab_size=256, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
        initializer_range=0.5,
    )).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def harness(folder: Path) -> HFLM:
    return HFLM(pretrained=HarmonicForCausalLM.from_pretrained(folder), tokenizer=AutoTokenizer.from_pretrained(folder),
                batch_size=3, device="cpu")


def log_probabilities(harness: HFLM, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first, and whether it is the likeliest, `[T - 1]` each, by one full pass."""
    with torch.no_grad():
        log_p = harness.model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].double().log_softmax(-1)
    targets = torch.tensor(tokens[1:])
    return torch.stack([log_p[torch.arange(len(targets)), targets], (log_p.argmax(-1) == targets).double()])


def loglikelihood(harness: HFLM, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return harness.loglikelihood(requests, disable_tqdm=True)


def test_the_length_is_the_configs_and_not_the_fallback(folder: Path, harness: HFLM) -> None:
    assert harness.max_length == LENGTH
    assert harness.max_length != HFLM._DEFAULT_MAX_LENGTH
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert HFLM(pretrained=harness.model, tokenizer=tokenizer, max_length=500, device="cpu").max_length == 500


words = st.text(st.sampled_from("abé—𐍈"), min_size=1, max_size=6)
sentences = st.tuples(st.lists(words, max_size=12).map(" ".join), words.map(" ".__add__))


@settings(max_examples=10)
@example([("", " abc"), ("é" * 40, " é—")])
@given(st.lists(sentences, min_size=1, max_size=5))
def test_every_byte_of_a_last_word_counts_after_as_much_context_as_fits(harness: HFLM, pairs: list[tuple[str, str]]) -> None:
    for (context, word), (actual, is_greedy) in zip(pairs, loglikelihood(harness, pairs), strict=True):
        target = list(word.encode())
        # the beginning of text stands for an empty context, and before no other; the last target is no input
        tokens = [*(context.encode() or b"\0"), *target][-LENGTH - 1:]
        log_p, hit = log_probabilities(harness, tokens)[:, -len(target):]
        assert actual == pytest.approx(log_p.sum().item(), rel=1e-4, abs=1e-4)
        assert is_greedy == bool(hit.all())


def test_a_longer_context_than_the_trained_one_counts_when_asked_for(folder: Path, harness: HFLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    longer = HFLM(pretrained=harness.model, tokenizer=tokenizer, max_length=500, device="cpu")
    word, context = " mat", " ".join(["the cat sat on the"] * 5)
    tokens = [*context.encode(), *word.encode()]
    expected = log_probabilities(harness, tokens)[0, -len(word):].sum().item()
    (actual, _), = loglikelihood(longer, [(context, word)])
    (cut, _), = loglikelihood(harness, [(context, word)])
    assert actual == pytest.approx(expected, rel=1e-5)
    assert abs(cut - expected) > 1e-3


def test_rolling_likelihood_covers_every_byte_once(harness: HFLM) -> None:
    text = "It is a truth universally acknowledged. " * 4
    actual, = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    data = list(text.encode())
    # windows of the trained length behind the beginning of text; the last one reaches back to be as long as the others
    expected = log_probabilities(harness, [0, *data[:LENGTH]])[0].sum().item()
    for start in range(LENGTH, len(data), LENGTH):
        stop = min(start + LENGTH, len(data))
        expected += log_probabilities(harness, data[stop - LENGTH - 1:stop])[0, start - stop:].sum().item()
    assert actual == pytest.approx(expected, rel=1e-5)


def test_generation_stops_at_its_string(harness: HFLM) -> None:
    ids = harness.model.generate(torch.tensor([list(b"the cat ")]), max_new_tokens=6, do_sample=False)[0, 8:]
    expected = harness.tokenizer.decode(ids, skip_special_tokens=True)
    for until in ("\n\n", expected[2]):
        request = Instance("generate_until", {}, ("the cat ", {"until": [until], "max_gen_toks": 6, "do_sample": False}), 0)
        assert harness.generate_until([request], disable_tqdm=True) == [expected.split(until)[0]]


@pytest.mark.processes
@pytest.mark.slow
def test_command_scores_a_local_task_file(folder: Path, harness: HFLM, tmp_path: Path) -> None:
    data = tmp_path / "sentences.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    (tmp_path / "last_word.yaml").write_text(TASK.format(data=data))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    run = subprocess.run(
        [sys.executable, "-m", "eval.harness", "run", "--model", "hf", "--model_args", f"pretrained={folder}",
         "--device", "cpu", "--include_path", tmp_path, "--tasks", "last_word", "--output_path", tmp_path / "scores.json"],
        capture_output=True, text=True, timeout=400, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | offline,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    file, = tmp_path.glob("scores*.json")
    result = json.loads(file.read_text())["results"]["last_word"]
    pairs = [(text.rsplit(" ", 1)[0], " " + text.rsplit(" ", 1)[1]) for text in SENTENCES]
    expected = loglikelihood(harness, pairs)
    mean = sum(log_p for log_p, _ in expected) / len(expected)
    assert result["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-4)
    assert result["acc,none"] == sum(is_greedy for _, is_greedy in expected) / len(expected)
