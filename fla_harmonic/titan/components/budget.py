"""
One token budget at every sequence length: `--data.budget_seq_len 65536` changes a job's length, and keeps its tokens.

    [data]
    token_budget = 65_536_000

    [training]
    local_batch_size = 2
    seq_len = 8192
    steps = 4000

A step keeps its tokens as long as a sequence fits in it; where a sequence is longer, a step is one sequence, and steps and
warm-up are fewer by the same factor.
"""

from typing import Any

from torchtitan.tools.logging import logger

from fla_harmonic.titan.config import data_section, global_batch_size


def keep_token_budget(job_config: Any, dp_world_size: int = 1) -> None:
    """
    With `data.budget_seq_len`, derive the job's length, batches, steps and warm-up from it, in place; to do so again changes
    nothing. Without it, leave the job as it is.

    The global batch is split over the ranks, so that their number does not change the budget. A rank computes at most as
    many tokens at a time as `local_batch_size x seq_len` of the file, or one sequence, and accumulates gradients over the
    rest.
    """
    training, scheduler, data = job_config.training, job_config.lr_scheduler, data_section(job_config)
    for name in ("token_budget", "budget_seq_len"):
        if (value := getattr(data, name)) < 0:
            raise ValueError(f"expected data.{name} >= 0, but got {value}. Remedy: a number of tokens, or 0 for off")
    budget, length = data.token_budget, data.budget_seq_len
    if not length:
        return
    rows = global_batch_size(job_config)
    if (tokens := rows * training.seq_len * training.steps) != budget:
        raise ValueError(
            f"expected global batch x training.seq_len x training.steps to be data.token_budget = {budget:,} with "
            f"data.budget_seq_len = {length}, but got {rows} x {training.seq_len} x {training.steps} = {tokens:,}. Remedy: "
            "leave batch, seq_len and steps as the file has them, or set data.token_budget to the tokens that you mean"
        )
    old_step, microbatch = rows * training.seq_len, training.local_batch_size * training.seq_len
    # a step has its tokens, or is one longer sequence
    step = max(length, old_step)
    rows = _whole("the tokens of a step", step, length, length)
    steps = _whole("data.token_budget", budget, step, length)
    schedule = {
        name: _whole(f"lr_scheduler.{name} = {value} in tokens", value * old_step, step, length)
        for name in ("warmup_steps", "total_steps") if (value := getattr(scheduler, name)) is not None
    }
    if rows % dp_world_size:
        raise ValueError(
            f"expected the data-parallel degree to divide the global batch, which is {rows} at data.budget_seq_len = "
            f"{length}, but it is {dp_world_size}. Remedy: fewer data-parallel ranks, or parallelism.context_parallel_degree"
        )
    rank_rows = rows // dp_world_size
    fitting = max(1, microbatch // length)
    local_rows = max(n for n in range(1, min(fitting, rank_rows) + 1) if rank_rows % n == 0)
    shape = {"seq_len": length, "local_batch_size": local_rows, "global_batch_size": rows, "steps": steps}
    changes = []
    for section, values in {"training": shape, "lr_scheduler": schedule}.items():
        for name, value in values.items():
            config = getattr(job_config, section)
            changes.append(f"{section}.{name} = {value} (was {getattr(config, name)})")
            setattr(config, name, value)
    logger.info(f"data.budget_seq_len = {length}, {budget:,} tokens: {', '.join(changes)}")


def _whole(name: str, tokens: int, unit: int, length: int) -> int:
    """How often `unit` goes into the tokens."""
    if tokens % unit:
        raise ValueError(
            f"expected {name}, {tokens:,}, to be a multiple of {unit:,} with data.budget_seq_len = {length}. Remedy: another "
            "length, or other [training] and [lr_scheduler] that amount to data.token_budget"
        )
    return tokens // unit


def warn_of_another_budget(job_config: Any, dp_world_size: int) -> None:
    """Warn where a run is not of the tokens that its file states, as a longer `training.seq_len` or more ranks make it."""
    training, budget = job_config.training, data_section(job_config).token_budget
    rows = global_batch_size(job_config, dp_world_size)
    if budget and (tokens := rows * training.seq_len * training.steps) != budget:
        logger.warning(
            f"this run is of {tokens:,} tokens, and the file's data.token_budget is {budget:,}: do not compare it with runs "
            f"of that budget. --data.budget_seq_len {training.seq_len} in place of other overrides keeps it"
        )
