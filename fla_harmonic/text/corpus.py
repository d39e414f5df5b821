"""Text in, UTF-8 documents out, and their cut into train, validation and test."""

import json
import logging
import zipfile
from bisect import bisect_right
from collections.abc import Iterator
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path

logger = logging.getLogger(__name__)

DATASETS = ("novels", "text", "enwik8", "jsonl", "hub")
SPLITS = ("train", "validation", "test")
NOVELS = ("pride_and_prejudice.txt", "emma.txt")
ENWIK8_BYTES = 100_000_000


def load_documents(
    dataset: str,
    path: str | Path | None = None,
    *,
    text_field: str = "text",
    hub_config: str = "",
    hub_split: str = "train",
) -> list[bytes]:
    """
    Read a corpus.

    Args:
        dataset (str):
            "novels": two novels that ship with the package, no path. "text": one local UTF-8 file, one document.
            "enwik8": that file, or the zip it is distributed in, one document. "jsonl": one JSON object per line, each a
            document. "hub": what `datasets.load_dataset` reads, one document per row. Case is ignored.
        path (str | Path | None):
            The local file; for "hub" the name of the dataset on the hub, or a local folder.
        text_field, hub_config, hub_split (str):
            See `TextOptions`.

    Returns:
        The documents as UTF-8 bytes, in order. Empty documents are left out; the list is never empty.

    Raises:
        ValueError: the dataset is unknown, or its content is not what the dataset promises.
        FileNotFoundError: no such file or hub dataset.
    """
    name = dataset.lower()
    if name not in DATASETS:
        raise ValueError(f"expected [training] dataset to be one of {', '.join(DATASETS)}, got {dataset!r}")
    if bool(path) is (name == "novels"):
        wanted = {"novels": "ships with the package and takes no path (dataset = 'text' reads a file of yours)",
                  "hub": "needs the name of a hub dataset or a local folder"}.get(name, "needs a local file")
        raise ValueError(f"dataset {name!r} {wanted}, got [training] dataset_path {path!r}")
    file = Path(path or "").expanduser()
    if name == "novels":
        documents = [(files("fla_harmonic") / "assets" / novel).read_bytes() for novel in NOVELS]
    elif name == "hub":
        documents = list(_hub_documents(str(path), text_field, hub_config, hub_split))
    elif not file.is_file():
        raise FileNotFoundError(
            f"dataset {name!r}: expected a file at {str(file)!r} (from {str(Path.cwd())!r}), but there is "
            f"{'a folder' if file.is_dir() else 'nothing'}; correct [training] dataset_path"
        )
    elif name == "jsonl":
        documents = list(_jsonl_documents(file, text_field))
    else:
        content = _enwik8_bytes(file) if name == "enwik8" else file.read_bytes()
        _decoded(content, str(file))
        documents = [content]
    documents = [document for document in documents if document]
    if not documents:
        raise ValueError(f"dataset {name!r} at {str(path)!r} holds no text: expected at least one document that is not empty")
    return documents


def split_documents(documents: list[bytes], split: str) -> list[bytes]:
    """
    The part of a corpus that belongs to one split: the first 90% of its bytes train, the next 5% validation and the last
    5% test, by position in the concatenated documents. A document across a border is cut there, at the start of the UTF-8
    character that holds the border, so that the three splits concatenated are the whole text.

    Returns:
        The documents, and parts of documents, of the split; none is empty.

    Raises:
        ValueError: the split is unknown, or has no text in a corpus this short.
    """
    start, stop = _split_span(documents, split)
    if start == stop:
        raise ValueError(
            f"the {split} split of a text of {sum(map(len, documents))} bytes is empty: expected at least a few kilobytes, "
            "so that 5% of them hold a window of tokens; use a longer text"
        )
    offsets = [0, *accumulate(map(len, documents))]
    return [
        document[max(start - first, 0) : stop - first]
        for document, (first, last) in zip(documents, pairwise(offsets), strict=True)
        if first < stop and last > start
    ]


def split_ends_inside_document(documents: list[bytes], split: str) -> bool:
    """Whether the split's last part is a document that continues in the next split: no end of text belongs after it."""
    _, stop = _split_span(documents, split)
    return stop not in accumulate(map(len, documents))


def _split_span(documents: list[bytes], split: str) -> tuple[int, int]:
    """First byte of the split, and the first byte after it, counted over the concatenated documents."""
    if split not in SPLITS:
        raise ValueError(f"expected the split to be one of {', '.join(SPLITS)}, got {split!r}")
    offsets = [0, *accumulate(map(len, documents))]
    total = offsets[-1]
    borders = [0, *(_character_start(documents, offsets, total * n // 20) for n in (18, 19)), total]
    at = SPLITS.index(split)
    return borders[at], borders[at + 1]


def _character_start(documents: list[bytes], offsets: list[int], position: int) -> int:
    """The start of the character that holds byte `position`: bytes 10xxxxxx continue a character in UTF-8."""
    number = bisect_right(offsets, position) - 1
    while documents[number][position - offsets[number]] & 0xC0 == 0x80:
        position -= 1
    return position


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text: byte 0x{content[error.start]:02x} at position {error.start} ({error.reason}); "
            "convert it first, for example with iconv -t utf-8"
        ) from error


def _enwik8_bytes(path: Path) -> bytes:
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                content = archive.read("enwik8")
        except KeyError as error:
            raise ValueError(f"expected enwik8.zip as it is distributed, got {path}: {error}") from error
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{path} is damaged: {error}; fetch enwik8.zip again") from error
    else:
        content = path.read_bytes()
    # a number measured on something shorter under this name would be compared with published ones
    if len(content) != ENWIK8_BYTES:
        logger.warning(f"{path} has {len(content):,} bytes, enwik8 has {ENWIK8_BYTES:,}: results are not enwik8 results")
    return content


def _document(row: dict[str, object], field: str, where: str) -> bytes:
    """The text field of one row as UTF-8."""
    if field not in row:
        raise ValueError(f"{where}: no field {field!r}, only {sorted(row)}; name the text's in [data] text_field")
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected a string in field {field!r}, got {type(value).__name__}")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: field {field!r} has an unpaired surrogate at character {error.start}") from error


def _jsonl_documents(path: Path, field: str) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            text = _decoded(line, where)
            if not line.strip():
                continue
            try:
                row = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{where}: expected one JSON object per line, got {line[:60]!r} ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield _document(row, field, where)


def _hub_documents(path: str, field: str, config: str, split: str) -> Iterator[bytes]:
    # importing datasets takes a second, and only this dataset needs it
    from datasets import load_dataset

    where = f"hub dataset {path!r} (config {config!r}, split {split!r})"
    try:
        rows = load_dataset(path, name=config or None, split=split)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
        raise kind(f"{where} cannot be read: {error}; check [training] dataset_path, [data] hub_config and hub_split, and the "
                   "connection to the hub") from error
    if field in rows.column_names:
        # decoding the others, such as images, costs time
        rows = rows.select_columns([field])
    for number, row in enumerate(rows):
        yield _document(row, field, f"{where}, row {number}")
