"""
Which kinds of parallelism and of training combine: what a job's start-up accepts and refuses, asked for each pair.

    python -m benchmarks.combinations
"""

import copy
from functools import cache
from itertools import combinations
from typing import Any

import tyro
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.train_spec import get_train_spec

import fla_harmonic.titan  # noqa: F401  (registers the specs)
from benchmarks.parallel import ROOT
from fla_harmonic.titan.models.hf_model import HFModelArgs

FAMILIES = ("harmonic", "mamba", "llama")
# fields of the job that are set
_SHARDS, _REPLICAS = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
KINDS: dict[str, dict[str, Any]] = {
    "FSDP": {_SHARDS: 2},
    "HSDP": {_SHARDS: 2, _REPLICAS: 2},
    "DDP": {_REPLICAS: 2},
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
    # a flavor's, not the job's
    "tied tables": {},
}
# one and the same kind at different degrees
_DATA = ("FSDP", "HSDP", "DDP")


def refusal(family: str, *kinds: str) -> str:
    """
    Why a job of these kinds is refused, in the words of its error; empty where it is accepted.

    Args:
        family (str):
            `"harmonic"`, `"mamba"` or `"llama"`.
        *kinds (str):
            Keys of `KINDS`.
    """
    fields = {_SHARDS: 1, _REPLICAS: 1}
    for kind in kinds:
        fields |= KINDS[kind]
    config = copy.deepcopy(_job(family))
    for name, value in fields.items():
        section, _, leaf = name.partition(".")
        setattr(getattr(config, section), leaf, value)
    args = copy.deepcopy(get_train_spec(family).model_args["debug"])
    if "tied tables" in kinds:
        _tie(args)
    try:
        args.update_from_config(config)
    except ValueError as error:
        return str(error)
    return ""


@cache
def _job(family: str) -> JobConfig:
    return ConfigManager().parse_args([f"--job.config_file={ROOT / f'titan_configs/{family}_debug.toml'}"])


def _tie(args: Any) -> None:
    if isinstance(args, HFModelArgs):
        args.config["tie_word_embeddings"] = True
    else:
        args.tie_word_embeddings = True


def _said(kinds: tuple[str, ...], message: str, reasons: dict[str, list[str]]) -> str:
    """The cell of a table; a reason is noted, without what it says about one configuration."""
    if not message:
        return "yes"
    reason = message.partition(": ")[2].partition(", but ")[0]
    reasons.setdefault(reason, []).append(" x ".join(kinds))
    return "no"


def pairs_table() -> str:
    """Pairs of kinds for Harmonic, and why pairs are refused, in Markdown."""
    reasons: dict[str, list[str]] = {}
    names = tuple(KINDS)
    cells = {
        pair: _said(pair, refusal("harmonic", *pair), reasons)
        for pair in combinations(names, 2) if not set(pair) <= set(_DATA)
    }
    lines = ["| Harmonic | " + " | ".join(names[1:]) + " |", "|---" * len(names) + "|"]
    for index, row in enumerate(names[:-1]):
        lines.append(f"| {row} | " + " | ".join(
            cells.get((row, column), "") if column in names[index + 1:] else "" for column in names[1:]) + " |")
    return "\n".join(lines) + "\n\n" + _listed(reasons)


def families_table() -> str:
    """Kinds by family, and why kinds are refused, in Markdown."""
    reasons: dict[str, list[str]] = {}
    lines = ["| model | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for family in FAMILIES:
        lines.append(f"| {family} | " + " | ".join(
            _said((family, kind), refusal(family, kind), reasons) for kind in KINDS) + " |")
    return "\n".join(lines) + "\n\n" + _listed(reasons)


def _listed(reasons: dict[str, list[str]]) -> str:
    return "\n".join(f"- {', '.join(where)}: {reason}" for reason, where in reasons.items())


def main() -> None:
    print(pairs_table())
    print()
    print(families_table())


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
