"""
Training whose states outlive a batch: consecutive text in every row, the states that a row ended with at its next batch's
start, and both in the trainer's checkpoint.

The loader owns the states. They travel to the model in the batch, and to the checkpoint in the loader's state, one entry
for each stream of text: so a run resumes on other ranks, or with other accumulation, as long as the streams are the same.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger

from fla_harmonic.text.tokenizers import TextTokenizer
from fla_harmonic.titan.components import dataloader as data
from fla_harmonic.titan.components.budget import keep_token_budget, warn_of_another_budget
from fla_harmonic.titan.components.dataloader import Batch, TokenWindows, WindowLoader
from fla_harmonic.titan.components.states import LayerLayout, LayerState, States, zero_states
from fla_harmonic.titan.config import harmonic_section


class RowStates:
    """
    The states of a batch's rows on their way to the model and back.

    No pytree, so that FSDP's mixed precision leaves its tensors in float32.

    Args:
        store (dict[int, States]):
            States of one row, `[1, ...]` each, by stream; read and replaced here.
        streams (Sequence[int]):
            The stream that each of the B rows belongs to.
        continues (torch.Tensor):
            Whether a row goes on where its stream stopped, `[B]` bool.
    """

    def __init__(self, store: dict[int, States], streams: Sequence[int], continues: torch.Tensor) -> None:
        self.store, self.streams, self.continues = store, streams, continues

    def read(self, device: torch.device) -> tuple[States, torch.Tensor]:
        """The rows' states, `[B, ...]` each, and which rows go on with them."""
        rows = [self.store[stream] for stream in self.streams]
        states = [_join(layer).map(lambda x: x.to(device)) for layer in zip(*rows, strict=True)]
        return states, self.continues.to(device)

    def write(self, states: States) -> None:
        """Replace the rows' states, without their gradient."""
        for row, stream in enumerate(self.streams):
            # new tensors: an asynchronous checkpoint may still be writing the old ones
            self.store[stream] = [state.map(partial(_row, row)) for state in states]


def _row(row: int, x: torch.Tensor) -> torch.Tensor:
    return x[row:row + 1].detach().float().clone()


def _join(rows: Sequence[LayerState]) -> LayerState:
    levels = tuple(torch.cat(level) for level in zip(*(row.levels for row in rows), strict=True))
    return LayerState(levels, None if rows[0].conv is None else torch.cat([row.conv for row in rows if row.conv is not None]))


