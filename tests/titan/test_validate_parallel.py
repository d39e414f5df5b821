from pathlib import Path

import pytest
from runs import VALIDATION, options, read, run

NUMBERS = ("validation_metrics/loss", "validation_metrics/bits_per_byte", "harmonic/level_1/mean_timescale",
           "harmonic/level_2/state_rms", "harmonic/level_3/state_rms")


@pytest.mark.processes
@pytest.mark.slow
def test_validation_and_states_are_those_of_one_process(tmp_path: Path) -> None:
    common = ["--checkpoint.no_enable", "--training.local_batch_size=4", "--validation.enable", "--validation.freq=2",
              "--validation.seq_len=64", "--validation.steps=3", "--validation.local_batch_size=4"]
    layouts = {kind: [f"--parallelism.{kind}_parallel_degree=2"] for kind in ("context", "tensor", "pipeline")}
    layouts["pipeline"].append("--parallelism.pipeline_parallel_microbatch_size=2")
    for kind in ("context", "tensor"):
        layouts[kind].append("--harmonic.loss_chunk_tokens=30")
    run(1, options(tmp_path / "one", 1, 2, *common))
    expected = read(tmp_path / "one")
    assert sum(VALIDATION in record for record in expected) == 2
    for kind, layout in layouts.items():
        # a layout a launch: torchtitan's meshes are the process's
        run(2, options(tmp_path / kind, 1, 2, *common, *layout))
        for record, other in zip(expected, read(tmp_path / kind), strict=True):
            for name in NUMBERS:
                # a pipeline logs no states
                if kind == "pipeline" and name.startswith("harmonic/"):
                    assert name not in other
                elif name in record:
                    assert other[name] == pytest.approx(record[name], rel=1e-6), (kind, record["step"], name)
