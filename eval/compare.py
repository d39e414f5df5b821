"""
Harmonic, Mamba and Llama at one token budget and two sequence lengths: `python -m eval.compare` (`make compare`).

Each cell is a run of stock torchtitan with the debug config of its family and nothing but length, batch and steps
overridden; batch x length x steps is the same in every cell. The trained model is exported, checked for causality and
scored on the test split. A cell that is done is not run again, so a killed comparison goes on where it stopped.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import tyro

FAMILIES = ("harmonic", "mamba", "llama")
# what makes cells comparable
_SET_HERE = ("--job.", "--training.dataset", "--training.seq_len", "--training.steps", "--training.local_batch_size",
             "--training.global_batch_size", "--data.", "--model.", "--checkpoint.")


@dataclass
class Options:
    """The cells and where they go."""

    families: tuple[str, ...] = FAMILIES
    """Models to train."""

    seq_lens: tuple[int, ...] = (1024, 4096)
    """Sequence lengths in tokens."""

    tokens: int = 112 * 4096
    """Token budget of every cell; a multiple of `step_tokens`."""

    step_tokens: int = 4096
    """Tokens of an optimizer step in every cell; a multiple of every length."""

    threads: int = 2
    """CPU threads of a run."""

    out: Path = Path("outputs/compare")
    """Folder for runs, table and plot."""

    overrides: tuple[str, ...] = ()
    """More torchtitan options for every cell, e.g. `--overrides=--optimizer.lr=1e-3`."""


@dataclass(frozen=True)
class Cell:
    """One run of the comparison."""

    family: str
    seq_len: int
    batch: int
    steps: int
    overrides: tuple[str, ...]
    config: str
    """Digest of the family's TOML file."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len * self.steps


def cells(options: Options) -> list[Cell]:
    """
    The runs, all of exactly `options.tokens` tokens.

    Raises:
        ValueError: for an unknown family, or if lengths, step and budget do not divide.
    """
    for family in options.families:
        if family not in FAMILIES:
            raise ValueError(f"`families` must be of {FAMILIES}; got {family!r}.")
    for override in options.overrides:
        if override.startswith(_SET_HERE):
            raise ValueError(f"`overrides` must leave {_SET_HERE} to the comparison; got {override!r}.")
    planned = [
        Cell(family, seq_len, options.step_tokens // seq_len, options.tokens // options.step_tokens, options.overrides,
             hashlib.sha256(config_file(family).read_bytes()).hexdigest())
        for seq_len in options.seq_lens for family in options.families
    ]
    for cell in planned:
        if cell.tokens != options.tokens or cell.tokens == 0:
            raise ValueError(
                f"every cell must see {options.tokens} tokens; {cell.family} at {cell.seq_len} would see {cell.batch} x "
                f"{cell.seq_len} x {cell.steps} = {cell.tokens}. Make `tokens` a multiple of `step_tokens`, and that of "
                "every length.")
    return planned


def config_file(family: str) -> Path:
    return Path(f"titan_configs/{family}_debug.toml")


