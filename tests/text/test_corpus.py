import json
import logging
import zipfile

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_harmonic.text.corpus import SPLITS, load_documents, split_documents, split_ends_inside_document

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=6))
def test_splits_one_after_another_are_the_whole_text(documents: list[str]) -> None:
    corpus = [document.encode() for document in documents]
    parts: list[bytes] = []
    for split in SPLITS:
        try:
            part = split_documents(corpus, split)
        except ValueError as error:
            # a split without a byte says so, and takes nothing away
            if f"{split} split" not in str(error):
                raise
            continue
        assert all(part)
        for piece in part:
            piece.decode("utf-8")
        parts += part
    assert b"".join(parts) == b"".join(corpus)
    # no document is joined with the next one
    assert len(parts) >= len(corpus)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=6).filter(lambda documents: len("".join(documents).encode()) >= 80))
def test_splits_are_90_5_5_percent_of_the_bytes_up_to_a_character(documents: list[str]) -> None:
    corpus = [document.encode() for document in documents]
    total = sum(map(len, corpus))
    sizes = [sum(map(len, split_documents(corpus, split))) for split in SPLITS]
    assert 0 <= total * 18 // 20 - sizes[0] <= 3
    assert 0 <= total * 19 // 20 - sizes[0] - sizes[1] <= 3


def test_split_of_ascii_cuts_at_the_exact_byte_and_says_so() -> None:
    corpus = [b"a" * 60, b"b" * 40]
    assert split_documents(corpus, "train") == [b"a" * 60, b"b" * 30]
    assert split_documents(corpus, "validation") == split_documents(corpus, "test") == [b"b" * 5]
    assert [split_ends_inside_document(corpus, split) for split in SPLITS] == [True, True, False]
    assert not split_ends_inside_document([b"a" * 90, b"b" * 10], "train")


def test_split_without_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"validation split of a text of 2 bytes is empty.*longer text"):
        split_documents([b"ab"], "validation")


def test_unknown_split_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"train, validation, test.*'valid'"):
        split_documents([b"a" * 100], "valid")


def test_novels_are_two_plain_documents_without_a_path() -> None:
    first, second = load_documents("novels")
    assert first.startswith(b"PRIDE AND PREJUDICE")
    assert second.startswith(b"EMMA")
    assert len(first) + len(second) == 1_567_796
    assert (first + second).isascii()
    with pytest.raises(ValueError, match="takes no path"):
        load_documents("novels", "mine.txt")


def test_unknown_dataset_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"novels, text, enwik8, jsonl, hub, got 'c4_test'"):
        load_documents("c4_test")


@pytest.mark.parametrize("dataset", ["text", "enwik8", "jsonl", "hub"])
@pytest.mark.parametrize("path", [None, ""])
def test_missing_path_names_the_setting(dataset: str, path: str | None) -> None:
    with pytest.raises(ValueError, match=rf"'{dataset}' needs .* dataset_path"):
        load_documents(dataset, path)


@pytest.mark.parametrize("dataset", ["text", "enwik8", "jsonl", "hub"])
def test_missing_file_is_named(dataset: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        load_documents(dataset, tmp_path / "nowhere.txt")


@pytest.mark.parametrize("dataset", ["text", "enwik8", "jsonl"])
def test_folder_in_place_of_a_file_is_refused(dataset: str, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a file at .* a folder; correct .*dataset_path"):
        load_documents(dataset, tmp_path)


@pytest.mark.parametrize("dataset", ["text", "enwik8", "jsonl"])
def test_empty_file_is_refused(dataset: str, tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(ValueError, match="no text"):
        load_documents(dataset, tmp_path / "a")


def test_text_is_one_document_byte_for_byte(tmp_path) -> None:
    content = "\ufeffZeile\r\n\r\n\u2028 漢字 \x85".encode()
    (tmp_path / "a.txt").write_bytes(content)
    assert load_documents("Text", str(tmp_path / "a.txt")) == [content]


def test_text_that_is_not_utf8_is_refused_with_the_position(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes("größer".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: byte 0xf6 at position 2 .*iconv"):
        load_documents("text", tmp_path / "a.txt")


def test_enwik8_reads_the_file_and_its_zip_alike_and_tells_a_part_from_the_whole(tmp_path, caplog) -> None:
    content = "<mediawiki>é</mediawiki>".encode()
    (tmp_path / "enwik8").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", content)
    with caplog.at_level(logging.WARNING):
        assert load_documents("enwik8", tmp_path / "enwik8") == load_documents("enwik8", tmp_path / "enwik8.zip") == [content]
    assert caplog.text.count("results are not enwik8 results") == 2


def test_zip_without_the_member_or_damaged_is_refused(tmp_path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("enwik9", b"text")
    with pytest.raises(ValueError, match=r"other\.zip: .*'enwik8'"):
        load_documents("enwik8", tmp_path / "other.zip")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("enwik8", b"some text")
    (tmp_path / "bad.zip").write_bytes((tmp_path / "bad.zip").read_bytes().replace(b"some text", b"some tent"))
    with pytest.raises(ValueError, match="damaged"):
        load_documents("enwik8", tmp_path / "bad.zip")


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.booleans())
def test_jsonl_documents_come_back_without_the_empty_ones(tmp_path_factory, documents: list[str], ascii_only: bool) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    lines = [json.dumps({"id": n, "body": text}, ensure_ascii=ascii_only) for n, text in enumerate(documents)]
    path.write_bytes("\n".join(lines).encode() + b"\n\n")
    expected = [text.encode() for text in documents if text]
    if expected:
        assert load_documents("jsonl", path, text_field="body") == expected
    else:
        with pytest.raises(ValueError, match="no text"):
            load_documents("jsonl", path, text_field="body")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "half', r"line 3: expected one JSON object per line"),
        (b'["text"]', r"line 3: expected a JSON object, got list"),
        (b'{"body": "a"}', r"line 3: no field 'text', only \['body'\].*text_field"),
        (b'{"text": null}', r"line 3: expected a string in field 'text', got NoneType"),
        (b'{"text": "\\ud800"}', r"line 3: field 'text' has an unpaired surrogate"),
        (b'{"text": "\xff"}', r"line 3 is not UTF-8 text: byte 0xff at position 10"),
    ],
    ids=["broken", "not-an-object", "no-field", "not-a-string", "surrogate", "not-utf8"],
)
def test_bad_jsonl_line_is_refused_with_its_number(line: bytes, message: str, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        load_documents("jsonl", tmp_path / "a.jsonl")


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    Dataset.from_dict({"body": ["first é", "", "second"], "n": [1, 2, 3]}).to_parquet(folder / "train.parquet")
    return folder


def test_hub_dataset_is_read_from_a_local_folder(hub_folder) -> None:
    assert load_documents("hub", hub_folder, text_field="body") == ["first é".encode(), b"second"]


def test_bad_hub_settings_are_refused(hub_folder) -> None:
    with pytest.raises(ValueError, match=r"no field 'text', only \['body', 'n'\].*text_field"):
        load_documents("hub", hub_folder)
    with pytest.raises(ValueError, match="row 0: expected a string in field 'n', got int"):
        load_documents("hub", hub_folder, text_field="n")
    with pytest.raises(ValueError, match=r"split 'nowhere'.*hub_split"):
        load_documents("hub", hub_folder, text_field="body", hub_split="nowhere")
    with pytest.raises(ValueError, match=r"config 'other'.*hub_config"):
        load_documents("hub", hub_folder, text_field="body", hub_config="other")
