import copy
import logging
from pathlib import Path

import pytest
import runs
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from jobs import build, job
from torchtitan.config import JobConfig
from transformers import AutoConfig

import fla_harmonic.titan  # noqa: F401  (registers the families)
from fla_harmonic.titan.components.budget import keep_token_budget
from fla_harmonic.titan.components.dataloader import build_dataloader
from fla_harmonic.titan.components.tokenizer import build_tokenizer
from fla_harmonic.titan.export import export

PLAIN = job(size="28m")


def shape(config: JobConfig) -> dict[str, int | None]:
    training, scheduler = config.training, config.lr_scheduler
    return {"seq_len": training.seq_len, "local": training.local_batch_size, "global": training.global_batch_size,
            "steps": training.steps, "warmup": scheduler.warmup_steps, "total": scheduler.total_steps}


@pytest.mark.parametrize(("length", "batch", "steps", "warmup"), [
    (1024, 16, 4000, 200), (2048, 8, 4000, 200), (4096, 4, 4000, 200), (8192, 2, 4000, 200), (16384, 1, 4000, 200),
    (32768, 1, 2000, 100), (65536, 1, 1000, 50),
])
def test_the_papers_lengths_see_the_papers_tokens(length: int, batch: int, steps: int, warmup: int) -> None:
    config = job("harmonic", f"--data.budget_seq_len={length}", size="28m")
    keep_token_budget(config)
    expected = PLAIN.to_dict()
    expected["job"]["config_file"] = config.job.config_file
    expected["data"]["budget_seq_len"] = length
    expected["training"] |= {"seq_len": length, "local_batch_size": batch, "global_batch_size": batch, "steps": steps}
    expected["lr_scheduler"]["warmup_steps"] = warmup
    assert config.to_dict() == expected
    assert batch * length * steps == 65_536_000


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@given(local=sizes, accumulate=sizes, seq_len=sizes, steps=st.integers(1, 60), warmup=st.integers(0, 60),
       total=st.none() | st.integers(1, 60), length=sizes | st.integers(1, 200), ranks=st.sampled_from([1, 2, 3, 4]),
       is_global=st.booleans())
def test_a_length_keeps_every_token_or_is_refused(
    local: int,
    accumulate: int,
    seq_len: int,
    steps: int,
    warmup: int,
    total: int | None,
    length: int,
    ranks: int,
    is_global: bool,
) -> None:
    config = copy.deepcopy(PLAIN)
    training, scheduler, rows = config.training, config.lr_scheduler, local * accumulate if is_global else local
    training.local_batch_size, training.global_batch_size = local, rows if is_global else -1
    training.seq_len, training.steps = seq_len, steps
    scheduler.warmup_steps, scheduler.total_steps = warmup, total
    config.data.token_budget, config.data.budget_seq_len = rows * seq_len * steps, length
    before, step = shape(config), rows * seq_len
    new_step = max(length, step)
    whole = [steps * step, warmup * step, (total or 0) * step]
    if (length <= step and step % length) or new_step // length % ranks or any(tokens % new_step for tokens in whole):
        with pytest.raises(ValueError, match="Remedy"):
            keep_token_budget(config, ranks)
        # nothing is half done
        assert shape(config) == before
        return
    keep_token_budget(config, ranks)
    assert new_step == training.global_batch_size * length
    assert training.seq_len == length
    assert new_step * training.steps == rows * seq_len * steps
    assert new_step * scheduler.warmup_steps == step * warmup
    assert scheduler.total_steps is None if total is None else new_step * scheduler.total_steps == step * total
    assert training.global_batch_size % (training.local_batch_size * ranks) == 0
    assert training.local_batch_size * length <= max(local * seq_len, length)
    after = shape(config)
    keep_token_budget(config, ranks)
    assert shape(config) == after


@pytest.mark.parametrize("override", [
    "--training.steps=2000", "--training.seq_len=16384", "--training.local_batch_size=16", "--training.global_batch_size=4",
    "--data.token_budget=131072000",
])
def test_another_budget_by_accident_is_an_error(override: str) -> None:
    with pytest.raises(ValueError, match=r"data\.token_budget = [\d,]+ with data\.budget_seq_len = 1024, but got .*Remedy"):
        keep_token_budget(job("harmonic", "--data.budget_seq_len=1024", override, size="28m"))


