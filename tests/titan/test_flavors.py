import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F
from jobs import CONFIGS, job
from torchtitan.protocols.train_spec import get_train_spec

from fla_harmonic.titan.job_files import count_parameters, job_files, main
from fla_harmonic.titan.models import flavors
from fla_harmonic.titan.models.flavors import SIZES

FAMILIES = ("harmonic", "mamba", "llama")
# what the paper's logs print, with GPT-2's vocabulary; of its models at about 100M they print no shape
PAPER = {"7M": (6_993_024, True), "15M": (15_100_160, True), "28M": (27_965_952, False), "35M": (34_656_768, True)}
GPT2 = 50257


def flavors_of(size: str) -> dict[str, int]:
    """Parameters of all flavors of a size: the paper's shape, the stack, the best blocks, Mamba and Llama."""
    names = {"paper": ("harmonic", size), "stack": ("harmonic", f"{size}-stack"), "best": ("harmonic", f"{size}-best"),
             "mamba": ("mamba", size), "llama": ("llama", size)}
    if size == "debug":
        names |= {"paper": ("harmonic", "debug-paper"), "stack": ("harmonic", "debug")}
    return {shape: count_parameters(*name) for shape, name in names.items()}


@pytest.mark.parametrize("size", ["debug", *SIZES])
def test_families_have_as_many_parameters_as_the_papers_layer(size: str) -> None:
    counts = flavors_of(size)
    paper = counts["paper"]
    assert all(abs(count / paper - 1) < 0.04 for count in counts.values()), counts
    if size == "debug":
        return
    assert round(paper / 1e6) == int(size.removesuffix("M"))
    width, tables = SIZES[size].width, 1 if SIZES[size].tied else 2
    assert paper == 34 * width**2 + 24 * width + tables * GPT2 * width
    # no model gets its count by wider tables
    assert all(abs((count - tables * GPT2 * width) / (paper - tables * GPT2 * width) - 1) < 0.08 for count in counts.values())
    row = re.search(rf"\| {size} \| {width} \| (\w+) \| (.*) \|", flavors.__doc__ or "")
    assert row is not None
    assert row[1] == ("tied" if SIZES[size].tied else "untied")
    assert [int(cell.replace(",", "")) for cell in row[2].split(" | ")] == list(counts.values())


@pytest.mark.parametrize(("size", "expected"), PAPER.items())
def test_the_papers_sizes_are_exact(size: str, expected: tuple[int, bool]) -> None:
    assert (count_parameters("harmonic", size), SIZES[size].tied) == expected


@pytest.mark.parametrize("size", SIZES)
def test_every_family_ties_what_the_papers_layer_ties(size: str) -> None:
    for family, flavor in [("harmonic", size), ("harmonic", f"{size}-stack"), ("harmonic", f"{size}-best"),
                           ("mamba", size), ("llama", size)]:
        args: Any = get_train_spec(family).model_args[flavor]
        assert args.vocab_size == GPT2
        assert args.hf_config().tie_word_embeddings == SIZES[size].tied


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_shapes_suit_the_hardware(size: flavors.Size) -> None:
    llama = size.llama().hf_config()
    assert size.width % 32 == size.stack_mlp % 16 == llama.intermediate_size % 64 == 0
    assert llama.hidden_size // llama.num_attention_heads in (32, 64, 96)


@pytest.mark.parametrize("name", SIZES)
def test_the_mlps_of_blocks_are_the_widest_below_the_papers_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = SIZES[name]
    wider = dataclasses.replace(size, stack_mlp=size.stack_mlp + 16, best_mlp=size.best_mlp + 8)
    monkeypatch.setitem(flavors.HARMONIC, "wider-stack", wider.stack())
    monkeypatch.setitem(flavors.HARMONIC, "wider-best", wider.best())
    paper = count_parameters("harmonic", name)
    for shape in ("stack", "best"):
        assert count_parameters("harmonic", f"{name}-{shape}") <= paper < count_parameters("harmonic", f"wider-{shape}")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_flavors_are_as_plain_as_json_and_count_what_they_hold(family: str) -> None:
    spec = get_train_spec(family)
    for flavor in ("debug", *SIZES):
        args: Any = copy.deepcopy(spec.model_args[flavor])
        assert json.loads(json.dumps(dataclasses.asdict(args))) == dataclasses.asdict(args)
        with torch.device("meta"):
            model = spec.model_cls(args)
        assert args.get_nparams_and_flops(model, 1024)[0] == count_parameters(family, flavor)


