import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import VOCAB, config, model, tokens

from fla_harmonic import HarmonicConfig, HarmonicForCausalLM, HarmonicModel
from fla_harmonic.layers.harmonic import Timescale

presets = pytest.mark.parametrize("preset", ["paper", "stack"])
RELOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
import fla_harmonic
for path in sys.argv[1:]:
    lm = AutoModelForCausalLM.from_pretrained(path)
    saved = torch.load(path + "/expected.pt")
    assert type(lm).__name__ == "HarmonicForCausalLM"
    with torch.no_grad():
        assert torch.equal(lm(saved["x"]).logits, saved["logits"])
"""


def gradients(loss: torch.Tensor, lm: torch.nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [p for p in lm.parameters() if p.requires_grad], materialize_grads=True))


@presets
@pytest.mark.parametrize("options", [{}, {"fuse_cross_entropy": False}, {"tie_word_embeddings": True},
                                     {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}], ids=str)
@pytest.mark.filterwarnings("ignore:`fuse_linear_cross_entropy` is enabled")
def test_loss_is_the_cross_entropy_of_the_next_token(preset: str, options: dict[str, Any]) -> None:
    lm, x = model(preset, **options), tokens(2, 33)
    labels = x.clone()
    labels[0, :9] = -100
    results = []
    for loss in (
        lm(x, labels=labels).loss,
        F.cross_entropy(lm(x).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
    ):
        results.append([loss, *gradients(loss, lm)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@presets
def test_loss_is_divided_by_the_number_of_items_of_the_whole_batch(preset: str) -> None:
    lm, x = model(preset), tokens(2, 9)
    mean = lm(x, labels=x).loss
    for items in (64, torch.tensor(64)):
        torch.testing.assert_close(lm(x, labels=x, num_items_in_batch=items).loss, mean * 16 / 64)


@presets
@pytest.mark.parametrize("shape", [(2, 5), (1, 9), (4, 9), (18,)], ids=str)
def test_labels_of_another_shape_are_refused(preset: str, shape: tuple[int, ...]) -> None:
    # torch would give some of them a loss, over logits of other tokens
    with pytest.raises(ValueError, match=r"`labels` must have the shape of the inputs, \(2, 9\); got"):
        model(preset)(tokens(2, 9), labels=torch.zeros(shape, dtype=torch.long))


def test_an_assigned_criterion_is_used() -> None:
    lm, x = model("paper"), tokens(2, 9)
    plain = lm(x, labels=x).loss
    lm.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.5)
    expected = F.cross_entropy(lm(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), label_smoothing=0.5)
    torch.testing.assert_close(lm(x, labels=x).loss, expected)
    assert not any("criterion" in key for key in lm.state_dict())
    lm.criterion = None
    assert torch.equal(lm(x, labels=x).loss, plain)


@presets
def test_tied_head_is_the_embedding(preset: str) -> None:
    lm = model(preset, tie_word_embeddings=True)
    assert lm.lm_head.weight is lm.model.embeddings.weight
    assert model(preset).lm_head.weight is not model(preset).model.embeddings.weight


@presets
def test_logits_to_keep(preset: str) -> None:
    lm, x = model(preset), tokens(2, 9)
    logits = lm(x).logits
    torch.testing.assert_close(lm(x, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(lm(x, logits_to_keep=torch.tensor([0, 5])).logits, logits[:, [0, 5]])


def test_unfused_norms_change_nothing() -> None:
    fused, plain = model("stack"), model("stack", fuse_norm=False)
    plain.load_state_dict(fused.state_dict())
    x = tokens(2, 9)
    torch.testing.assert_close(plain(x).logits, fused(x).logits, rtol=0, atol=1e-5)


@pytest.mark.processes
def test_saved_models_load_bit_equal_in_a_new_process(tmp_path: Path) -> None:
    paths = []
    variants = {"paper": {"tie_word_embeddings": True}, "stack": {"conv_bias": True, "timescale_mode": "init"}}
    for preset, options in variants.items():
        torch.manual_seed(0)
        lm, x = HarmonicForCausalLM(config(preset, **options)).eval(), tokens(2, 70)
        with torch.no_grad():
            for p in lm.parameters():
                p += 0.1 * torch.randn_like(p)
            paths.append(str(tmp_path / preset))
            lm.save_pretrained(paths[-1])
            torch.save({"x": x, "logits": lm(x).logits}, f"{paths[-1]}/expected.pt")
        again = HarmonicForCausalLM.from_pretrained(paths[-1])
        assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in lm.state_dict().items()}
        assert torch.equal(HarmonicModel.from_pretrained(paths[-1])(x)[0], lm.model(x)[0])
    result = subprocess.run([sys.executable, "-c", RELOAD, *paths], env=dict(os.environ), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


@presets
def test_loaded_timescales_are_exempt_from_weight_decay(preset: str, tmp_path: Path) -> None:
    model(preset).save_pretrained(tmp_path)
    for options in ({}, {"dtype": torch.bfloat16}):
        lm = HarmonicForCausalLM.from_pretrained(tmp_path, **options)
        exempt = {name for name, p in lm.named_parameters() if getattr(p, "_no_weight_decay", False)}
        assert exempt == {name for name, _ in lm.named_parameters() if name.endswith("timescale.bias")} != set()


@presets
@pytest.mark.parametrize("timescale_mode", ["bounded", "init"])
@pytest.mark.parametrize("route", ["cpu", "meta", "loaded"])
def test_initialisation_leaves_nothing_out(preset: str, timescale_mode: str, route: str, tmp_path: Path) -> None:
    options = dict(timescale_mode=timescale_mode, conv_bias=True)
    expected = HarmonicForCausalLM(config(preset, **options))
    if route == "meta":
        with torch.device("meta"):
            lm = HarmonicForCausalLM(config(preset, **options))
        lm.to_empty(device="cpu")
    else:
        lm = HarmonicForCausalLM(config(preset, **options))
    if route == "loaded":
        lm.save_pretrained(tmp_path)
        lm = HarmonicForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for x in (*lm.parameters(), *lm.buffers()):
            x.fill_(torch.nan)
    for module in lm.modules():
        # transformers marks what it has initialised or loaded, and leaves that alone
        module._is_hf_initialized = False
    for p in lm.parameters():
        p._is_hf_initialized = False
    lm.init_weights()
    for (name, p), (_, q) in zip(lm.named_parameters(), expected.named_parameters(), strict=True):
        assert p.isfinite().all(), name
        # drawn values differ, the others are given
        assert p.std() < 2.5 * q.std() + 1e-9 or p.numel() < 20, name
    for module, twin in zip(lm.modules(), expected.modules(), strict=True):
        if isinstance(module, Timescale):
            assert torch.equal(module.bias, twin.bias)
        if isinstance(module, torch.nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert not module.bias.any()
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            assert not module.bias.any()


def test_loading_a_checkpoint_without_some_weights_initialises_those(tmp_path: Path) -> None:
    lm = HarmonicForCausalLM(config("paper"))
    state = {key: value for key, value in lm.state_dict().items() if "timescale" not in key and "levels.0.norm" not in key}
    lm.save_pretrained(tmp_path, state_dict=state)
    again = HarmonicForCausalLM.from_pretrained(tmp_path)
    for key, value in lm.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


@pytest.mark.parametrize("bad", [-1, VOCAB, 10**6])
def test_token_outside_the_vocabulary_is_an_error(bad: int) -> None:
    x = tokens(1, 5)
    x[0, 3] = bad
    with pytest.raises(ValueError, match=rf"token ids must be in \[0, {VOCAB}\); got {bad}"):
        model("paper")(x)


def test_resized_vocabulary_accepts_its_new_tokens() -> None:
    lm = model("paper")
    lm.resize_token_embeddings(VOCAB + 3)
    assert lm(torch.tensor([[VOCAB + 2]])).logits.shape == (1, 1, VOCAB + 3)
    with pytest.raises(ValueError, match=rf"\[0, {VOCAB + 3}\); got {VOCAB + 3}"):
        lm(torch.tensor([[VOCAB + 3]]))


@presets
@pytest.mark.parametrize("timescale_mode", ["bounded", "init"])
def test_greedy_generation_equals_a_loop_of_full_passes(preset: str, timescale_mode: str) -> None:
    lm, x = model(preset, timescale_mode, eos_token_id=None), tokens(2, 7)
    expected = x
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat([expected, lm(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(lm.generate(x, max_new_tokens=12, do_sample=False), expected)
    assert torch.equal(lm.generate(x, max_new_tokens=12, do_sample=False, use_cache=False), expected)
    # a shorter prompt beside the longer one
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), x[1:, :3]], 1)
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    both = lm.generate(torch.cat([x[:1], padded]), attention_mask=mask, max_new_tokens=12, do_sample=False)
    alone = lm.generate(x[1:, :3], max_new_tokens=12, do_sample=False)
    assert torch.equal(both[:1], expected[:1])
    assert torch.equal(both[1:, 4:], alone)


def test_beam_search_runs_on_the_cache() -> None:
    lm, x = model("stack", eos_token_id=None), tokens(2, 7)
    beams = dict(max_new_tokens=8, do_sample=False, num_beams=3)
    assert torch.equal(lm.generate(x, **beams), lm.generate(x, use_cache=False, **beams))


@presets
@pytest.mark.parametrize("cut", [1, 3, 63, 64, 65])
def test_continued_cache_equals_the_full_logits(preset: str, cut: int) -> None:
    lm, x = model(preset), tokens(2, 70)
    with torch.no_grad():
        first = lm(x[:, :cut], use_cache=True)
        second = lm(x[:, cut:], past_key_values=first.past_key_values, use_cache=True)
        expected = lm(x, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected.logits, rtol=0, atol=2e-5)
    assert second.past_key_values.get_seq_length() == 70


@presets
def test_both_names_of_the_cache_are_heard(preset: str) -> None:
    # fla says `past_key_values`, transformers `cache`
    lm, x = model(preset), tokens(1, 9)
    old, new = (lm(x[:, :8], use_cache=True).past_key_values for _ in range(2))
    logits = lm(x[:, 8:], cache=new, use_cache=True).logits
    assert torch.equal(logits, lm(x[:, 8:], past_key_values=old, use_cache=True).logits)
    assert not torch.equal(logits, lm(x[:, 8:]).logits)


def test_state_size_does_not_grow_with_the_length() -> None:
    for preset in ("paper", "stack"):
        lm = model(preset)
        for T in (1, 50):
            cache = lm(tokens(1, T), use_cache=True).past_key_values
            held = sum(s.numel() for layer in cache for s in layer["recurrent_state"])
            held += sum(layer["conv_state"].numel() for layer in cache if layer["conv_state"] is not None)
            assert lm.state_size == lm.model.state_size == held


@presets
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])
def test_gradient_checkpointing_changes_no_gradient(preset: str, reentrant: bool) -> None:
    lm, x = model(preset).train(), tokens(2, 40)
    expected = gradients(lm(x, labels=x).loss, lm)
    lm.gradient_checkpointing_enable({"use_reentrant": reentrant})
    lm(x, labels=x).loss.backward()
    for (name, p), gradient in zip(lm.named_parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient), name


@presets
def test_every_parameter_gets_a_gradient(preset: str) -> None:
    lm, x = model(preset), tokens(2, 40)
    for (name, _), gradient in zip(lm.named_parameters(), gradients(lm(x, labels=x).loss, lm), strict=True):
        assert gradient.any(), name


@presets
def test_model_in_bfloat16_stays_near_float32(preset: str) -> None:
    lm, x = model(preset, initializer_range=0.1), tokens(2, 40)
    with torch.no_grad():
        expected = lm(x).logits
        with torch.autocast("cpu", torch.bfloat16):
            mixed = lm(x).logits
        narrow = lm.bfloat16()(x).logits
    assert narrow.dtype == torch.bfloat16
    for logits in (mixed, narrow):
        assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_double_precision_is_not_narrowed() -> None:
    lm, x = model("stack").double(), tokens(1, 5)
    embeddings = lm.model.embeddings(x).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda e: lm(inputs_embeds=e, use_cache=False).logits, embeddings, fast_mode=True, atol=1e-7)


def test_generation_continues_from_a_cache() -> None:
    model = HarmonicForCausalLM(HarmonicConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50)).eval()
    prompt = torch.randint(50, (2, 9))
    options = dict(do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    whole = model.generate(prompt, max_new_tokens=12, **options).sequences
    first = model.generate(prompt, max_new_tokens=5, **options)
    second = model.generate(first.sequences, max_new_tokens=7, past_key_values=first.past_key_values, **options)
    assert torch.equal(second.sequences, whole)


def test_gradient_checkpointing_refuses_a_cache_and_makes_none() -> None:
    model = HarmonicForCausalLM(HarmonicConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50))
    tokens = torch.randint(50, (2, 9))
    cache = model.eval()(tokens, use_cache=True).past_key_values
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="excludes a cache"):
        model(tokens, past_key_values=cache)
    assert model(tokens, use_cache=True).past_key_values is None
