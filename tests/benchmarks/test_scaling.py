"""What docs/scaling.md says about communication, memory and launch lines."""

import copy
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

from benchmarks import combinations, communication, plan
from benchmarks.communication import LAYOUTS, Shapes, debug_shapes, designed, differences, expected, run, traced
from benchmarks.parallel import ROOT, Layout
from fla_harmonic.models.harmonic import HarmonicConfig

PAGE = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SHAPES = debug_shapes()


@pytest.mark.processes
@pytest.mark.slow
def test_counted_calls_are_the_designed_ones(tmp_path: Path) -> None:
    counted = run(LAYOUTS, tmp_path)
    assert set(counted) == set(LAYOUTS)
    assert all(sum(calls.values()) for calls in counted.values())
    assert not differences(counted, SHAPES)
    assert communication.table(counted, SHAPES) in PAGE


@pytest.mark.parametrize("main", [combinations.main, plan.main])
def test_the_page_has_what_the_commands_print(main, capsys: pytest.CaptureFixture[str]) -> None:
    main()
    # torchtitan's log is not ours
    blocks = [block for block in capsys.readouterr().out.strip().split("\n\n") if block.startswith(("|", "-"))]
    assert len(blocks) >= 3
    for block in blocks:
        assert block in PAGE


def test_the_tables_between_the_markers_are_those_of_the_code() -> None:
    begin, end = combinations.MARKERS
    assert PAGE.partition(begin)[2].partition(end)[0].strip() == combinations.section().strip()


def test_a_difference_is_reported() -> None:
    _, calls = expected(LAYOUTS[0], SHAPES)
    assert not differences({LAYOUTS[0]: calls}, SHAPES)
    calls["all-gather", 7] += 1
    assert differences({LAYOUTS[0]: calls}, SHAPES) == [
        f"{LAYOUTS[0].name}: 0 calls of all-gather with 7 bytes designed, 1 counted"]


def test_an_unknown_operation_between_ranks_is_refused() -> None:
    inner = SimpleNamespace(name="c10d::gather_", children=[])
    with pytest.raises(RuntimeError, match="c10d::gather_"):
        traced([SimpleNamespace(name="aten::add", children=[inner])])


