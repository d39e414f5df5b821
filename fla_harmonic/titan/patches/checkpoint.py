"""
The checkpoints of torchtitan 0.2.2 cannot always be loaded after a run is killed, and leave the random state out.

The trainer builds its `CheckpointManager` by name, so methods of that class are replaced.
"""

import os
from functools import cache, wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torchtitan.components.checkpoint import DATALOADER, OPTIMIZER, CheckpointManager
from torchtitan.tools.logging import logger

from fla_harmonic.titan.components.checkpoint import (
    RANDOM_STATE,
    RandomState,
    WithoutIdentity,
    checkpoint_steps,
    is_whole,
    read_metadata,
)
from fla_harmonic.titan.components.window_loader import IDENTITY

# the methods as torchtitan has them
_STOCK: dict[str, Any] = dict(vars(CheckpointManager))
# the checkpoint that each manager is saving
_SAVING: WeakKeyDictionary[CheckpointManager, str] = WeakKeyDictionary()


@cache
def install_checkpoint_hooks() -> None:
    """
    Make torchtitan's `CheckpointManager` safe against a kill at any moment, once.

    - The latest checkpoint is the latest whole one, and the log warns of newer ones that are not. Without a whole one the run
      starts as if the folder were not there, with `initial_load_path` where that is set (stock torchtitan drops it), and
      says so.
    - A save into a folder that holds a checkpoint takes that one's metadata away first, so that never half of each is loaded.
    - `keep_latest_k` counts whole checkpoints and the one that is being saved.
    - The random state is stored too.
    - A load without the data position (`exclude_from_loading`, or weights alone) says that the data starts from its beginning;
      one from before checkpoints named their data loads as it did.
    - A checkpoint of the model alone, from which no run can continue, says so.
    """
    for method in (__init__, load, dcp_load, dcp_save, _find_load_step, _purge_stale_checkpoints):
        setattr(CheckpointManager, method.__name__, wraps(getattr(CheckpointManager, method.__name__))(method))


def __init__(self: CheckpointManager, *args: Any, **kwargs: Any) -> None:
    _STOCK["__init__"](self, *args, **kwargs)
    self.states[RANDOM_STATE] = RandomState()


def load(self: CheckpointManager, step: int = -1) -> bool:
    if not self.enable or step != -1 or not os.path.exists(self.folder):
        return _STOCK["load"](self, step)
    if (latest := self._find_load_step()) != -1:
        return _STOCK["load"](self, latest)
    logger.warning(
        f"{self.folder} holds no whole checkpoint: the run starts from "
        f"{self.initial_load_path or 'its initial weights'}, at step 1"
    )
    folder = self.folder
    # stock torchtitan looks at the initial weights only where there is no folder
    self.folder = os.path.join(folder, "none")
    try:
        return _STOCK["load"](self, step)
    finally:
        self.folder = folder


def _find_load_step(self: CheckpointManager, folder: str = "") -> int:
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


def dcp_load(
    self: CheckpointManager, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
) -> None:
    if not from_hf and (metadata := read_metadata(Path(checkpoint_id))) is not None:
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
        if DATALOADER in state_dict and f"{DATALOADER}.{IDENTITY}" not in metadata.state_dict_metadata:
            state_dict = state_dict | {DATALOADER: WithoutIdentity(state_dict[DATALOADER])}
    if DATALOADER not in state_dict:
        logger.info(f"no data position is loaded from {checkpoint_id}: the data starts from its beginning")
    _STOCK["dcp_load"](self, state_dict, checkpoint_id=checkpoint_id, from_hf=from_hf, from_quantized=from_quantized)


def dcp_save(self: CheckpointManager, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
    _SAVING[self] = checkpoint_id
    # no rank writes before the first one has heard from all what they have to write
    if not dist.is_initialized() or dist.get_rank() == 0:
        (Path(checkpoint_id) / ".metadata").unlink(missing_ok=True)
    return _STOCK["dcp_save"](self, state_dict, checkpoint_id, *args, **kwargs)


def _purge_stale_checkpoints(self: CheckpointManager) -> None:
    if self.keep_latest_k <= 0 or dist.get_rank() != 0:
        return
    found = checkpoint_steps(self.folder)
    saving = Path(_SAVING.get(self, ""))
    good = [step for step, path in found.items() if path == saving or is_whole(path)]
    kept = good[-self.keep_latest_k:]
    for step, path in found.items():
        # what a killed run left unfinished goes with the rest, once there are newer ones
        if kept and step < kept[0]:
            self.purge_queue.put(str(path))
