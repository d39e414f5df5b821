"""What of a folder of checkpoints can be loaded, and the random state that is stored along."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.tools import utils

from fla_harmonic.titan.components.window_loader import IDENTITY

RANDOM_STATE = "random_state"


class RandomState(Stateful):
    """
    The states of torch's generators, on the CPU and on the accelerator. torchtitan gives all ranks of a pipeline stage the
    same seed, so one state is stored for all. No model here draws a number after the initialisation; a user's own layer may.
    """

    def state_dict(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if utils.device_type != "cpu":
            states[utils.device_type] = utils.device_module.get_rng_state()
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["cpu"])
        if (state := state_dict.get(utils.device_type)) is not None and utils.device_type != "cpu":
            utils.device_module.set_rng_state(state)


class WithoutIdentity(Stateful):
    """A data loader as checkpoints know it that were written before they named their data."""

    def __init__(self, dataloader: Stateful) -> None:
        self.dataloader = dataloader

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.dataloader.state_dict().items() if name != IDENTITY}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dataloader.load_state_dict(state_dict)


def checkpoint_steps(folder: str | os.PathLike) -> dict[int, Path]:
    """The folders `step-N` of a folder of checkpoints, whole ones and others, by their steps in ascending order."""
    if not Path(folder).is_dir():
        return {}
    matches = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in Path(folder).iterdir() if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def is_whole(checkpoint: str | os.PathLike) -> bool:
    """
    Whether a checkpoint has all that it promises: the metadata, which a save writes last, and every file named there in the
    length that is read. A save or a deletion that was cut off fails one or the other.
    """
    checkpoint = Path(checkpoint)
    # weights of a last step in Hugging Face's format
    if (checkpoint / "model.safetensors.index.json").is_file():
        return True
    metadata = read_metadata(checkpoint)
    if metadata is None:
        return False
    ends: dict[str, int] = {}
    for item in (metadata.storage_data or {}).values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    files = {name: checkpoint / name for name in ends}
    return all(file.is_file() and file.stat().st_size >= ends[name] for name, file in files.items())


def read_metadata(checkpoint: Path) -> Metadata | None:
    """The metadata of a checkpoint; None where it is missing or cannot be read."""
    try:
        return FileSystemReader(checkpoint).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
