"""
A kill at any moment leaves a checkpoint to go on from.

A child does nothing but save, and is killed at a random moment; the next one loads what is left. The children are forks of
one process that has imported everything, this file run as a script.
"""

import itertools
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config.job_config import Checkpoint, LRScheduler, Optimizer

import fla_harmonic.titan  # noqa: F401  (the hooks)
from fla_harmonic.titan.components.checkpoint import checkpoint_steps, is_whole
from fla_harmonic.titan.components.optimizer import build_optimizers
from fla_harmonic.titan.export import find_checkpoint

KILLS = 10


class Counter:
    """A train state, and a data position: how far the run is."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]


def build(folder: Path, **config: Any) -> tuple[CheckpointManager, nn.Module, Counter]:
    model, counter = nn.Linear(400, 400), Counter()
    optimizers = build_optimizers([model], Optimizer(), None)
    manager = CheckpointManager(
        dataloader=Counter(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=build_lr_schedulers(optimizers, LRScheduler(), 1000),
        states={"train_state": counter},
        checkpoint_config=Checkpoint(enable=True, **{"interval": 1, "keep_latest_k": 2} | config),
        sd_adapter=None,
        base_folder=str(folder),
    )
    return manager, model, counter


def init_one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_kill_at_any_moment_loses_no_finished_checkpoint(mode: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, __file__, str(tmp_path), mode], check=True, stdout=subprocess.PIPE, timeout=400)
    rounds = json.loads(done.stdout.splitlines()[-1])
    assert len(rounds) == KILLS
    for (_, finished, _), (loaded, _, _) in itertools.pairwise(rounds):
        assert loaded >= finished
    # kills that hit a save
    assert sum(broken for _, _, broken in rounds) >= KILLS // 4


def kill_and_resume(folder: Path, mode: str) -> None:
    random.seed(0)
    rounds = []
    for _ in range(KILLS):
        # loaded, finished
        shared = mmap.mmap(-1, 16)
        shared[:] = struct.pack("qq", -1, -1)
        child = os.fork()
        if child == 0:
            try:
                save_forever(folder, mode, shared)
            finally:
                os._exit(1)
        wanted = random.randrange(1, 4)
        while True:
            loaded, finished = struct.unpack("qq", shared[:])
            if loaded >= 0 and finished >= loaded + wanted:
                break
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended by itself"
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        broken = [path for path in checkpoint_steps(folder / "checkpoint").values() if not is_whole(path)]
        rounds.append((loaded, struct.unpack("qq", shared[:])[1], bool(broken)))
    print(json.dumps(rounds))


def save_forever(folder: Path, mode: str, shared: mmap.mmap) -> None:
    init_one_rank()
    manager, model, counter = build(folder, async_mode=mode)
    manager.load()
    loaded = counter.step
    if loaded:
        # all of one step, not some of the next
        assert torch.equal(model.weight, torch.full_like(model.weight, loaded))
    shared[:8] = struct.pack("q", loaded)
    while True:
        counter.step += 1
        with torch.no_grad():
            # at once after a save has returned, when one in the background has yet to write
            model.weight.fill_(counter.step)
        manager.save(counter.step)
        # a save in the background is waited for by the next one
        shared[8:] = struct.pack("q", counter.step - (mode == "async"))


@pytest.fixture
def one_rank() -> Any:
    init_one_rank()
    yield
    dist.destroy_process_group()


def saved(folder: Path, *steps: int, **config: Any) -> None:
    manager, model, counter = build(folder, **config)
    for counter.step in steps:
        with torch.no_grad():
            model.weight.fill_(counter.step)
        manager.save(counter.step)
    manager.close()


def loaded(folder: Path, **config: Any) -> int:
    manager, model, counter = build(folder, **config)
    assert manager.load()
    assert torch.equal(model.weight, torch.full_like(model.weight, counter.step))
    return counter.step


def test_what_is_not_whole_is_passed_over_and_named(one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, keep_latest_k=0)
    checkpoints = checkpoint_steps(tmp_path / "checkpoint")
    # a save without its end, a deletion in the midst, and a file that is too short
    (checkpoints[5] / ".metadata").unlink()
    next(checkpoints[4].glob("*.distcp")).unlink()
    short = next(checkpoints[3].glob("*.distcp"))
    short.write_bytes(short.read_bytes()[:-1])
    assert [step for step, path in checkpoints.items() if is_whole(path)] == [1, 2]
    assert find_checkpoint(tmp_path / "checkpoint") == checkpoints[2]
    assert loaded(tmp_path) == 2
    assert "passing over step-5, step-4, step-3" in caplog.text
    assert "step-2 is the latest whole checkpoint" in caplog.text


def test_a_folder_without_a_whole_checkpoint_starts_as_if_it_were_not_there(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    saved(tmp_path / "source", 7)
    (tmp_path / "run/checkpoint/step-3").mkdir(parents=True)
    manager, model, counter = build(tmp_path / "run", initial_load_path=str(tmp_path / "source/checkpoint/step-7"))
    assert manager.load()
    assert (counter.step, model.weight[0, 0].item()) == (0, 7)
    assert "holds no whole checkpoint: the run starts from" in caplog.text
    assert not build(tmp_path / "run")[0].load()
    assert "its initial weights, at step 1" in caplog.text


def test_saving_over_a_checkpoint_never_leaves_half_of_each(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved(tmp_path, 1, 2)
    manager, _, _ = build(tmp_path)
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", lambda *args: 1 / 0)
    with pytest.raises(CheckpointException, match="division by zero"):
        manager.save(2)
    assert not is_whole(tmp_path / "checkpoint/step-2")
    assert loaded(tmp_path) == 1


def test_unfinished_saves_do_not_push_out_whole_ones(one_rank: None, tmp_path: Path) -> None:
    for step in (1, 8, 9):
        (tmp_path / f"checkpoint/step-{step}").mkdir(parents=True)
    saved(tmp_path, 2, 3, 4)
    deadline = time.monotonic() + 20
    while len(found := checkpoint_steps(tmp_path / "checkpoint")) > 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(found) == [3, 4, 8, 9]
    assert loaded(tmp_path) == 4


def test_a_checkpoint_of_the_model_alone_says_what_it_lacks(one_rank: None, tmp_path: Path) -> None:
    manager, _, _ = build(tmp_path)
    manager.save(1, last_step=True)
    with pytest.raises(RuntimeError, match=r"expected a full checkpoint, .*last_save_model_only = true\. Remedy"):
        build(tmp_path)[0].load()


def test_a_checkpoint_without_random_state_loads(one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _, _ = build(tmp_path)
    del manager.states["random_state"]
    manager.save(1)
    fresh, _, _ = build(tmp_path)
    before = torch.get_rng_state()
    assert fresh.load()
    assert torch.equal(torch.get_rng_state(), before)


def test_random_state_goes_on_where_it_was(one_rank: None, tmp_path: Path) -> None:
    manager, _, _ = build(tmp_path)
    torch.manual_seed(3)
    torch.rand(5)
    manager.save(1)
    expected = torch.rand(5)
    fresh, _, _ = build(tmp_path)
    torch.manual_seed(4)
    fresh.load()
    assert torch.equal(torch.rand(5), expected)


if __name__ == "__main__":
    kill_and_resume(Path(sys.argv[1]), sys.argv[2])
