"""The text that a torchtitan job names, in a model's own tokens."""

from collections.abc import Sequence
from pathlib import Path

from torchtitan.config import ConfigManager, JobConfig

from fla_harmonic.text import TokenSplit, load_split
from fla_harmonic.text.tokenizers import JsonTokenizer
from fla_harmonic.titan.config import data_section


def job_of(config_file: Path, overrides: Sequence[str]) -> JobConfig:
    """A TOML file's job, some fields overridden; a ValueError if states are reset at each document, which no score does."""
    job = ConfigManager().parse_args([f"--job.config_file={config_file}", *overrides])
    if data_section(job).reset_documents:
        raise ValueError(
            "scoring with states that are reset at each document is not supported, but data.reset_documents = true. "
            "Remedy: --data.no-reset_documents, which scores the documents as one text")
    return job


def split_of(job: JobConfig, split: str, directory: Path) -> TokenSplit:
    """The train, validation or test split of a job's text, by the tokenizer of a Hugging Face directory."""
    return load_split(job.training.dataset, job.training.dataset_path, split, JsonTokenizer(directory), data_section(job))
