import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols import train_spec

from fla_harmonic.text import ByteTokenizer, JsonTokenizer, TokenSplit, TokenWindows, load_documents, split_documents
from fla_harmonic.titan.components.dataloader import build_dataloader, bytes_per_token, check_vocabulary
from fla_harmonic.titan.components.tokenizer import build_tokenizer
from fla_harmonic.titan.components.window_loader import WindowLoader
from fla_harmonic.titan.config import Data, data_section


def numbered(length: int, starts: tuple[int, ...] = (0,)) -> TokenSplit:
    """Tokens that are their own positions."""
    return TokenSplit(np.arange(length, dtype=np.uint16), np.asarray(starts, dtype=np.int64), length)


def loader(split: TokenSplit, seq_len: int, batch: int, world: int = 1, rank: int = 0, **kwargs) -> WindowLoader:
    return WindowLoader(TokenWindows(split, seq_len), local_batch_size=batch, dp_world_size=world, dp_rank=rank, **kwargs)


def global_step(loaders: list[WindowLoader], accumulation: int) -> list[list[int]]:
    """The labels of all windows of one step, sorted: ranks and micro-batches together."""
    iterators = [iter(each) for each in loaders]
    return sorted(row for _ in range(accumulation) for each in iterators for row in next(each)[1].tolist())


# order and state


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(-3, 3))
def test_each_epoch_reads_every_window_once_in_its_own_order(count: int, batch: int, seed: int) -> None:
    stream = iter(loader(numbered(4 * count + 1), 4, batch, seed=seed))
    firsts = [row[0] for _ in range(3 * count) for row in next(stream)[0]["input"].tolist()]
    epochs = [firsts[at : at + count] for at in range(0, 3 * count, count)]
    assert all(sorted(epoch) == list(range(0, 4 * count, 4)) for epoch in epochs)
    other = next(iter(loader(numbered(4 * count + 1), 4, count, seed=seed + 1)))[0]["input"][:, 0].tolist()
    if count > 12:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != other


