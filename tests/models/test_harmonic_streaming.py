import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import VOCAB, model, tokens
from transformers import AutoTokenizer, TextIteratorStreamer

from fla_harmonic import HarmonicForCausalLM
from fla_harmonic.models import stream_state
from fla_harmonic.text.tokenizers import ByteTokenizer

models = pytest.mark.parametrize("net", [
    pytest.param((preset, mode), id=f"{preset}-{mode}") for preset in ("paper", "stack") for mode in ("bounded", "init")])
RESUME = """
import sys, torch
import fla_harmonic
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    lm = AutoModelForCausalLM.from_pretrained(folder + "/model")
    stream = lm.stream(torch.load(folder + "/rest.pt"), 16, state=folder + "/state.safetensors")
    torch.save({"losses": torch.cat(list(stream), -1), "nll": stream.state.nll}, folder + "/resumed.pt")
"""
SAVE_FOR_EVER = """
import sys
import fla_harmonic
from transformers import AutoModelForCausalLM
lm = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model")
stream = lm.stream((number % 50 + 3 for number in range(10**9)), 4)
for losses in stream:
    stream.save(sys.argv[1] + "/state.safetensors")
    print(stream.state.tokens, flush=True)
"""


def expected(lm: HarmonicForCausalLM, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = lm(x, use_cache=False).logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(len(x), -1)


def cut(x: torch.Tensor, places: list[int]) -> list[torch.Tensor]:
    return list(x.tensor_split(sorted(place % (x.shape[-1] + 1) for place in places), dim=-1))


def joined(stream: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(stream), -1)


@models
@settings(max_examples=8)
@given(length=st.integers(2, 150), chunk_size=st.integers(1, 160), rows=st.sampled_from([1, 3]))
def test_losses_are_those_of_one_full_pass(net: tuple[str, str], length: int, chunk_size: int, rows: int) -> None:
    lm, x = model(*net), tokens(rows, length)
    stream = lm.stream(x, chunk_size)
    losses = joined(stream)
    assert losses.shape == (rows, length - 1)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected(lm, x), rtol=1e-5, atol=1e-5)
    assert (stream.state.targets, stream.state.tokens) == (rows * (length - 1), length)
    assert stream.bits_per_token == pytest.approx(losses.double().mean().item() / np.log(2), rel=1e-12)


@given(places=st.lists(st.integers(0, 200), max_size=5), chunk_size=st.integers(5, 40), length=st.integers(0, 90),
       form=st.sampled_from(["integers", "lists", "arrays", "tensors", "unsigned", "scalars", "one tensor"]))
def test_form_and_pieces_of_the_text_change_nothing(places: list[int], chunk_size: int, length: int, form: str) -> None:
    lm, x = model("stack"), tokens(length)
    pieces = cut(x, places)
    text: Any = {
        "integers": (int(token) for token in x),
        "lists": [piece.tolist() for piece in pieces],
        "arrays": (piece.numpy() for piece in pieces),
        "tensors": iter(pieces),
        "unsigned": (piece.numpy().astype(np.uint16) for piece in pieces),
        "scalars": list(x.numpy()),
        "one tensor": x,
    }[form]
    losses = list(lm.stream(text, chunk_size))
    assert all(part.ndim == 1 and len(part) for part in losses)
    assert sum(map(len, losses)) == max(0, length - 1)
    if losses:
        assert torch.equal(torch.cat(losses), joined(lm.stream(x[None], chunk_size))[0])


@models
@settings(max_examples=5)
@given(places=st.lists(st.integers(0, 200), max_size=3), chunk_size=st.integers(4, 40), rows=st.sampled_from([1, 2]))
def test_a_stream_in_pieces_is_bit_equal(
    net: tuple[str, str], places: list[int], chunk_size: int, rows: int,
) -> None:
    lm, x = model(*net), tokens(rows, 80)
    whole = lm.stream(x, chunk_size)
    expected_losses = joined(whole)
    losses, state = [], None
    for piece in cut(x, places):
        stream = lm.stream(piece, chunk_size, state=state)
        losses += list(stream)
        state = stream.state
    assert torch.equal(torch.cat(losses, 1), expected_losses)
    assert state.nll == pytest.approx(whole.state.nll, rel=1e-12)
    assert (state.tokens, state.targets) == (80, rows * 79)