class StreamLoader(WindowLoader):
    """
    Endless batches for one data-parallel rank in which every row goes on where it stopped in the batch before.

    The windows are cut into as many streams of equal length as the global batch has rows; what is left over at the end is
    not read. A global step reads the next window of each stream. After its last window a stream begins again, from zeros.

    Args:
        windows (TokenWindows):
            The windows of the training split.
        streams (int):
            Rows of the global batch; a multiple of `local_batch_size * dp_world_size`.
        layout (Sequence[LayerLayout]):
            What the model's layers remember.
        **kwargs:
            As for `WindowLoader`; the seed is not used.

    Raises:
        ValueError: there are fewer windows than streams, or the batch sizes do not fit.
    """

    def __init__(self, windows: TokenWindows, *, streams: int, layout: Sequence[LayerLayout], **kwargs: Any) -> None:
        super().__init__(windows, **kwargs)
        batch = self.local_batch_size * self.dp_world_size
        if streams < 1 or streams % batch:
            raise ValueError(
                f"expected the streams, the rows of the global batch, to be a multiple of local_batch_size x dp_world_size = "
                f"{self.local_batch_size} x {self.dp_world_size}, but got {streams}"
            )
        if streams > len(windows):
            raise ValueError(
                f"expected at least one window of seq_len {windows.seq_len} for each of the {streams} rows of the global "
                f"batch, but the split has {len(windows)}. Remedy: a longer text, a smaller global batch or seq_len"
            )
        self.streams, self.layout = streams, layout
        self.stream_windows = len(windows) // streams
        own = [stream for stream in range(streams) if stream // self.local_batch_size % self.dp_world_size == self.dp_rank]
        self.states: dict[int, States] = {stream: zero_states(layout, 1) for stream in own}

    def _batch(self, first: int) -> Batch:
        inputs, labels = super()._batch(first)
        steps, streams = np.divmod(np.arange(first, first + self.local_batch_size), self.streams)
        places = steps % self.stream_windows
        continues = places > 0
        if self.document_ids:
            begins = (streams * self.stream_windows + places) * self.windows.seq_len
            continues &= ~np.isin(begins, self.windows.document_starts)
        carried: Any = RowStates(self.states, streams.tolist(), torch.from_numpy(continues))
        return inputs | {"carried": carried}, labels

    def _indices(self, first: int) -> np.ndarray:
        steps, streams = np.divmod(np.arange(first, first + self.local_batch_size), self.streams)
        return streams * self.stream_windows + steps % self.stream_windows

    def state_dict(self) -> dict[str, Any]:
        """
        `stream_windows`, the windows that all ranks together have read; `streams`, their number; `seq_len` and
        `windows_of_stream`, the lengths of a window and of a stream; and of each stream that this rank reads its states,
        `states.STREAM.LAYER.level_N` and `.conv`.
        """
        states = {str(stream): _named(states) for stream, states in self.states.items()}
        # no key of `WindowLoader`: neither's position means anything to the other
        return {
            "stream_windows": self.consumed, "streams": self.streams, "seq_len": self.windows.seq_len,
            "windows_of_stream": self.stream_windows, "states": states,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        if (streams := state_dict.get("streams")) != self.streams:
            raise ValueError(
                f"expected the states of {self.streams} streams, the rows of the global batch, but the checkpoint has those "
                f"of {streams}. Remedy: [training] global_batch_size = {streams}, or leave the loader out with [checkpoint] "
                "exclude_from_loading"
            )
        # the states belong to the text before the next window, which other windows or another text move elsewhere
        found, expected = ((s["seq_len"], s["windows_of_stream"]) for s in (state_dict, self.state_dict()))
        if found != expected:
            raise ValueError(
                f"expected states of streams of {expected[1]} windows of seq_len {expected[0]}, but the checkpoint has those "
                f"of {found[1]} windows of seq_len {found[0]}. Remedy: the [training] seq_len and dataset that it was written "
                "with, or leave the loader out with [checkpoint] exclude_from_loading"
            )
        windows = state_dict["stream_windows"]
        for stream in self.states:
            named = state_dict["states"][str(stream)]
            self.states[stream] = [
                LayerState(
                    tuple(named[f"{index}"][f"level_{level}"] for level in range(len(layer.levels))),
                    None if layer.conv is None else named[f"{index}"]["conv"],
                )
                for index, layer in enumerate(self.layout)
            ]
        self.consumed = windows


def _named(states: States) -> dict[str, dict[str, torch.Tensor]]:
    named = {}
    for index, state in enumerate(states):
        tensors = {f"level_{level}": x for level, x in enumerate(state.levels)}
        named[str(index)] = tensors if state.conv is None else tensors | {"conv": state.conv}
    return named


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: TextTokenizer, job_config: Any) -> WindowLoader:
    """
    `build_dataloader_fn` of all three families: `data.build_dataloader`, with `harmonic.stateful` on consecutive text.

    The trainer reads length, batches, steps and schedule after this call: those of `data.budget_seq_len` hold for all of it.

    Raises:
        ValueError: as `data.build_dataloader` and `keep_token_budget`, or the model has layers without a state to carry.
        FileNotFoundError: the corpus is not there.
    """
    keep_token_budget(job_config, dp_world_size)
    warn_of_another_budget(job_config, dp_world_size)
    if not harmonic_section(job_config).stateful:
        return data.build_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    streams = job_config.training.global_batch_size
    if streams <= 0:
        streams = job_config.training.local_batch_size * dp_world_size
    args = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    make = partial(StreamLoader, streams=streams, layout=args.state_layout())
    loader = data.build_dataloader(dp_world_size, dp_rank, tokenizer, job_config, make)
    assert isinstance(loader, StreamLoader)
    left = len(loader.windows) - streams * loader.stream_windows
    logger.info(f"stateful: {streams:,} streams of {loader.stream_windows:,} windows; {left:,} windows are not read")
    if not loader.document_ids and len(loader.windows.document_starts) > 1:
        logger.warning("states run on from one document into the next: [data] reset_documents = true resets them there")
    return loader
