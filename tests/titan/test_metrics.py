import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac

import fla_harmonic.titan  # noqa: F401  (the CPU shim)
from fla_harmonic.layers import HarmonicAttention
from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.ops.harmonic import naive_recurrent_harmonic
from fla_harmonic.titan.components import metrics
from fla_harmonic.titan.components.metrics import JSONLLogger, JSONLMetricsProcessor
from fla_harmonic.titan.components.state_metrics import StateMonitor
from fla_harmonic.titan.models.flavors import LLAMA
from fla_harmonic.titan.models.hf_model import HFModel, HFModelArgs
from fla_harmonic.titan.models.llama import Llama

LOSS = "loss_metrics/global_avg_loss"


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, numbers: range) -> None:
    logger = JSONLLogger(path)
    logger.truncate(numbers[0])
    for step in numbers:
        logger.log({LOSS: 1 / step}, step)
    logger.close()


def test_resumed_run_replaces_the_steps_that_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 7))
    write(path, range(4, 9))
    assert steps(path) == list(range(1, 9))
    assert not (tmp_path / "metrics.jsonl.old").exists()


def test_new_run_keeps_the_numbers_of_the_old_one_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    write(path, range(1, 2))
    assert steps(path) == [1]
    assert steps(tmp_path / "metrics.jsonl.old") == [1, 2, 3]


def test_torn_and_foreign_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    with path.open("a") as file:
        file.write('{"x": 1}\n5\n{"step": 3, "lo')
    write(path, range(3, 5))
    assert steps(path) == [1, 2, 3, 4]


def test_numbers_keep_their_digits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JSONLLogger(path)
    logger.log({LOSS: 0.1 + 0.2, "mfu(%)": float("nan")}, 1)
    logger.close()
    record = json.loads(path.read_text())
    assert record[LOSS] == 0.1 + 0.2
    assert record["mfu(%)"] is None


@pytest.fixture
def model() -> nn.Module:
    """Two blocks of Harmonic whose levels differ."""
    config = HarmonicConfig(hidden_size=16, vocab_size=32, num_hidden_layers=2, timescales=[(2, 8), (20, 80)])
    model = HFModel(HFModelArgs.of(config))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def reference(model: nn.Module, tokens: torch.Tensor) -> dict[str, float]:
    """States and timescales by the oracle of the scan, level by level in float64."""
    states: list[list[torch.Tensor]] = [[], []]
    taus: list[list[torch.Tensor]] = [[], []]

    def observe(layer: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        layer = copy.deepcopy(layer).double()
        below = z = kwargs["hidden_states"].double()
        for index, level in enumerate(layer.levels):
            u, v = level(z)
            a_min, a_max = level.decay_range
            taus[index].append(1 / (1 - (a_min + (a_max - a_min) * torch.sigmoid(u))))
            h, _ = naive_recurrent_harmonic(u, v, level.decay_range)
            states[index].append(h)
            y = level.norm(h)
            if index == 0:
                error = below - layer.predictions[0](y)
                z = nn.functional.layer_norm(error, error.shape[-1:], eps=layer.norm_eps)

    layers = [module for module in model.modules() if isinstance(module, HarmonicAttention)]
    handles = [layer.register_forward_hook(observe, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    metrics = {}
    for index in range(2):
        metrics[f"harmonic/level_{index + 1}/state_rms"] = torch.cat(states[index]).square().mean().sqrt().item()
        metrics[f"harmonic/level_{index + 1}/mean_timescale"] = torch.cat(taus[index]).mean().item()
    return metrics


def test_states_and_timescales_are_those_of_the_data(model: nn.Module) -> None:
    tokens = torch.randint(32, (3, 40))
    expected = reference(model, tokens)
    monitor = StateMonitor([model], 2)
    monitor.arm()
    model(tokens)
    # a validation in between is not seen
    model.eval()
    model(torch.zeros_like(tokens))
    model.train()
    # the same rows once more: another microbatch
    model(tokens)
    assert monitor.collect() == pytest.approx(expected, rel=1e-5)
    assert expected["harmonic/level_2/mean_timescale"] > expected["harmonic/level_1/mean_timescale"] > 2


@pytest.mark.parametrize("option", ["1", "2", "op"])
def test_what_checkpointing_recomputes_does_not_count(option: str, model: nn.Module) -> None:
    tokens = torch.randint(32, (3, 40))
    expected = reference(model, tokens)
    config = ActivationCheckpoint(mode="selective", selective_ac_option=option)
    apply_ac(model, config, model_compile_enabled=False, op_sac_save_list=set())
    monitor = StateMonitor([model], 2)
    monitor.arm()
    model(tokens).square().sum().backward()
    assert monitor.collect() == pytest.approx(expected, rel=1e-5)


def test_watching_changes_no_bit_and_ends_with_the_step(model: nn.Module) -> None:
    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    tokens = torch.randint(32, (2, 40))
    before, expected = hooks(), model(tokens)
    monitor = StateMonitor([model], 2)
    assert hooks() == before
    monitor.arm()
    assert hooks() == before + 8
    assert torch.equal(model(tokens), expected)
    first = monitor.collect()
    assert hooks() == before
    # nothing of an earlier step is left
    monitor.arm()
    model(tokens)
    assert monitor.collect() == first


def test_layers_that_call_no_hook_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monitor = StateMonitor([nn.Linear(2, 2)], 2)
    for _ in range(2):
        monitor.arm()
        assert monitor.collect() == {}
    assert caplog.text.count("are not logged") == 1


@pytest.mark.parametrize("first", [1, 6])
def test_states_are_watched_on_logged_steps_alone(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = JSONLMetricsProcessor.__new__(JSONLMetricsProcessor)
    processor.job_config = SimpleNamespace(
        metrics=SimpleNamespace(log_freq=5), training=SimpleNamespace(global_batch_size=4, seq_len=8))
    processor.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1)
    processor.started, processor.jsonl, processor.num_levels = True, None, 2
    calls: list[str] = []
    monkeypatch.setattr(metrics, "StateMonitor", lambda *args: SimpleNamespace(
        arm=lambda: calls.append("arm"), disarm=lambda: calls.append("disarm"), collect=lambda: {}))
    monkeypatch.setattr(MetricsProcessor, "log", lambda *args: None)
    monkeypatch.setattr(metrics, "bytes_per_token", lambda job_config: None)
    processor.model_parts = [nn.Identity()]
    armed = []
    for step in range(first, 17):
        armed.append((step, calls[-1] == "arm"))
        if processor.should_log(step):
            processor.log(step, 1.0, 1.0, 1.0)
    # the first step of a run is not known beforehand to be one that is not logged
    assert [step for step, is_armed in armed if is_armed] == [first, *range(5 if first == 1 else 10, 17, 5)]


def test_flops_of_attention_count_the_keys_that_a_token_sees() -> None:
    args = copy.deepcopy(LLAMA["debug"])
    args.max_seq_len = 64
    with torch.device("meta"):
        model = Llama(args)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embeddings" not in name)
    # token t multiplies t queries' worth of keys and values: 2 operations a number, twice, and twice that backward
    attention = sum(3 * 2 * 2 * args.dim * t for t in range(1, 65)) / 64 * args.n_layers
    assert args.get_nparams_and_flops(model, 64)[1] == 6 * matrices + attention
