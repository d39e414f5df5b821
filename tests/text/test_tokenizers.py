import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from fla_harmonic.text.corpus import load_documents
from fla_harmonic.text.tokenizers import ByteTokenizer, JsonTokenizer, tokenize

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
texts = st.text(st.characters(exclude_categories=["Cs"]))
# text of few characters, where words, spaces and line breaks meet in every way
lines = st.text(st.sampled_from("ab \n\t.1é。\u3000\u00a0\r"), min_size=1, max_size=300)


def train_bpe(kind: str) -> Tokenizer:
    """A small BPE on the novels, with the pre-tokenizer of GPT-2, of Llama 3, or as Llama 2 without any."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "llama3":
        split = pre_tokenizers.Split(Regex(CL100K), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = list("▁ab\n\t.1é。\u3000\u00a0\r")
    sample = load_documents("novels")[0][:100_000].decode().splitlines(keepends=True) + [".\n\n", "1.\n", "a.\n"] * 50
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=["gpt2", "llama3", "llama2"])
def any_folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    train_bpe(request.param).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def gpt2_json(tmp_path_factory) -> str:
    return train_bpe("gpt2").to_str()


def write(folder: Path, tokenizer_json: str, config: dict | str | None = None) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


# bytes


@settings(deadline=None)
@given(texts)
def test_byte_ids_are_the_bytes(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == tokenizer.encode(text.encode()) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, add_bos=True, add_eos=True) == [0, *text.encode(), 0]
    assert next(tokenizer.encode_documents([text.encode()])).tolist() == tokenizer.encode(text)


def test_bytes_that_are_not_text_still_decode_and_ids_that_are_not_bytes_do_not() -> None:
    assert ByteTokenizer().decode([0x61, 0xFF, 0xC3]) == "a\ufffd\ufffd"
    with pytest.raises(ValueError, match="range"):
        ByteTokenizer().decode([256])


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder), JsonTokenizer(folder)


@settings(deadline=None)
@given(texts)
def test_saved_byte_tokenizer_gives_the_same_ids_through_transformers(saved_bytes, text: str) -> None:
    theirs, ours = saved_bytes
    assert theirs(text)["input_ids"] == ours.encode(text) == list(text.encode())
    assert theirs.decode(theirs(text)["input_ids"]) == ours.decode(ours.encode(text)) == text


def test_saved_byte_tokenizer_covers_every_byte_and_keeps_its_special_token(saved_bytes) -> None:
    theirs, ours = saved_bytes
    every = "".join(map(chr, range(0x250))) + "𐀀\U0010ffff"
    assert theirs(every)["input_ids"] == list(every.encode())
    assert len(theirs) == ours.get_vocab_size() == 256
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eos_id == ours.bos_id == 0


# tokenizer.json


@settings(deadline=None)
@given(st.lists(lines, min_size=1, max_size=4), st.integers(1, 40))
def test_encoding_in_pieces_equals_the_whole(any_folder: Path, documents: list[str], piece: int) -> None:
    tokenizer = JsonTokenizer(any_folder)
    for document in documents:
        assert "".join(tokenizer.cut(document, piece)) == document
    arrays = list(tokenizer.encode_documents([document.encode() for document in documents], piece))
    assert [ids.tolist() for ids in arrays] == [tokenizer.encode(document) for document in documents]


def test_novels_are_cut_into_pieces_and_batches_and_equal_the_whole(any_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("fla_harmonic.text.tokenizers.BATCH_CHARACTERS", 30_000)
    tokenizer = JsonTokenizer(any_folder)
    documents = [document[:100_000] for document in load_documents("novels")]
    pieces = len(tokenizer.cut(documents[0].decode(), 10_000))
    # the one without a pre-tokenizer puts a space before each piece: it has to take the text whole
    assert pieces == 1 if tokenizer.tokenizer.pre_tokenizer is None else 9 <= pieces <= 10
    arrays = list(tokenizer.encode_documents(documents, 10_000))
    assert [ids.tolist() for ids in arrays] == [tokenizer.encode(document) for document in documents]
    assert {ids.dtype for ids in arrays} == {np.dtype(np.uint16)}


def test_gpt2_whose_bos_is_its_eos_keeps_both(gpt2_json: str, tmp_path) -> None:
    for config in (None, {}, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}):
        tokenizer = JsonTokenizer(write(tmp_path, gpt2_json, config))
        assert tokenizer.bos_id == tokenizer.eos_id == tokenizer.tokenizer.token_to_id("<|endoftext|>")


@pytest.mark.parametrize("eos", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_end_of_text_is_recognised_without_a_config(eos: str, gpt2_json: str, tmp_path) -> None:
    other = Tokenizer.from_str(gpt2_json.replace("<|endoftext|>", eos))
    assert JsonTokenizer(write(tmp_path, other.to_str())).eos_id == other.token_to_id(eos)


def test_config_names_special_tokens_as_strings_or_objects_or_none(gpt2_json: str, tmp_path) -> None:
    config = {"eos_token": {"content": "a", "__type": "AddedToken"}, "bos_token": None}
    tokenizer = JsonTokenizer(write(tmp_path, gpt2_json, config))
    assert tokenizer.eos_id == tokenizer.tokenizer.token_to_id("a")
    assert tokenizer.bos_id is None
    assert tokenizer.encode("b", add_eos=True)[-1] == tokenizer.eos_id
    with pytest.raises(ValueError, match=r"no bos_id.*tokenizer_config"):
        tokenizer.encode("b", add_bos=True)


def with_template(tokenizer_json: str) -> str:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    eos = "<|endoftext|>"
    special = [(eos, tokenizer.token_to_id(eos))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{eos} $A {eos}", special_tokens=special)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    return tokenizer.to_str()


def test_nothing_is_added_cut_or_padded_unless_asked_for(gpt2_json: str, tmp_path) -> None:
    (tmp_path / "a").mkdir()
    plain = JsonTokenizer(write(tmp_path, gpt2_json))
    tokenizer = JsonTokenizer(write(tmp_path / "a", with_template(gpt2_json)))
    text = "a text that is longer than four tokens"
    assert len(plain.encode(text)) > 4
    for each in ("", "a", text):
        assert tokenizer.encode(each) == plain.encode(each) == next(tokenizer.encode_documents([each.encode()])).tolist()
    assert tokenizer.encode(text, add_bos=True, add_eos=True) == [plain.bos_id, *plain.encode(text), plain.eos_id]


@pytest.fixture(scope="module")
def saved_json(gpt2_json: str, tmp_path_factory):
    config = {"eos_token": "<|endoftext|>", "bos_token": None, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    tokenizer = JsonTokenizer(write(tmp_path_factory.mktemp("source"), with_template(gpt2_json), config))
    tokenizer.save_pretrained(folder := tmp_path_factory.mktemp("saved"))
    return tokenizer, AutoTokenizer.from_pretrained(folder), JsonTokenizer(folder)


@settings(deadline=None)
@given(texts)
def test_saved_json_tokenizer_gives_the_same_ids_through_transformers(saved_json, text: str) -> None:
    tokenizer, theirs, ours = saved_json
    for each in (text, f"{text}<|endoftext|>{text}"):
        assert theirs(each)["input_ids"] == ours.encode(each) == tokenizer.encode(each)
        assert theirs.decode(tokenizer.encode(each)) == tokenizer.decode(tokenizer.encode(each)) == each


def test_saved_json_tokenizer_keeps_its_special_tokens(saved_json) -> None:
    tokenizer, theirs, ours = saved_json
    assert theirs.eos_token_id == ours.eos_id == tokenizer.eos_id is not None
    assert theirs.bos_token_id is None


def test_vocabulary_counts_the_rows_of_an_embedding(gpt2_json: str, tmp_path) -> None:
    sparse = json.loads(gpt2_json)
    token = next(token for token, index in sparse["model"]["vocab"].items() if index == 10)
    sparse["model"]["vocab"][token] = 70_000
    tokenizer = JsonTokenizer(write(tmp_path, json.dumps(sparse)))
    assert tokenizer.get_vocab_size() == 70_001
    assert tokenize([b"a"], tokenizer, append_eos=False)[0].dtype == np.uint32


def test_fingerprint_changes_with_the_vocabulary_and_the_end_of_text(gpt2_json: str, tmp_path) -> None:
    first = JsonTokenizer(write(tmp_path, gpt2_json)).fingerprint
    assert JsonTokenizer(tmp_path / "tokenizer.json").fingerprint == first
    changed = Tokenizer.from_str(gpt2_json)
    changed.add_tokens([AddedToken("Elizabeth")])
    assert JsonTokenizer(write(tmp_path, changed.to_str())).fingerprint != first
    assert JsonTokenizer(write(tmp_path, gpt2_json, {"eos_token": "a"})).fingerprint != first


def test_missing_or_broken_files_are_named_with_a_remedy(gpt2_json: str, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r'tokenizer\.json.*hf_assets_path.*tokenizer = "bytes"'):
        JsonTokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json"):
        JsonTokenizer(write(tmp_path, "{}"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a JSON object"):
        JsonTokenizer(write(tmp_path, gpt2_json, "{"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a JSON object"):
        JsonTokenizer(write(tmp_path, gpt2_json, "[]"))
    for wrong in ("<|nowhere|>", {"content": 3}, 3):
        with pytest.raises(ValueError, match=r"eos_token to be a token of the vocabulary.*do not belong together"):
            JsonTokenizer(write(tmp_path, gpt2_json, {"eos_token": wrong}))


# joined documents


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1).map(lambda document: document.replace(b"\0", b"0")), min_size=1), st.booleans())
def test_joined_bytes_are_ended_by_nul_except_where_the_text_is_cut(documents: list[bytes], is_cut: bool) -> None:
    tokens, starts = tokenize(documents, ByteTokenizer(), append_eos=True, is_cut=is_cut)
    assert tokens.tobytes() == b"\0".join(documents) + (b"" if is_cut else b"\0")
    assert starts.dtype == np.int64
    assert starts.tolist() == [0, *(np.flatnonzero(tokens == 0) + 1).tolist()][: len(documents)]


def test_nul_in_joined_bytes_is_refused_and_alone_is_a_byte() -> None:
    with pytest.raises(ValueError, match="document 1 holds NUL at byte 2"):
        tokenize([b"ab", b"ab\0c"], ByteTokenizer(), append_eos=True)
    assert tokenize([b"ab\0c"], ByteTokenizer(), append_eos=False)[0].tobytes() == b"ab\0c"


def test_several_documents_need_an_end_of_text(gpt2_json: str, tmp_path) -> None:
    tokenizer = JsonTokenizer(write(tmp_path, gpt2_json, {"eos_token": None}))
    with pytest.raises(ValueError, match=r"needs an end-of-text token.*eos_token in tokenizer_config"):
        tokenize([b"ab", b"cd"], tokenizer, append_eos=True)


def test_document_without_tokens_has_no_start(gpt2_json: str, tmp_path) -> None:
    deaf = Tokenizer.from_str(gpt2_json)
    deaf.normalizer = normalizers.Replace("x", "")
    tokenizer = JsonTokenizer(write(tmp_path, deaf.to_str()))
    tokens, starts = tokenize([b"a", b"x", b"a"], tokenizer, append_eos=False)
    assert tokens.tolist() == tokenizer.encode("a") * 2
    assert starts.tolist() == [0, 1]
    with pytest.raises(ValueError, match="no token for 2 bytes"):
        tokenize([b"xx"], tokenizer, append_eos=False)
