import copy
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from jobs import arguments, initialised, job, moved
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

import fla_harmonic.titan
from fla_harmonic.models.harmonic import HarmonicConfig, HarmonicForCausalLM
from fla_harmonic.models.mamba.modeling_mamba import build_mamba
from fla_harmonic.titan.distributed.parallelize import parallelize
from fla_harmonic.titan.models.flops import matmul_flops
from fla_harmonic.titan.models.hf_model import HFModel, HFModelArgs, HFStateDictAdapter, document_borders

FAMILIES = ["harmonic", "mamba", "llama"]
HF_BUILDERS = {"harmonic": HarmonicForCausalLM, "mamba": build_mamba}


def build(family: str, flavor: str = "debug") -> HFModel:
    args = copy.deepcopy(get_train_spec(family).model_args[flavor])
    args.seed = 0
    return moved(initialised(HFModel(args)), 1)


def test_importing_twice_is_harmless() -> None:
    spec = get_train_spec("harmonic")
    importlib.reload(fla_harmonic.titan)
    fla_harmonic.titan.register_specs()
    assert get_train_spec("harmonic") is spec


def test_flops_count_matrix_products_and_the_scan() -> None:
    args = get_train_spec("harmonic").model_args["28M"]
    with torch.device("meta"):
        flops = args.get_nparams_and_flops(HFModel(args), 8192)[1]
    # one head, 34 H^2 of linear maps, a multiply and an add for each of 3 H states forward and twice that backward
    assert flops == 6 * (50257 * 256 + 34 * 256**2) + 3 * 2 * 3 * 256
    # a short convolution has weights, and no part in the scan
    args = HFModelArgs.of(HarmonicConfig.paper(hidden_size=32, vocab_size=50, use_short_conv=True))
    with torch.device("meta"):
        flops = args.get_nparams_and_flops(HFModel(args), 8192)[1]
    assert flops == 6 * (50 * 32 + 34 * 32**2 + 4 * 32) + 3 * 2 * 3 * 32
    args = get_train_spec("mamba").model_args["debug"]
    with torch.device("meta"):
        flops = args.get_nparams_and_flops(HFModel(args), 8192)[1]
    layer = 128 * 512 + 256 * 4 + 256 * 40 + 8 * 256 + 256 * 128
    assert flops == 6 * (256 * 128 + 5 * layer) + 3 * 7 * 5 * 256 * 16


@pytest.mark.parametrize("window_size", [None, 5, 100])
def test_flops_of_attention_layers_count_the_keys_that_a_token_sees(window_size: int | None) -> None:
    attn = {"layers": [1], "num_heads": 2, "window_size": window_size}
    args = HFModelArgs.of(HarmonicConfig(num_hidden_layers=2, hidden_size=32, vocab_size=50, attn=attn))
    with torch.device("meta"):
        model = HFModel(args)
    keys = sum(min(t, window_size or 20) for t in range(1, 21)) / 20
    # keys and values, forward and twice that backward, a multiply and an add each; a scan in the other layer
    assert args.get_nparams_and_flops(model, 20)[1] == matmul_flops(model) + 3 * 2 * 2 * 32 * keys + 3 * 2 * 3 * 32


def test_compiled_attention_over_packed_documents_is_refused() -> None:
    attn = {"layers": [1], "num_heads": 2}
    args = HFModelArgs.of(HarmonicConfig(num_hidden_layers=2, hidden_size=32, vocab_size=256, attn=attn))
    for override in ("--compile.enable", "--data.reset_documents"):
        args.update_from_config(job("harmonic", override))
    with pytest.raises(ValueError, match=r"attention layers over packed documents cannot be compiled.*Remedy"):
        args.update_from_config(job("harmonic", "--compile.enable", "--data.reset_documents"))


@pytest.mark.parametrize(("family", "flavor"), [("harmonic", "debug"), ("harmonic", "debug-paper"), ("mamba", "debug")])
def test_values_and_gradients_are_those_of_the_hf_model(family: str, flavor: str) -> None:
    model = build(family, flavor)
    adapter = HFStateDictAdapter(model.model_args, None)
    hf_model = HF_BUILDERS[family](model.model_args.hf_config())
    hf_model.load_state_dict(adapter.to_hf(model.state_dict()))
    tokens, labels = torch.randint(256, (2, 2, 100))
    logits = model(tokens)
    hf_logits = hf_model(tokens, use_cache=False).logits
    assert torch.equal(logits, hf_logits)
    for x in (logits, hf_logits):
        F.cross_entropy(x.flatten(0, 1), labels.flatten()).backward()
    grads = adapter.from_hf({name: p.grad for name, p in hf_model.named_parameters()})
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, grads[name]), name


@pytest.mark.parametrize("family", ["harmonic", "mamba"])
def test_names_go_to_hf_and_back(family: str) -> None:
    model = build(family)
    adapter = HFStateDictAdapter(model.model_args, None)
    state_dict = model.state_dict()
    hf_names = adapter.to_hf(state_dict).keys()
    assert hf_names == HF_BUILDERS[family](model.model_args.hf_config()).state_dict().keys()
    assert adapter.from_hf(adapter.to_hf(state_dict)).keys() == state_dict.keys()
    with pytest.raises(KeyError, match="rotary"):
        adapter.to_hf({"rotary.weight": torch.zeros(1)})


