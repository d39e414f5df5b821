import copy
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tied_flavors  # noqa: F401  (the small flavor "tied")
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import initialised, job, moved
from runs import VALIDATION, options, read, run, steps, values
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

from fla_harmonic.text import TokenSplit, load_split
from fla_harmonic.text.corpus import split_documents
from fla_harmonic.text.tokenizers import ByteTokenizer
from fla_harmonic.titan.combinations import Start, check_job
from fla_harmonic.titan.components.validate import SplitValidator, scored_bytes


class Recorder(SimpleNamespace):
    """What a validator asks of the metrics processor."""
    ntokens_since_last_log: int

    def log_validation(self, loss: float, step: int, metrics: dict[str, float]) -> None:
        self.tokens_counted = self.ntokens_since_last_log
        self.ntokens_since_last_log, self.time_last_log = 0, -1.0
        self.logged.append((step, loss, metrics))


def validating(text: Path, *overrides: str, family: str = "harmonic") -> JobConfig:
    return job(family, "--model.flavor=tied", "--training.dataset=text", f"--training.dataset_path={text}",
               "--validation.enable", *overrides)


def dims(**degrees: int) -> ParallelDims:
    sizes = {"dp_shard": 1, "dp_replicate": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees
    return ParallelDims(**sizes, world_size=math.prod(sizes.values()))


def validator(config: JobConfig, ranks: int = 1, rank: int = 0) -> SplitValidator:
    return SplitValidator(
        config, tokenizer=ByteTokenizer(), parallel_dims=dims(), dp_world_size=ranks, dp_rank=rank, loss_fn=cross_entropy_loss,
        validation_context=nullcontext, maybe_enable_amp=nullcontext(),
        metrics_processor=Recorder(ntokens_since_last_log=123, time_last_log=5.0, logged=[]),
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text"
    letters = np.random.default_rng(0).integers(ord("a"), ord("z"), 20_000, dtype=np.uint8)
    file.write_bytes(letters.tobytes())
    return file


@pytest.fixture(scope="module")
def model() -> nn.Module:
    spec = get_train_spec("harmonic")
    return moved(initialised(spec.model_cls(copy.deepcopy(spec.model_args["tied"]))))


@given(seq_len=st.integers(1, 90), batch=st.integers(1, 5), n=st.sampled_from([-1, 1, 2, 7]), ranks=st.integers(1, 3))
@settings(max_examples=8)
def test_loss_is_that_of_training_on_the_same_tokens(
    text: Path, model: nn.Module, seq_len: int, batch: int, n: int, ranks: int,
) -> None:
    config = validating(text, f"--validation.seq_len={max(seq_len, 20)}", f"--validation.local_batch_size={batch}",
                 f"--validation.steps={n}")
    seq_len = config.validation.seq_len
    # what training computes, window by window, on the text itself
    tokens = torch.tensor(list(split_documents([text.read_bytes()], "validation")[0]))
    labels = len(tokens) - 1 if n < 0 else min(len(tokens) - 1, n * batch * ranks * seq_len)
    expected = 0.0
    with torch.no_grad():
        for start in range(0, labels, seq_len):
            stop = min(start + seq_len, labels)
            logits = model(tokens[None, start:stop])
            expected += F.cross_entropy(logits[0].double(), tokens[start + 1 : stop + 1], reduction="sum").item()
    scores = [validator(config, ranks, rank)._score(model, 1) for rank in range(ranks)]
    assert sum(targets for _, targets, _ in scores) == labels == validator(config, ranks).targets
    assert sum(nll for nll, _, _ in scores) == pytest.approx(expected, rel=1e-6)


def test_two_validations_agree_in_every_bit_and_leave_training_alone(text: Path, model: nn.Module) -> None:
    check = validator(validating(text, "--validation.seq_len=50"))
    model.train()
    state = torch.get_rng_state()
    check.validate([model], 1)
    check.validate([model], 2)
    (_, loss, metrics), (_, again, metrics_again) = check.metrics_processor.logged
    assert loss == again
    assert metrics == metrics_again
    assert metrics["validation_metrics/bits_per_token"] == loss / math.log(2)
    # letters: a byte each
    assert metrics["validation_metrics/bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-12)
    assert metrics["validation_metrics/tokens"] == 999
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    # its own throughput counts its tokens, the one of training does not, and its clock has stood still
    assert check.metrics_processor.tokens_counted >= 999
    assert check.metrics_processor.ntokens_since_last_log == 123
    assert 5 < check.metrics_processor.time_last_log < 60


def test_a_validation_that_drops_tokens_is_an_error(text: Path, model: nn.Module) -> None:
    check = validator(validating(text, "--validation.seq_len=50"), ranks=2)
    with pytest.raises(RuntimeError, match=r"expected 999 tokens to be scored .*Remedy"):
        check.validate([model], 1)


@given(documents=st.lists(st.binary(min_size=1, max_size=9).map(lambda b: bytes(c | 1 for c in b)), min_size=1, max_size=6),
       ended=st.sampled_from(["none", "between", "all"]), data=st.data())
def test_bytes_are_those_of_the_labels(documents: list[bytes], ended: str, data: Any) -> None:
    parts = [document + b"\0" * (ended != "none") for document in documents]
    if ended == "between":
        parts[-1] = documents[-1]
    tokens = np.frombuffer(b"".join(parts), np.uint8)
    starts = np.cumsum([0, *map(len, parts[:-1])])
    split = TokenSplit(tokens, starts, sum(map(len, documents)))
    targets = data.draw(st.integers(0, len(tokens) - 1))
    # 0 is only ever an end of text here
    assert scored_bytes(split, ByteTokenizer(), targets) == int((tokens[1 : targets + 1] != 0).sum())


def test_bytes_of_the_packaged_text() -> None:
    split = load_split("novels", None, "validation", ByteTokenizer())
    assert scored_bytes(split, ByteTokenizer(), len(split.tokens) - 1) == split.num_bytes - 1


def test_steps_of_validation() -> None:
    check = SplitValidator.__new__(SplitValidator)
    check.job_config = SimpleNamespace(validation=SimpleNamespace(freq=4), training=SimpleNamespace(steps=10))
    assert [step for step in range(1, 11) if check.should_validate(step)] == [1, 4, 8, 10]


@pytest.mark.parametrize(("overrides", "message"), [
    (["--parallelism.pipeline_parallel_degree=2"],
     r"pipeline .*validation\.local_batch_size = 8, validation\.seq_len = 2048, training\.local_batch_size = 4"),
    (["--parallelism.context_parallel_degree=3", "--training.seq_len=999"], r"equal pieces, but validation\.seq_len = 2048"),
    (["--validation.freq=0"], r"at least one window, but validation\.freq = 0"),
    (["--validation.local_batch_size=0"], r"at least one window, but .*validation\.local_batch_size = 0"),
    (["--validation.seq_len=0"], r"at least one window, but .*validation\.seq_len = 0"),
    (["llama", "--validation.seq_len=128", "--training.seq_len=64"],
     r"llama: positions beyond .*validation\.seq_len = 128, training\.seq_len = 64"),
    (["--validation.seq_len=128", "--training.seq_len=64"], None),
    (["--validation.no_enable", "--validation.seq_len=0"], None),
])
def test_what_would_score_something_else_is_refused(text: Path, overrides: list[str], message: str | None) -> None:
    family = "llama" if overrides[0] == "llama" else "harmonic"
    config = validating(text, "--model.flavor=debug", *(o for o in overrides if o != family), family=family)
    start = Start(config, family, blocks=2)
    if message is None:
        check_job(start)
        return
    with pytest.raises(ValueError, match=f"{message}.*Remedy"):
        check_job(start)


@pytest.mark.processes
@pytest.mark.slow
def test_validation_in_training(tmp_path: Path) -> None:
    validation = ["--validation.enable", "--validation.freq=2", "--validation.seq_len=64", "--validation.steps=3"]
    plain, single, shards = (tmp_path / name for name in ("plain", "single", "shards"))
    common = ["--checkpoint.no_enable"]
    run(1, options(plain, 1, 4, *common),
        options(single, 1, 4, *common, *validation, "--validation.local_batch_size=6", "--metrics.enable_tensorboard"))
    run(2, options(shards, 2, 4, *common, *validation, "--validation.local_batch_size=3", "--activation_checkpoint.mode=full"))
    assert values(steps(single), "bits_per_byte") == values(steps(plain), "bits_per_byte")
    one, two = ([record for record in read(out) if VALIDATION in record] for out in (single, shards))
    assert [record["step"] for record in one] == [record["step"] for record in two] == [1, 2, 4]
    for record, other in zip(one, two, strict=True):
        assert record["validation_metrics/tokens"] == other["validation_metrics/tokens"] == 3 * 6 * 64
        assert other[VALIDATION] == pytest.approx(record[VALIDATION], rel=1e-6)
        assert record["validation_metrics/bits_per_byte"] == pytest.approx(record[VALIDATION] / math.log(2), rel=1e-3)
    # it learns, so these are not the numbers of one model
    assert one[0][VALIDATION] > one[1][VALIDATION] > one[2][VALIDATION]

    events = EventAccumulator(str(next((single / "tb").iterdir())))
    events.Reload()
    for name in (VALIDATION, "validation_metrics/bits_per_byte", "bits_per_token", "bits_per_byte",
                 "harmonic/level_3/mean_timescale"):
        assert [event.step for event in events.Scalars(name)] == ([1, 2, 4] if "validation" in name else [1, 2, 3, 4])

    # states and timescales: in their ranges, and the same on two shards whose blocks are computed twice
    ranges = [(2.2, 8.3), (10, 40), (125, 1000)]
    for record, other in zip(steps(single), steps(shards), strict=True):
        for level, (low, high) in enumerate(ranges, start=1):
            assert low < record[f"harmonic/level_{level}/mean_timescale"] < high
            for name in ("mean_timescale", "state_rms"):
                key = f"harmonic/level_{level}/{name}"
                assert other[key] == pytest.approx(record[key], rel=1e-5)