@settings(max_examples=8)
@given(taken=st.integers(0, 12), chunk_size=st.integers(4, 20), saves=st.booleans())
def test_a_stream_left_in_the_middle_loses_no_token(taken: int, chunk_size: int, saves: bool, tmp_path_factory: Any) -> None:
    lm, x = model("stack"), tokens(100)
    text = iter(x.split(17))
    first = lm.stream(text, chunk_size)
    losses = [part for _, part in zip(range(taken), first, strict=False)]
    state: Any = first.state
    if saves:
        state = tmp_path_factory.mktemp("state") / "state.safetensors"
        first.save(state)
    losses += list(lm.stream(text, chunk_size, state=state))
    assert torch.equal(torch.cat(losses), joined(lm.stream(x, chunk_size)))


@settings(max_examples=10)
@given(first=st.integers(3, 40), second=st.integers(3, 40), place=st.integers(0, 100))
def test_chunk_size_may_change_on_the_way(first: int, second: int, place: int) -> None:
    lm, x = model("stack"), tokens(1, 101)
    start = lm.stream(x[:, :place], first)
    losses = [*start, *lm.stream(x[:, place:], second, state=start.state)]
    torch.testing.assert_close(torch.cat(losses, 1), expected(lm, x), rtol=1e-5, atol=1e-5)


def test_a_failing_source_and_a_failing_model_lose_nothing() -> None:
    lm, x = model("stack"), tokens(60)

    def broken() -> Iterator[int]:
        yield from x[:25].tolist()
        raise OSError("the disk is gone")

    stream = lm.stream(broken(), 16)
    losses = [next(stream)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert stream.state.tokens == 25
    stream = lm.stream(x[25:], 16, state=stream.state)
    handle = lm.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    before = stream.state.nll
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    handle.remove()
    assert stream.state.nll == before
    assert torch.equal(torch.cat([*losses, *stream]), joined(lm.stream(x, 16)))


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_without_targets_has_no_loss(length: int) -> None:
    stream = model("paper").stream(tokens(length))
    assert list(stream) == []
    assert np.isnan(stream.bits_per_token)
    # the only token is the context of what follows
    assert len(joined(model("paper").stream(tokens(5), state=stream.state))) == 4 + length


def test_float32_losses_of_a_model_in_bfloat16() -> None:
    lm, x = model("stack", initializer_range=0.1).bfloat16(), tokens(1, 40)
    losses = joined(lm.stream(x, 16))
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected(lm, x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("text", "message"), [
    ([0.5], "float32"), ([True], "bool"), (["text"], "got str. Tokenize the text"),
    (torch.zeros(1, 1, 1, dtype=torch.long), r"shape \(1, 1, 1\)"),
    ([[1, 2], torch.ones(2, 2, dtype=torch.long)], "same rows"),
    ([torch.ones(2, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.long)], "same rows"),
    ([torch.ones(1, 2, dtype=torch.long), 5], "same rows"), ([1, VOCAB], "token ids must be"),
    ([1, -1, 2], "token ids must be"), ([VOCAB], "token ids must be"), ([1, 2, 3, 4, VOCAB], "token ids must be"),
])
def test_what_is_no_token_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(model("paper").stream(text, 4))


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, True])
def test_impossible_chunk_size_is_refused(chunk_size: Any) -> None:
    with pytest.raises(ValueError, match="`chunk_size` must be a positive integer"):
        model("paper").stream([1, 2], chunk_size)


def test_attention_layers_are_refused() -> None:
    lm = model("stack")
    lm.model.layers[1].attn = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"attention in layers \[1\] .*`attn`"):
        lm.stream([1, 2])


