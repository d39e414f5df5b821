"""
Training that starts from a Hugging Face directory, by torchtitan's own options:

    [checkpoint]
    initial_load_path = "outputs/x/hf"
    initial_load_in_hf = true
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

# what two directories of one model may differ in: ids and lengths of their texts, how weights are stored and initialised, and
# which kernels run
_FREE = {
    "architectures", "attn_mode", "bos_token_id", "dtype", "eos_token_id", "fuse_cross_entropy", "fuse_linear_cross_entropy",
    "fuse_norm", "fuse_swiglu", "initializer_range", "max_position_embeddings", "pad_token_id", "rescale_prenorm_residual",
    "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale", "transformers_version",
    "use_cache", "use_mambapy", "_name_or_path",
}


def check_hf_directory(path: str | Path, expected: PreTrainedConfig) -> None:
    """
    Compare the model in a Hugging Face directory with the job's flavor, whose configuration is `expected`: tensors of the
    right shapes may belong to a model that computes something else.

    Raises:
        ValueError: the directory has no config.json, or one of another model; names the fields that differ.
    """
    if not (Path(path) / "config.json").is_file():
        raise ValueError(
            "expected a Hugging Face directory with a config.json in checkpoint.initial_load_path, but "
            f"{str(path)!r} has none. Remedy: name one that save_pretrained or fla_harmonic.titan.export wrote"
        )
    found, _ = PreTrainedConfig.get_config_dict(path)
    if found.get("model_type") == expected.model_type:
        # with the defaults of fields that the file leaves out
        found = type(expected).from_dict(found).to_dict()
    else:
        found = {"model_type": found.get("model_type")}
    found, wanted, missing = _binding(found), _binding(expected.to_dict()), object()
    different = [
        f"{name} = {found.get(name)!r}, not {wanted[name]!r}"
        for name in sorted(wanted) if found.get(name, missing) != wanted[name]
    ]
    if different:
        raise ValueError(
            f"expected the model of the job's flavor in {str(path)!r}, but its config.json has {'; '.join(different)}. "
            "Remedy: choose the model.flavor that the directory was written from"
        )


def _binding(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that must agree, also of the configurations within."""
    return {name: _binding(value) if isinstance(value, dict) else value for name, value in fields.items() if name not in _FREE}
