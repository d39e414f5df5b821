import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import MambaConfig, MambaForCausalLM

import eval.scoring.text_pieces
from eval.scoring.growth import LENGTHS, Growth, measure, table
from eval.scoring.models import load_recurrent
from eval.scoring.score import score
from eval.scoring.text_pieces import TextPieces
from eval.stream import Options, StreamScore, main, read
from fla_harmonic import HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.text import TokenSplit
from fla_harmonic.text.tokenizers import ByteTokenizer, JsonTokenizer

WORDS = ["the", "cat", "naïve", "sat", "🙂", "on", "a", "mat,", "é"]
SPACES = [" ", " ", "\n", "\n", "  ", "\n\n", " \n", "\r\n", "\t", ""]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, as `fla_harmonic.titan.export` leaves one."""
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    config = HarmonicConfig(
        hidden_size=16, num_hidden_layers=2, vocab_size=256, use_short_conv=True, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0)
    HarmonicForCausalLM(config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text_of(300)], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return JsonTokenizer(path)


def text_of(length: int, seed: int = 0) -> str:
    generator = np.random.default_rng(seed)
    return "".join(generator.choice(WORDS) + generator.choice(SPACES) for _ in range(length))


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def run(directory: Path, text: Path, **options: object) -> StreamScore:
    return read(load_recurrent(directory), Options(directory, text, **{"chunk_size": 64, **options}))


@given(words=st.lists(st.sampled_from(WORDS + SPACES), max_size=300), piece=st.integers(1, 80), block=st.integers(1, 50),
       bytes_only=st.booleans())
def test_pieces_of_a_text_have_its_tokens(
    words: list[str], piece: int, block: int, bytes_only: bool, merges: JsonTokenizer, directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tokenizer = JsonTokenizer(directory) if bytes_only else merges
    text = "".join(words)
    path = written(tmp_path_factory.mktemp("text") / "text.txt", text)
    pieces = TextPieces(path, tokenizer, piece)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval.scoring.text_pieces, "_BLOCK_BYTES", block)
        tokens = [token for ids in pieces for token in ids]
    assert tokens == tokenizer.encode(text)
    assert pieces.num_bytes == len(text.encode())


def test_long_texts_come_in_pieces(merges: JsonTokenizer, tmp_path: Path) -> None:
    pieces = list(TextPieces(written(tmp_path / "text.txt", text_of(20_000)), merges, 1000))
    assert len(pieces) > 40
    assert max(map(len, pieces)) < 2000


def test_text_without_a_place_to_cut_is_refused(merges: JsonTokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "text.txt", "a" * 300_000)
    with pytest.raises(ValueError, match=r"expected a line break .* within 100,000 characters"):
        list(TextPieces(path, merges, max_characters=100_000))
    assert sum(map(len, TextPieces(path, merges))) == len(merges.encode("a" * 300_000))


@pytest.mark.parametrize(("broken", "place"), [(b"\xff", 70_000), (b"\xc3", 70_000), (b"\xc3(", 0)])
def test_text_that_is_not_utf8_is_refused_at_its_byte(
    broken: bytes, place: int, merges: JsonTokenizer, tmp_path: Path,
) -> None:
    path = written(tmp_path / "text.txt", "é\n".encode() * (place // 3) + b"x" * (place % 3) + broken)
    with pytest.raises(ValueError, match=rf"expected UTF-8; got byte 0x{broken[0]:02x} at byte {place:,} "):
        list(TextPieces(path, merges))


def test_score_is_that_of_one_window_over_the_whole_text(directory: Path, tmp_path: Path) -> None:
    text = text_of(300)
    result = run(directory, written(tmp_path / "text.txt", text))
    ids = np.frombuffer(text.encode(), np.uint8)
    model = load_recurrent(directory)
    expected = score(model, TokenSplit(ids, np.zeros(1, np.int64), len(ids)), len(ids), 1)
    assert (result.tokens, result.targets, result.num_bytes) == (len(ids), len(ids) - 1, len(ids))
    assert result.bits_per_token == pytest.approx(expected.bits_per_token, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert result.tokens_per_second > 0


@pytest.mark.parametrize("same_text", [True, False])
def test_a_text_in_two_runs_scores_as_in_one(directory: Path, tmp_path: Path, same_text: bool) -> None:
    text, state = text_of(120), tmp_path / "state.safetensors"
    first, whole = written(tmp_path / "first.txt", text[:301]), written(tmp_path / "whole.txt", text)
    rest = whole if same_text else written(tmp_path / "rest.txt", text[301:])
    run(directory, first, save_state=state)
    resumed = run(directory, rest, load_state=state, same_text=same_text, save_state=state)
    expected = run(directory, whole)
    assert (resumed.targets, resumed.num_bytes) == (expected.targets, expected.num_bytes)
    assert resumed.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-12)
    # and the one after that
    third = run(directory, first, load_state=state)
    assert third.num_bytes == third.tokens == third.targets + 1 == len((text + text[:301]).encode())


def test_a_run_that_stops_on_the_way_can_go_on(directory: Path, tmp_path: Path) -> None:
    text, state = text_of(18_000).encode(), tmp_path / "state.safetensors"
    assert len(text) > 70_000
    path = written(tmp_path / "text.txt", text + b"\xff")
    options = dict(save_state=state, save_every=10_000, chunk_size=2048)
    with pytest.raises(ValueError, match=f"0xff at byte {len(text):,}"):
        run(directory, path, **options)
    written(path, text)
    with safe_open(state, "pt") as file:
        read_before = int(file.metadata()["tokens"])
    assert 0 < read_before < len(text)
    resumed = run(directory, path, load_state=state, same_text=True, **options)
    expected = run(directory, path, chunk_size=2048)
    assert resumed.targets == expected.targets == len(text) - 1
    assert resumed.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-12)


def test_state_of_another_text_or_of_no_text_is_refused(directory: Path, tmp_path: Path) -> None:
    state, text = tmp_path / "state.safetensors", text_of(100).encode()
    run(directory, written(tmp_path / "text.txt", text), save_state=state)
    for other in (text[:-1], b"x" + text[1:], b""):
        path = written(tmp_path / "other.txt", other)
        with pytest.raises(ValueError, match=r"expected .*other\.txt to begin with the"):
            run(directory, path, load_state=state, same_text=True)
    stream = load_recurrent(directory).stream([1, 2, 3])
    list(stream)
    stream.save(state)
    with pytest.raises(ValueError, match=r"expected a state that eval\.stream saved"):
        run(directory, path, load_state=state)


@pytest.mark.parametrize(("options", "message"), [
    (dict(text=None), "expected a text"), (dict(same_text=True), "--load_state"), (dict(save_every=5), "--save_state"),
    (dict(save_every=0, save_state=Path("state")), "positive number of bytes")])
def test_options_that_make_no_sense_are_refused(directory: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(directory, **{"text": tmp_path / "text.txt", **options})


@pytest.mark.parametrize("text", ["", "x"])
def test_text_without_targets_has_no_score(directory: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=f"two tokens or more; got {len(text)}"):
        run(directory, written(tmp_path / "text.txt", text))


def test_model_that_reads_the_future_gets_no_score(directory: Path, tmp_path: Path) -> None:
    model = load_recurrent(directory)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + logits.flip(1))
    with pytest.raises(RuntimeError, match="gets no score"):
        read(model, Options(directory, written(tmp_path / "text.txt", "some text")))


def test_model_whose_memory_grows_is_refused(directory: Path, tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=256, state_size=4)).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"constant state, HarmonicForCausalLM; got Mamba.*eval\.score"):
        load_recurrent(tmp_path)


def test_command_prints_and_writes_the_score(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(Options(directory, written(tmp_path / "text.txt", text_of(50)), out=tmp_path / "score.json"))
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "score.json").read_text())
    assert printed["bits_per_byte"] > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "length"), [("stream", 20_000), ("generate", 1_500)])
def test_memory_and_time_do_not_grow_with_the_text(directory: Path, mode: str, length: int) -> None:
    short, long = measure(directory, mode, (500, length), rounds=11)
    assert long.peak_bytes < 1.05 * short.peak_bytes
    # time of the CPU: what else runs on the machine must not decide
    assert 0 < long.cpu_seconds < 1.2 * short.cpu_seconds


def test_growth_is_told_as_ratios() -> None:
    rows = [Growth("stream", LENGTHS[0], 2**20, 1e-6, 1e-6), Growth("stream", LENGTHS[1], 2**21, 3e-6, 2e-6)]
    assert table(rows).splitlines()[-1] == "| 100,000 | stream | 2.0 | 2.000 | 3.0 | 3.000 | 2.0 | 2.000 |"
    with pytest.raises(ValueError, match="positive multiples of chunk_size=100; got 150"):
        measure(Path("none"), "stream", (150,))
