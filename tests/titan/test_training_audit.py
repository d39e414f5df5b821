"""`[audit]`: losses of training and validation that read the future stop the run, in any layout; honest ones are unchanged."""

from pathlib import Path

import pytest
import torch
from runs import options, run, start, steps, values
from torchtitan.components.loss import IGNORE_INDEX

from fla_harmonic.titan.components.audit import replaced

pytestmark = pytest.mark.processes

# name: ranks, options
LAYOUTS = {
    "one process": (1, []),
    "chunks": (1, ["--harmonic.loss_chunk_tokens=50"]),
    "stateful segments": (1, ["--harmonic.segment_len=24", "--harmonic.stateful"]),
    "documents": (1, ["--data.reset_documents", "--training.dataset=jsonl", "--training.dataset_path={documents}"]),
    "validation": (1, ["--validation.enable", "--validation.freq=2", "--validation.steps=1",
                       "--validation.local_batch_size=2", "--validation.seq_len=64"]),
    "compiled": (1, ["--compile.enable", "--compile.components=model"]),
    "FSDP": (2, []),
    "DDP": (2, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]),
    "TP": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "CP": (2, ["--parallelism.context_parallel_degree=2"]),
    "PP": (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"]),
}


def test_audit_changes_no_number(tmp_path: Path) -> None:
    for ranks in (1, 2):
        names = [name for name, (needed, _) in LAYOUTS.items() if needed == ranks]
        documents = tmp_path / "documents.jsonl"
        documents.write_text("".join(f'{{"text": "{"word " * (number % 40 + 1)}"}}\n' for number in range(2000)))
        jobs = []
        for name in names:
            overrides = [option.format(documents=documents) for option in LAYOUTS[name][1]]
            data_ranks = ranks if name in ("FSDP", "DDP") else 1
            for interval in (0, 2):
                jobs.append(options(tmp_path / f"{name}-{interval}", data_ranks, 3, "--checkpoint.no_enable",
                                    f"--audit.interval={interval}", *overrides))
        log = run(ranks, *jobs)
        for name in names:
            without, with_audit = (values(steps(tmp_path / f"{name}-{interval}")) for interval in (0, 2))
            assert len(without) == 3
            assert without == with_audit, name
        assert log.count("audit of step 1: causal") >= len(names)
        assert log.count("audit of step 2: causal") >= len(names)
        assert ranks > 1 or "audit of the validation at step 2: causal" in log


@pytest.mark.parametrize(("leak", "ranks", "overrides"), [
    ("train", 1, []),
    ("eval", 1, LAYOUTS["validation"][1]),
    ("rank", 2, []),
], ids=["train mode", "eval mode", "one rank"])
def test_leak_stops_the_run(
    leak: str, ranks: int, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LEAK", leak)
    process = start(ranks, tmp_path / "log", options(
        tmp_path / "run", ranks, 3, "--checkpoint.no_enable", "--audit.interval=1000",
        "--experimental.custom_import=leaky_flavors", *overrides))
    assert process.wait(300) != 0
    assert "depend on earlier tokens alone" in (tmp_path / "log").read_text()


def test_only_what_is_kept_stays() -> None:
    tokens = torch.randint(50, (3, 40))
    documents = torch.arange(40).expand(3, 40) // 10
    others, kept, splits = replaced({"input": tokens, "document_ids": documents}, tokens, 50, (0, 1))
    for row, split in enumerate(splits):
        is_kept = kept[row] != IGNORE_INDEX
        assert is_kept.nonzero().flatten().tolist() == list(range((split - 1) // 10 * 10, split))
        assert torch.equal(others["input"][row] == tokens[row], is_kept)
