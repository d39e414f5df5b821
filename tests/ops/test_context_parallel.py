import itertools
import math
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fla_harmonic import HarmonicAttention
from fla_harmonic.ops.harmonic import naive_recurrent_harmonic
from fla_harmonic.ops.harmonic.context_parallel import (
    CPContext,
    build_cp_context,
    cp_chunk_harmonic,
    tokens_before,
)

RANKS = 3
RANGES = ((0.55, 0.88), (0.992, 0.999), (0.0, 1.0))


def on_ranks(check: Callable[[], None], folder: Path) -> None:
    """Runs the check on every rank of a gloo group; a failure on one is a failure here."""
    mp.spawn(_start, (check, str(folder / "store")), nprocs=RANKS)


def _start(rank: int, check: Callable[[], None], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    check()
    dist.barrier()
    dist.destroy_process_group()


def piece(x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1] // RANKS
    return x[:, dist.get_rank() * length:(dist.get_rank() + 1) * length]


def borders(document_ids: torch.Tensor) -> torch.Tensor:
    """Borders of the documents in the flattened rows, one id after another."""
    ends = [0]
    for row in document_ids.tolist():
        for _, run in itertools.groupby(row):
            ends.append(ends[-1] + len(list(run)))
    return torch.tensor(ends)


def check_one_sequence(B: int, length: int, D: int, seed: int, decay_range: tuple[float, float], packed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    T = RANKS * length
    u, v, weight = torch.randn(3, B, T, D, generator=generator, dtype=torch.float64)
    u = 3 * u
    # between one document in a row and one in every other token
    density = (0.5, 2 / T, 0)[seed % 3]
    ids = (torch.rand(B, T, generator=generator) < density).cumsum(1) if packed else None

    whole = [x.clone().requires_grad_() for x in (u, v)]
    flat = [x.reshape(1, B * T, D) if packed else x for x in whole]
    expected, _ = naive_recurrent_harmonic(*flat, decay_range=decay_range, cu_seqlens=borders(ids) if packed else None)
    expected = expected.view(B, T, D)
    grads = torch.autograd.grad((expected * weight).sum(), whole)

    context, cu_seqlens = build_cp_context(dist.group.WORLD, ids, length)
    local = [piece(x).clone().requires_grad_() for x in (u, v)]
    flat = [x.reshape(1, B * length, D) if packed else x for x in local]
    h = cp_chunk_harmonic(flat[0], flat[1], decay_range, context, cu_seqlens).view(B, length, D)
    torch.testing.assert_close(h, piece(expected), rtol=1e-11, atol=1e-13)
    actual = torch.autograd.grad((h * piece(weight)).sum(), local)
    for a, e in zip(actual, grads, strict=True):
        torch.testing.assert_close(a, piece(e), rtol=1e-11, atol=1e-13)


def check_document_that_is_not_finite() -> None:
    # documents within a piece, over a border of pieces and over a whole piece; one at a time is not finite
    length, D = 12, 3
    T = RANKS * length
    ends = torch.tensor([[5, 8, 30], [12, 24, 31]])
    ids = (torch.arange(T) >= ends[..., None]).sum(1)
    context, cu_seqlens = build_cp_context(dist.group.WORLD, ids, length)
    generator = torch.Generator().manual_seed(0)
    u, v, weight = torch.randn(3, 2, T, D, generator=generator)

    def run(u: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        local = [piece(x).reshape(1, -1, D).requires_grad_() for x in (u, v)]
        h = cp_chunk_harmonic(local[0], local[1], (0.5, 0.9), context, cu_seqlens)
        return [h, *torch.autograd.grad((h * piece(weight).reshape(h.shape)).sum(), local)]

    clean = run(u, v)
    for document, row, which, value in itertools.product(range(4), range(2), range(2), (math.nan, math.inf)):
        poison = ids == document
        poison[1 - row] = False
        inputs = [u, v]
        inputs[which] = inputs[which].masked_fill(poison[..., None], value)
        kept = ~piece(poison).flatten()
        for before, after in zip(clean, run(*inputs), strict=True):
            assert torch.equal(before[0, kept], after[0, kept])


def check_float32_of_a_long_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v, weight = torch.randn(3, 1, RANKS * 3000, 8, generator=generator)
    whole = [x.double().requires_grad_() for x in (u, v)]
    # the slowest level: what enters a piece is felt for a thousand tokens
    expected, _ = naive_recurrent_harmonic(*whole, decay_range=(0.992, 0.9999))
    grads = torch.autograd.grad((expected * weight).sum(), whole)
    local = [piece(x).clone().requires_grad_() for x in (u, v)]
    h = cp_chunk_harmonic(local[0], local[1], (0.992, 0.9999), build_cp_context(dist.group.WORLD)[0])
    assert h.dtype == torch.float32
    assert (h - piece(expected)).abs().max() < 2e-6 * expected.abs().max()
    for a, e in zip(torch.autograd.grad((h * piece(weight)).sum(), local), grads, strict=True):
        assert (a - piece(e)).abs().max() < 5e-6 * e.abs().max()


def check_layer() -> None:
    torch.manual_seed(0)
    layer = HarmonicAttention(hidden_size=8, use_short_conv=True).double()
    x = torch.randn(2, RANKS * 20, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, RANKS * 20, 8, dtype=torch.float64)
    o = layer(x)[0]
    grads = torch.autograd.grad((o * weight).sum(), [x, *layer.parameters()])
    local = piece(x).detach().requires_grad_()
    actual = layer(local, cp_context=build_cp_context(dist.group.WORLD)[0])[0]
    torch.testing.assert_close(actual, piece(o), rtol=1e-10, atol=1e-12)
    dx, *dparams = torch.autograd.grad((actual * piece(weight)).sum(), [local, *layer.parameters()])
    torch.testing.assert_close(dx, piece(grads[0]), rtol=1e-10, atol=1e-12)
    for mine, all_ranks in zip(dparams, grads[1:], strict=True):
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, all_ranks, rtol=1e-10, atol=1e-12)


def check_everything() -> None:
    # the same problems on every rank, which one draw a process would not be
    draw = random.Random(0)
    for seed in range(40):
        length = draw.choice((1, 2, draw.randint(3, 70)))
        check_one_sequence(draw.randint(1, 3), length, draw.randint(1, 5), seed, draw.choice(RANGES), bool(seed % 2))
    check_document_that_is_not_finite()
    check_float32_of_a_long_sequence()
    check_layer()


@pytest.mark.processes
def test_pieces_on_ranks_equal_the_whole_sequence(tmp_path: Path) -> None:
    on_ranks(check_everything, tmp_path)


@pytest.fixture
def alone() -> Any:
    """A group of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'store')}", rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


def test_the_operators_are_what_they_tell_torch(alone: dist.ProcessGroup) -> None:
    u, v = torch.randn(2, 2, 6, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    for context, cu_seqlens in (build_cp_context(alone), build_cp_context(alone, ids, 6)):
        shape = (2, 6, 3) if cu_seqlens is None else (1, 12, 3)
        options = (cu_seqlens, *context[3:], [0.5, 0.9], "torch", *context[:3])
        torch.library.opcheck(
            torch.ops.fla_harmonic.cp_harmonic_scan, (u.detach().view(shape), v.detach().view(shape), *options),
            test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.fla_harmonic.cp_tokens_before, (u.detach(), 2, *context[:3]))


def test_what_does_not_belong_together_is_refused(alone: dist.ProcessGroup) -> None:
    u = torch.zeros(1, 6, 3)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    context, cu_seqlens = build_cp_context(alone, ids, 6)
    assert isinstance(context, CPContext)
    with pytest.raises(ValueError, match=r"must be built together.*Pass both"):
        cp_chunk_harmonic(u, u, (0.5, 0.9), context)
    with pytest.raises(ValueError, match=r"must be built together.*Pass both"):
        cp_chunk_harmonic(u, u, (0.5, 0.9), context._replace(first=None, last=None, enters=None), cu_seqlens)
    with pytest.raises(ValueError, match=r"1 ranks x 5 tokens; got 6.*all ranks"):
        build_cp_context(alone, ids, 5)
    with pytest.raises(ValueError, match="at least 7 tokens; got 6"):
        tokens_before(u, 7, context)
    layer = HarmonicAttention(hidden_size=3, use_short_conv=True)
    with pytest.raises(ValueError, match=r"use_short_conv.*packed documents"):
        layer(u, cp_context=context, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="`cp_context` excludes `attention_mask`"):
        layer(u, cp_context=context, attention_mask=torch.ones(1, 6, dtype=torch.long))
    with pytest.raises(ValueError, match="mode 'fused_recurrent'"):
        HarmonicAttention(mode="fused_recurrent", hidden_size=3)(u, cp_context=build_cp_context(alone)[0])