@pytest.mark.parametrize(("family", "flavor"), [
    ("harmonic", "7M"), ("harmonic", "7M-stack"), ("harmonic", "35M"), ("mamba", "15M"), ("llama", "7M"), ("llama", "15M"),
    ("llama", "35M"),
])
def test_tied_models_begin_near_the_uniform_distribution(family: str, flavor: str) -> None:
    spec = get_train_spec(family)
    args: Any = copy.deepcopy(spec.model_args[flavor])
    args.seed = 42
    model = spec.model_cls(args)
    tokens = torch.randint(GPT2, (2, 65))
    with torch.no_grad():
        model.init_weights()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(GPT2), abs=0.3)


# the job files


def load(family: str, size: str) -> dict[str, Any]:
    return job(family, size=size.lower()).to_dict()


def own_fields(config: dict[str, Any]) -> tuple[str, ...]:
    """What a file has for itself, taken out of its configuration."""
    job, model = config["job"], config["model"]
    assert job.pop("config_file")
    assert job.pop("description")
    return job.pop("dump_folder"), model.pop("name"), model.pop("flavor")


@pytest.mark.parametrize("size", ["debug", *SIZES])
def test_files_of_a_size_differ_in_the_model_alone(size: str) -> None:
    configs = {family: load(family, size) for family in FAMILIES}
    for family, config in configs.items():
        assert own_fields(config) == (f"./outputs/{family}_{size.lower()}", family, size)
    assert configs["harmonic"] == configs["mamba"] == configs["llama"]


def test_files_of_all_sizes_follow_one_protocol_the_papers() -> None:
    configs = [load("harmonic", size) for size in SIZES]
    for config in configs:
        own_fields(config)
    assert all(config == configs[0] for config in configs)
    training, schedule = configs[0]["training"], configs[0]["lr_scheduler"]
    assert training["global_batch_size"] == -1
    tokens = training["local_batch_size"] * training["seq_len"] * training["steps"]
    assert tokens == configs[0]["data"]["token_budget"] == 16 * 1024 * 4000
    assert training["max_norm"] == 1.0
    assert (configs[0]["optimizer"]["name"], schedule["decay_type"]) == ("AdamW", "cosine")
    assert 0 < schedule["min_lr_factor"] < 1
    assert 0 < schedule["warmup_steps"] < training["steps"]


def test_the_files_are_what_the_command_writes(tmp_path: Path) -> None:
    main(tmp_path / "new")
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == job_files()
    assert written.keys() == {f"{family}_{size.lower()}.toml" for family in FAMILIES for size in SIZES}
    for name, text in written.items():
        assert (CONFIGS / name).read_text() == text, f"{name}: write it again with python -m fla_harmonic.titan.job_files"
    # no file that none of these wrote, but for the debug ones and those of converted models
    others = {f"{family}_debug.toml" for family in FAMILIES}
    others |= {f"hallamonic_{size}_phase{phase}.toml" for size in ("debug", "smollm2", "tinyllama") for phase in (1, 2)}
    assert {path.name for path in CONFIGS.glob("*.toml")} == written.keys() | others


@pytest.mark.processes
@pytest.mark.slow
def test_the_two_smallest_sizes_of_each_family_train(tmp_path: Path) -> None:
    names = [(family, size) for size in ("7M", "15M") for family in FAMILIES]
    runs.run(1, *[
        [f"--job.config_file={CONFIGS / f'{family}_{size.lower()}.toml'}", f"--job.dump_folder={tmp_path / family / size}",
         "--data.tokenizer=bytes", "--training.dataset=novels", "--training.dataset_path=", "--checkpoint.no_enable",
         "--training.mixed_precision_param=float32", "--metrics.log_freq=1", "--metrics.no_enable_tensorboard",
         "--training.local_batch_size=1", "--training.seq_len=128", "--training.steps=1", "--lr_scheduler.warmup_steps=1",
         "--data.token_budget=128", "--data.budget_seq_len=64"]
        for family, size in names
    ])
    for family, size in names:
        (record,) = runs.steps(tmp_path / family / size)
        # an untrained model of 50,257 tokens
        assert record[runs.LOSS] == pytest.approx(math.log(GPT2), abs=0.3), (family, size)
        assert (record["step"], record["n_tokens_seen"]) == (1, 128)
        assert record["grad_norm"] > 0