@settings(deadline=None)
@given(st.integers(1, 25), st.integers(0, 3), st.data())
def test_a_global_step_reads_the_same_windows_on_any_ranks_and_accumulation(
    count: int, skip: int, data: st.DataObject
) -> None:
    split, runs = numbered(3 * count + 2), []
    for _ in range(2):
        world = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
        batch = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if 12 % (world * n) == 0]))
        loaders = [loader(split, 3, batch, world, rank) for rank in range(world)]
        runs.append([global_step(loaders, 12 // (world * batch)) for _ in range(skip + 2)])
        assert all(each.state_dict()["windows"] == 12 * (skip + 2) for each in loaders)
    assert runs[0] == runs[1]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 40), st.integers(1, 3), st.integers(1, 3))
def test_resume_is_bit_identical_within_and_across_epochs(count: int, steps: int, batch: int, world: int) -> None:
    split = numbered(3 * count + 1, (0, count, 2 * count))
    for rank in range(world):
        whole, resumed = (loader(split, 3, batch, world, rank, document_ids=True) for _ in range(2))
        stream = iter(whole)
        for _ in range(steps):
            next(stream)
        resumed.load_state_dict(whole.state_dict())
        for _, (inputs, labels), (again, labels_again) in zip(range(5), stream, resumed, strict=False):
            assert labels.equal(labels_again)
            assert inputs.keys() == again.keys()
            assert all(inputs[key].equal(again[key]) for key in inputs)


def test_resume_on_other_ranks_through_a_checkpoint_continues_the_order(tmp_path) -> None:
    split = numbered(3 * 20 + 1)
    before = [loader(split, 3, 4, 2, rank, global_batch_size=8) for rank in range(2)]
    for _ in range(4):
        global_step(before, 1)
    dcp.save({"dataloader": before[1]}, checkpoint_id=tmp_path, no_dist=True)
    after = [loader(split, 3, 1, 4, rank, global_batch_size=8) for rank in range(4)]
    for each in after:
        dcp.load({"dataloader": each}, checkpoint_id=tmp_path, no_dist=True)
    for _ in range(4):
        assert global_step(after, 2) == global_step(before, 1)


def test_state_of_another_loader_is_refused() -> None:
    each = loader(numbered(9), 4, 1)
    each.load_state_dict({})
    assert each.state_dict()["windows"] == 0
    for wrong in ({"dp_rank_0": b"", "world_size": 1}, {"windows": -1}):
        with pytest.raises(ValueError, match=r'"windows": n.*another data loader'):
            each.load_state_dict(wrong)


@pytest.mark.parametrize(("changed", "differs"), [
    (dict(seq_len=2), ("seq_len = 3", "seq_len = 2")),
    (dict(global_batch_size=4), ("global_batch_size = 8", "global_batch_size = 4")),
    (dict(seed=1), ("seed = 0", "seed = 1")),
    (dict(document_ids=False), ("reset_documents = True", "reset_documents = False")),
    (dict(split=numbered(62, (0, 5))), ("tokens = 61, tokens_sha256", "tokens = 62, tokens_sha256")),
    # of another text, or another tokenizer
    (dict(split=TokenSplit(np.arange(1, 62, dtype=np.uint16), np.asarray([0, 5]), 61)), ("tokens_sha256", "tokens_sha256")),
    # the same tokens, other documents
    (dict(split=numbered(61, (0, 6))), ("tokens_sha256", "tokens_sha256")),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_a_position_in_other_data_is_refused(changed: dict, differs: tuple[str, str]) -> None:
    options = dict(split=numbered(61, (0, 5)), seq_len=3, batch=2, global_batch_size=8, document_ids=True)
    saved = loader(**options).state_dict()
    loader(**options).load_state_dict(saved)
    other = loader(**options | changed)
    with pytest.raises(ValueError, match=f"{differs[0]}.*this job has {differs[1]}.*exclude_from_loading.*initial_load_path"):
        other.load_state_dict(saved)
    assert other.consumed == 0


def test_reset_documents_of_one_document_are_no_other_data() -> None:
    saved = loader(numbered(61), 3, 2, document_ids=True).state_dict()
    loader(numbered(61), 3, 2, document_ids=False).load_state_dict(saved)


def test_a_position_that_does_not_name_its_data_is_taken_and_logged(caplog) -> None:
    each = loader(numbered(61), 3, 2)
    each.load_state_dict({"windows": 6})
    assert each.state_dict()["windows"] == 6
    assert "does not say which data" in caplog.text


# a torchtitan job


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Build a job configuration from TOML, as torchtitan's own entry point does."""
    sizes = {"tiny": 100, "debug": 256, "big": 512}
    flavors = {name: SimpleNamespace(vocab_size=size, update_from_config=lambda job: None) for name, size in sizes.items()}
    monkeypatch.setitem(train_spec._extra_train_specs, "toy", SimpleNamespace(model_args=flavors))

    def build_config(
        training: str = "",
        dataset: str = "novels",
        data: str = "",
        tokenizer: str = "bytes",
        flavor: str = "debug",
        more: str = "",
    ) -> JobConfig:
        (tmp_path / "job.toml").write_text(
            f"""
            [job]
            custom_config_module = "fla_harmonic.titan.config"
            [model]
            name = "toy"
            flavor = "{flavor}"
            hf_assets_path = "{tmp_path}"
            [data]
            tokenizer = "{tokenizer}"
            cache_dir = "{tmp_path / "cache"}"
            {data}
            [training]
            dataset = "{dataset}"
            local_batch_size = 2
            seq_len = 64
            steps = 10
            {training}
            {more}
            """
        )
        return ConfigManager().parse_args(["--job.config_file", str(tmp_path / "job.toml")])

    return build_config


def build(job_config, world: int = 1, rank: int = 0) -> WindowLoader:
    return build_dataloader(dp_world_size=world, dp_rank=rank, tokenizer=build_tokenizer(job_config), job_config=job_config)


def test_job_trains_on_the_packaged_text_with_its_exact_budget_in_the_log(job, caplog) -> None:
    with caplog.at_level(logging.INFO):
        dataloader = build(job("global_batch_size = 8"), world=2, rank=1)
    text = b"\0".join(split_documents(load_documents("novels"), "train"))
    count = (len(text) - 1) // 64
    assert f"10 steps x 8 windows x 64 tokens = 5,120 tokens; {80 / count:.2f} epochs of {count:,} windows" in caplog.text
    inputs, labels = next(iter(dataloader))
    assert list(inputs) == ["input"]
    assert inputs["input"].shape == labels.shape == (2, 64)
    assert all(bytes(row.tolist()) in text for row in inputs["input"])


def test_seed_of_the_job_orders_the_windows(job) -> None:
    batches = [next(iter(build(job(more=more))))[1] for more in ("", "[debug]\nseed = 0", "[debug]\nseed = 1")]
    assert batches[0].equal(batches[1])
    assert not batches[0].equal(batches[2])


def test_budget_beyond_one_epoch_is_delivered_and_logged(job, tmp_path, caplog) -> None:
    # 900 bytes train: 14 windows, and 10 steps of 2 read 20
    (tmp_path / "short.txt").write_bytes(b"some words" * 100)
    with caplog.at_level(logging.INFO):
        dataloader = build(job(dataset="text", training=f'dataset_path = "{tmp_path / "short.txt"}"'))
    assert "1,280 tokens; 1.43 epochs of 14 windows" in caplog.text
    batches = [labels for _, (_, labels) in zip(range(10), dataloader, strict=False)]
    assert sum(labels.numel() for labels in batches) == 1280
    assert dataloader.state_dict()["windows"] == 20


def test_reset_documents_adds_the_document_of_each_token(job, tmp_path, caplog) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "abcdefg"}\n' * 500)
    path, data = f'dataset_path = "{tmp_path / "a.jsonl"}"', 'reset_documents = true\ntext_field = "body"'
    config = job(dataset="jsonl", training=path, data=data)
    inputs, _ = next(iter(build(config)))
    # the end of text belongs to the document that it ends: eight tokens each
    assert (inputs["input"][:, 7::8] == 0).all()
    assert inputs["document_ids"].tolist() == [[at // 8 for at in range(64)]] * 2
    assert "no effect" not in caplog.text
    (tmp_path / "a.txt").write_text("one document " * 100)
    build(job(dataset="text", training=f'dataset_path = "{tmp_path / "a.txt"}"', data="reset_documents = true"))
    assert "reset_documents has no effect" in caplog.text


def test_json_tokenizer_trains_where_the_ids_that_occur_fit_the_model(job, tmp_path) -> None:
    # the bytes again, with larger ids: 200 for the first one
    vocab = {character: 200 + n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={"<|endoftext|>": 0, **vocab}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    inputs, _ = next(iter(build(job(tokenizer="hf", flavor="big"))))
    text = b"".join(load_documents("novels")).decode()
    assert all(JsonTokenizer(tmp_path).decode(row) in text for row in inputs["input"])
    with pytest.raises(ValueError, match=r"token \d+ .* toy debug has vocab_size 256: choose a flavor with at least 456"):
        build(job(tokenizer="hf", flavor="debug"))
    # a larger vocabulary is no fault while its ids do not occur
    check_vocabulary(np.asarray([255]), JsonTokenizer(tmp_path), job(flavor="debug"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"more": "[training.dataloader]\nnum_workers = 2"}, "num_workers = 0, got 2"),
        ({"training": "global_batch_size = 7"}, r"multiple of .* = 2 x 1, got 7"),
        ({"flavor": "tiny"}, r"token \d+ \('.'\) occurs in the text, and toy tiny has vocab_size 100"),
        ({"flavor": "7B"}, r"flavor of toy to be one of tiny, debug, big, got '7B'"),
    ],
    ids=["workers", "global-batch", "vocabulary", "flavor"],
)
def test_impossible_settings_are_refused(settings: dict[str, str], message: str, job) -> None:
    with pytest.raises(ValueError, match=message):
        build(job(**settings))


def test_tokenizer_of_a_job_follows_its_data_section(tmp_path) -> None:
    ByteTokenizer().save_pretrained(tmp_path)
    model = SimpleNamespace(hf_assets_path=str(tmp_path))
    assert isinstance(build_tokenizer(SimpleNamespace(model=model)), JsonTokenizer)
    tokenizer = build_tokenizer(SimpleNamespace(model=model, data=Data(tokenizer="bytes")))
    assert isinstance(tokenizer, ByteTokenizer)
    assert isinstance(tokenizer, BaseTokenizer)
    with pytest.raises(ValueError, match="'bytes' or 'hf', got 'byte'"):
        build_tokenizer(SimpleNamespace(model=model, data=Data(tokenizer="byte")))
    assert data_section(SimpleNamespace()) == data_section(JobConfig()) == Data()


def test_bytes_per_token_are_those_of_the_jobs_own_text(job, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefg"}\n' * 500)
    config = job(dataset="jsonl", training=f'dataset_path = "{tmp_path / "a.jsonl"}"')
    assert bytes_per_token(config) is None
    build(config)
    # each document is cut by nothing and ended by one token: seven bytes of eight, but for the last, which a border cuts
    assert bytes_per_token(config) == pytest.approx(7 / 8, rel=1e-3)
    build(job())
    assert bytes_per_token(config) == pytest.approx(7 / 8, rel=1e-3)
