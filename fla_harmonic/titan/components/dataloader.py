"""The training data of a torchtitan job."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger

from fla_harmonic.text import TextTokenizer, TokenWindows, load_split
from fla_harmonic.titan.components.budget import keep_token_budget, warn_of_another_budget
from fla_harmonic.titan.components.stateful import StreamLoader
from fla_harmonic.titan.components.window_loader import WindowLoader
from fla_harmonic.titan.config import data_section, global_batch_size, harmonic_section, loss_in_model

# of the train splits that `build_dataloader` has read, by the job's text
_bytes_per_token: dict[tuple[Any, ...], float] = {}


def bytes_per_token(job_config: JobConfig) -> float | None:
    """
    Mean UTF-8 bytes per token of the job's train split, once `build_dataloader` has read it: torchtitan builds the metrics
    from the configuration alone.
    """
    return _bytes_per_token.get(_text_key(job_config))


def _text_key(job_config: JobConfig) -> tuple[Any, ...]:
    model, training = job_config.model, job_config.training
    return model.name, model.hf_assets_path, training.dataset, training.dataset_path, repr(data_section(job_config))


def _model_args(job_config: JobConfig) -> Any:
    """The arguments of the job's model as the trainer will have them: it updates its own once the data is there."""
    model = job_config.model
    flavors = get_train_spec(model.name).model_args
    if model.flavor not in flavors:
        raise ValueError(f"expected [model] flavor of {model.name} to be one of {', '.join(flavors)}, got {model.flavor!r}")
    args = copy.deepcopy(flavors[model.flavor])
    args.update_from_config(job_config)
    return args


def check_vocabulary(tokens: np.ndarray, tokenizer: TextTokenizer, job_config: JobConfig) -> None:
    """A ValueError where a token that occurs has no row in the embedding of the job's model, or its flavor is unknown."""
    model = job_config.model
    vocab_size, largest = _model_args(job_config).vocab_size, int(tokens.max())
    if largest >= vocab_size:
        raise ValueError(
            f"token {largest} ({tokenizer.decode([largest])!r}) occurs in the text, and {model.name} {model.flavor} has "
            f"vocab_size {vocab_size}: choose a flavor with at least {tokenizer.get_vocab_size()}, or a smaller tokenizer"
            ' ([data] tokenizer = "bytes" has 256)'
        )


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: TextTokenizer, job_config: JobConfig) -> WindowLoader:
    """
    `build_dataloader_fn` of all families: endless batches of the train split of `[training] dataset`, with
    `harmonic.stateful` of consecutive text. The log says how many epochs the steps make.

    The trainer reads length, batches, steps and schedule after this call: those of `data.budget_seq_len` hold for all of it.
    """
    keep_token_budget(job_config, dp_world_size)
    warn_of_another_budget(job_config, dp_world_size)
    model_args = _model_args(job_config)
    training, data = job_config.training, data_section(job_config)
    if training.dataloader.num_workers != 0:
        raise ValueError(
            f"expected [training.dataloader] num_workers = 0, got {training.dataloader.num_workers}: the tokens are in "
            "memory, where no worker is of use; leave it out"
        )
    rows, batch_size = global_batch_size(job_config, dp_world_size), training.local_batch_size * dp_world_size
    if batch_size < 1 or rows % batch_size:
        raise ValueError(
            f"expected [training] global_batch_size to be a multiple of local_batch_size x data-parallel degree = "
            f"{training.local_batch_size} x {dp_world_size}, got {rows}"
        )
    split = load_split(training.dataset, training.dataset_path, "train", tokenizer, data)
    check_vocabulary(split.tokens, tokenizer, job_config)
    _bytes_per_token[_text_key(job_config)] = split.num_bytes / len(split.tokens)
    windows, documents = TokenWindows(split, training.seq_len), len(split.document_starts)
    if data.reset_documents and documents == 1:
        logger.warning("[data] reset_documents has no effect: the train split is one document")
    tokens = training.steps * rows * training.seq_len
    logger.info(
        f"token budget: {training.steps:,} steps x {rows:,} windows x {training.seq_len:,} tokens = {tokens:,} tokens; "
        f"{training.steps * rows / len(windows):.2f} epochs of {len(windows):,} windows"
    )
    make: Callable[..., WindowLoader] = partial(WindowLoader, global_batch_size=rows)
    if harmonic_section(job_config).stateful:
        make = partial(StreamLoader, streams=rows, layout=model_args.state_layout())
        logger.info(f"stateful: {rows:,} streams of {len(windows) // rows:,} windows; {len(windows) % rows:,} are not read")
        if documents > 1 and not data.reset_documents:
            logger.warning("states run on from one document into the next: [data] reset_documents = true resets them there")
    return make(
        windows,
        local_batch_size=training.local_batch_size,
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        seed=job_config.debug.seed or 0,
        document_ids=data.reset_documents,
        labels_in_inputs=loss_in_model(job_config),
        pin_memory=training.dataloader.pin_memory,
    )