@pytest.mark.parametrize("option", [{"gate_ratio": 2}, {"tie_word_embeddings": True}, {"use_output_proj": False}], ids=str)
def test_a_model_without_formulas_is_refused(option: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Shapes.of(HarmonicConfig(hidden_size=8, vocab_size=16, num_hidden_layers=1, **option))


def test_a_combination_without_formulas_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor=2"):
        designed(Layout("", fsdp=2, tensor=2), SHAPES, rows=1, tokens=8)


@given(
    n=st.sampled_from([2, 4, 8]), m=st.sampled_from([2, 4]), S=st.sampled_from([1, 2, 4, 8, 16]), G=st.integers(1, 3),
    B=st.integers(1, 4), T=st.sampled_from([64, 512]), p=st.sampled_from([2, 4]), a=st.sampled_from([2, 4]),
)
def test_the_pages_formulas_are_what_is_designed(n: int, m: int, S: int, G: int, B: int, T: int, p: int, a: int) -> None:
    N, L, H, D, r = SHAPES.blocks, SHAPES.levels, SHAPES.hidden, SHAPES.level, 4
    E, K, head = (communication.numbers_in(group) for group in (SHAPES.embeddings, SHAPES.block, SHAPES.head))
    P, ring = SHAPES.parameters, (n - 1) / n

    def sent(segments: int = 1, keeps: bool = False, **degrees: int) -> float:
        layout = Layout("", accumulation=G, segment_len=T // segments, keeps=keeps, **degrees)
        bookkeeping = {"number of labels", "gradient norms", "gradient norm over stages", "mean and largest loss",
                       "number of tokens", "states and timescales"}
        calls = designed(layout, SHAPES, B, T, param=p, reduce=r, activation=a)
        return sum(call.sent for call in calls if call.purpose not in bookkeeping)

    fsdp = G * ring * (p * (2 * E + 2 * N * K + head) + r * P)
    replicas = G * 2 * (m - 1) / m * r * P
    norms = H * (2 * N + 1) + 2 * D * N * L + H * D * N * (L - 1)
    tensor = G * ring * (a * B * T * (2 * H * (N * (L + 4) + 2) + 2 * N * (L + 2) * D / n) + 2 * (12 * B * T + 4 * norms))
    assert sent(fsdp=n) == pytest.approx(fsdp)
    assert sent(S, fsdp=n) == pytest.approx(G * ring * (p * ((S + 1) * E + 2 * S * N * K + S * head) + r * P))
    assert sent(S, keeps=True, fsdp=n) == pytest.approx(G * ring * (p * (E + S * N * K + S * head) + r * P))
    assert sent(fsdp=n, replicas=m) == pytest.approx(fsdp + replicas / n)
    assert sent(replicas=m) == pytest.approx(replicas)
    assert sent(context=n) == pytest.approx(fsdp + G * (n - 1) * 12 * N * L * D * B)
    assert sent(tensor=n) == pytest.approx(tensor)
    assert sent(pipeline=n) == pytest.approx(G * a * B * T * H)


@pytest.mark.parametrize(
    "layout", [layout for layout, _ in plan.PLANS], ids=lambda layout: f"{layout.name}, {plan.options(layout)}")
def test_start_up_accepts_the_plans(layout: Layout) -> None:
    config = ConfigManager().parse_args([
        f"--job.config_file={ROOT / 'titan_configs/harmonic_28m.toml'}", f"--training.seq_len={plan.TOKENS}",
        "--activation_checkpoint.mode=none", *layout.arguments()])
    copy.deepcopy(get_train_spec("harmonic").model_args["28M"]).update_from_config(config)


def test_what_is_suggested_fits() -> None:
    model, hardware = plan.Costs.build(), plan.Hardware()
    suggested = [layout for layout, suggested in plan.PLANS if suggested]
    assert {layout.ranks for layout in suggested} == {8, 64, 512}
    for layout in suggested:
        assert sum(plan.needs(layout, model, hardware)[0]) <= hardware.memory * hardware.usable


@pytest.mark.processes
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[0])
def test_launch_lines_are_bash_and_set_what_the_job_has(block: str) -> None:
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    arguments = shlex.split(block.replace("\\\n", " ").partition("-m torchtitan.train ")[2])
    assert arguments
    arguments[1] = str(ROOT / arguments[1])
    config = ConfigManager().parse_args(arguments)
    nodes, ranks = (re.search(pattern, block) for pattern in (r"--n?nodes=(\d+)", r"--nproc_per_node=(\d+)"))
    assert ranks
    world = int(ranks[1]) * (int(nodes[1]) if nodes else 1)
    replicas, shards = config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree
    # -1: all ranks
    assert shards == -1 or replicas * shards == world
    assert config.training.global_batch_size == world * config.training.local_batch_size


@pytest.mark.processes
def test_the_batch_script_meets_at_the_first_of_its_nodes(tmp_path: Path) -> None:
    (script,) = (block for block in BLOCKS if "#SBATCH" in block)
    # more names than a pipe holds
    for name, body in (("scontrol", "for i in $(seq 20000); do echo node$i; done"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-20000]", "SLURM_NNODES": "4",
                        "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/shared"}
    done = subprocess.run(["bash"], input=script, text=True, env=env, check=True, stdout=subprocess.PIPE)
    arguments = done.stdout.splitlines()
    assert {"--nnodes=4", "--rdzv_id=7", "--rdzv_endpoint=node1:29500"} <= set(arguments)
    assert arguments[arguments.index("--job.dump_folder") + 1].startswith("/shared/")
