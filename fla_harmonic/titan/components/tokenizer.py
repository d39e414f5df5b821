"""The tokenizers of `fla_harmonic.text` as torchtitan's."""

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig

from fla_harmonic.text import ByteTokenizer, JsonTokenizer, TextTokenizer
from fla_harmonic.titan.config import data_section

BaseTokenizer.register(TextTokenizer)


def build_tokenizer(job_config: JobConfig) -> TextTokenizer:
    """`build_tokenizer_fn` of all families: "bytes", or "hf" for the tokenizer.json in `[model] hf_assets_path`."""
    kind = data_section(job_config).tokenizer
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "hf":
        return JsonTokenizer(job_config.model.hf_assets_path)
    raise ValueError(f"expected [data] tokenizer to be 'bytes' or 'hf', got {kind!r}")
