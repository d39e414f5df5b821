import copy

import pytest
import torch
from jobs import initialised
from torch import nn
from torchtitan.config.job_config import Optimizer as OptimizerConfig
from torchtitan.protocols.train_spec import get_train_spec

import fla_harmonic.titan  # noqa: F401
from fla_harmonic.titan.components.optimizer import DecayGroupsContainer, build_optimizers

FAMILIES = ["harmonic", "mamba", "llama"]


def build(family: str) -> nn.Module:
    spec = get_train_spec(family)
    args = copy.deepcopy(spec.model_args["debug"])
    if family == "llama":
        args.max_seq_len = 16
    return initialised(spec.model_cls(args))


def config(**kwargs: object) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.5} | kwargs)


def expected_undecayed(name: str, p: nn.Parameter) -> bool:
    return p.ndim == 1 or name.endswith("A_log")


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_matrices_decay(family: str, implementation: str, name: str) -> None:
    model = build(family)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    build_optimizers([model], config(implementation=implementation, name=name), None).step()
    for key, p in model.named_parameters():
        if expected_undecayed(key, p):
            assert torch.equal(p, before[key]), key
        else:
            assert not torch.equal(p, before[key]), key


def test_a_flagged_matrix_does_not_decay_once_its_model_has_kept_the_name() -> None:
    model = nn.Linear(3, 3)
    model.weight._no_weight_decay = True
    container = DecayGroupsContainer([model], torch.optim.AdamW, {"weight_decay": 0.5})
    assert container.optimizers[0].param_groups[0]["weight_decay"] == 0
    # what `to_empty` and FSDP do to the flag
    model.weight = nn.Parameter(model.weight.detach().clone())
    model.undecayed = frozenset({"weight"})
    container = DecayGroupsContainer([model], torch.optim.AdamW, {"weight_decay": 0.5})
    assert [group["weight_decay"] for group in container.optimizers[0].param_groups] == [0]


def test_every_timescale_of_a_built_model_is_free_of_decay() -> None:
    for family, marks in {"harmonic": ("gate_proj", "norm"), "mamba": ("A_log", ".D", "dt_proj.bias")}.items():
        model = build(family)
        decayed = {id(p) for p in build_optimizers([model], config(), None).optimizers[0].param_groups[0]["params"]}
        timescales = [
            (name, p) for name, p in model.named_parameters()
            if any(mark in name for mark in marks) and not (name.endswith("weight") and p.ndim == 2)
        ]
        assert timescales
        for name, p in timescales:
            assert id(p) not in decayed, name


def test_a_state_dict_survives_saving_and_loading() -> None:
    def trained() -> tuple[nn.Module, DecayGroupsContainer]:
        model = build("mamba")
        container = build_optimizers([model], config(), None)
        for step in range(2):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            container.step()
        return model, container

    (_, first), (model, second) = trained(), trained()
    saved = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in first.state_dict().items()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    second.step()
    assert any(not torch.equal(saved[k], v) for k, v in second.state_dict().items() if isinstance(v, torch.Tensor))
    second.load_state_dict(copy.deepcopy(saved))
    loaded = second.state_dict()
    assert saved.keys() == loaded.keys()
    for key, value in saved.items():
        assert torch.equal(value, loaded[key]) if isinstance(value, torch.Tensor) else value == loaded[key], key
    weight_decays = [group["weight_decay"] for group in second.optimizers[0].param_groups]
    assert weight_decays == [0.5, 0]


@pytest.mark.parametrize(("field", "value"), [("name", "Muon"), ("implementation", "triton")])
def test_an_unknown_choice_is_named(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"optimizer\.{field} in .*{value}"):
        build_optimizers([nn.Linear(2, 2)], config(**{field: value}), None)
