"""A cell of a study: one run of stock torchtitan, named after everything that its numbers follow from."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from eval.results import record_digest
from eval.scoring.models import FAMILIES

# torchrun's variables for a single process; port 0 is any free one
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class Model:
    """A flavor of the torchtitan plugin under the name that tables and folders have."""

    label: str
    family: str
    flavor: str
    config: tuple[str, ...] = ()
    """Fields in place of the flavor's, one an entry, as in `[harmonic] config`."""

    @classmethod
    def of(cls, name: str) -> "Model":
        """The model `family/flavor`."""
        return cls(name, *name.partition("/")[::2])


@dataclass(frozen=True)
class Text:
    """What cells train and are scored on, by the names of torchtitan's `[training]` and `[data]`."""

    dataset: str
    path: str
    digest: str
    """SHA-256 of the documents as read, each after its length, and of the tokenizer.json of "hf"."""
    tokenizer: str
    assets: str
    """Folder of the tokenizer.json of "hf"."""
    test: int
    validation: int
    """Target tokens of each split: the first ones that have a longest window of tokens before them."""
    file_digest: str = ""
    """SHA-256 of the file at the path, as `sha256sum` prints it; empty where there is none."""


@dataclass(frozen=True)
class Cell:
    """One run of torchtitan: everything that its numbers follow from."""

    model: Model
    text: Text
    config_file: str
    """The TOML file that gives what is not set here."""
    config_digest: str
    seq_len: int
    step_tokens: int
    """Tokens per optimizer step."""
    steps: int
    seed: int
    lr: float
    longest: int
    """Longest windows of the study: every target has as many tokens before it."""
    micro_tokens: int = 0
    """Most tokens per forward pass; 0: all of a step."""
    overrides: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.step_tokens * self.steps

    @property
    def record(self) -> dict[str, Any]:
        """The cell as JSON gives it back."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def name(self) -> str:
        """Of its folder, different for different cells. Where the text lies does not matter."""
        record = self.record
        record["text"] |= {"path": "", "assets": ""}
        # `digest` says what is read
        del record["text"]["file_digest"]
        # a flavor of the same name may be another model tomorrow
        record["flavor"] = flavor_digest(self.model.family, self.model.flavor)
        return folder_name(f"{self.model.label}-{self.seq_len}-seed{self.seed}-lr{self.lr:g}", record)

    def arguments(self, folder: Path) -> list[str]:
        """torchtitan's command line."""
        batch = self.step_tokens // self.seq_len
        micro = max(1, min(self.micro_tokens or self.step_tokens, self.step_tokens) // self.seq_len)
        log_freq = max(n for n in range(1, 11) if self.steps % n == 0)
        arguments = [
            f"--job.config_file={self.config_file}", f"--job.dump_folder={folder}", f"--model.name={self.model.family}",
            f"--model.flavor={self.model.flavor}", f"--training.dataset={self.text.dataset}",
            f"--training.dataset_path={self.text.path}", f"--data.tokenizer={self.text.tokenizer}",
            f"--model.hf_assets_path={self.text.assets}", f"--training.seq_len={self.seq_len}",
            f"--training.global_batch_size={batch}", f"--training.local_batch_size={micro}",
            f"--training.steps={self.steps}", f"--lr_scheduler.warmup_steps={max(1, self.steps // 10)}",
            f"--optimizer.lr={self.lr}", f"--debug.seed={self.seed}", f"--metrics.log_freq={log_freq}",
            "--metrics.no_enable_tensorboard", "--metrics.disable_color_printing", "--checkpoint.keep_latest_k=2",
            "--data.token_budget=0", *self.overrides,
        ]
        if self.model.config:
            arguments.append(f"--harmonic.config={' '.join(self.model.config)}")
        return arguments


def check_cells(cells: Sequence[Cell]) -> None:
    """A ValueError for cells that differ in their tokens or their steps, that no length divides, or that are the same."""
    budgets = {(cell.tokens, cell.step_tokens) for cell in cells}
    if len(budgets) != 1:
        raise ValueError(f"expected every cell to see as many tokens, and as many in a step; got (tokens, step) {budgets}.")
    for cell in cells:
        if cell.tokens <= 0 or cell.step_tokens % cell.seq_len:
            raise ValueError(
                f"expected a budget above 0 and steps of whole sequences; got {cell.steps} steps of {cell.step_tokens} tokens "
                f"with sequences of {cell.seq_len}. Make the tokens of a step a multiple of every length.")
    if len({cell.name for cell in cells}) != len(cells):
        raise ValueError(f"expected different cells; got {sorted(cell.name for cell in cells)}.")


def folder_name(text: str, record: dict[str, Any]) -> str:
    """A folder's name: the text for people, and a digest of the record."""
    return f"{text.replace('/', '-').replace(' ', '-')}-{record_digest(record, 10)}"


def flavor_digest(family: str, flavor: str) -> str:
    """SHA-256 of what a flavor is; empty for one whose shape is a directory's."""
    args = FAMILIES.get(family, {}).get(flavor)
    if args is None:
        return ""
    # without what a job sets in them
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier",
             "tie_word_embeddings")
    return record_digest(args.config if hasattr(args, "config") else {name: getattr(args, name) for name in names}, 64)


def file_digest(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    return sha256(file.read_bytes()).hexdigest()


def curve(folder: Path) -> pd.DataFrame:
    """The logged steps of a run, without its validations."""
    return pd.read_json(folder / "metrics.jsonl", lines=True).dropna(subset="loss_metrics/global_avg_loss")
