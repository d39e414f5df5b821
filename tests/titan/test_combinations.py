"""The table of what combines, against what jobs meet when they start."""

import copy
from itertools import combinations
from typing import Any

import pytest
from jobs import job
from torchtitan.protocols.train_spec import get_train_spec

import fla_harmonic.titan  # noqa: F401  (registers the specs)
from fla_harmonic.titan.combinations import FAMILIES, KINDS, ROWS, refusal

SHARDS, REPLICAS = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
# what a job sets to ask for a kind; tied tables are a flavor's
SETTINGS: dict[str, dict[str, Any]] = {
    "FSDP": {SHARDS: 2},
    "HSDP": {SHARDS: 2, REPLICAS: 2},
    "DDP": {REPLICAS: 2},
    "TP": {"parallelism.tensor_parallel_degree": 2},
    "PP": {"parallelism.pipeline_parallel_degree": 2},
    "CP": {"parallelism.context_parallel_degree": 2},
    "segments": {"harmonic.segment_len": 256},
    "stateful": {"harmonic.stateful": True},
    "chunked loss": {"harmonic.loss_chunk_tokens": 256},
    "recomputed blocks": {"activation_checkpoint.mode": "full"},
    "compiled blocks": {"compile.enable": True, "compile.components": ["model"]},
    "documents": {"data.reset_documents": True},
    "bf16": {"training.mixed_precision_param": "bfloat16"},
    "tied tables": {},
}
PAIRS = [pair for pair in combinations(SETTINGS, 2) if not set(pair) <= {"FSDP", "HSDP", "DDP"}]


@pytest.mark.parametrize("family", ["harmonic", "mamba", "llama"])
def test_a_job_meets_at_its_start_what_the_table_says_of_each_pair(family: str) -> None:
    stock = job(family)
    for pair in [*((kind,) for kind in SETTINGS), *PAIRS]:
        config, fields = copy.deepcopy(stock), {SHARDS: 1, REPLICAS: 1}
        for kind in pair:
            fields |= SETTINGS[kind]
        for name, value in fields.items():
            section, _, leaf = name.partition(".")
            setattr(getattr(config, section), leaf, value)
        args: Any = copy.deepcopy(get_train_spec(family).model_args["debug"])
        if "tied tables" in pair:
            if family == "llama":
                args.tie_word_embeddings = True
            else:
                args.config["tie_word_embeddings"] = True
        row = refusal(family, {*pair, "CPU"})
        if row is None:
            args.update_from_config(config)
            continue
        with pytest.raises(ValueError, match="Remedy: ") as error:
            args.update_from_config(config)
        said = str(error.value)
        assert said.startswith(f"{family}: {row.reason}, but "), (pair, said)
        assert said.endswith(f". Remedy: {row.remedy}"), (pair, said)


def test_every_row_can_be_met() -> None:
    for row in ROWS:
        kinds = {part.partition("|")[0] for part in row.kinds}
        assert kinds <= KINDS.keys()
        assert {kind for part in row.kinds for kind in part.split("|")} <= KINDS.keys()
        assert set(row.families) <= set(FAMILIES)
        # in some family, and before any other row
        assert any(refusal(family, kinds) is row for family in row.families), row