@pytest.mark.processes
def test_a_saved_stream_goes_on_bit_equal_in_a_new_process(tmp_path: Path) -> None:
    wholes = {}
    for preset in ("paper", "stack"):
        for mode in ("bounded", "init"):
            lm, x, folder = model(preset, mode), tokens(2, 120), tmp_path / f"{preset}-{mode}"
            lm.save_pretrained(folder / "model")
            torch.save(x[:, 71:], folder / "rest.pt")
            whole, first = lm.stream(x, 16), lm.stream(x[:, :71], 16)
            expected_losses, losses = joined(whole), joined(first)
            first.save(folder / "state.safetensors")
            wholes[folder] = losses, expected_losses, whole.state.nll
    done = subprocess.run(
        [sys.executable, "-c", RESUME, *map(str, wholes)], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for folder, (losses, expected_losses, nll) in wholes.items():
        resumed = torch.load(folder / "resumed.pt")
        assert torch.equal(torch.cat([losses, resumed["losses"]], 1), expected_losses)
        assert resumed["nll"] == pytest.approx(nll, rel=1e-12)


def test_a_file_holds_every_state_and_what_the_caller_adds(tmp_path: Path) -> None:
    lm = model("stack")
    stream = lm.stream(tokens(2, 70), 16)
    list(stream)
    stream.save(tmp_path / "state.safetensors", {"book": "Emma"})
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert held.pop("pending").shape == (2, 70 % 16)
    assert sum(value.numel() for value in held.values()) == 2 * lm.state_size
    state = lm.stream([], state=tmp_path / "state.safetensors").state
    assert state.metadata == {"book": "Emma"}
    for layer, own in zip(state.cache, stream.state.cache, strict=True):
        assert torch.equal(layer["conv_state"], own["conv_state"])
        for level, same in zip(layer["recurrent_state"], own["recurrent_state"], strict=True):
            assert torch.equal(level, same)
    assert state.cache.get_seq_length() == stream.state.cache.get_seq_length() == 64
    assert (state.nll, state.targets, state.scored) == (stream.state.nll, stream.state.targets, stream.state.scored)


def saved(path: Path, lm: HarmonicForCausalLM, length: int = 40) -> Path:
    stream = lm.stream(tokens(length), 16)
    list(stream)
    stream.save(path / "state.safetensors")
    return path / "state.safetensors"


@pytest.mark.parametrize(("option", "other"), [
    ("timescale_mode", "init"), ("timescales", [[3, 8], [10, 40], [125, 1000]]), ("use_prediction_error", False),
    ("num_hidden_layers", 3), ("gate_rank", 4), ("norm_eps", 1e-3), ("use_short_conv", False), ("hidden_size", 32)], ids=str)
def test_state_of_another_architecture_is_refused(option: str, other: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, model("stack"))
    with pytest.raises(ValueError, match=f"expected the state of a model with .*{option}=.*; got one of .*{option}="):
        model("stack", **{option: other}).stream([], state=path)


def test_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    lm = model("stack")
    path = saved(tmp_path, lm)
    with torch.no_grad():
        lm.model.layers[1].attn.levels[2].timescale.bias[3] += 1e-6
    with pytest.raises(ValueError, match=r"same architecture with weights .*Load the model that wrote the state"):
        lm.stream([], state=path)
    with pytest.raises(ValueError, match="weights"):
        model("stack").bfloat16().stream([], state=path)


def test_a_state_in_memory_of_another_model_is_refused() -> None:
    lm, x = model("stack"), tokens(60)
    first = lm.stream(x[:40], 16)
    losses, state = joined(first), first.state
    # of equal shapes: first the weights, then the architecture
    other = model("stack")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match=r"expected the state of a model with weights .*; got one .*Load the model"):
        other.stream(x[40:], 16, state=state)
    for option in ({"use_prediction_error": False}, {"norm_eps": 1e-3}, {"num_hidden_layers": 3}):
        with pytest.raises(ValueError, match=f"expected the state of a model with {next(iter(option))}=.*; got one of .*Load"):
            model("stack", **option).stream(x[40:], 16, state=state)
    with pytest.raises(ValueError, match="names its model"):
        lm.stream(x[40:], 16, state=dataclasses.replace(state, model=None))
    # a twin is the same model
    second = model("stack").stream(x[40:], 16, state=state)
    assert torch.equal(torch.cat([losses, joined(second)]), joined(lm.stream(x, 16)))


def test_weights_are_read_once_for_a_state_and_never_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reads: list[Any] = []
    fingerprint = stream_state.fingerprint
    monkeypatch.setattr(stream_state, "fingerprint", lambda lm: reads.append(lm) or fingerprint(lm))
    lm, x = model("stack"), tokens(90)
    stream = lm.stream(x, 8)
    for _ in stream:
        pass
    assert not reads
    for _ in range(3):
        state = stream.state
        stream.save(tmp_path / "state.safetensors")
    assert len(reads) == 1
    for start in (state, tmp_path / "state.safetensors"):
        reads.clear()
        second = lm.stream(x, 8, state=start)
        assert sum(len(losses) for losses in second) == second.state.targets - state.targets == 90
        assert len(reads) == 1


