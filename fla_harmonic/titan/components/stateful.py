"""
Training whose states outlive a batch: every row reads consecutive text and starts a batch from the states that it ended the
last one with.

The loader owns the states. They travel to the model in the batch, and to the checkpoint in the loader's state, one entry
per stream of text: a run resumes on other ranks, or with other accumulation, as long as the streams are the same.
"""

import json
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fla_harmonic.text.windows import Batch, TokenWindows
from fla_harmonic.titan.components.states import LayerLayout, LayerState, States, zero_states
from fla_harmonic.titan.components.window_loader import IDENTITY, WindowLoader


class RowStates:
    """
    The states of a batch's rows on their way to the model and back, in a store of states `[1, ...]` by stream. `continues`
    says which of the B rows continue where their stream stopped.

    No pytree, so that FSDP's mixed precision leaves its tensors in float32.
    """

    def __init__(self, store: dict[int, States], streams: Sequence[int], continues: torch.Tensor) -> None:
        self.store, self.streams, self.continues = store, streams, continues

    def read(self, device: torch.device) -> tuple[States, torch.Tensor]:
        """The rows' states, `[B, ...]` each, and which rows continue with them."""
        states = []
        for rows in zip(*(self.store[stream] for stream in self.streams), strict=True):
            levels = tuple(torch.cat(level).to(device) for level in zip(*(row.levels for row in rows), strict=True))
            convs = [row.conv for row in rows if row.conv is not None]
            states.append(LayerState(levels, torch.cat(convs).to(device) if convs else None))
        return states, self.continues.to(device)

    def write(self, states: States) -> None:
        """Replace the rows' states, without their gradient."""

        def copied(x: torch.Tensor, row: int) -> torch.Tensor:
            # a new tensor: an asynchronous checkpoint may still be writing the old one
            return x[row:row + 1].detach().float().clone()

        for row, stream in enumerate(self.streams):
            self.store[stream] = [state.map(partial(copied, row=row)) for state in states]


class StreamLoader(WindowLoader):
    """
    Endless batches for one data-parallel rank in which every row continues where it stopped in the batch before.

    The windows are cut into as many streams of equal length as the global batch has rows; what is left over at the end is
    not read. A global step reads the next window of each stream. After its last window a stream begins again, from zeros.

    Args:
        streams (int):
            Rows of the global batch; a multiple of `local_batch_size * dp_world_size`.
        **kwargs:
            As for `WindowLoader`, but for `global_batch_size`; the seed is not used.
    """

    def __init__(self, windows: TokenWindows, *, streams: int, layout: Sequence[LayerLayout], **kwargs: Any) -> None:
        super().__init__(windows, global_batch_size=streams, **kwargs)
        if streams > len(windows):
            raise ValueError(
                f"expected at least one window of seq_len {windows.seq_len} for each of the {streams} rows of the global "
                f"batch, but the split has {len(windows)}. Remedy: a longer text, a smaller global batch or seq_len"
            )
        self.streams = streams
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

    @cached_property
    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in super().identity.items() if name != "seed"}

    def state_dict(self) -> dict[str, Any]:
        """
        `stream_windows`, the windows that all ranks together have read; how the text is cut into streams; the `identity` of
        the data; and the states of each stream that this rank reads, `states.STREAM.LAYER.level_N` and `.conv`.
        """
        states = {str(stream): _named(states) for stream, states in self.states.items()}
        # no key of `WindowLoader`: neither's position means anything to the other
        return {
            "stream_windows": self.consumed, "streams": self.streams, "seq_len": self.windows.seq_len,
            "windows_of_stream": self.stream_windows, "states": states, IDENTITY: json.dumps(self.identity),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        # the states belong to the text before the next window, which other windows or another text move elsewhere
        keys = ("streams", "windows_of_stream", "seq_len")
        expected, found = ({key: state.get(key) for key in keys} for state in (self.state_dict(), state_dict))
        if found != expected:
            raise ValueError(
                f"expected the states of {expected}, but the checkpoint has those of {found}. Remedy: the [training] "
                "global_batch_size, seq_len and dataset that it was written with, or leave the loader out with [checkpoint] "
                "exclude_from_loading"
            )
        self._check_identity(state_dict)
        for stream in self.states:
            named = state_dict["states"][str(stream)]
            self.states[stream] = [_unnamed(named[str(index)]) for index in range(len(named))]
        self.consumed = state_dict["stream_windows"]


def _named(states: States) -> dict[str, dict[str, torch.Tensor]]:
    named = {}
    for index, state in enumerate(states):
        tensors = {f"level_{level}": x for level, x in enumerate(state.levels)}
        named[str(index)] = tensors if state.conv is None else tensors | {"conv": state.conv}
    return named


def _unnamed(layer: dict[str, torch.Tensor]) -> LayerState:
    return LayerState(tuple(layer[f"level_{level}"] for level in range(len(layer) - ("conv" in layer))), layer.get("conv"))
