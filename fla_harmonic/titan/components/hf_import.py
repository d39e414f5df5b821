"""
Training that starts from a Hugging Face directory, by torchtitan's own options:

    [checkpoint]
    initial_load_path = "outputs/x/hf"
    initial_load_in_hf = true
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

# what two directories of one model may differ in: ids and lengths of their texts, how weights are stored and began, and
# which kernels run
_FREE = {
    "architectures", "attn_mode", "bos_token_id", "dtype", "eos_token_id", "fuse_cross_entropy", "fuse_linear_cross_entropy",
    "fuse_norm", "fuse_swiglu", "initializer_range", "max_position_embeddings", "pad_token_id", "rescale_prenorm_residual",
    "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale", "transformers_version",
    "use_cache", "use_mambapy", "_name_or_path",
}


def check_hf_directory(path: str | Path, expected: PreTrainedConfig) -> None:
    """
    Compare the model in a Hugging Face directory with the one that is to be trained: tensors of the right shapes may belong
    to a model that computes something else.

    Args:
        path (str | Path):
            The directory.
        expected (PreTrainedConfig):
            Configuration of the job's flavor.

    Raises:
        ValueError: the directory has no config.json, or one of another model; names the fields that differ.
    """
    if not (Path(path) / "config.json").is_file():
        raise ValueError(
            "expected a Hugging Face directory with a config.json in checkpoint.initial_load_path, but "
            f"{str(path)!r} has none. Remedy: name one that save_pretrained or fla_harmonic.titan.export wrote"
        )
    found, wanted = _binding(_fields(type(expected), path)), _binding(expected.to_dict())
    missing = object()
    different = [
        f"{name} = {found.get(name, None)!r}, not {wanted[name]!r}"
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


def _fields(config_class: type[PreTrainedConfig], path: str | Path) -> dict[str, Any]:
    values, _ = PreTrainedConfig.get_config_dict(path)
    if values.get("model_type") != config_class.model_type:
        return {"model_type": values.get("model_type")}
    return config_class.from_dict(values).to_dict()
