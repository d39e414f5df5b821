import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hallamonic_jobs import CONFIGS, SEQ, convert, options
from runs import LOSS, ROOT, run, steps, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torchtitan.config import ConfigManager
from torchtitan.config.job_config import Optimizer
from torchtitan.protocols.train_spec import get_train_spec
from transformers import AutoModelForCausalLM, LlamaConfig

from fla_harmonic.hallamonic import HallamonicConfig
from fla_harmonic.hallamonic.configuration_hallamonic import UNLIMITED
from fla_harmonic.hallamonic.convert import layer_options
from fla_harmonic.titan.components.optimizer import build_optimizers
from fla_harmonic.titan.export import export, load_model, to_hf
from fla_harmonic.titan.models.hallamonic import Hallamonic

HARMONIC = ".harmonic."


def arguments(job: list[str]) -> Any:
    return jobs.arguments(ConfigManager().parse_args(job))


def build(job: list[str]) -> Any:
    return jobs.build_as_trainer(ConfigManager().parse_args(job))


def weights(model: nn.Module, directory: Path) -> None:
    """Loads what torchtitan's checkpoint manager would."""
    adapter = get_train_spec("hallamonic").state_dict_adapter(model.model_args, str(directory))
    state = adapter.to_hf(get_model_state_dict(model))
    dcp.load(state, storage_reader=adapter.get_hf_storage_reader(str(directory)))
    model.load_state_dict(adapter.from_hf(state))


