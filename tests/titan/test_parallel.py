"""Every parallelism against one process, on gloo: loss and gradient norm before clipping, from equal initial weights."""

import json
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.parallel import LAYOUTS, ROOT, Layout, far, run, table

STEPS = 3
# beyond the table of `python -m benchmarks.parallel`: kinds that go wrong each in a way of its own
MORE = (
    # DDP reduces accumulated gradients again
    Layout("DDP 2, accumulation", replicas=2, accumulation=2),
    Layout("CP 2, compiled", context=2, overrides=("--compile.enable", "--compile.backend=aot_eager")),
    Layout("CP 2, loss in chunks", context=2, overrides=("--harmonic.loss_chunk_tokens=50",)),
    Layout("CP 2, recomputed", context=2, overrides=("--activation_checkpoint.mode=full",)),
    Layout("TP 2, op-selective", tensor=2, overrides=(
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")),
    Layout("TP 2, loss in chunks", tensor=2, overrides=("--harmonic.loss_chunk_tokens=50",)),
    Layout("TP 2, whole logits", tensor=2, overrides=("--parallelism.disable_loss_parallel",)),
    Layout("TP 2 x CP 2", tensor=2, context=2),
    Layout("FSDP 2 x PP 2", fsdp=2, pipeline=2),
    Layout("FSDP 2, segments", fsdp=2, accumulation=2, overrides=(
        "--harmonic.segment_len=48", "--harmonic.loss_chunk_tokens=50", "--activation_checkpoint.mode=full",
        "--parallelism.fsdp_reshard_after_forward=always")),
    Layout("DDP 2, segments", replicas=2, overrides=("--harmonic.segment_len=48", "--harmonic.loss_chunk_tokens=50")),
    # MLP gates, no projection
    Layout("paper", flavor="debug-paper", like="paper"),
    Layout("paper, TP 2", flavor="debug-paper", tensor=2, like="paper"),
    Layout("mamba", family="mamba", like="mamba"),
    Layout("mamba, DDP 2", family="mamba", replicas=2, like="mamba"),
    *(
        Layout(f"mamba, PP 2 {schedule}", family="mamba", pipeline=2, like="mamba", overrides=(
            f"--parallelism.pipeline_parallel_schedule={schedule}",))
        for schedule in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
    ),
    Layout("llama", family="llama", like="llama"),
    Layout("llama, DDP 2", family="llama", replicas=2, like="llama"),
    Layout("llama, TP 2", family="llama", tensor=2, like="llama"),
    Layout("llama, PP 2", family="llama", pipeline=2, like="llama"),
)


def check(rows: pd.DataFrame) -> None:
    assert not far(rows), table(rows, STEPS)


def packed(path: Path) -> list[Layout]:
    """Layouts that read windows of several documents, some of which cross the ranks' borders."""
    text = (ROOT / "fla_harmonic/assets/emma.txt").read_text()
    with path.open("w") as file:
        for number in range(3000):
            # from one to about two hundred characters
            file.write(json.dumps({"text": text[61 * number:61 * number + 1 + number % 7 * (number % 31)]}) + "\n")
    overrides = ("--training.dataset=jsonl", f"--training.dataset_path={path}", "--data.reset_documents")
    name = "documents"
    return [
        Layout(name, overrides=overrides, like=name),
        Layout(f"{name}, CP 2", context=2, overrides=overrides, like=name),
        Layout(f"{name}, TP 2", tensor=2, overrides=overrides, like=name),
        Layout(f"{name}, CP 4", context=4, overrides=overrides, like=name),
    ]


@pytest.mark.processes
@pytest.mark.slow
def test_every_layout_trains_like_one_process(tmp_path: Path) -> None:
    rows = run((*LAYOUTS, *MORE, *packed(tmp_path / "documents.jsonl")), STEPS, tmp_path)
    print(table(rows, STEPS))
    check(rows)