def test_what_changes_no_state_is_no_other_model(tmp_path: Path) -> None:
    path = saved(tmp_path, model("stack"))
    other = model("stack", max_position_embeddings=7, eos_token_id=5, attn_mode="fused_recurrent", fuse_norm=False)
    state = other.stream([], state=path).state
    assert state.tokens == 40
    assert model("stack").stream([], state=state).state.tokens == 40


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    lm = model("stack")
    path = saved(tmp_path, lm)
    whole = path.read_bytes()
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with pytest.raises(FileNotFoundError, match="found no file"):
        lm.stream([], state=tmp_path / "none")
    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is not a whole safetensors file"):
            lm.stream([], state=path)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="got format None"):
        lm.stream([], state=path)
    save_file(tensors, path, {**metadata, "version": "99"})
    with pytest.raises(ValueError, match="version 99"):
        lm.stream([], state=path)
    for name, value in tensors.items():
        save_file({key: kept for key, kept in tensors.items() if key != name}, path, metadata)
        with pytest.raises(ValueError, match=f"expected '{name}'"):
            lm.stream([], state=path)
        save_file({**tensors, name: value[..., :-1].clone()}, path, metadata)
        with pytest.raises(ValueError, match="expected "):
            lm.stream([], state=path)
    for name in metadata.keys() - {"format", "version"}:
        save_file(tensors, path, {key: kept for key, kept in metadata.items() if key != name})
        with pytest.raises(ValueError, match=f"expected '{name}'"):
            lm.stream([], state=path)
    assert json.loads(metadata["config"])["hidden_size"] == 16


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model("stack")
    path = saved(tmp_path, lm)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(stream_state.os, name, fail)
            with pytest.raises(OSError, match="no space left"):
                saved(tmp_path, lm, 50)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.processes
def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    lm, path, generator = model("stack"), tmp_path / "state.safetensors", random.Random(0)
    lm.save_pretrained(tmp_path / "model")
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3 * generator.random())
        process.send_signal(signal.SIGKILL)
        printed = [int(line) for line in process.stdout.read().split()]
    finally:
        process.kill()
        process.wait()
    state = lm.stream([], state=path).state
    # the last that was announced, or the one that was written when the signal came
    assert not printed or state.tokens in (printed[-1], printed[-1] + 4)
    assert joined(lm.stream([7, 8, 9], 4, state=path)).isfinite().all()


@models
@settings(max_examples=4)
@given(length=st.integers(1, 90), chunk_size=st.integers(4, 40))
def test_generation_goes_on_after_a_stream(net: tuple[str, str], length: int, chunk_size: int) -> None:
    lm, x = model(*net, eos_token_id=None), tokens(2, length)
    # the id of padding, too, is a token of the text
    x[:, -1] = 0
    stream = lm.stream(x, chunk_size)
    list(stream)
    prompt = stream.prompt()
    assert prompt["input_ids"].shape[1] <= chunk_size
    continued = lm.generate(**prompt, max_new_tokens=6, do_sample=False)
    whole = lm.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=6, do_sample=False)
    assert torch.equal(continued[:, -6:], whole[:, -6:])
    # the stream itself has not moved
    assert torch.equal(lm.generate(**stream.prompt(), max_new_tokens=6, do_sample=False), continued)


def test_generated_text_streams_out_as_it_is_made(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    lm = model("stack", vocab_size=256, eos_token_id=None)
    prompt = tokenizer("Emma", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0)
    thread = threading.Thread(target=lm.generate, kwargs={**prompt, **options, "streamer": streamer})
    thread.start()
    parts = list(streamer)
    thread.join()
    assert "".join(parts) == tokenizer.decode(lm.generate(**prompt, **options)[0, 4:])
    assert sum(map(bool, parts)) > 1


def test_memory_of_a_stream_does_not_grow() -> None:
    lm = model("stack")
    held = set()
    stream = lm.stream((number % 50 + 3 for number in range(2000)), 64)
    for _ in stream:
        tensors = [*stream_state._tensors(stream.state.cache).values(), stream.state.pending]
        held.add(sum(value.numel() for value in tensors[:-1]))
        assert tensors[-1].shape[1] <= 65
    assert held == {lm.state_size}
    assert stream.state.cache.get_seq_length() == 64 * 31
