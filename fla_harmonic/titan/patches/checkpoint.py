"""
What torchtitan's checkpoints lack to be loadable whenever a run is killed, and complete.

torchtitan's trainer builds its `CheckpointManager` by name, so methods of that class are replaced, for the version that
`check_torchtitan_version` has checked.
"""

import os
import pickle
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import OPTIMIZER, CheckpointManager
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

RANDOM_STATE = "random_state"


class RandomState(Stateful):
    """
    The states of torch's generators, on the CPU and on the accelerator. torchtitan gives all ranks of a pipeline stage the
    same seed, so one state is stored for all. Nothing in the three families draws a number after the initialisation; a layer
    of a user's own may.
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
    metadata = _metadata(checkpoint)
    if metadata is None:
        return False
    ends: dict[str, int] = {}
    for item in (metadata.storage_data or {}).values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    files = {name: checkpoint / name for name in ends}
    return all(file.is_file() and file.stat().st_size >= ends[name] for name, file in files.items())


def install_checkpoint_hooks() -> None:
    """
    Make torchtitan's `CheckpointManager` safe against a kill at any moment. Harmless when repeated.

    - The latest checkpoint is the latest whole one, and the log warns of newer ones that are not. Without a whole one the run
      starts as if the folder were not there, with `initial_load_path` where that is set (stock torchtitan drops it), and
      says so.
    - A save into a folder that holds a checkpoint takes that one's metadata away first, so that never half of each is loaded.
    - `keep_latest_k` counts whole checkpoints and the one that is being saved.
    - The random state is stored too.
    - What cannot be loaded or saved says why: a checkpoint of the model alone, pinned memory on a CPU.
    """
    if getattr(CheckpointManager, "is_safe", False):
        return
    for name, replace in (
        ("__init__", _init), ("load", _load), ("dcp_load", _dcp_load), ("dcp_save", _dcp_save),
        ("_find_load_step", _find_load_step), ("_purge_stale_checkpoints", _purge_stale_checkpoints),
    ):
        stock = getattr(CheckpointManager, name)
        setattr(CheckpointManager, name, wraps(stock)(replace(stock)))
    CheckpointManager.is_safe = True  # type: ignore[attr-defined]


def _init(stock: Callable) -> Callable:
    def __init__(self: CheckpointManager, *args: Any, **kwargs: Any) -> None:
        config = kwargs["checkpoint_config"]
        if config.enable and config.async_mode.lower() == "async_with_pinned_mem" and utils.device_type == "cpu":
            # stock torchtitan fails at the first save
            raise ValueError(
                "expected checkpoint.async_mode to be \"disabled\" or \"async\" on a machine without an accelerator, whose "
                "memory has nothing to pin it for, but got \"async_with_pinned_mem\""
            )
        stock(self, *args, **kwargs)
        self.states[RANDOM_STATE] = RandomState()
        self.saving = ""  # type: ignore[attr-defined]
    return __init__


def _load(stock: Callable) -> Callable:
    def load(self: CheckpointManager, step: int = -1) -> bool:
        if not self.enable or step != -1 or not os.path.exists(self.folder):
            return stock(self, step)
        if (latest := self._find_load_step()) != -1:
            return stock(self, latest)
        logger.warning(
            f"{self.folder} holds no whole checkpoint: the run starts from "
            f"{self.initial_load_path or 'its initial weights'}, at step 1"
        )
        folder = self.folder
        # stock torchtitan looks at the initial weights only where there is no folder
        self.folder = os.path.join(folder, "none")
        try:
            return stock(self, step)
        finally:
            self.folder = folder
    return load


def _find_load_step(stock: Callable) -> Callable:
    def find_load_step(self: CheckpointManager, folder: str = "") -> int:
        broken, latest = [], -1
        for step, checkpoint in reversed(checkpoint_steps(folder or self.folder).items()):
            if is_whole(checkpoint):
                latest = step
                break
            broken.append(checkpoint.name)
        if broken:
            logger.warning(
                f"passing over {', '.join(broken)} in {folder or self.folder}: the save or deletion was cut off"
                + (f"; step-{latest} is the latest whole checkpoint" if latest != -1 else "")
            )
        return latest
    return find_load_step


def _dcp_load(stock: Callable) -> Callable:
    def dcp_load(
        self: CheckpointManager, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if not from_hf and (metadata := _metadata(Path(checkpoint_id))) is not None:
            stored = {name.partition(".")[0] for name in metadata.state_dict_metadata}
            if OPTIMIZER in state_dict.keys() - stored:
                raise RuntimeError(
                    f"expected a full checkpoint, but {checkpoint_id} has the model alone: it was the last of a run with "
                    "checkpoint.last_save_model_only = true. Remedy: name an earlier one in checkpoint.load_step, or start a "
                    "new run from its weights with checkpoint.initial_load_path"
                )
            if RANDOM_STATE in state_dict.keys() - stored:
                logger.info(f"{checkpoint_id} has no random state: it is left as it is")
                state_dict = {name: value for name, value in state_dict.items() if name != RANDOM_STATE}
        stock(self, state_dict, checkpoint_id=checkpoint_id, from_hf=from_hf, from_quantized=from_quantized)
    return dcp_load


def _dcp_save(stock: Callable) -> Callable:
    def dcp_save(self: CheckpointManager, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        self.saving = checkpoint_id  # type: ignore[attr-defined]
        # no rank writes before the first one has heard from all what they have to write
        if not dist.is_initialized() or dist.get_rank() == 0:
            (Path(checkpoint_id) / ".metadata").unlink(missing_ok=True)
        return stock(self, state_dict, checkpoint_id, *args, **kwargs)
    return dcp_save


def _purge_stale_checkpoints(stock: Callable) -> Callable:
    def purge_stale_checkpoints(self: CheckpointManager) -> None:
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        found = checkpoint_steps(self.folder)
        good = [step for step, path in found.items() if str(path) == str(Path(self.saving)) or is_whole(path)]  # type: ignore[attr-defined]
        kept = good[-self.keep_latest_k:]
        for step, path in found.items():
            # what a killed run left unfinished goes with the rest, once there are newer ones
            if kept and step < kept[0]:
                self.purge_queue.put(str(path))
    return purge_stale_checkpoints


def _metadata(checkpoint: Path) -> Metadata | None:
    """The metadata of a checkpoint; None where it is missing or cannot be read."""
    try:
        return FileSystemReader(checkpoint).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
