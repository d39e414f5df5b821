"""
Loss of a trained Harmonic model over a text of any length, as one sequence and in constant memory:
`python -m eval.stream --model outputs/harmonic_debug/hf --text book.txt`.

Every token of the text but the first is a target exactly once, and is predicted from all of the text before it. A model whose
early logits depend on later tokens gets no score. With `--save_state` reading can continue another time: in the same text
(`--load_state FILE --same_text`), or in the one that follows it (`--load_state FILE`). `--growth` measures instead whether
memory or time per token grows.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

from eval.scoring.growth import MODES, measure, table
from eval.scoring.in_situ import InSitu, Verdict
from eval.scoring.models import load_recurrent
from eval.scoring.text_pieces import TextPieces
from fla_harmonic import HarmonicForCausalLM
from fla_harmonic.models.streaming import HarmonicStream
from fla_harmonic.text.tokenizers import JsonTokenizer

# what the state of a stream keeps of its text
_KEYS = ("num_bytes", "text_bytes", "text_digest")


@dataclass
class Options:
    """What to read, and with which model."""

    model: Path
    """Hugging Face directory, as `fla_harmonic.titan.export` writes it."""

    text: Path | None = None
    """UTF-8 file."""

    chunk_size: int = 1024
    """Tokens that the model reads at once: sets speed and memory, and changes no score."""

    save_state: Path | None = None
    """File for the state after the text."""

    save_every: int | None = None
    """Bytes of text after which the state is saved on the way, so that a killed run need not start again."""

    load_state: Path | None = None
    """State to start from."""

    same_text: bool = False
    """Whether the loaded state is of this text, which is then read from where it stopped; else the text follows it."""

    growth: bool = False
    """Measure peak memory and time per token after 1,000 and 100,000 tokens, and read no text."""

    out: Path | None = None
    """JSON file for the score, if wanted."""


@dataclass
class StreamScore:
    """Loss over all that the stream has read, earlier runs included, and the speed of this one."""

    tokens: int
    """Tokens read."""
    targets: int
    """Tokens predicted: all but the first."""
    num_bytes: int
    """UTF-8 bytes of the text."""
    bits_per_token: float
    """Negative log-likelihood in bits, over `targets`."""
    bits_per_byte: float
    """Negative log-likelihood in bits, over `num_bytes`."""
    tokens_per_second: float
    """Targets scored in a second of this run, the audit included."""

    audit: Verdict
    """What the audit of this run's calls saw, with the states that they continued from."""


def read(model: HarmonicForCausalLM, options: Options) -> StreamScore:
    """
    Streams the text through the model; see the options.

    Raises:
        ValueError: options that exclude one another, a state that belongs to other weights, another text or another command,
            a text without targets, or one that is not UTF-8.
        RuntimeError: the model reads the future.
    """
    if options.text is None:
        raise ValueError("expected a text, or `--growth`; got neither. Pass `--text FILE`.")
    if options.same_text and options.load_state is None:
        raise ValueError("`--same_text` needs the state of the run that began the text; pass `--load_state FILE`.")
    if options.save_every is not None and (options.save_state is None or options.save_every < 1):
        raise ValueError(
            f"`--save_every` must be a positive number of bytes, beside `--save_state FILE`; got {options.save_every} and "
            f"{options.save_state}.")
    text = TextPieces(options.text, JsonTokenizer(options.model))
    stream = model.stream(text, options.chunk_size, options.load_state)
    bytes_before = 0
    if options.load_state is not None:
        kept = stream.state.metadata
        if any(key not in kept for key in _KEYS):
            raise ValueError(
                f"{options.load_state}: expected a state that eval.stream saved, which counts the bytes of its text; got one "
                "without. Stream the text again.")
        bytes_before = int(kept["num_bytes"])
        if options.same_text:
            text.skip(int(kept["text_bytes"]), kept["text_digest"])
            bytes_before -= text.num_bytes
    return _read(stream, text, bytes_before, options)


def _read(stream: HarmonicStream, text: TextPieces, bytes_before: int, options: Options) -> StreamScore:

    def save() -> None:
        if options.save_state is not None:
            values = (str(bytes_before + text.num_bytes), str(text.num_bytes), text.digest)
            stream.save(options.save_state, dict(zip(_KEYS, values, strict=True)))

    saved, targets, start = text.num_bytes, stream.state.targets, time.perf_counter()
    # a pipe has no size
    size = text.path.stat().st_size or None
    bar = tqdm(total=size, initial=text.num_bytes, unit="B", unit_scale=True, desc=text.path.name, mininterval=1)
    with bar, InSitu(stream.model) as audit:
        for _ in stream:
            bar.set_postfix_str(f"{stream.bits_per_token:.4f} bits per token", refresh=False)
            bar.update(text.num_bytes - bar.n)
            if options.save_every is not None and text.num_bytes - saved >= options.save_every:
                save()
                saved = text.num_bytes
    seconds = time.perf_counter() - start
    save()
    state = stream.state
    num_bytes = bytes_before + text.num_bytes
    if not state.targets:
        raise ValueError(f"expected a text of two tokens or more; got {state.tokens} in {options.text}. Nothing to score.")
    bits = state.nll / math.log(2)
    return StreamScore(
        state.tokens, state.targets, num_bytes, bits / state.targets, bits / num_bytes, (state.targets - targets) / seconds,
        audit.verdict.require())


def main(options: Options) -> None:
    model = load_recurrent(options.model)
    if options.growth:
        print(table([row for mode in MODES for row in measure(options.model, mode)]))
        return
    result = asdict(read(model, options))
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
