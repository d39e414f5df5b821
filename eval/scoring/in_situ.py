"""
An audit of the work itself: whether a model reads the future in the very calls whose numbers are reported.

    with InSitu(model) as audit:
        ...  # whatever calls the model: windows, padded batches, pieces with a carried state
    audit.verdict.require()

A sample of the calls runs again in place (same lengths, rows, dtype, backend, mode, pads, document borders, carried state),
with the tokens of every row replaced from a split of its own on. Everything the model said before the split must stay.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# tokens up to and behind the split of a snippet, which shows a token id in a context that it has in the text
_BEFORE, _AFTER = 16, 8
# every split below this is tried at the start of a window
_DENSE = 49
# rows of short pieces that run at once
_ROWS = 64
# keyword arguments that a call changes, so that each run needs a copy
_STATES = ("past_key_values", "cache_params")


@dataclass
class Verdict:
    """What an audit in place saw; `failure` is empty for a causal model."""

    failure: str = ""
    """The first difference that was found, with its position."""

    calls: int = 0
    """Calls of the model that computed what is reported."""

    audited: int = 0
    """Those that ran again with replaced tokens."""

    splits: int = 0
    """Splits that were tried in them."""

    short_splits: int = 0
    """Splits on short pieces of the text: every position at a window's start, and one behind each token id."""

    lengths: list[int] = field(default_factory=list)
    """Lengths of the audited calls, in tokens."""

    distances: list[int] = field(default_factory=list)
    """Fewest and most tokens that a split had before or behind it."""

    conditions: list[str] = field(default_factory=list)
    """Modes and dtypes, and whether there were pads, documents or a carried state."""

    ids: int = 0
    """Distinct token ids in the calls."""

    ids_tried: int = 0
    """Those of them that stood before an audited split."""

    largest_change: float = 0.0
    """Largest change of a logit (or of an element of a hidden state) before a split."""

    largest_effect: float = 0.0
    """Largest change behind a split: 0 for a model that does not see its input, of which an audit says nothing."""

    random_bits_per_token: float = 0.0
    """Loss on uniformly random tokens."""

    log2_vocab: float = 0.0
    """What no causal model can be below on them, up to the sample's error."""

    share: float = 0.0
    """Time of the audit over the time of the work."""

    @property
    def causal(self) -> bool:
        return not self.failure

    def require(self) -> "Verdict":
        """
        Returns:
            The verdict.

        Raises:
            RuntimeError: the model reads the future, or nothing was audited.
        """
        if self.failure:
            raise RuntimeError(
                f"expected a model whose logits depend on earlier tokens alone; found {self.failure}. It gets no score.")
        return self

    def __str__(self) -> str:
        if self.failure:
            return f"not causal: {self.failure}"
        return (f"causal in {self.audited} of {self.calls} calls: {self.splits} splits at lengths {self.lengths}, "
                f"{self.short_splits} on short pieces, {self.ids_tried} of {self.ids} token ids; "
                f"{', '.join(self.conditions)}; {self.share:.0%} of the time")


@dataclass
class _Call:
    """One call of a module, which can be repeated with other ids."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ids: torch.Tensor
    wanted: bool = False
    random_state: torch.Tensor | None = None

    @property
    def mask(self) -> torch.Tensor | None:
        mask = self.kwargs.get("attention_mask")
        return None if mask is None or bool(mask.all()) else mask[:, -self.ids.shape[1]:].bool().cpu()

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        return self.kwargs.get("cu_seqlens")

    @property
    def is_carried(self) -> bool:
        """Whether it continues from a state."""
        states = [state for name in _STATES if (state := self.kwargs.get(name)) is not None]
        return any(not hasattr(state, "get_seq_length") or bool(state.get_seq_length()) for state in states)

    def keep_state(self) -> None:
        """Takes copies of what the call is about to change."""
        self.kwargs = {name: copy.deepcopy(value) if name in _STATES else value for name, value in self.kwargs.items()}
        # dropout, in train mode, has to fall on the same elements
        self.random_state = torch.get_rng_state() if self.module.training else None

    @torch.no_grad()
    def repeat(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits or hidden states of other ids, `[B, n, V or H]` for the last n tokens."""
        kwargs = {name: copy.deepcopy(value) if name in _STATES else value for name, value in self.kwargs.items()}
        args = self.args
        if "input_ids" in kwargs:
            kwargs["input_ids"] = ids
        else:
            args = (ids, *args[1:])
        state = torch.get_rng_state()
        try:
            if self.random_state is not None:
                torch.set_rng_state(self.random_state)
            return _answers(self.module(*args, **kwargs))
        finally:
            torch.set_rng_state(state)


