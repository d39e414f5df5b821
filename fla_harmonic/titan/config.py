"""torchtitan's job configuration with three more sections, `[data]`, `[harmonic]` and `[hallamonic]`.

Named in a TOML file by `[job] custom_config_module = "fla_harmonic.titan.config"`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fla_harmonic.text import TextOptions


@dataclass
class Data(TextOptions):
    tokenizer: Literal["bytes", "hf"] = "hf"
    """
    Tokens of the text: "bytes" (256 ids, the UTF-8 bytes themselves) or "hf" (the tokenizer.json in
    `model.hf_assets_path`)
    """

    reset_documents: bool = False
    """Whether the model's state is reset where a document starts, by an extra input `document_ids`"""

    token_budget: int = 0
    """
    Tokens that `[training]` amounts to as the file states it: global batch (the local one where that is unset) x seq_len x
    steps. A run that departs from it warns. 0: none is stated
    """

    budget_seq_len: int = 0
    """
    Length of the sequences in place of `training.seq_len`, at exactly `token_budget` tokens: batch, steps and warm-up follow
    from those of `[training]`, which then has to amount to the budget. 0 is off
    """


@dataclass
class Harmonic:
    loss_chunk_tokens: int = 0
    """
    Tokens whose logits exist at a time: the model computes the loss itself, a chunk of tokens after another, with the values
    and gradients of the dense loss. 0 is the dense loss, on logits [T, vocab_size]. For all families
    """

    segment_len: int = 0
    """
    Most tokens of a segment: a sequence runs as segments that pass on their states, each computed again in the backward
    pass; the same values and gradients, in the memory of one segment. 0 is off. Harmonic alone
    """

    stateful: bool = False
    """
    Whether the states are carried over from batch to batch of consecutive text, without gradient: each row of the global
    batch reads a part of the text of its own, from its start to its end. With `data.reset_documents` a state ends with its
    document. Harmonic alone
    """

    config: str = ""
    """
    Fields of `HarmonicConfig` in place of the flavor's: name=value, parted by spaces, each value in JSON without spaces or a
    plain word, e.g. "timescale_mode=init gate_rank=16 timescales=[[2,8],[100,1000]]". Harmonic alone
    """


@dataclass
class Hallamonic:
    train: Literal["harmonic", "all"] = "all"
    """
    Which parameters of a converted model are trained: "harmonic", those of the layers that took attention's place (phase 1),
    or "all" (phase 2). The others have neither gradients nor optimizer states, and stay as they are bit for bit
    """

    teacher_path: str = ""
    """
    Hugging Face directory of a model with the same tokens, as a rule the original: training brings the model's distribution of
    the next token close to the teacher's. Each rank holds the whole teacher. Empty: the text alone teaches
    """

    teacher_weight: float = 0.5
    """
    Share of the teacher in the loss, w KL(teacher || model) + (1 - w) cross entropy, which is what is logged in training.
    Validation scores the cross entropy
    """


@dataclass
class Audit:
    interval: int = 1000
    """
    The loss is audited at step 1, at each multiple of this many steps and in each validation: its batch runs again with other
    tokens behind a split, and the loss before the split must stay. An audit costs two steps. 0 is off
    """


@dataclass
class JobConfig:
    """Extension of torchtitan's JobConfig, which merges these sections into its own."""

    data: Data = field(default_factory=Data)
    """Text data configuration"""

    harmonic: Harmonic = field(default_factory=Harmonic)
    """Loss in chunks, segments and carried states: training at long lengths"""

    hallamonic: Hallamonic = field(default_factory=Hallamonic)
    """Training of converted models"""

    audit: Audit = field(default_factory=Audit)
    """Whether the losses that are logged read the future"""


def _section(job_config: Any, default: Any) -> Any:
    """A section of a job; the default in a job that does not name this module as its `custom_config_module`."""
    section = getattr(job_config, type(default).__name__.lower(), None)
    return default if section is None else section


def data_section(job_config: Any) -> Data:
    return _section(job_config, Data())


def harmonic_section(job_config: Any) -> Harmonic:
    return _section(job_config, Harmonic())


def hallamonic_section(job_config: Any) -> Hallamonic:
    return _section(job_config, Hallamonic())


def audit_section(job_config: Any) -> Audit:
    # without a section nothing is audited
    return _section(job_config, Audit(interval=0))


def config_overrides(job_config: Any) -> dict[str, Any]:
    """The fields that `[harmonic] config` sets."""
    return parse_fields(harmonic_section(job_config).config.split())


def parse_fields(entries: Sequence[str]) -> dict[str, Any]:
    """Entries name=value, the value in JSON or a plain word, as a dictionary; a ValueError for others and repeated names."""
    fields: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not (name.isidentifier() and equals) or name in fields:
            raise ValueError(
                f"expected harmonic.config to be name=value parted by spaces, each field once, but got {entry!r}. Remedy: for "
                'example "timescale_mode=init gate_rank=16"'
            )
        try:
            fields[name] = json.loads(text)
        except ValueError:
            # a plain word
            fields[name] = text
    return fields


def global_batch_size(job_config: Any, dp_degree: int = 1) -> int:
    """Rows of a step: `training.global_batch_size`, or the local batches of all data-parallel ranks where that is unset."""
    training = job_config.training
    return training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * dp_degree


def compiles_model(job_config: Any) -> bool:
    """Whether the blocks of the model are compiled."""
    return job_config.compile.enable and "model" in job_config.compile.components


def loss_in_model(job_config: Any) -> bool:
    """Whether the model computes the loss itself, from labels that the batches hold."""
    section = harmonic_section(job_config)
    in_parts = section.loss_chunk_tokens or section.segment_len or section.stateful
    return bool(in_parts or hallamonic_section(job_config).teacher_path)
