"""torchtitan's job configuration with one more section, `[data]`.

Named in a TOML file by `[job] custom_config_module = "fla_harmonic.titan.config"`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Data:
    tokenizer: Literal["bytes", "hf"] = "hf"
    """
    Tokens of the text: "bytes" (256 ids, the UTF-8 bytes themselves) or "hf" (the tokenizer.json in
    `model.hf_assets_path`)
    """

    text_field: str = "text"
    """Field that holds a document's text, in the datasets "jsonl" and "hub", which have one document a row"""

    hub_config: str = ""
    """Configuration name of the hub dataset (`name` of `datasets.load_dataset`); empty is the dataset's default"""

    hub_split: str = "train"
    """Split of the hub dataset that is read; it is then cut 90/5/5 by position like every other text"""

    reset_documents: bool = False
    """Whether the model's state is reset where a document starts, by an extra input `document_ids`"""

    cache_dir: str = ""
    """
    Folder of the cached token arrays; empty is `fla_harmonic` in `$XDG_CACHE_HOME`, or in `~/.cache` where that is unset
    """


@dataclass
class JobConfig:
    """
    Extension of torchtitan's JobConfig, which merges these sections into its own.
    """

    data: Data = field(default_factory=Data)
    """Text data configuration"""


def data_section(job_config: Any) -> Data:
    """
    The `[data]` section of a job configuration, or its defaults where the job has no such section, as in a job that does
    not name this module as its `custom_config_module`.
    """
    section = getattr(job_config, "data", None)
    return Data() if section is None else section
