"""Every parallelism against one process, on gloo: loss and gradient norm before clipping, from equal initial weights."""

from pathlib import Path

import pytest

from benchmarks.parallel import BOUND, LAYOUTS, Layout, Row, run, table

STEPS = 3
# beyond the table of `python -m benchmarks.parallel`: kinds that go wrong each in a way of its own
MORE = (
    # DDP reduces accumulated gradients again
    Layout("DDP 2, accumulation", replicas=2, accumulation=2),
    Layout("CP 2, compiled", context=2, overrides=("--compile.enable", "--compile.backend=aot_eager")),
    Layout("CP 2, recomputed", context=2, overrides=("--activation_checkpoint.mode=full",)),
    Layout("TP 2, op-selective", tensor=2, overrides=(
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")),
    Layout("TP 2, whole logits", tensor=2, overrides=("--parallelism.disable_loss_parallel",)),
    Layout("TP 2 x CP 2", tensor=2, context=2),
    Layout("FSDP 2 x PP 2", fsdp=2, pipeline=2),
    # MLP gates, no projection
    Layout("paper", flavor="debug-paper"),
    Layout("paper, TP 2", flavor="debug-paper", tensor=2, like="paper"),
    Layout("mamba", family="mamba"),
    Layout("mamba, DDP 2", family="mamba", replicas=2, like="mamba"),
    Layout("mamba, PP 2 interleaved", family="mamba", pipeline=2, like="mamba", overrides=(
        "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",)),
    Layout("llama", family="llama"),
    Layout("llama, DDP 2", family="llama", replicas=2, like="llama"),
    Layout("llama, TP 2", family="llama", tensor=2, like="llama"),
    Layout("llama, PP 2", family="llama", pipeline=2, like="llama"),
)


def check(rows: list[Row]) -> None:
    far = [row for row in rows if not max(row.loss_difference, row.norm_difference) <= BOUND]
    assert not far, table(rows)


@pytest.mark.slow
def test_every_layout_trains_like_one_process(tmp_path: Path) -> None:
    rows = run((*LAYOUTS, *MORE), STEPS, tmp_path)
    print(table(rows))
    # a bound of one in a million means something only where the values are not all alike
    assert len({row.norm for row in rows}) > 1
    check(rows)