@pytest.mark.parametrize(("overrides", "ranks", "message"), [
    (["--data.budget_seq_len=1000"], 1, "the tokens of a step, 16,384, to be a multiple of 1,000 "),
    (["--data.budget_seq_len=1048576"], 1, "data.token_budget, 65,536,000, to be a multiple of 1,048,576 "),
    (["--data.budget_seq_len=262144"], 1, "lr_scheduler.warmup_steps = 200 .* multiple of 262,144 "),
    (["--data.budget_seq_len=8192"], 4, "the global batch, which is 2 at data.budget_seq_len = 8192, but it is 4"),
    (["--data.budget_seq_len=8192", "--data.token_budget=0"], 1, "data.token_budget = 0 .* = 65,536,000"),
    (["--data.budget_seq_len=-1"], 1, "data.budget_seq_len >= 0, but got -1"),
    (["--data.token_budget=-1"], 1, "data.token_budget >= 0, but got -1"),
])
def test_impossible_lengths_are_refused(overrides: list[str], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*Remedy"):
        keep_token_budget(job("harmonic", *overrides, size="28m"), ranks)


SMALL = ["--training.dataset=novels", "--training.dataset_path=", "--data.tokenizer=bytes"]


def logged(caplog: pytest.LogCaptureFixture, *overrides: str, ranks: int = 1) -> str:
    config = job("harmonic", *SMALL, *overrides, size="28m")
    with caplog.at_level(logging.INFO):
        build_dataloader(ranks, 0, build_tokenizer(config), config)
    return caplog.text


def test_the_log_says_what_a_length_changes(caplog: pytest.LogCaptureFixture) -> None:
    text = logged(caplog, "--data.budget_seq_len=65536")
    assert "training.steps = 1000 (was 4000)" in text
    assert "lr_scheduler.warmup_steps = 50 (was 200)" in text
    assert "token budget: 1,000 steps x 1 windows x 65,536 tokens = 65,536,000 tokens" in text
    assert "do not compare" not in text


def test_the_file_as_it_is_has_its_budget(caplog: pytest.LogCaptureFixture) -> None:
    assert "do not compare" not in logged(caplog)


@pytest.mark.parametrize(("overrides", "ranks", "tokens"), [
    (["--training.seq_len=1024"], 1, "8,192,000"), (["--training.steps=20"], 1, "327,680"), ([], 2, "131,072,000"),
])
def test_a_run_of_another_budget_warns(
    overrides: list[str],
    ranks: int,
    tokens: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert f"this run is of {tokens} tokens, and the file's data.token_budget is 65,536,000" in logged(
        caplog, *overrides, ranks=ranks)


def test_an_exported_model_has_the_trained_length(tmp_path: Path) -> None:
    overrides = ["--data.token_budget=2457600", "--data.budget_seq_len=128"]
    dcp.save(build(job("llama")).state_dict(), checkpoint_id=tmp_path / "step-1")
    export(job("llama", *overrides), tmp_path / "step-1", tmp_path / "hf")
    assert AutoConfig.from_pretrained(tmp_path / "hf").max_position_embeddings == 128


@pytest.mark.processes
@pytest.mark.slow
def test_two_ranks_share_the_budget_of_one(tmp_path: Path) -> None:
    small = ["--training.global_batch_size=-1", "--training.local_batch_size=2", "--training.seq_len=128",
             "--training.steps=4", "--data.token_budget=1024", "--checkpoint.no_enable"]

    def options(name: str, ranks: int, length: int) -> list[str]:
        return runs.options(tmp_path / name, ranks, 4, *small, f"--data.budget_seq_len={length}")

    runs.run(1, options("one", 1, 32), options("long", 1, 512))
    runs.run(2, options("two", 2, 32))
    one, two, long = (runs.steps(tmp_path / name) for name in ("one", "two", "long"))
    assert [record["n_tokens_seen"] for record in one] == [256, 512, 768, 1024]
    for record, reference in zip(two, one, strict=True):
        for name in (runs.LOSS, "grad_norm"):
            assert record[name] == pytest.approx(reference[name], rel=1e-5)
        assert (record["lr"], record["n_tokens_seen"]) == (reference["lr"], reference["n_tokens_seen"])
    # half as many steps of twice the tokens, and half the warm-up
    assert [record["n_tokens_seen"] for record in long] == [512, 1024]
    assert long[0]["lr"] > one[0]["lr"]
