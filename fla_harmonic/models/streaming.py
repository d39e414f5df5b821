"""Losses of a text of any length, in constant memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from fla.models.cache_utils import Cache

from fla_harmonic.layers.harmonic import HarmonicAttention
from fla_harmonic.models.stream_state import StreamState, check_model, identity, load_state, save_state

if TYPE_CHECKING:
    import os

    from fla_harmonic.models.harmonic.modeling_harmonic import HarmonicForCausalLM


_END = object()


class HarmonicStream(Iterator[torch.Tensor]):
    """
    Iterator of the losses of a text without end; see `HarmonicForCausalLM.stream`.

    The model always reads `chunk_size` tokens at once, the last ones of the text filled up with tokens that nothing sees, so
    that a loss depends on the text and on `chunk_size` alone: a text in one stream, or in pieces that saved states link, has
    the same losses bit for bit (on the CPU).

    A state names the model that it belongs to, whose weights are read for it when a stream begins with a state, or gives out
    its first one.
    """

    def __init__(
        self,
        model: HarmonicForCausalLM,
        tokens: Iterable[Any],
        chunk_size: int = 1024,
        state: StreamState | str | os.PathLike | None = None,
    ) -> None:
        if type(chunk_size) is not int or chunk_size < 1:
            raise ValueError(f"`chunk_size` must be a positive integer; got {chunk_size!r}.")
        attention = [index for index, block in enumerate(model.model.layers) if not isinstance(block.attn, HarmonicAttention)]
        if attention:
            raise ValueError(
                f"a stream needs recurrent layers; got attention in layers {attention} (field `attn` of the config), whose "
                "cache grows with the text. Score windows of a fixed length instead.")
        self.model = model
        self.chunk_size = chunk_size
        if not isinstance(state, StreamState):
            state = StreamState() if state is None else load_state(state, model)
        elif state.tokens:
            if state.model is None:
                raise ValueError(
                    "expected a state that names its model; got one that does not. Pass the `state` of another stream, or a "
                    "file that its `save` wrote.")
            check_model("", state.model, model)
        self._state = state
        # iterating over a tensor would take its rows for pieces of one text
        self._tokens = iter([tokens] if hasattr(tokens, "ndim") else tokens)

    def __next__(self) -> torch.Tensor:
        while True:
            self._take()
            losses = self._advance()
            if losses is None:
                raise StopIteration
            if losses.shape[1]:
                return losses if self._state.is_batch else losses[0]

    @property
    def state(self) -> StreamState:
        """
        What has been read, up to the last token taken from the iterable. Never changed in place: it can be kept, and passed
        to `HarmonicForCausalLM.stream`, to continue from here.
        """
        if self._state.model is None and self._state.tokens:
            self._state = replace(self._state, model=identity(self.model))
        return self._state

    @property
    def bits_per_token(self) -> float:
        """Mean loss in bits of the targets so far; NaN before the first."""
        return self._state.nll / math.log(2) / self._state.targets if self._state.targets else math.nan

    def save(self, path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
        """
        Writes the state, and `metadata` with it (default: what the state was loaded with), to a safetensors file from which
        `HarmonicForCausalLM.stream` continues. An interrupted write leaves the file that was there.
        """
        if metadata is not None:
            self._state = replace(self._state, metadata=metadata)
        save_state(path, self.state, self.model)

    def prompt(self) -> dict[str, Any]:
        """
        Arguments with which `generate` continues the text: `model.generate(**stream.prompt(), max_new_tokens=100)`. What
        it returns begins with the few last tokens of the text, `input_ids`.
        """
        ids = self._state.pending.to(self.model.device)
        if self._state.cache is None:
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # `generate` takes the ids for what follows the cache if the mask is longer than they are
        mask = ids.new_ones(ids.shape[0], ids.shape[1] + 1)
        return {"input_ids": ids, "attention_mask": mask, "past_key_values": copy.deepcopy(self._state.cache)}

    def _take(self) -> None:
        """Takes tokens until a chunk and its last target are there, or the iterable ends."""
        integers: list[int] = []
        try:
            while self._state.pending.shape[1] + len(integers) <= self.chunk_size:
                item = next(self._tokens, _END)
                if item is _END:
                    return
                if type(item) is int:
                    integers.append(item)
                    continue
                self._append(integers)
                integers = []
                self._append(item)
        finally:
            # when the iterable fails, too: what it gave before is read
            self._append(integers)

    def _append(self, item: Any) -> None:
        try:
            ids, state = torch.as_tensor(item), self._state
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"`tokens` must give integers, or integer ids of shape [n] or [B, n]; got {type(item).__name__}. Tokenize the "
                "text first.") from error
        if ids.numel() == 0 and ids.ndim < 2:
            return
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim > 2:
            raise ValueError(
                "`tokens` must give integers, or integer ids of shape [n] or [B, n]; got "
                f"{ids.dtype} of shape {tuple(ids.shape)}. Tokenize the text first.")
        is_batch = ids.ndim == 2
        ids = ids.to("cpu", torch.long).reshape(ids.shape[0] if is_batch else 1, -1)
        # here, because a token is a target before it is an input
        self.model.model.check_token_ids(ids)
        if state.is_batch not in (None, is_batch) or (state.tokens and ids.shape[0] != state.pending.shape[0]):
            expected = f"[{state.pending.shape[0]}, n]" if state.is_batch else "[n], or integers"
            raise ValueError(
                f"`tokens` must give ids of the shape of the first, {expected}; got {tuple(torch.as_tensor(item).shape)}. A "
                "stream has the same rows from its start to its end.")
        pending = torch.cat([state.pending, ids], 1) if state.tokens else ids
        self._state = replace(state, pending=pending, tokens=state.tokens + ids.shape[1], is_batch=is_batch)

    @torch.no_grad()
    def _advance(self) -> torch.Tensor | None:
        """The losses `[B, n]` of the targets in the next chunk, or in what the text has left; `None` if there are none."""
        state, size = self._state, self.chunk_size
        length = state.pending.shape[1]
        is_whole = length > size
        if not is_whole and length - 1 <= state.scored:
            return None
        # of one shape always: rounding depends on the number of rows that are multiplied at once
        window = F.pad(state.pending[:, : size + 1], (0, max(0, size + 1 - length))).to(self.model.device)
        # a copy: an interrupted or a padded pass leaves the state as it was
        cache = Cache() if state.cache is None else copy.deepcopy(state.cache)
        logits = self.model(window[:, :-1], past_key_values=cache, use_cache=True).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="none").view(len(window), size)
        stop = size if is_whole else length - 1
        losses = losses[:, state.scored : stop]
        state = replace(
            state, scored=stop, targets=state.targets + losses.numel(), nll=state.nll + losses.double().sum().item())
        if is_whole:
            state = replace(
                state, cache=cache, pending=state.pending[:, size:], scored=max(0, self._state.scored - size))
        self._state = state
        return losses