class InSitu:
    """
    Watches a model's calls, and repeats some of them with other tokens behind a split.

    Calls of the model and of its `base_model` are seen; the first of every length (in powers of two), mode, and kind of call
    is audited, then as many as the share allows. At the end come short pieces of what was read: every split at the start of a
    window, and a split right behind each token id, rare ones first.

    Args:
        model (nn.Module):
            A Hugging Face causal language model, or a module from token ids `[B, T]` to logits `[B, T, V]`.
        share (float):
            Tokens read for the audit over those of the work, beyond the first calls. Default: 0.12.
        bound (float):
            Change of a logit that rounding may cause in a call of the same shape, times the largest logit where that is above
            1, in units of the dtype's epsilon. Kernels that round a row alike whatever the others hold change nothing.
            Default: 2.
        seed (int):
            Seed of splits and replacements. Default: 0.
        short_pieces (bool):
            Whether short pieces follow at the end; not needed again for one model on one text. Default: `True`.

    Attributes:
        verdict (Verdict):
            Complete when the `with` block has ended.

    Raises:
        ValueError: the size of the vocabulary is not known.
        RuntimeError: in a call without token ids.
    """

    def __init__(
        self, model: nn.Module, share: float = 0.12, bound: float = 2, seed: int = 0, short_pieces: bool = True,
    ) -> None:
        self.model, self.share, self.bound = model, share, bound
        self.short_pieces = short_pieces
        self.verdict = Verdict()
        self._vocab_size = _vocab_size(model)
        self._generator = np.random.default_rng(seed)
        self._counts: Counter[int] = Counter()
        self._tried: set[int] = set()
        self._snippets: dict[int, np.ndarray] = {}
        self._longest: _Call | None = None
        self._kinds: set[tuple[Any, ...]] = set()
        # the call that runs, and the calls within it
        self._running: list[_Call | None] = []
        self._tokens = self._audit_tokens = self._number = 0
        self._audit_seconds = 0.0

    def __enter__(self) -> "InSitu":
        watched = {id(module): module for module in (self.model, getattr(self.model, "base_model", self.model))}
        self._handles: list[Any] = []
        for module in watched.values():
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is not None:
            return
        work = time.perf_counter() - self._started - self._audit_seconds
        verdict = self.verdict
        if self.short_pieces and self._longest is not None and not verdict.failure:
            with self._timed():
                self._short_pieces(self._longest)
                if not verdict.failure:
                    self._random_tokens(self._longest.ids.device)
        if not verdict.failure and not verdict.splits + verdict.short_splits:
            verdict.failure = f"nothing to audit in {verdict.calls} calls, none of which has two tokens"
        verdict.ids, verdict.ids_tried = len(self._counts), len(self._tried & self._counts.keys())
        verdict.share = self._audit_seconds / work

    @contextmanager
    def _timed(self) -> Iterator[None]:
        _synchronize()
        began = time.perf_counter()
        yield
        _synchronize()
        self._audit_seconds += time.perf_counter() - began

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running:
            # of the base within the model, or of the audit: not a call of the work
            self._running.append(None)
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise RuntimeError(
                "expected a call with token ids [B, T], some of which the audit replaces; got "
                f"{type(ids).__name__}. Pass `input_ids`.")
        call = _Call(module, args, {name: value for name, value in kwargs.items() if name != "labels"}, ids)
        if self._wants(call):
            call.wanted = True
            call.keep_state()
        self._running.append(call)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._running[-1]
        try:
            # no output: the call failed
            if call is not None and output is not None:
                with self._timed():
                    self._note(call)
                    if call.wanted and not self.verdict.failure:
                        self._audit(call, _answers(output).detach())
        finally:
            self._running.pop()

    def _wants(self, call: _Call) -> bool:
        tokens, length = call.ids.numel(), call.ids.shape[1]
        kind = (length.bit_length(), call.module.training, call.mask is None, call.is_carried, call.cu_seqlens is None)
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        # half of the share is for the short pieces
        return length > 1 and (is_new or self._audit_tokens + tokens <= self.share / 2 * (self._tokens + tokens))

    def _note(self, call: _Call) -> None:
        """Counts the token ids of a call, and keeps new ones with their context."""
        self.verdict.calls += 1
        self._tokens += call.ids.numel()
        ids = call.ids.detach().cpu().numpy()
        values, places, counts = np.unique(ids[:, ::-1], return_index=True, return_counts=True)
        is_plain = call.mask is None and call.cu_seqlens is None and not call.is_carried
        length = ids.shape[1]
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            row, position = place // length, length - 1 - place % length
            if value not in self._snippets and is_plain and position + 1 < length:
                self._snippets[value] = ids[row, max(0, position + 1 - _BEFORE):position + 1 + _AFTER].copy()
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if is_plain and (self._longest is None or length > self._longest.ids.shape[1]):
            self._longest = _Call(call.module, call.args, call.kwargs, call.ids.detach())

    def _audit(self, call: _Call, said: torch.Tensor) -> None:
        """Runs a call again, each row replaced from a split on, and with it all pads, and all documents but one."""
        ids = call.ids.detach().cpu().numpy()
        rows, length = ids.shape
        real = np.ones_like(ids, dtype=bool) if call.mask is None else call.mask.numpy()
        replaced = np.zeros_like(real)
        kept = np.zeros_like(real)
        others = ids.copy()
        for row, (start, stop) in enumerate(self._spans(call)):
            # what can be compared begins where the model answers
            begin = max(start, length - said.shape[1], int(real[row].argmax()))
            if begin + 1 >= stop:
                continue
            split = self._split(ids[row], begin, stop)
            replaced[row] = ~real[row]
            replaced[row, :start] = replaced[row, split:] = True
            others[row] = np.where(replaced[row], self._replacement(ids, row, split), ids[row])
            kept[row, begin:split] = real[row, begin:split]
            self._tried.update(ids[row, start:split].tolist())
            self.verdict.splits += 1
            distances = [*self.verdict.distances, split - begin, stop - split]
            self.verdict.distances = [min(distances), max(distances)]
        if not kept.any():
            return
        self._audit_tokens += ids.size
        self.verdict.audited += 1
        self.verdict.lengths = sorted({*self.verdict.lengths, length})
        facts = {"train": call.module.training, "eval": not call.module.training, "pads": call.mask is not None,
                 str(said.dtype).removeprefix("torch."): True, "documents": call.cu_seqlens is not None,
                 "carried state": call.is_carried, f"{rows} rows": True}
        self.verdict.conditions = sorted({*self.verdict.conditions, *(name for name, is_so in facts.items() if is_so)})
        again = call.repeat(torch.from_numpy(others).to(call.ids.device))
        skipped = length - said.shape[1]
        self._compare(said, again, kept[:, skipped:], replaced[:, skipped:],
                      self.bound * torch.finfo(said.dtype).eps,
                      f"of a call of {rows} x {length} tokens, of which it answers the last {said.shape[1]}",
                      lambda: call.repeat(call.ids))

    def _spans(self, call: _Call) -> list[tuple[int, int]]:
        """What of each row is one sequence: all of it, or one of its documents."""
        rows, length = call.ids.shape
        if call.cu_seqlens is None:
            return [(0, length)] * rows
        borders = call.cu_seqlens.tolist()
        longest = int(np.diff(borders).argmax())
        number = longest if self._number % 2 else int(self._generator.integers(len(borders) - 1))
        return [(borders[number], borders[number + 1])]

    def _split(self, ids: np.ndarray, begin: int, stop: int) -> int:
        """Near the end, behind the rarest id, at a border of chunks, anywhere, or near the start."""
        kind, shift = self._number % 5, self._number // 5 % 3 - 1
        self._number += 1
        uniform = self._generator.random()
        near = int((stop - begin) ** uniform)
        if kind == 0:
            split = stop - near
        elif kind == 1:
            split = begin + 1 + int(np.argmin([self._counts[value] for value in ids[begin:stop - 1].tolist()]))
        elif kind == 2:
            border = 1 << int(self._generator.integers(3, max(4, stop.bit_length())))
            split = border * int(1 + uniform * (stop // border)) + shift
        elif kind == 3:
            split = begin + int(uniform * (stop - begin))
        else:
            split = begin + near
        return min(max(split, begin + 1), stop - 1)

    def _replacement(self, ids: np.ndarray, row: int, split: int) -> np.ndarray:
        """Tokens `[T]` in place of a row's: text from elsewhere, random ids, or one rare id; another one at the split."""
        kind = int(self._generator.integers(3))
        length = ids.shape[1]
        if kind == 0:
            # from another row where there is one, begun anywhere, so that a row never replaces itself
            source = ids[(row + 1) % len(ids)]
            other = np.roll(source, int(self._generator.integers(1, length)))
        elif kind == 1:
            rare = self._counts.most_common()[-16:]
            other = np.full_like(ids[row], rare[int(self._generator.integers(len(rare)))][0])
        else:
            other = self._generator.integers(self._vocab_size, size=length).astype(ids.dtype)
        if other[split] == ids[row, split]:
            other[split] = (other[split] + 1) % self._vocab_size
        return other

    def _short_pieces(self, call: _Call) -> None:
        """Every split at the start of a window, and one behind each token id in a context that it has in the text."""
        start = call.ids[0, :_DENSE].cpu().numpy()
        pieces = [(start, split) for split in range(1, len(start))]
        allowed = max(_ROWS, int(self.share / 2 * self._tokens / (2 * (_BEFORE + _AFTER))))
        rarest = sorted(self._snippets.keys() - self._tried, key=lambda value: (self._counts[value], value))
        for value in rarest[:allowed]:
            piece = self._snippets[value]
            pieces.append((piece, int((piece == value).nonzero()[0][-1]) + 1))
            self._tried.add(value)
        options = {name: value for name, value in call.kwargs.items() if name == "use_cache"}
        short = _Call(call.module, (call.ids,), options, call.ids)
        for length in sorted({len(piece) for piece, _ in pieces}):
            same = [(piece, split) for piece, split in pieces if len(piece) == length and split < length]
            for first in range(0, len(same), _ROWS):
                originals = np.stack([piece for piece, _ in same[first:first + _ROWS]])
                splits = np.asarray([split for _, split in same[first:first + _ROWS]])
                others = np.stack([self._replacement(originals, row, split) for row, split in enumerate(splits.tolist())])
                kept = np.arange(length) < splits[:, None]
                # the start of the window is in all its rows
                once, places = np.unique(originals, axis=0, return_inverse=True)
                both = torch.from_numpy(np.concatenate([once, np.where(kept, originals, others)])).to(call.ids.device)
                answers = short.repeat(both)
                said, again = answers[torch.from_numpy(places.reshape(-1)).to(answers.device)], answers[len(once):]
                self.verdict.short_splits += len(splits)
                # rows are rounded alike only at the same place of a call
                bound = max(1e-5, 4 * torch.finfo(said.dtype).eps)
                self._compare(said, again, kept, ~kept, bound, f"of a piece of {length} tokens",
                              lambda both=both, places=places: short.repeat(both)[places.reshape(-1)])
                if self.verdict.failure:
                    return

    @torch.no_grad()
    def _random_tokens(self, device: torch.device) -> None:
        """The loss on uniformly random tokens, of which nothing can be known."""
        verdict = self.verdict
        tokens = torch.from_numpy(self._generator.integers(self._vocab_size, size=(8, 64))).to(device)
        logits = _answers(self.model(tokens))[:, :-1].float()
        bits = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").double() / math.log(2)
        error = bits.std().item() / math.sqrt(len(bits))
        verdict.random_bits_per_token, verdict.log2_vocab = bits.mean().item(), math.log2(self._vocab_size)
        # written so that NaN fails
        if not verdict.random_bits_per_token >= verdict.log2_vocab - 4 * error - 1e-4:
            verdict.failure = (f"{verdict.random_bits_per_token:.4f} bits per token on uniformly random tokens, below "
                               f"log2({self._vocab_size}) = {verdict.log2_vocab:.4f}")

    def _compare(self, said: torch.Tensor, again: torch.Tensor, kept: np.ndarray, replaced: np.ndarray, bound: float,
                 what: str, same: Any) -> None:
        """Compares what a model said with what it says after tokens were replaced; `same` runs the original once more."""
        verdict = self.verdict
        if said.isnan().any():
            verdict.failure = f"logits that are no numbers (NaN) {what}"
            return
        change = torch.stack([_change(*rows) for rows in zip(said, again, strict=True)]).numpy()
        before = np.where(kept, change, 0.0)
        verdict.largest_effect = max(verdict.largest_effect, float(np.where(replaced, change, 0.0).max()))
        # NaN stays NaN
        verdict.largest_change = float(np.maximum(verdict.largest_change, before.max()))
        scale = max(1.0, said.abs().max().item())
        if before.max() <= bound * scale:
            return
        # kernels that add in any order differ from run to run
        noise = max(_change(*rows).max().item() for rows in zip(said, same(), strict=True))
        if not noise <= 16 * torch.finfo(said.dtype).eps * scale:
            verdict.failure = f"other answers to the same tokens, by {noise:.2e}, {what}: it keeps something from call to call"
        elif not before.max() <= 4 * noise:
            row, position = np.argwhere(~(before <= bound * scale))[0].tolist()
            verdict.failure = (f"the answer at position {position} of row {row} {what}, which changes by "
                               f"{before[row, position]:.2e} with tokens behind it, or of other rows and documents")


def _change(said: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
    """Largest change at each position of `[n, V]`, float32 `[n]` on the CPU."""
    if torch.equal(said, again):
        return torch.zeros(len(said))
    pairs = zip(said.split(1024), again.split(1024), strict=True)
    return torch.cat([(one.float() - other.float()).abs().amax(-1) for one, other in pairs]).cpu()


def _answers(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def _vocab_size(model: nn.Module) -> int:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None:
        size = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if size is None:
        raise ValueError(f"expected `config.vocab_size` or an nn.Embedding in the model; {type(model).__name__} has neither.")
    return size


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
