"""
A torchtitan checkpoint as a Hugging Face directory.

    python -m fla_harmonic.titan.export --checkpoint outputs/x/checkpoint --config_file titan_configs/x.toml --out DIR

writes config.json, model.safetensors and the tokenizer's files, which `AutoModelForCausalLM.from_pretrained(DIR)` loads
(Harmonic after `import fla_harmonic`; Mamba better by `fla_harmonic.models.mamba.load_mamba(DIR)`). What follows these
options overrides the TOML, as in training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import tyro
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.job_config import Parallelism
from torchtitan.protocols import ModelProtocol
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools.logging import init_logger, logger
from transformers import PreTrainedModel

import fla_harmonic.titan  # noqa: F401  (registers the specs)
from fla_harmonic.titan.components.budget import keep_token_budget
from fla_harmonic.titan.components.checkpoint import checkpoint_steps, is_whole
from fla_harmonic.titan.models.hallamonic import HallamonicArgs
from fla_harmonic.titan.models.hf_model import HFModelArgs
from fla_harmonic.titan.models.llama import LlamaArgs


@dataclass
class Args:
    checkpoint: Path
    """A checkpoint (step-N), or the folder that holds several: its latest is taken."""
    config_file: Path
    """The TOML file that the checkpoint was trained with."""
    out: Path
    """The directory to write."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint `path` itself, or the latest in the folder `path`; a FileNotFoundError if there is none."""
    if is_whole(path):
        return path
    # a save that was cut off is no checkpoint
    steps = [folder for folder in checkpoint_steps(path).values() if is_whole(folder)]
    if not steps:
        raise FileNotFoundError(
            f"expected a whole checkpoint of torchtitan, or a folder of step-N checkpoints, but found none in {path}. Remedy: "
            "pass {job.dump_folder}/{checkpoint.folder} of a run with checkpoint.enable = true"
        )
    return steps[-1]


def load_model(job_config: JobConfig, checkpoint: Path) -> ModelProtocol:
    """The job's model on the CPU in fp32 and evaluation mode, with the weights of the checkpoint."""
    spec, args = _spec_and_args(job_config)
    model = spec.model_cls(args)
    with torch.no_grad():
        # buffers are not in a checkpoint
        model.init_weights()
    state_dict = get_model_state_dict(model)
    dcp.load(state_dict, checkpoint_id=str(checkpoint))
    set_model_state_dict(model, state_dict)
    return model.eval()


def to_hf(job_config: JobConfig, model: ModelProtocol) -> PreTrainedModel:
    """The HF model with the weights of a torchtitan model."""
    spec, args = _spec_and_args(job_config)
    hf_model = args.build_hf()
    adapter = spec.state_dict_adapter(args, hf_assets_path=None)
    state_dict = adapter.to_hf(get_model_state_dict(model))
    if hf_model.config.tie_word_embeddings:
        # torchtitan's model has the one table once, the HF model under both names
        state_dict |= {head: state_dict[table] for head, table in hf_model._tied_weights_keys.items()}
    hf_model.load_state_dict(state_dict)
    return hf_model.eval()


def export(job_config: JobConfig, checkpoint: Path, out: Path) -> None:
    """Write the HF directory `out` of a checkpoint, or of the latest in a folder, and of the job that it was trained with."""
    checkpoint = find_checkpoint(checkpoint)
    spec, args = _spec_and_args(job_config)
    # what may be missing comes first, so that no half a directory is left
    tokenizer = spec.build_tokenizer_fn(job_config)
    hf_model = to_hf(job_config, load_model(job_config, checkpoint))
    # the length that evaluation tools take for the model's own
    hf_model.config.max_position_embeddings = args.trained_length(job_config.training.seq_len)
    # a converted model has the pretrained one's ids; elsewhere the defaults are ids of other vocabularies: Mamba's would end
    # every text at GPT-2's "!"
    if not isinstance(args, HallamonicArgs):
        for config in (hf_model.config, hf_model.generation_config):
            config.bos_token_id, config.eos_token_id, config.pad_token_id = tokenizer.bos_id, tokenizer.eos_id, None
    hf_model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    logger.info(f"Wrote {job_config.model.name} {job_config.model.flavor} from {checkpoint} to {out}")


def _spec_and_args(job_config: JobConfig) -> tuple[TrainSpec, HFModelArgs | LlamaArgs]:
    spec = get_train_spec(job_config.model.name)
    # where and how the checkpoint was trained does not matter to the one process that reads it
    job_config.parallelism = Parallelism()
    # the trained length
    keep_token_budget(job_config)
    job_config.training.enable_cpu_offload = job_config.compile.enable = False
    job_config.checkpoint.async_mode = "disabled"
    args: Any = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    return spec, args


def main() -> None:
    init_logger()
    args, overrides = tyro.cli(Args, return_unknown_args=True)
    job_config = ConfigManager().parse_args([f"--job.config_file={args.config_file}", *overrides])
    export(job_config, args.checkpoint, args.out)


if __name__ == "__main__":
    main()