def stored(checkpoint: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {name: torch.empty(metadata[name].size) for name in names}
    dcp.load(state, checkpoint_id=checkpoint)
    return state


@pytest.mark.parametrize("layers", [[], [1], [0, 1, 2]], ids=["none", "one", "all"])
@pytest.mark.parametrize("tied", [True, False])
def test_values_and_gradients_are_those_of_the_converted_model(layers: list[int], tied: bool, tmp_path: Path) -> None:
    expected: Any = convert(tmp_path, layers, tie_word_embeddings=tied)
    model = build(options(tmp_path, tmp_path, 1, phase=2))
    weights(model, tmp_path)
    tokens = torch.randint(256, (2, SEQ))
    logits, hf_logits = model(tokens), expected(tokens, use_cache=False).logits
    assert torch.equal(logits, hf_logits)
    for x in (logits, hf_logits):
        x.square().sum().backward()
    grad, hf_grad = model.tok_embeddings.weight.grad, expected.get_input_embeddings().weight.grad
    assert hf_grad.abs().max() > 0
    assert torch.equal(grad, hf_grad)


@pytest.mark.parametrize("layers", [[], [1], [0, 1, 2]], ids=["none", "one", "all"])
def test_documents_of_a_window_do_not_see_one_another(layers: list[int], tmp_path: Path) -> None:
    convert(tmp_path, layers)
    model = build(options(tmp_path, tmp_path, 1, phase=2))
    weights(model, tmp_path)
    tokens = torch.randint(256, (1, SEQ))
    document_ids = (torch.arange(SEQ) >= 23).int()[None]
    packed = model(tokens, document_ids=document_ids)
    torch.testing.assert_close(packed[:, :23], model(tokens[:, :23]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(packed[:, 23:], model(tokens[:, 23:]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("chunk", [0, 24])
def test_phase_1_has_gradients_and_optimizer_states_of_the_new_layers_alone(chunk: int, tmp_path: Path) -> None:
    convert(tmp_path, [1])
    job = options(tmp_path, tmp_path, 1, f"--harmonic.loss_chunk_tokens={chunk}")
    model = build(job)
    tokens, labels = torch.randint(256, (2, 2, SEQ))
    model(tokens, labels=labels).backward()
    new = {name for name, _ in model.named_parameters() if HARMONIC in name}
    assert new
    assert {name for name, p in model.named_parameters() if p.grad is not None} == new
    optimizers = build_optimizers([model], Optimizer(weight_decay=0.5), None)
    optimizers.step()
    states = get_optimizer_state_dict(model, optimizers.optimizers[0])["state"]
    assert states.keys() == new


def test_operations_of_weights_that_stay_are_not_counted_as_trained(tmp_path: Path) -> None:
    convert(tmp_path, [1], tie_word_embeddings=False)
    jobs = {phase: options(tmp_path, tmp_path, 1, phase=phase) for phase in (1, 2)}
    flops = {}
    for phase, job in jobs.items():
        model = build(job)
        parameters, flops[phase] = model.model_args.get_nparams_and_flops(model, SEQ)
        assert parameters == sum(p.numel() for p in model.parameters())
    # two attention layers of 32 -> 32, 16, 16 and back, three MLPs, the head
    frozen = 2 * (2 * 32 * 32 + 2 * 32 * 16) + 3 * 3 * 32 * 40 + 256 * 32
    assert flops[2] - flops[1] == 2 * frozen
    levels = 3 * 2 * 3 * 32
    attention = 3 * 2 * 4 * 32 * (SEQ + 1) // 2
    maps = sum(p.numel() for name, p in model.named_parameters() if HARMONIC in name and p.ndim == 2)
    assert flops[2] == 6 * (frozen + maps) + levels + attention


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a conversion, `converted`, phase 1 in one go, `out`, and in two, `halves`; and phase 2, `second`, after `out`."""
    folder = tmp_path_factory.mktemp("trained")
    convert(folder / "converted", [1])
    run(1, *(phase1(folder, name, stop) for name, stop in (("out", 4), ("halves", 2), ("halves", 4))), phase2(folder))
    return folder


def phase1(folder: Path, name: str, stop: int = 4, ranks: int = 1) -> list[str]:
    return options(folder / "converted", folder / name, stop, "--optimizer.weight_decay=0.5", "--lr_scheduler.total_steps=4",
                   ranks=ranks)


def phase2(folder: Path) -> list[str]:
    return options(folder / "converted", folder / "second", 2, "--checkpoint.no_initial_load_in_hf",
                   f"--checkpoint.initial_load_path={folder / 'out/checkpoint/step-4'}", phase=2)


@pytest.mark.processes
def test_training_goes_on_bit_for_bit_and_leaves_what_is_frozen_bit_for_bit(trained: Path) -> None:
    out, halves, second = (trained / name for name in ("out", "halves", "second"))
    names = ("harmonic/level_1/state_rms", "harmonic/level_3/mean_timescale")
    assert values(steps(halves), *names) == values(steps(out), *names)
    job = ConfigManager().parse_args(phase1(trained, "out"))
    model, again = (load_model(job, folder / "checkpoint/step-4") for folder in (out, halves))
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    before = AutoModelForCausalLM.from_pretrained(trained / "converted").state_dict()
    after = to_hf(job, model).state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) != (HARMONIC in name), name
    # phase 2 goes on from there, with all parameters
    whole = load_model(ConfigManager().parse_args(phase2(trained)), second / "checkpoint/step-2").state_dict()
    assert all(not torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    assert steps(second)[0][LOSS] < steps(out)[0][LOSS]


@pytest.mark.processes
def test_exported_models_generate_in_a_new_process_what_they_do_here(tmp_path: Path) -> None:
    prompt = list(b"It is a truth universally acknowledged")
    expected, folders = [], []
    for layers in ([1], [0, 1, 2]):
        folder = tmp_path / str(len(layers))
        folders.append(str(folder / "hf"))
        convert(folder / "converted", layers)
        job = options(folder / "converted", folder, 1)
        model = build(job)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder / "checkpoint/step-1")
        config = ConfigManager().parse_args(job)
        export(config, folder / "checkpoint", folder / "hf")
        # the length of what is left of attention is the pretrained model's, that of recurrences what they were trained on
        exported = json.loads((folder / "hf/config.json").read_text())
        assert exported["max_position_embeddings"] == (SEQ if len(layers) == 3 else 128)
        ids = torch.tensor([prompt])
        for _ in range(8):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        expected.append(ids[0].tolist())
    script = (
        "import sys, json, torch, fla_harmonic\n"
        "from transformers import AutoModelForCausalLM\n"
        "models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in sys.argv[2:]]\n"
        "ids = torch.tensor([json.loads(sys.argv[1])])\n"
        "print(json.dumps([model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist() for model in models]))\n")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, json.dumps(prompt), *folders], env=env, check=True,
                          capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_conversion_has_no_limit_until_it_is_trained(tmp_path: Path) -> None:
    assert convert(tmp_path, [0, 1, 2]).config.max_position_embeddings == UNLIMITED
    args = arguments(options(tmp_path, tmp_path, 1))
    assert args.trained_length(SEQ) == SEQ
    args.config["max_position_embeddings"] = 4096
    assert args.trained_length(SEQ) == 4096


def test_jobs_that_would_train_something_else_are_refused(tmp_path: Path) -> None:
    converted, whole = tmp_path / "converted", tmp_path / "whole"
    convert(converted, [1])
    convert(whole, [])
    for directory, overrides, message in (
        (tmp_path, [], r"has no config\.json.*Remedy"),
        (converted, ["--checkpoint.no_initial_load_in_hf"],
         r"weights of a converted model, but .*initial_load_in_hf = false.*Remedy"),
        (converted, ["--checkpoint.no_enable"], r"checkpoint\.enable = false.*Remedy"),
        (whole, [], r"layers that took attention's place.*Remedy"),
        *((converted, [f"--parallelism.{kind}_parallel_degree=2"], rf"not supported .*{kind}_parallel_degree = 2\. Remedy")
          for kind in ("tensor", "context", "pipeline")),
        (converted, ["--harmonic.segment_len=16"], r"hallamonic: Harmonic alone .*segment_len = 16.*Remedy"),
    ):
        with pytest.raises(ValueError, match=message):
            arguments(options(directory, tmp_path, 1, *overrides))
    (tmp_path / "llama").mkdir()
    LlamaConfig().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"has model_type = 'llama'.*Remedy"):
        arguments(options(tmp_path / "llama", tmp_path, 1))


TINYLLAMA = dict(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
    num_key_value_heads=4, max_position_embeddings=2048)
SMOLLM2 = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True)


@pytest.mark.processes
@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize(("size", "shape", "layers", "sizes", "new", "tokens"), [
    # 140.7M new parameters, 33K tokens a step: the published protocol
    ("tinyllama", TINYLLAMA, range(22), (0.5, 70), 140_777_472, {1: 10_000 * 32_768, 2: 5_000 * 32_768}),
    ("smollm2", SMOLLM2, (10, 15, 20), (None, None), 3 * 2_327_616, {1: 20 * 1024, 2: 10 * 1024}),
], ids=["tinyllama", "smollm2"])
def test_configs_of_pretrained_models_build(
    size: str, shape: dict[str, Any], layers: range, sizes: tuple[float | None, int | None], new: int, tokens: dict[int, int],
    phase: int, tmp_path: Path,
) -> None:
    source = LlamaConfig(**shape)
    HallamonicConfig(source, layers, layer_options(source, *sizes)).save_pretrained(tmp_path)
    job = [f"--job.config_file={CONFIGS / f'hallamonic_{size}_phase{phase}.toml'}", f"--model.hf_assets_path={tmp_path}"]
    config = ConfigManager().parse_args(job)
    with torch.device("meta"):
        model = Hallamonic(arguments(job))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if phase == 2 or HARMONIC in name}
    assert sum(p.numel() for name, p in model.named_parameters() if HARMONIC in name) == new
    training = config.training
    batch = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size
    assert batch * training.seq_len * training.steps == tokens[phase]
    assert config.data.token_budget in (0, tokens[phase])


@pytest.mark.processes
def test_two_shards_train_like_one_process(trained: Path) -> None:
    run(2, phase1(trained, "shards", ranks=2))
    single, shards = trained / "out", trained / "shards"
    expected, actual = ([(record[LOSS], record["grad_norm"]) for record in steps(out)] for out in (single, shards))
    for one, two in zip(expected, actual, strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    names = [f"layers.1.self_attn{HARMONIC}o_proj.weight", "layers.1.mlp.up_proj.weight", "tok_embeddings.weight"]
    ours, theirs = (stored(out / "checkpoint/step-4", names) for out in (single, shards))
    for name in names:
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=1e-6 if HARMONIC in name else 0)


def test_a_teacher_gives_the_divergence_from_its_distribution(tmp_path: Path) -> None:
    convert(tmp_path / "teacher", [])
    convert(tmp_path / "converted", [0, 1, 2])
    directory = tmp_path / "converted"
    teach = (f"--hallamonic.teacher_path={tmp_path / 'teacher'}", "--hallamonic.teacher_weight=0.25")
    model, teacher = build(options(directory, tmp_path, 1, *teach)), build(options(tmp_path / "teacher", tmp_path, 1, phase=2))
    weights(model, directory)
    weights(teacher, tmp_path / "teacher")
    tokens, labels = torch.randint(256, (2, 2, SEQ))
    labels[0, :7] = -100
    scored = labels != -100
    p, log_p, log_q = teacher(tokens).softmax(-1), teacher(tokens).log_softmax(-1), model(tokens).log_softmax(-1)
    divergence = (p * (log_p - log_q)).sum(-1)[scored].sum()
    text = -log_q[scored].gather(-1, labels[scored][:, None]).sum()
    torch.testing.assert_close(model(tokens, labels=labels), 0.25 * divergence + 0.75 * text)
    # the teacher is no part of the model, and validation scores the text
    assert not any(name.startswith("teacher") for name in get_model_state_dict(model))
    torch.testing.assert_close(model.eval()(tokens, labels=labels), text)


def test_a_teacher_that_cannot_teach_is_refused(tmp_path: Path) -> None:
    convert(tmp_path / "converted", [1])
    convert(tmp_path / "other", [], vocab_size=300)
    teacher = f"--hallamonic.teacher_path={tmp_path / 'converted'}"
    for overrides, message in (
        ([f"--hallamonic.teacher_path={tmp_path / 'other'}"], r"same 256 tokens .* vocab_size = 300.*Remedy"),
        ([f"--hallamonic.teacher_path={tmp_path}"], r"has no config\.json.*Remedy"),
        ([teacher, "--hallamonic.teacher_weight=1.5"], r"teacher_weight = 1\.5.*Remedy"),
        ([teacher, "--harmonic.loss_chunk_tokens=16"], r"whole logits .*loss_chunk_tokens = 16.*Remedy"),
        ([teacher, "--data.reset_documents"], r"reset_documents = true.*Remedy"),
    ):
        with pytest.raises(ValueError, match=message):
            arguments(options(tmp_path / "converted", tmp_path, 1, *overrides))


@pytest.mark.parametrize("family", ["harmonic", "mamba", "llama"])
@pytest.mark.parametrize("option", ["train=harmonic", "teacher_path=somewhere"])
def test_other_families_refuse_options_of_converted_models(family: str, option: str) -> None:
    job = ConfigManager().parse_args([f"--job.config_file={CONFIGS / f'{family}_debug.toml'}", f"--hallamonic.{option}"])
    name = option.split("=")[0]
    with pytest.raises(ValueError, match=rf"{family}: .* is for converted models, but .*hallamonic\.{name} = .*Remedy"):
        copy.deepcopy(get_train_spec(family).model_args["debug"]).update_from_config(job)
