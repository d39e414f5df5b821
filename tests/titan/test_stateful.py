import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_model import build, job
from test_train import LOSS, check_same, launch, read, train

from fla_harmonic.text import TokenSplit, TokenWindows
from fla_harmonic.text.tokenizers import ByteTokenizer
from fla_harmonic.titan.components.dataloader import build_dataloader
from fla_harmonic.titan.components.stateful import StreamLoader
from fla_harmonic.titan.components.states import LayerLayout

LAYOUT = (LayerLayout((3, 3), (2, 4)), LayerLayout((3, 3), None))


def loader(tokens: int, seq_len: int, streams: int, starts: tuple[int, ...] = (0,), **options: Any) -> StreamLoader:
    split = TokenSplit(np.arange(tokens, dtype=np.uint16), np.asarray(starts), tokens)
    options = {"local_batch_size": streams} | options
    return StreamLoader(TokenWindows(split, seq_len), streams=streams, layout=LAYOUT, labels_in_inputs=True, **options)


@given(
    seq_len=st.integers(1, 7), windows=st.integers(1, 40), streams=st.integers(1, 6), steps=st.integers(1, 12),
)
def test_every_row_reads_on_where_it_stopped(seq_len: int, windows: int, streams: int, steps: int) -> None:
    if streams > windows:
        with pytest.raises(ValueError, match=f"each of the {streams} rows.*has {windows}.*Remedy"):
            loader(windows * seq_len + 1, seq_len, streams)
        return
    batches = iter(loader(windows * seq_len + 1, seq_len, streams))
    own = windows // streams
    for step in range(steps):
        inputs, labels = next(batches)
        assert torch.equal(inputs["labels"], labels)
        begins = np.arange(streams) * own * seq_len + step % own * seq_len
        assert torch.equal(inputs["input"], torch.from_numpy(begins[:, None] + np.arange(seq_len)))
        assert torch.equal(labels, inputs["input"] + 1)
        # the states go on too, but for the first window of an epoch
        assert inputs["carried"].continues.tolist() == [step % own > 0] * streams


def test_states_end_with_their_document() -> None:
    batches = iter(loader(41, 5, 2, starts=(0, 5, 12, 30), document_ids=True))
    # streams begin at 0 and 20; documents begin at the first and third step of the one, the third of the other
    continues = [next(batches)[0]["carried"].continues.tolist() for _ in range(4)]
    assert continues == [[False, False], [False, True], [True, False], [True, True]]


