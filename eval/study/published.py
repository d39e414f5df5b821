"""The numbers that arXiv 2606.24650 and its run logs publish, and how their set-up differs from `eval.crossover`."""

import pandas as pd

from eval.tables import markdown

# bits per token of GPT-2's tokens, by length: Transformer, Mamba, Harmonic; one seed
ENWIK8 = {
    1024: (6.662, 6.616, 6.571),
    2048: (6.657, 6.532, 6.426),
    4096: (7.045, 6.740, 6.687),
    8192: (6.787, 6.422, 6.333),
    16384: (6.873, 6.286, 6.196),
    32768: (7.259, 6.549, 6.433),
    65536: (None, None, 6.169),
}

_DIFFERENCES = """\
| | published | here |
|---|---|---|
| text | enwik8 (100 MB), first 90% train | {text} |
| tokens | GPT-2's, bits per token | {tokenizer} |
| model | 28M, of which 25.7M are tables | {sizes} |
| budget of a cell | 65.5M tokens; 131.1M at 32,768 | {tokens:,} tokens at every length |
| rival with attention | no positional encoding at all, post-norm | torchtitan's Llama: RoPE, pre-norm, SwiGLU |
| Mamba | the author's own | transformers' MambaForCausalLM, checked against its reference |
| Harmonic | the paper's single layer | {models} |
| learning rate | one for all | one for all, and each model's best of a sweep on the validation split |
| seeds | one | {seeds} |
| score | mean loss on the validation split, in windows of the length | the same {targets:,} test tokens at every length |
| causality | not checked; the published 1B model reads the future | every model audited before it was scored |
| machine | H100 | {machine} |"""


def comparison(rows: pd.DataFrame, harmonic: str, mamba: str, llama: str) -> str:
    """
    Published losses beside those of one protocol of a study and of its models of these labels, with the gaps, as Markdown.
    The units differ, the signs of the gaps compare.
    """
    means = rows.groupby(["model", "seq_len"])["bits_per_byte"].mean()
    lines = []
    for length in sorted({*ENWIK8, *rows["seq_len"]}):
        theirs = ENWIK8.get(length, (None, None, None))
        missing = "out of memory" if length in ENWIK8 else "not run"
        ours = [means.get((name, length)) for name in (llama, mamba, harmonic)]
        lines.append([
            f"{length:,}", *(missing if value is None else f"{value:.3f}" for value in theirs), _gap(theirs[2], theirs[0]),
            *("not run" if value is None else f"{value:.3f}" for value in ours),
            *(_gap(ours[2], rival) for rival in ours[:2])])
    return markdown(["length", "published, bits a token: Transformer", "Mamba", "Harmonic", "gap to Transformer",
                     f"here, bits a byte: {llama}", mamba, harmonic, f"gap to {llama}", f"gap to {mamba}"], lines)


def _gap(harmonic: float | None, rival: float | None) -> str:
    return "" if harmonic is None or rival is None else f"{1 - harmonic / rival:+.1%}"


def differences(text: str, tokenizer: str, rows: pd.DataFrame, machine: str) -> str:
    """How the two set-ups differ, as Markdown."""
    sizes = rows["parameters"]
    # the same for all
    (tokens,), (targets,) = set(rows["tokens"]), set(rows["targets"])
    return _DIFFERENCES.format(
        text=text, tokenizer=tokenizer, sizes=f"{sizes.min():,} to {sizes.max():,} parameters", tokens=tokens,
        models=", ".join(model for model in rows["model"].unique() if model.startswith("harmonic")),
        seeds=rows["seed"].nunique(), targets=targets, machine=machine)

