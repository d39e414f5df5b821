"""Validation during training: the loss on the validation split, the same tokens every time."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice

import torch
from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import BaseValidator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from fla_harmonic.text import ByteTokenizer, TextTokenizer, TokenSplit, evaluation_batches, load_split
from fla_harmonic.titan.components.audit import audit_batch
from fla_harmonic.titan.components.dataloader import check_vocabulary
from fla_harmonic.titan.config import audit_section, data_section, loss_in_model

# what `[validation] dataset` is where the job leaves it out; no dataset of ours has this name
_STOCK_DATASET = "c4_validation"


class SplitValidator(BaseValidator):
    """
    Scores the validation split at step 1, every `validation.freq` steps and at the last one.

    `[validation] steps = -1` scores every token but the first once; `steps = n` the first n batches of `local_batch_size`
    windows per data-parallel rank, the same ones each time. A window of `seq_len` tokens knows nothing of the text before
    it. Losses are those of the training loss, summed in float64: two validations without an update in between agree in every
    bit. Training continues as it would have without: no random number is drawn, and its throughput counts neither the tokens
    nor the time of a validation.

    The arguments are those of torchtitan's `build_validator_fn`, which this is for all families. `[validation] dataset` left
    out is the training corpus.
    """

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: TextTokenizer,
        parallel_dims: ParallelDims,
        loss_fn: LossFunction,
        validation_context: Callable[[], AbstractContextManager[None]],
        maybe_enable_amp: AbstractContextManager[None],
        metrics_processor: MetricsProcessor,
        pp_schedule: _PipelineSchedule | None = None,
        pp_has_first_stage: bool | None = None,
        pp_has_last_stage: bool | None = None,
    ) -> None:
        super().__init__(job_config)
        self.pp_schedule, self.is_first_stage = pp_schedule, pp_has_first_stage
        # torchtitan says None where it has no pipeline
        self.is_last_stage = pp_schedule is None or pp_has_last_stage
        self.parallel_dims, self.dp_world_size, self.dp_rank = parallel_dims, dp_world_size, dp_rank
        self.loss_fn, self.validation_context, self.maybe_enable_amp = loss_fn, validation_context, maybe_enable_amp
        self.metrics_processor = metrics_processor
        config, training = job_config.validation, job_config.training
        text = training if config.dataset == _STOCK_DATASET else config
        self.split = load_split(text.dataset, text.dataset_path, "validation", tokenizer, data_section(job_config))
        check_vocabulary(self.split.tokens, tokenizer, job_config)
        # every token but the first is a label
        self.targets = len(self.split.tokens) - 1
        if config.steps > 0:
            self.targets = min(self.targets, config.steps * config.local_batch_size * dp_world_size * config.seq_len)
        self.num_bytes = scored_bytes(self.split, tokenizer, self.targets)
        logger.info(
            f"validation: {self.targets:,} of {len(self.split.tokens) - 1:,} labels of the validation split of {text.dataset} "
            f"in windows of {config.seq_len:,} tokens; {self.num_bytes:,.0f} bytes"
            + ("" if isinstance(tokenizer, ByteTokenizer) else " at the split's mean bytes per token")
        )
        if config.seq_len > training.seq_len:
            logger.warning(
                f"validation.seq_len = {config.seq_len} is beyond the trained length, training.seq_len = {training.seq_len}"
            )

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.job_config.training.steps

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the mean loss in nats, bits per token and bits per byte; a RuntimeError where tokens were dropped."""
        processor = self.metrics_processor
        tokens_since, last_log, began = processor.ntokens_since_last_log, processor.time_last_log, time.perf_counter()
        for model in model_parts:
            model.eval()
        nll, targets, tokens = self._score(model_parts[0], step)
        for model in model_parts:
            model.train()
        if targets != self.targets:
            raise RuntimeError(
                f"expected {self.targets} tokens to be scored in validation, but {targets} were: loss_fn or the data "
                "parallelism drops some. Remedy: validation.enable = false"
            )
        # for the throughput of this validation, and then as they were
        processor.ntokens_since_last_log, processor.time_last_log = tokens, began
        processor.log_validation(nll / targets, step, {
            "validation_metrics/bits_per_token": nll / targets / math.log(2),
            "validation_metrics/bits_per_byte": nll / self.num_bytes / math.log(2),
            "validation_metrics/tokens": targets,
        })
        processor.ntokens_since_last_log = tokens_since
        processor.time_last_log = last_log + time.perf_counter() - began

    def _score(self, model: nn.Module, step: int) -> tuple[float, int, int]:
        """Summed loss and labels over all ranks, and the tokens that this rank has read."""
        config, dims, device = self.job_config.validation, self.parallel_dims, utils.device_type
        batches = evaluation_batches(
            self.split, config.seq_len, config.local_batch_size,
            dp_world_size=self.dp_world_size, dp_rank=self.dp_rank, document_ids=data_section(self.job_config).reset_documents,
        )
        nll = torch.zeros((), dtype=torch.float64, device=device)
        targets, tokens = torch.zeros((), dtype=torch.int64, device=device), 0
        for number, (inputs, labels) in enumerate(islice(batches, config.steps if config.steps > 0 else None)):
            inputs, labels = {name: value.to(device) for name, value in inputs.items()}, labels.to(device)
            if audit_section(self.job_config).interval and number == 0:
                tried = audit_batch(
                    lambda inputs, labels: self._loss(model, inputs, labels)[0], inputs, labels,
                    int(self.split.tokens.max()) + 1, (step, self.dp_rank), f"the validation at step {step}")
                logger.info(f"audit of the validation at step {step}: causal; {tried}")
            loss, labels = self._loss(model, inputs, labels)
            nll += loss
            tokens += labels.numel()
            if self.is_last_stage:
                targets += (labels != IGNORE_INDEX).sum()
        mesh = dims.get_optional_mesh("loss") if dims.dp_cp_enabled else None
        sums = [dist_utils.dist_sum(total, mesh) for total in (nll, targets)]
        if dims.pp_enabled:
            # the last stage alone has them
            stages = dims.get_mesh("pp")
            sums = [dist_utils.dist_sum(torch.tensor(total, dtype=torch.float64, device=device), stages) for total in sums]
        return sums[0], int(sums[1]), tokens

    def _loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss of a batch on this rank, float64, and the labels that it has of it."""
        dims, extra = self.parallel_dims, dict(inputs)
        x = extra.pop("input")
        if loss_in_model(self.job_config):
            extra["labels"] = labels
        if dims.cp_enabled:
            # as the trainer does: each rank gets its piece of input and labels
            x, labels, _ = prepare_context_parallel_input(
                x, labels, {}, dims.get_mesh("cp"), x.device, self.job_config.parallelism.context_parallel_load_balancer)
        with self.validation_context():
            if self.pp_schedule is None:
                with self.maybe_enable_amp:
                    losses = [self.loss_fn(model(x, **extra), labels)]
            else:
                # of the microbatches, on the rank that has the last stage
                losses = []
                target, kept = (labels, losses) if self.is_last_stage else (None, None)
                args, extra = ((x,), extra) if self.is_first_stage else ((), {})
                self.pp_schedule.eval(*args, **extra, target=target, losses=kept)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for loss in losses:
            total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).double()
        return total, labels


def scored_bytes(split: TokenSplit, tokenizer: TextTokenizer, targets: int) -> float:
    """
    UTF-8 bytes of the first `targets` labels of a split, i.e. of its tokens 1 to `targets`. Exact for bytes, where an end of
    text that was added counts none. Of other tokenizers, that lose track of the bytes, at the split's mean bytes per token.
    """
    if not isinstance(tokenizer, ByteTokenizer):
        return split.num_bytes * targets / len(split.tokens)
    if len(split.tokens) == split.num_bytes:
        return targets
    # NUL, which a text of several documents does not hold
    return targets - int((split.tokens[1 : targets + 1] == tokenizer.eos_id).sum())
