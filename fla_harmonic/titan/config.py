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
    and gradients of the dense loss. 0 is the dense loss, on logits [T, vocab_size]. For all three families
    """

    segment_len: int = 0
    """
    Most tokens of a segment: a sequence runs as segments that hand their states on, each computed anew in the backward
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
class JobConfig:
    """
    Extension of torchtitan's JobConfig, which merges these sections into its own.
    """

    data: Data = field(default_factory=Data)
    """Text data configuration"""

    harmonic: Harmonic = field(default_factory=Harmonic)
    """Loss in chunks, segments and carried states: training at long lengths"""

    hallamonic: Hallamonic = field(default_factory=Hallamonic)
    """Training of converted models"""


def data_section(job_config: Any) -> Data:
    """
    The `[data]` section of a job configuration, or its defaults where the job has no such section, as in a job that does
    not name this module as its `custom_config_module`.
    """
    section = getattr(job_config, "data", None)
    return Data() if section is None else section


def harmonic_section(job_config: Any) -> Harmonic:
    """The `[harmonic]` section of a job configuration, or its defaults where the job has no such section."""
    section = getattr(job_config, "harmonic", None)
    return Harmonic() if section is None else section


def hallamonic_section(job_config: Any) -> Hallamonic:
    """The `[hallamonic]` section of a job configuration, or its defaults where the job has no such section."""
    section = getattr(job_config, "hallamonic", None)
    return Hallamonic() if section is None else section


def config_overrides(job_config: Any) -> dict[str, Any]:
    """
    The fields that `[harmonic] config` sets.

    Raises:
        ValueError: see `parse_fields`.
    """
    return parse_fields(harmonic_section(job_config).config.split())


def parse_fields(entries: Sequence[str]) -> dict[str, Any]:
    """
    Entries name=value, the value in JSON or a plain word, as a dictionary.

    Raises:
        ValueError: an entry is no name=value, or sets a field again.
    """
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


def check_harmonic_section(job_config: Any, family: str) -> None:
    """
    Refuse at start-up what the `[harmonic]` section asks for and the family or the other sections exclude.

    Raises:
        ValueError: says what is not supported, what is configured, and the remedy.
    """
    section, parallelism = harmonic_section(job_config), job_config.parallelism
    for name in ("loss_chunk_tokens", "segment_len"):
        if (value := getattr(section, name)) < 0:
            raise ValueError(f"expected harmonic.{name} >= 0, but got {value}. Remedy: a number of tokens, or 0 for off")
    defaults = vars(Hallamonic())
    converted = {name: value for name, value in vars(hallamonic_section(job_config)).items() if value != defaults.get(name)}
    if family != "hallamonic" and converted:
        asked = ", ".join(f"hallamonic.{name} = {value!r}" for name, value in converted.items())
        raise ValueError(
            f"{family}: the section [hallamonic] is for converted models, but {asked}. Remedy: leave the section out, or "
            'model.name = "hallamonic"'
        )
    if family != "harmonic" and section.config:
        raise ValueError(
            f"{family}: fields of HarmonicConfig cannot change this model, but harmonic.config = {section.config!r}. Remedy: "
            'harmonic.config = "", or model.name = "harmonic"'
        )
    for name, off in {"segment_len": "0", "stateful": "false"}.items():
        if family != "harmonic" and (value := getattr(section, name)):
            raise ValueError(
                f"{family}: states are handed on by Harmonic alone, but harmonic.{name} = {value}. Remedy: harmonic.{name} = "
                f"{off}, or model.name = \"harmonic\""
            )
    compiled = compiles_model(job_config)
    if (section.segment_len or section.stateful) and compiled and (mode := job_config.activation_checkpoint.mode) != "none":
        # the checkpoint would be inside the compiled block, and tracing it forbids the block to hand its states out
        raise ValueError(
            f"{family}: compiled blocks that hand states on cannot be checkpointed, but activation_checkpoint.mode = {mode!r} "
            f"with compile.enable = true, harmonic.segment_len = {section.segment_len} and harmonic.stateful = "
            f"{section.stateful}. Remedy: activation_checkpoint.mode = \"none\"; segments are computed anew as they are"
        )
    if section.loss_chunk_tokens and parallelism.tensor_parallel_degree > 1 and parallelism.disable_loss_parallel:
        raise ValueError(
            f"{family}: a loss in chunks under tensor parallelism needs logits that stay sharded, but "
            f"harmonic.loss_chunk_tokens = {section.loss_chunk_tokens} and parallelism.disable_loss_parallel = True. Remedy: "
            "parallelism.disable_loss_parallel = False, or harmonic.loss_chunk_tokens = 0"
        )
    offs = {"loss_chunk_tokens": "0", "segment_len": "0", "stateful": "false"}
    for kind in ("context", "tensor", "pipeline"):
        # a loss in chunks needs no more than a rank's labels, if its piece of the sequence is contiguous, or its logits
        alone = ("segment_len", "stateful") if kind != "pipeline" and family == "harmonic" else tuple(offs)
        used = {name: value for name in alone if (value := getattr(section, name))}
        if used and (degree := getattr(parallelism, f"{kind}_parallel_degree")) > 1:
            asked = ", ".join(f"harmonic.{name} = {value}" for name, value in used.items())
            remedy = ", ".join(f"harmonic.{name} = {offs[name]}" for name in used)
            raise ValueError(
                f"{family}: a loss inside the model is supported with data parallelism alone (in chunks, with Harmonic's "
                f"tensor and context parallelism too), but {asked} and parallelism.{kind}_parallel_degree = {degree}. Remedy: "
                f"{remedy}, or parallelism.{kind}_parallel_degree = 1"
            )
