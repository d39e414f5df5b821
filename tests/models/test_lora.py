"""peft's LoRA adapters on the linear maps of a Harmonic model."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from small_models import model, tokens
from torch import nn

from fla_harmonic import HarmonicForCausalLM

presets = pytest.mark.parametrize("preset", ["paper", "stack"])
# the layer's maps by their names: gate, input and prediction maps of every level, which the paper's preset has as MLPs
NAMED = {
    "paper": r".*\.(gate|input)_proj\.[02]|.*\.predictions\.\d",
    "stack": r".*\.attn\.(.*_proj|predictions\.\d)",
}
targets = pytest.mark.parametrize("target_modules", ["all-linear", "named"])


def adapted(preset: str, target_modules: str) -> PeftModel:
    lm = model(preset, eos_token_id=None)
    torch.manual_seed(1)
    target_modules = NAMED[preset] if target_modules == "named" else target_modules
    return get_peft_model(lm, LoraConfig(r=3, lora_alpha=6, target_modules=target_modules, task_type="CAUSAL_LM"))


def train(peft_model: PeftModel, x: torch.Tensor, steps: int = 8) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = peft_model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@presets
@targets
def test_adapters_sit_on_the_linear_maps_and_change_nothing_at_first(preset: str, target_modules: str) -> None:
    lm, x = model(preset), tokens(2, 20)
    expected = lm(x).logits
    linear = {name for name, module in lm.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    peft_model = adapted(preset, target_modules).eval()
    found = {name.removeprefix("base_model.model.") for name, module in peft_model.named_modules()
             if isinstance(module, LoraLayer)}
    assert found == (linear if target_modules == "all-linear" else {name for name in linear if ".attn." in name})
    assert torch.equal(peft_model(x).logits, expected)


@presets
@targets
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
def test_only_the_adapters_train(preset: str, target_modules: str, checkpointing: bool) -> None:
    x = tokens(2, 20)
    before = model(preset).state_dict()
    peft_model = adapted(preset, target_modules).train()
    if checkpointing:
        # frozen embeddings need no gradient, and reentrant checkpoints pass none on without
        peft_model.enable_input_require_grads()
        peft_model.gradient_checkpointing_enable({"use_reentrant": True})
    adapters = {name: p.detach().clone() for name, p in peft_model.named_parameters() if p.requires_grad}
    assert adapters
    assert all("lora_" in name for name in adapters)
    losses = train(peft_model, x)
    assert losses[-1] < losses[0] - 0.1
    after = dict(peft_model.named_parameters())
    assert not any(torch.equal(after[name], p) for name, p in adapters.items())
    frozen = {name.removeprefix("base_model.model.").replace(".base_layer", ""): p
              for name, p in peft_model.state_dict().items() if "lora_" not in name}
    assert frozen.keys() == before.keys()
    for name, p in frozen.items():
        assert torch.equal(p, before[name]), name


@presets
@targets
def test_merged_and_reloaded_adapters_give_the_same_logits(preset: str, target_modules: str, tmp_path: Path) -> None:
    x = tokens(2, 20)
    peft_model = adapted(preset, target_modules)
    untrained = peft_model(x).logits
    train(peft_model, x)
    expected = peft_model.eval()(x).logits
    assert (expected - untrained).abs().max() > 0.1
    peft_model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(model(preset), tmp_path).eval()
    assert torch.equal(again(x).logits, expected)
    merged = again.merge_and_unload()
    assert type(merged) is HarmonicForCausalLM
    assert not any(isinstance(module, LoraLayer) for module in merged.modules())
    torch.testing.assert_close(merged(x).logits, expected, rtol=1e-4, atol=1e-4)


@presets
def test_adapted_models_generate(preset: str) -> None:
    x = tokens(2, 9)
    peft_model = adapted(preset, "all-linear").eval()
    train(peft_model, x)
    options = dict(max_new_tokens=6, do_sample=False)
    merged = HarmonicForCausalLM.generate(peft_model.merge_and_unload(), x, **options)
    assert torch.equal(peft_model.generate(x, **options), merged)
