"""
The TOML files of the sizes in `titan_configs`: `python -m fla_harmonic.titan.job_files` writes them.

All follow the protocol of arXiv 2606.24650. Three files of a size differ in dump_folder, description and [model] alone, and
sizes differ in no more.
"""

import copy
from pathlib import Path

import torch
import tyro
from torchtitan.protocols.train_spec import get_train_spec

import fla_harmonic.titan  # noqa: F401  (registers the families)
from fla_harmonic.titan.models.flavors import SIZES

_FAMILIES = ("harmonic", "mamba", "llama")
_FILE = '''\
# {title}, {shape}, {parameters:,} parameters
#
# 65,536,000 tokens of enwik8 in GPT-2 tokens, the budget of arXiv 2606.24650, on one accelerator. The three files of this
# size differ in dump_folder, description and [model] alone. One option more trains at another length, from 1,024 to 65,536,
# on the same number of tokens:
#   --data.budget_seq_len 65536
# It also splits the batch over the ranks of several accelerators, where the length leaves it a multiple of their number.
#
#   torchrun --nproc_per_node=1 -m torchtitan.train --job.config_file titan_configs/{name}.toml
#
# Written by python -m fla_harmonic.titan.job_files

[job]
dump_folder = "./outputs/{name}"
description = "{title} {size} on enwik8"
custom_config_module = "fla_harmonic.titan.config"

[experimental]
custom_import = "fla_harmonic.titan"

[model]
name = "{family}"
flavor = "{size}"
hf_assets_path = "./assets/gpt2"

[data]
tokenizer = "hf"
token_budget = 65_536_000

[training]
dataset = "enwik8"
dataset_path = "./data/enwik8"
local_batch_size = 2
seq_len = 8192
steps = 4000
max_norm = 1.0
mixed_precision_param = "bfloat16"

[optimizer]
name = "AdamW"
lr = 1e-3
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1
implementation = "fused"

[lr_scheduler]
warmup_steps = 200
decay_type = "cosine"
min_lr_factor = 0.1

[activation_checkpoint]
mode = "none"

[compile]
enable = false

[checkpoint]
enable = true
interval = 1000
keep_latest_k = 2
# the last one too can be resumed from, with more steps
last_save_model_only = false

[metrics]
log_freq = 10
enable_tensorboard = true

[comm]
trace_buf_size = 0

[debug]
seed = 42
'''


def count_parameters(family: str, flavor: str) -> int:
    """Parameters of the model that torchtitan trains, a tied table once; none is allocated."""
    spec = get_train_spec(family)
    with torch.device("meta"):
        model = spec.model_cls(copy.deepcopy(spec.model_args[flavor]))
    return sum(p.numel() for p in model.parameters())


def job_files() -> dict[str, str]:
    """The text of each file by its name: `{family}_{size}.toml`, the size in lower case."""
    files = {}
    for size in SIZES:
        for family in _FAMILIES:
            layers = get_train_spec(family).model_args[size].n_layers
            shape = "the paper's single layer" if family == "harmonic" else f"{layers} layers"
            name = f"{family}_{size.lower()}"
            files[f"{name}.toml"] = _FILE.format(
                title=family.capitalize(), shape=shape, parameters=count_parameters(family, size), name=name, size=size,
                family=family,
            )
    return files


def main(out: Path = Path("titan_configs")) -> None:
    """
    Write the files.

    Args:
        out: Folder, made if it is missing; files of the same names are replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, text in job_files().items():
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)


if __name__ == "__main__":
    tyro.cli(main)