@pytest.mark.parametrize("flavor", ["debug", "debug-paper"])
def test_state_resets_at_document_start(flavor: str) -> None:
    model = build("harmonic", flavor)
    tokens = torch.randint(256, (2, 60))
    document_ids = torch.zeros(2, 60, dtype=torch.int32)
    document_ids[0, 17:], document_ids[0, 40:], document_ids[1, 1:] = 1, 2, 1
    logits = model(tokens, document_ids=document_ids)
    assert logits.shape == (2, 60, 256)
    for row, bounds in enumerate([(0, 17, 40, 60), (0, 1, 60)]):
        for start, end in itertools.pairwise(bounds):
            torch.testing.assert_close(logits[row, start:end], model(tokens[row:row + 1, start:end])[0], atol=2e-5, rtol=2e-5)
    # the gradient across a border is zero, not small
    embedded: list[torch.Tensor] = []
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    model(tokens, document_ids=document_ids)[0, 17:40].sum().backward(inputs=embedded_leaf(embedded))
    grad = embedded[0].grad.view(2, 60, -1)
    assert grad[0, 17:40].abs().amin(0).max() > 0
    assert not grad[0, :17].any()
    assert not grad[0, 40:].any()
    assert not grad[1].any()


def embedded_leaf(embedded: list[torch.Tensor]) -> list[torch.Tensor]:
    embedded[0].retain_grad()
    return embedded


def test_document_borders_read_row_by_row() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 2]], dtype=torch.int32)
    assert document_borders(ids).tolist() == [0, 2, 4, 7, 8]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("override", "message"), [
    ("--optimizer.early_step_in_backward", r"early_step_in_backward = true.*Remedy"),
    ("--fault_tolerance.enable", r"fault_tolerance.enable = true.*Remedy"),
    ("--model.converters=float8", r"model\.converters = \[\"float8\"\].*Remedy"),
])
def test_what_is_not_supported_is_refused(family: str, override: str, message: str) -> None:
    args = copy.deepcopy(get_train_spec(family).model_args["debug"])
    with pytest.raises(ValueError, match=f"{family}: .*{message}"):
        args.update_from_config(job(family, override))
    args.update_from_config(job(family))
    assert args.seed == 42


@pytest.mark.parametrize("family", ["mamba", "llama"])
def test_packed_documents_are_for_harmonic_alone(family: str) -> None:
    arguments(job("harmonic", "--data.reset_documents"))
    with pytest.raises(ValueError, match=f"{family}: .*reset_documents = true.*Remedy"):
        arguments(job(family, "--data.reset_documents"))


def test_attention_masks_are_refused_as_the_stock_validator_expects() -> None:
    with pytest.raises(TypeError):
        build("harmonic").get_attention_masks(torch.zeros(1, 4), None)


def gradients(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return logits, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("family", ["harmonic", "mamba"])
@pytest.mark.parametrize("options", [["full"], ["selective", "op"], ["selective", "1"]], ids=" ".join)
def test_activation_checkpointing_changes_no_bit(family: str, options: list[str]) -> None:
    overrides = [f"--activation_checkpoint.mode={options[0]}"]
    overrides += [f"--activation_checkpoint.selective_ac_option={option}" for option in options[1:]]
    tokens = torch.randint(256, (2, 70))
    expected, expected_grads = gradients(build(family), tokens)
    model = parallelize(build(family), one_rank(), job(family, *overrides))
    assert all("_checkpoint_wrapped_module" in name for name, _ in model.layers.named_parameters())
    actual, grads = gradients(model, tokens)
    assert torch.equal(actual, expected)
    assert all(torch.equal(a, e) for a, e in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize("family", ["harmonic", "mamba"])
def test_blocks_compile_without_a_graph_break(family: str) -> None:
    tokens = torch.randint(256, (2, 70))
    expected, expected_grads = gradients(build(family), tokens)
    model = parallelize(build(family), one_rank(), job(family, "--compile.enable", "--compile.backend=aot_eager"))
    actual, grads = gradients(model, tokens)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for a, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-4)


def test_mambas_kernels_refuse_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments(job("mamba", "--compile.enable"))
    monkeypatch.setattr("fla_harmonic.models.mamba.modeling_mamba.HAS_MAMBA_KERNELS", True)
    monkeypatch.setattr("torchtitan.tools.utils.device_type", "cuda")
    arguments(job("mamba"))
    arguments(job("mamba", "--compile.enable", "--compile.components=loss"))
    with pytest.raises(ValueError, match=r"mamba: torch\.compile.*Remedy: compile\.enable = false"):
        arguments(job("mamba", "--compile.enable"))


def one_rank() -> ParallelDims:
    return ParallelDims(dp_shard=1, dp_replicate=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
