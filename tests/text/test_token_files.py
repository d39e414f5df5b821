import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fla_harmonic.text import ByteTokenizer, JsonTokenizer, TextOptions, TokenSplit, load_documents, load_split, token_files


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([load_documents("novels")[0][:100_000].decode()], trainer)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(load_documents("novels")[1][:40_000])
    return path


def test_byte_splits_of_the_novels_are_their_bytes_and_one_end_of_text() -> None:
    documents = load_documents("novels")
    splits = [load_split("novels", None, split, ByteTokenizer()) for split in ("train", "validation", "test")]
    assert sum(split.num_bytes for split in splits) == sum(map(len, documents))
    # the second novel continues in validation and test, so only its last part is ended
    assert b"".join(split.tokens.tobytes() for split in splits) == b"\0".join(documents) + b"\0"
    assert splits[0].document_starts.tolist() == [0, len(documents[0]) + 1]
    assert splits[1].document_starts.tolist() == splits[2].document_starts.tolist() == [0]
    assert len(splits[1].tokens) == splits[1].num_bytes
    assert splits[1].tokens.dtype == np.uint8


def test_one_document_has_no_end_of_text(text_file: Path, bpe_folder: Path, tmp_path) -> None:
    tokenizer = JsonTokenizer(bpe_folder)
    split = load_split("text", text_file, "train", tokenizer, TextOptions(cache_dir=str(tmp_path)))
    text = text_file.read_bytes()[:36_000]
    assert split.num_bytes == 36_000
    assert split.tokens.dtype == np.uint16
    assert split.document_starts.dtype == np.int64
    assert split.tokens.tolist() == tokenizer.encode(text)
    assert split.document_starts.tolist() == [0]


def load(text_file: Path, folder: Path, cache: Path | str, monkeypatch, split: str = "train") -> tuple[TokenSplit, int]:
    """The split, and how often it was tokenized for that."""
    calls = []
    tokenize = token_files.tokenize

    def counted(*args, **kwargs):
        calls.append(args)
        return tokenize(*args, **kwargs)

    monkeypatch.setattr(token_files, "tokenize", counted)
    result = load_split("text", text_file, split, JsonTokenizer(folder), TextOptions(cache_dir=str(cache)))
    monkeypatch.setattr(token_files, "tokenize", tokenize)
    return result, len(calls)


def assert_equal(a: TokenSplit, b: TokenSplit) -> None:
    assert np.array_equal(a.tokens, b.tokens)
    assert np.array_equal(a.document_starts, b.document_starts)
    assert (a.tokens.dtype, a.document_starts.dtype, a.num_bytes) == (b.tokens.dtype, b.document_starts.dtype, b.num_bytes)


def test_cache_is_read_again_and_follows_text_split_and_tokenizer(text_file, bpe_folder, tmp_path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    first, built = load(text_file, bpe_folder, cache, monkeypatch)
    assert built == 1
    again, built = load(text_file, bpe_folder, cache, monkeypatch)
    assert built == 0
    assert_equal(first, again)
    assert load(text_file, bpe_folder, cache, monkeypatch, "validation")[1] == 1
    (bpe_folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert load(text_file, bpe_folder, cache, monkeypatch)[1] == 1
    (bpe_folder / "tokenizer_config.json").unlink()
    text_file.write_bytes(text_file.read_bytes().replace(b"Emma", b"Anna"))
    assert load(text_file, bpe_folder, cache, monkeypatch)[1] == 1
    assert len(list(cache.glob("*.npz"))) == 4


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_cache_is_built_again(text_file, bpe_folder, tmp_path, monkeypatch, data: st.DataObject) -> None:
    cache = tmp_path / "cache"
    expected, _ = load(text_file, bpe_folder, cache, monkeypatch)
    (file,) = cache.glob("*.npz")
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    # a bit that the reader does not look at may be read over: the arrays are the same either way
    assert_equal(load(text_file, bpe_folder, cache, monkeypatch)[0], expected)
    assert_equal(load(text_file, bpe_folder, cache, monkeypatch)[0], expected)


def test_cache_with_a_shorter_shape_in_its_header_is_built_again(text_file, bpe_folder, tmp_path, monkeypatch) -> None:
    expected, _ = load(text_file, bpe_folder, tmp_path / "cache", monkeypatch)
    (file,) = (tmp_path / "cache").glob("*.npz")
    shape = f"({len(expected.tokens)},)".encode()
    shorter = f"({len(expected.tokens) - 9},)".encode()
    assert len(shorter) == len(shape)
    file.write_bytes(file.read_bytes().replace(shape, shorter))
    split, built = load(text_file, bpe_folder, tmp_path / "cache", monkeypatch)
    assert built == 1
    assert_equal(split, expected)


def test_cache_that_cannot_be_written_only_warns(text_file, bpe_folder, tmp_path, monkeypatch, caplog) -> None:
    expected, _ = load(text_file, bpe_folder, tmp_path / "cache", monkeypatch)
    (tmp_path / "a_file").write_text("")

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    with caplog.at_level(logging.WARNING):
        assert_equal(load(text_file, bpe_folder, tmp_path / "a_file" / "cache", monkeypatch)[0], expected)
        monkeypatch.setattr(token_files.np, "savez", fail)
        split, built = load(text_file, bpe_folder, tmp_path / "full", monkeypatch)
    assert built == 1
    assert_equal(split, expected)
    assert caplog.text.count("tokens are not cached") == 2
    assert "No space left" in caplog.text
    assert not list((tmp_path / "full").glob("*.npz"))


def test_cache_folder_follows_the_environment(text_file, bpe_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load(text_file, bpe_folder, "", monkeypatch)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load(text_file, bpe_folder, "", monkeypatch)
    for folder in ("xdg/fla_harmonic", "home/.cache/fla_harmonic"):
        assert len(list((tmp_path / folder).glob("tokens-*.npz"))) == 1


@pytest.mark.parametrize("has_locks", [True, False], ids=["locks", "no-locks"])
def test_ranks_at_once_agree_and_tokenize_once(text_file, bpe_folder, tmp_path, monkeypatch, has_locks: bool) -> None:
    # a file lock holds between threads as between processes; without it, on some file systems, each rank writes the file
    if not has_locks:
        monkeypatch.setattr(token_files, "FileLock", contextlib.nullcontext)
    expected, _ = load(text_file, bpe_folder, tmp_path / "alone", monkeypatch)
    tokenize, calls = token_files.tokenize, []

    def slow(*args, **kwargs):
        calls.append(args)
        time.sleep(0.2)
        return tokenize(*args, **kwargs)

    monkeypatch.setattr(token_files, "tokenize", slow)
    settings, tokenizer = TextOptions(cache_dir=str(tmp_path / "cache")), JsonTokenizer(bpe_folder)
    with ThreadPoolExecutor(4) as ranks:
        splits = list(ranks.map(lambda _: load_split("text", text_file, "train", tokenizer, settings), range(4)))
    for split in splits:
        assert_equal(split, expected)
    assert len(calls) == 1 if has_locks else len(calls) > 1
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 1