@pytest.mark.parametrize(("local_batch_size", "ranks"), [(4, 1), (2, 2), (1, 2), (1, 4), (2, 1)])
def test_ranks_and_accumulation_share_the_streams(local_batch_size: int, ranks: int) -> None:
    expected = next(iter(loader(200, 5, 4)))[0]["input"]
    own: list[int] = []
    rows: dict[int, torch.Tensor] = {}
    for rank in range(ranks):
        part = loader(200, 5, 4, local_batch_size=local_batch_size, dp_world_size=ranks, dp_rank=rank)
        batches = iter(part)
        for _ in range(4 // (local_batch_size * ranks)):
            inputs, _ = next(batches)
            rows |= dict(zip(inputs["carried"].streams, inputs["input"], strict=True))
        own += part.states
    assert sorted(own) == sorted(rows) == [0, 1, 2, 3]
    assert torch.equal(torch.stack([rows[stream] for stream in range(4)]), expected)


def test_saved_states_go_back_to_their_streams_on_other_ranks() -> None:
    whole = loader(200, 5, 4)
    inputs, _ = next(iter(whole))
    states, _ = inputs["carried"].read(torch.device("cpu"))
    assert not any(x.any() for state in states for x in state.levels)
    written = [state.map(lambda x: torch.randn_like(x).requires_grad_()) for state in states]
    inputs["carried"].write(written)
    saved = whole.state_dict()
    second = loader(200, 5, 4, local_batch_size=2, dp_world_size=2, dp_rank=1)
    second.load_state_dict(saved)
    inputs, _ = next(iter(second))
    back, continues = inputs["carried"].read(torch.device("cpu"))
    assert continues.all()
    for state, expected in zip(back, written, strict=True):
        for x, e in zip([*state.levels, state.conv], [*expected.levels, expected.conv], strict=True):
            assert (x is None) == (e is None)
            if x is not None and e is not None:
                assert torch.equal(x, e[2:])
                assert not x.requires_grad
    with pytest.raises(ValueError, match=r"'streams': 2.*checkpoint.*'streams': 4.*global_batch_size"):
        loader(200, 5, 2).load_state_dict(saved)


@pytest.mark.parametrize(("tokens", "seq_len", "expected"), [(200, 10, "4, 'seq_len': 10"), (300, 5, "14")])
def test_states_do_not_go_on_at_another_place_of_the_text(tokens: int, seq_len: int, expected: str) -> None:
    saved = loader(200, 5, 4).state_dict()
    with pytest.raises(ValueError, match=rf"'windows_of_stream': {expected}.*checkpoint.* 9, 'seq_len': 5.*Remedy"):
        loader(tokens, seq_len, 4).load_state_dict(saved)


def test_streams_have_states_of_the_layers_that_the_job_sets() -> None:
    config = job("harmonic", "--harmonic.stateful", "--harmonic.config=num_hidden_layers=1", "--training.local_batch_size=2")
    (states, *_) = build_dataloader(1, 0, ByteTokenizer(), config).states.values()
    assert len(states) == 1


def test_states_of_another_text_are_refused() -> None:
    saved = loader(200, 5, 4).state_dict()
    # as many windows, in the same streams
    other = loader(199, 5, 4)
    with pytest.raises(ValueError, match=r"tokens = 200.*this job has tokens = 199.*Remedy"):
        other.load_state_dict(saved)
    assert other.consumed == 0


def test_states_that_do_not_name_their_text_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    saved = {name: value for name, value in loader(200, 5, 4).state_dict().items() if name != "identity"}
    loader(200, 5, 4).load_state_dict(saved | {"stream_windows": 8})
    assert "does not say which data" in caplog.text


def test_a_batch_is_the_sequence_that_it_continues() -> None:
    overrides = ("--harmonic.stateful", "--training.seq_len=32", "--training.local_batch_size=2")
    batches = iter(build_dataloader(1, 0, ByteTokenizer(), job("harmonic", *overrides)))
    model = build("harmonic")
    first, second = (next(batches)[0] for _ in range(2))
    with torch.no_grad():
        model.state_layout = model.model_args.state_layout()
        inputs = [{"tokens": batch.pop("input"), **batch} for batch in (first, second)]
        parts = sum(model(**batch) for batch in inputs)
        whole = model(torch.cat([b["tokens"] for b in inputs], 1), labels=torch.cat([b["labels"] for b in inputs], 1))
        fresh = sum(model(batch["tokens"], labels=batch["labels"]) for batch in inputs)
    torch.testing.assert_close(parts, whole, atol=1e-3, rtol=1e-6)
    assert abs(fresh - whole) > 1e-2
    with pytest.raises(ValueError, match="carried states need labels"):
        model(inputs[0]["tokens"], carried=first["carried"])


@pytest.mark.processes
@pytest.mark.slow
def test_stateful_training_resumes_bit_for_bit_and_on_other_ranks(tmp_path: Path) -> None:
    options = ("--harmonic.stateful", "--harmonic.segment_len=40", "--harmonic.loss_chunk_tokens=48")
    options += ("--checkpoint.interval=5",)
    train("harmonic", tmp_path / "whole", 1, 10, *options)
    expected = read(tmp_path / "whole")
    plain = train("harmonic", tmp_path / "plain", 1, 2, "--checkpoint.no_enable")
    assert plain[1][LOSS] != expected[1][LOSS]
    for name, ranks, more in (("same", 1, ()), ("ranks", 2, ("--training.local_batch_size=1",))):
        shutil.copytree(tmp_path / "whole/checkpoint/step-5", tmp_path / name / "checkpoint/step-5")
        records = train("harmonic", tmp_path / name, ranks, 10, *options, *more)
        check_same(records, expected[5:])
        if ranks == 1:
            for record, reference in zip(records, expected[5:], strict=True):
                assert (record[LOSS], record["grad_norm"]) == (reference[LOSS], reference["grad_norm"])
    # neither order of the text takes over the position of the other
    run = launch("harmonic", tmp_path / "same", 1, 11)
    assert run.returncode
    assert "Missing key in checkpoint state_dict: dataloader.windows" in run.stdout


@pytest.mark.processes
@pytest.mark.slow
def test_shards_train_on_segments_like_one_rank(tmp_path: Path) -> None:
    expected = train("harmonic", tmp_path / "whole", 1, 4, "--checkpoint.no_enable")
    options = ("--harmonic.segment_len=20", "--harmonic.loss_chunk_tokens=48", "--checkpoint.no_enable")
    check_same(train("harmonic", tmp_path / "shards", 2, 4, *options), expected)
    resharded = ("--parallelism.fsdp_reshard_after_forward=always", "--training.local_batch_size=1")
    check_same(train("harmonic", tmp_path / "resharded", 2, 4, *options, *resharded), expected)