def run(cell: Cell, folder: Path, threads: int) -> dict[str, object]:
    """Trains, exports and scores a cell, or reads what an earlier run of the same cell left."""
    plan_file, result_file = folder / "cell.json", folder / "result.json"
    plan = json.loads(json.dumps(asdict(cell)))
    # written first: what a killed run left is resumed by the same cell alone
    folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(plan_file.read_text()) if plan_file.is_file() else None if any(folder.iterdir()) else plan
    if found != plan:
        raise RuntimeError(
            f"{folder} holds another run: expected {plan}, found {found}. Remove it or choose another `--out`.")
    plan_file.write_text(json.dumps(plan))
    if result_file.is_file():
        return json.loads(result_file.read_text())
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    config = [str(config_file(cell.family)), f"--job.dump_folder={folder}", f"--training.seq_len={cell.seq_len}",
              f"--training.local_batch_size={cell.batch}", f"--training.steps={cell.steps}",
              f"--lr_scheduler.warmup_steps={max(1, cell.steps // 10)}",
              # so that the last step is logged
              f"--metrics.log_freq={max(n for n in range(1, 11) if cell.steps % n == 0)}", *cell.overrides]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1",
                    "-m", "torchtitan.train", "--job.config_file", *config], env=env, check=True)
    subprocess.run([sys.executable, "-m", "fla_harmonic.titan.export", "--checkpoint", folder / "checkpoint", "--out",
                    folder / "hf", "--config_file", *config], env=env, check=True)
    subprocess.run([sys.executable, "-m", "eval.score", "--model", folder / "hf", "--seq_len", str(cell.seq_len),
                    "--batch_size", str(cell.batch), "--out", folder / "score.json", "--config_file", *config],
                   env=env, check=True)
    steps = curve(folder)
    result = {
        "cell": plan,
        "parameters": parameters(folder / "hf"),
        "score": json.loads((folder / "score.json").read_text()),
        "tokens_seen": int(steps["n_tokens_seen"].iloc[-1]),
        # the first logged step has the start-up in it
        "tokens_per_second": statistics.median(steps["throughput(tps)"].iloc[min(1, len(steps) - 1):]),
        "peak_memory_gib": float(steps["memory/max_active(GiB)"].max()),
    }
    if result["tokens_seen"] != cell.tokens:
        raise RuntimeError(f"{folder}: expected {cell.tokens} tokens, trained on {result['tokens_seen']}. Remove the folder.")
    draft = result_file.with_suffix(".tmp")
    draft.write_text(json.dumps(result, indent=1))
    os.replace(draft, result_file)
    return result


def curve(folder: Path) -> pd.DataFrame:
    """The logged steps of a run, without its validations."""
    return pd.read_json(folder / "metrics.jsonl", lines=True).dropna(subset="loss_metrics/global_avg_loss")


def parameters(directory: Path) -> int:
    """Number of parameters in a Hugging Face directory."""
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (not a dict)


def table(results: list[dict]) -> str:
    """The results as Markdown."""
    lines = ["| length | model | parameters | tokens | bits per byte (test) | tokens/s | peak memory, GiB |",
             "|---|---|---|---|---|---|---|"]
    for result in results:
        cell = result["cell"]
        lines.append(
            f"| {cell['seq_len']:,} | {cell['family']} | {result['parameters']:,} | {result['tokens_seen']:,} | "
            f"{result['score']['bits_per_byte']:.3f}{' (beyond trained length)' * result['score']['beyond_trained_length']} | "
            f"{result['tokens_per_second']:,.0f} | {result['peak_memory_gib']:.2f} |")
    return "\n".join(lines)


def plot(results: list[dict], folder: Path, file: Path) -> None:
    """Training loss against tokens seen, one panel a length, with the test score at the end of each curve."""
    lengths = sorted({result["cell"]["seq_len"] for result in results})
    figure, axes = plt.subplots(1, len(lengths), figsize=(5 * len(lengths), 3.8), sharey=True, squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        for index, family in enumerate(FAMILIES):
            for result in results:
                cell = result["cell"]
                if (cell["family"], cell["seq_len"]) != (family, length):
                    continue
                steps = curve(folder / f"{family}-{length}")
                bits = steps["bits_per_token"]
                axis.plot(steps["n_tokens_seen"], bits, color=f"C{index}", label=family)
                axis.plot(steps["n_tokens_seen"].iloc[-1], result["score"]["bits_per_byte"], "o", color=f"C{index}")
        axis.set(title=f"length {length:,}", xlabel="tokens seen (bytes)", ylim=(1.5, 6))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("bits per byte: training (line), test (dot)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(options: Options) -> None:
    planned = cells(options)
    results = []
    for number, cell in enumerate(planned, 1):
        shape = f"{cell.batch} x {cell.seq_len} x {cell.steps}"
        print(f"cell {number} of {len(planned)}: {cell.family}, {shape} tokens", flush=True)
        results.append(run(cell, options.out / f"{cell.family}-{cell.seq_len}", options.threads))
    text = table(results)
    (options.out / "compare.md").write_text(text + "\n")
    plot(results, options.out, options.out / "compare.png")
    print(f"{text}\n\n{options.out / 'compare.md'}, {options.out / 'compare.png'}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
