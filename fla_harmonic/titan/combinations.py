"""
What combines with what. `KINDS` are the kinds of parallelism and of training that a job can ask for, and a row of `ROWS` is a
combination of them that is refused, with the reason and the remedy. The check when a job starts, the tables of
`docs/scaling.md` and `python -m benchmarks.combinations` read these two alone.
"""

import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torchtitan.tools import utils

from fla_harmonic.titan.config import Hallamonic, compiles_model, data_section, hallamonic_section, harmonic_section

FAMILIES = ("harmonic", "mamba", "llama", "hallamonic")
# the schedules that were compared with one process, and how many stages each gives to a rank
SCHEDULES = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}

_REPLICAS, _SHARDS = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
_TENSOR, _CONTEXT, _PIPELINE = (f"parallelism.{kind}_parallel_degree" for kind in ("tensor", "context", "pipeline"))
_SCHEDULE, _SCHEDULE_FILE = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"
_SHAPE = ("local_batch_size", "seq_len")
_VALIDATION = ("validation.freq", *(f"validation.{name}" for name in _SHAPE))
_SECTIONS: dict[str, Callable[[Any], Any]] = {
    "data": data_section, "harmonic": harmonic_section, "hallamonic": hallamonic_section,
}


@dataclass(frozen=True)
class Start:
    """
    A job that starts, and what the table asks about its model. `start["training.seq_len"]` is a field of the job,
    `start["blocks"]` one of these.
    """

    job_config: Any
    family: str
    blocks: int
    tied_tables: bool = False
    attention_layers: bool = False
    attn_mode: str = "chunk"
    # 0: no short convolutions
    conv_size: int = 0
    # in the place of a pretrained model's attention
    converted_layers: int = 0
    mamba_kernels: bool = False
    # set by `harmonic.config`, and not in `HarmonicConfig`
    unknown_fields: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        section, dot, leaf = name.partition(".")
        if not dot:
            return getattr(self, name)
        own = _SECTIONS.get(section)
        return getattr(own(self.job_config) if own is not None else getattr(self.job_config, section), leaf)

    @property
    def device(self) -> str:
        return utils.device_type

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters, as torchtitan counts: shards of the data and of the sequence."""
        shards = self[_SHARDS]
        if shards == -1:
            others = self[_REPLICAS] * self[_TENSOR] * self[_PIPELINE] * self[_CONTEXT]
            shards = max(1, int(os.environ.get("WORLD_SIZE", others)) // others)
        return shards * self[_CONTEXT]

    @property
    def stages(self) -> int:
        return self[_PIPELINE] * SCHEDULES.get(self[_SCHEDULE], 1)

    def kinds(self) -> set[str]:
        """The kinds that the job asks for."""
        return {name for name, kind in KINDS.items() if kind.is_asked(self)}


class Kind:
    """Something that a job can ask for: whether it does, and the fields of `Start` that an error names."""

    def __init__(self, is_asked: Callable[[Start], Any], *fields: str) -> None:
        self.is_asked, self.fields = is_asked, fields


def _set(field: str) -> Kind:
    return Kind(lambda start: start[field], field)


def _degree(field: str) -> Kind:
    return Kind(lambda start: start[field] > 1, field)


KINDS = {
    "FSDP": Kind(lambda s: s.shards > 1 and s[_REPLICAS] == 1, _SHARDS),
    "HSDP": Kind(lambda s: s.shards > 1 and s[_REPLICAS] > 1, _REPLICAS, _SHARDS),
    "DDP": Kind(lambda s: s.shards == 1 and s[_REPLICAS] > 1, _REPLICAS, _SHARDS),
    "TP": _degree(_TENSOR),
    "PP": _degree(_PIPELINE),
    "CP": _degree(_CONTEXT),
    "segments": _set("harmonic.segment_len"),
    "stateful": _set("harmonic.stateful"),
    "chunked loss": _set("harmonic.loss_chunk_tokens"),
    "recomputed blocks": Kind(lambda s: s["activation_checkpoint.mode"] != "none", "activation_checkpoint.mode"),
    "compiled blocks": Kind(lambda s: compiles_model(s.job_config), "compile.enable", "compile.components"),
    "documents": _set("data.reset_documents"),
    "bf16": Kind(lambda s: s["training.mixed_precision_param"] != s["training.dtype"],
                  "training.mixed_precision_param", "training.dtype"),
    "tied tables": Kind(lambda s: s.tied_tables, "model.flavor", "tied_tables"),
    # what follows is in no table of the docs
    "EP": _degree("parallelism.expert_parallel_degree"),
    "expert TP": _degree("parallelism.expert_tensor_parallel_degree"),
    "async TP": _set("parallelism.enable_async_tensor_parallel"),
    "whole logits": _set("parallelism.disable_loss_parallel"),
    "compiled loss": Kind(lambda s: s["compile.enable"] and "loss" in s["compile.components"],
                           "compile.enable", "compile.components"),
    "another schedule": Kind(lambda s: s[_SCHEDULE] not in SCHEDULES or s[_SCHEDULE_FILE], _SCHEDULE, _SCHEDULE_FILE),
    "more stages than blocks": Kind(lambda s: s.stages > s.blocks, "model.flavor", "blocks", _SCHEDULE, "stages"),
    "unequal pieces": Kind(lambda s: s["training.seq_len"] % (s[_TENSOR] * s[_CONTEXT]),
                            "training.seq_len", _TENSOR, _CONTEXT),
    "empty validation": Kind(lambda s: s["validation.enable"] and min(s[field] for field in _VALIDATION) < 1, *_VALIDATION),
    "another validation shape": Kind(
        lambda s: s["validation.enable"] and any(s[f"validation.{name}"] != s[f"training.{name}"] for name in _SHAPE),
        *(f"{section}.{name}" for section in ("validation", "training") for name in _SHAPE)),
    "longer validation": Kind(lambda s: s["validation.enable"] and s["validation.seq_len"] > s["training.seq_len"],
                               "validation.seq_len", "training.seq_len"),
    "unequal validation pieces": Kind(
        lambda s: s["validation.enable"] and s["validation.seq_len"] % (s[_TENSOR] * s[_CONTEXT]),
        "validation.seq_len", _TENSOR, _CONTEXT),
    "pieces within a convolution": Kind(lambda s: s["training.seq_len"] // s[_CONTEXT] < s.conv_size - 1,
                                         "training.seq_len", "conv_size"),
    "reordered sequence": Kind(lambda s: s["parallelism.context_parallel_load_balancer"] == "ptrr",
                                "parallelism.context_parallel_load_balancer"),
    "narrow parameters": Kind(lambda s: s["training.dtype"] != "float32", "training.dtype"),
    "CPU": Kind(lambda s: s.device == "cpu", "device"),
    "CPU offload": _set("training.enable_cpu_offload"),
    "pinned memory": Kind(lambda s: s["checkpoint.enable"] and s["checkpoint.async_mode"].lower() == "async_with_pinned_mem",
                           "checkpoint.async_mode"),
    "early optimizer steps": _set("optimizer.early_step_in_backward"),
    "torchft": _set("fault_tolerance.enable"),
    "converters": _set("model.converters"),
    "negative tokens": Kind(lambda s: min(s["harmonic.loss_chunk_tokens"], s["harmonic.segment_len"]) < 0,
                             "harmonic.loss_chunk_tokens", "harmonic.segment_len"),
    "mamba-ssm": Kind(lambda s: s.mamba_kernels and s.device == "cuda", "mamba_kernels"),
    "attention layers": Kind(lambda s: s.attention_layers, "model.flavor", "attention_layers"),
    "short convolutions": Kind(lambda s: s.conv_size, "model.flavor", "conv_size"),
    "step by step": Kind(lambda s: s.attn_mode != "chunk", "model.flavor", "attn_mode"),
    "fields of HarmonicConfig": _set("harmonic.config"),
    "unknown fields": _set("unknown_fields"),
    "[hallamonic]": Kind(lambda s: hallamonic_section(s.job_config) != Hallamonic(),
                          *(f"hallamonic.{name}" for name in vars(Hallamonic()))),
    "no weights": Kind(
        lambda s: not (s["checkpoint.enable"] and (s["checkpoint.initial_load_in_hf"] or s["checkpoint.initial_load_path"])),
        "checkpoint.enable", "checkpoint.initial_load_in_hf", "checkpoint.initial_load_path"),
    "nothing to train": Kind(lambda s: s["hallamonic.train"] == "harmonic" and not s.converted_layers,
                              "hallamonic.train", "converted_layers"),
    "teacher": _set("hallamonic.teacher_path"),
    "weight out of range": Kind(lambda s: not 0 <= s["hallamonic.teacher_weight"] <= 1, "hallamonic.teacher_weight"),
}


@dataclass(frozen=True)
class Row:
    """A combination that is refused. The docs list the reason too."""

    # keys of `KINDS`; of those joined by "|" any
    kinds: tuple[str, ...]
    reason: str
    remedy: str
    families: tuple[str, ...] = FAMILIES
    # any of these lifts it
    unless: tuple[str, ...] = ()

    def applies(self, family: str, kinds: Collection[str]) -> bool:
        return (
            family in self.families and not any(kind in kinds for kind in self.unless)
            and all(any(kind in kinds for kind in part.split("|")) for part in self.kinds)
        )

    def asked(self, start: Start) -> str:
        """The fields that the row is about, as the job has them."""
        kinds = [kind for part in self.kinds for kind in part.split("|") if KINDS[kind].is_asked(start)]
        fields = dict.fromkeys(field for kind in kinds for field in KINDS[kind].fields)
        return ", ".join(f"{field} = {json.dumps(start[field])}" for field in fields)


_HARMONIC, _MAMBA, _LLAMA, _HALLAMONIC = ((family,) for family in FAMILIES)
_SHARD_DATA = f"1, and shard over the data with {_SHARDS} = -1 (FSDP)"
_ONE_TEXT = "harmonic.segment_len = 0 and harmonic.stateful = false"
# the first that applies is reported
ROWS = (
    Row(("EP|expert TP",), "expert parallelism is not supported (there are no experts)", "degrees of 1"),
    Row(("TP",), "tensor parallelism is not supported (the projections of its mixer mix what the ranks would hold)",
        _SHARD_DATA, _MAMBA),
    Row(("CP",), "context parallelism is not supported (its mixer starts every rank's piece from an empty state)",
        _SHARD_DATA, _MAMBA),
    Row(("CPU", "CP"), "context parallelism is not supported (torch's ring attention has no CPU kernels)",
        _SHARD_DATA, _LLAMA),
    Row(("TP|CP|PP",), "tensor, context and pipeline parallelism are not supported (its layers are those of the pretrained "
        "model's class)", _SHARD_DATA, _HALLAMONIC),
    Row(("DDP", "TP|PP"), "replicas without shards (DDP) do not combine with tensor or pipeline parallelism",
        f"{_REPLICAS} = 1 and {_SHARDS} = -1"),
    Row(("unequal pieces",), "tensor and context parallelism cut a sequence into equal pieces",
        "training.seq_len a multiple of the product of both degrees"),
    Row(("empty validation",), "a validation scores at least one window", "at least 1 each, or validation.enable = false"),
    Row(("PP", "another validation shape"), "a pipeline runs on the shapes that its stages were built for",
        "validation.local_batch_size and validation.seq_len as in [training]"),
    Row(("unequal validation pieces",), "tensor and context parallelism cut a sequence into equal pieces",
        "validation.seq_len = training.seq_len"),
    Row(("longer validation",), "positions beyond the trained length mean nothing to the model",
        "validation.seq_len = training.seq_len", _LLAMA),
    Row(("CP", "reordered sequence"), "a recurrence needs contiguous pieces of the sequence",
        "leave the load balancer out; it is switched off", _HARMONIC),
    Row(("TP|PP", "bf16"), "tensor or pipeline parallelism without FSDP trains in training.dtype alone",
        f"make both equal, or add FSDP ({_SHARDS} > 1)", unless=("FSDP", "HSDP")),
    Row(("narrow parameters",), "timescales need parameters in float32 (rounded to bfloat16 they stay up to 2% off)",
        'training.dtype = "float32", and bfloat16 by training.mixed_precision_param', (*_HARMONIC, *_MAMBA, *_HALLAMONIC)),
    Row(("CPU offload", "CPU"), "parameters are offloaded from an accelerator", "training.enable_cpu_offload = false"),
    Row(("CPU offload",), "parameters are offloaded by FSDP", "training.enable_cpu_offload = false, or FSDP",
        unless=("FSDP", "HSDP")),
    Row(("pinned memory", "CPU"), "memory is pinned for an accelerator", 'checkpoint.async_mode = "async"'),
    Row(("TP", "compiled loss"), "a loss over sharded logits must not be compiled (wrong values, torch 2.13)",
        'compile.components = ["model"], or parallelism.disable_loss_parallel = true', unless=("whole logits",)),
    Row(("TP", "async TP"), "asynchronous tensor parallelism is not supported",
        "parallelism.enable_async_tensor_parallel = false", _HARMONIC),
    Row(("PP", "another schedule"), "other schedules were not compared with one process",
        f"{_SCHEDULE} one of {', '.join(SCHEDULES)}, and no file"),
    Row(("PP", "documents"), "torchtitan passes document_ids to the first stage of a pipeline alone",
        "data.reset_documents = false, or no pipeline"),
    Row(("early optimizer steps",), "optimizer steps in the backward pass allow neither clipping nor parameter groups",
        "optimizer.early_step_in_backward = false"),
    Row(("torchft",), "torchft is not supported", "fault_tolerance.enable = false"),
    Row(("converters",), "model converters are not supported", "model.converters = []"),
    Row(("compiled blocks", "mamba-ssm"), "torch.compile is not supported with mamba-ssm's kernels, which do not trace as one "
        "graph", 'compile.enable = false, or compile.components = ["loss"]', _MAMBA),
    Row(("documents",), "documents of one window cannot be kept apart",
        'data.reset_documents = false, or model.name = "harmonic"', (*_MAMBA, *_LLAMA)),
    Row(("negative tokens",), "these are numbers of tokens", "0 for off"),
    Row(("[hallamonic]",), "the section [hallamonic] is for converted models",
        'leave the section out, or model.name = "hallamonic"', (*_HARMONIC, *_MAMBA, *_LLAMA)),
    Row(("fields of HarmonicConfig",), "fields of HarmonicConfig cannot change this model",
        'harmonic.config = "", or model.name = "harmonic"', (*_MAMBA, *_LLAMA, *_HALLAMONIC)),
    Row(("unknown fields",), "HarmonicConfig has no such fields", "correct them in harmonic.config", _HARMONIC),
    Row(("segments|stateful",), "Harmonic alone passes states on", f'{_ONE_TEXT}, or model.name = "harmonic"',
        (*_MAMBA, *_LLAMA, *_HALLAMONIC)),
    Row(("segments|stateful", "attention layers"), "the memory of attention is no state that one segment can pass to the next",
        _ONE_TEXT),
    # the checkpoint would be inside the compiled block, and tracing it forbids the block to return its states
    Row(("segments|stateful", "compiled blocks", "recomputed blocks"), "compiled blocks that pass states on cannot be "
        "checkpointed", 'activation_checkpoint.mode = "none"; segments are recomputed as they are'),
    Row(("segments|stateful", "TP|PP|CP"), "states are passed on with data parallelism alone",
        f"{_ONE_TEXT}, or a degree of 1"),
    Row(("chunked loss", "PP"), "a pipeline computes the loss outside the model",
        f"harmonic.loss_chunk_tokens = 0, or {_PIPELINE} = 1"),
    # in Harmonic it needs no more than a rank's logits, or its labels, for its piece of the sequence is contiguous
    Row(("chunked loss", "TP|CP"), "with tensor or context parallelism only Harmonic has a loss in chunks",
        "harmonic.loss_chunk_tokens = 0, or a degree of 1", (*_MAMBA, *_LLAMA, *_HALLAMONIC)),
    Row(("chunked loss", "TP", "whole logits"), "a loss in chunks under tensor parallelism needs logits that stay sharded",
        "parallelism.disable_loss_parallel = false, or harmonic.loss_chunk_tokens = 0"),
    # before the number of stages: more blocks are no remedy
    Row(("tied tables", "TP|PP"), "tensor and pipeline parallelism are not supported for tied tables",
        "shard over the data (FSDP), or a flavor with tie_word_embeddings = False"),
    Row(("tied tables", "CP"), "context parallelism is not supported for tied tables",
        "shard over the data (FSDP), or a flavor with tie_word_embeddings = False", _LLAMA),
    Row(("PP", "more stages than blocks"), "a pipeline needs a block for each stage",
        "a lower degree, a schedule with one stage per rank (1F1B), or a flavor with more blocks"),
    Row(("compiled blocks", "documents", "attention layers"), "attention layers over packed documents cannot be compiled",
        "compile.enable = false, or data.reset_documents = false"),
    Row(("TP", "attention layers|short convolutions"), "tensor parallelism is for recurrences without convolutions alone",
        f"{_TENSOR} = 1, or a flavor without"),
    Row(("CP", "attention layers|step by step"), "context parallelism is for recurrences in chunks alone",
        f"{_CONTEXT} = 1, or a flavor of them"),
    Row(("CP", "short convolutions", "documents"), "short convolutions see no document's border on another rank",
        f"{_CONTEXT} = 1, a flavor without, or data.reset_documents = false"),
    Row(("CP", "pieces within a convolution"), "a rank's piece of the sequence needs at least conv_size - 1 tokens",
        "a longer sequence, or fewer ranks"),
    Row(("no weights",), "training starts from the weights of a converted model", "checkpoint.enable = true and "
        "checkpoint.initial_load_in_hf = true, which loads those of model.hf_assets_path", _HALLAMONIC),
    Row(("nothing to train",), "the model in model.hf_assets_path has no layers that took attention's place",
        'convert some, or hallamonic.train = "all"', _HALLAMONIC),
    Row(("teacher", "weight out of range"), "the teacher's weight is a share", "a value from 0 to 1", _HALLAMONIC),
    Row(("teacher", "chunked loss|documents"), "a teacher needs whole logits of windows that are one text",
        "harmonic.loss_chunk_tokens = 0 and data.reset_documents = false, or no hallamonic.teacher_path", _HALLAMONIC),
)


def refusal(family: str, kinds: Collection[str]) -> Row | None:
    """The first row that a family's job of these kinds meets; `None`: they combine."""
    return next((row for row in ROWS if row.applies(family, kinds)), None)


def check_job(start: Start) -> None:
    """
    Refuse, by a ValueError when a job starts, what would fail later or silently train something else: it says what does not
    combine, what is configured, and the remedy.
    """
    if (row := refusal(start.family, start.kinds())) is not None:
        raise ValueError(f"{start.family}: {row.reason}, but {row.asked(start)}. Remedy: {row.remedy}")
