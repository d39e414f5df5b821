"""
Sizes of the three families, matched by parameter count.

A size is a width, and whether embeddings and head are one table; its name is the count of the paper's single layer. At every
width the other shapes are the same: five layers of Mamba, three of Llama, and of Harmonic two blocks in the stack and three in
the best. All are within 2% of the paper's count of their size, those of `debug`, which reads bytes, within 4%. The others have
GPT-2's vocabulary.

| size | width | tables | paper's layer | stack | best | Mamba | Llama |
|---|---|---|---|---|---|---|---|
| 7M | 128 | tied | 6,993,024 | 6,984,704 | 6,985,600 | 7,016,064 | 6,999,040 |
| 15M | 256 | tied | 15,100,160 | 15,091,712 | 15,083,264 | 15,056,128 | 15,128,576 |
| 28M | 256 | untied | 27,965,952 | 27,957,504 | 27,949,056 | 27,921,920 | 27,994,368 |
| 35M | 512 | tied | 34,656,768 | 34,623,488 | 34,651,648 | 34,208,256 | 34,779,136 |
| 112M | 864 | untied | 112,245,696 | 112,244,832 | 112,202,496 | 110,652,480 | 112,231,008 |

Harmonic's flavor of a size is the paper's layer, with `-stack` the stack, and with `-best` what a search at the size of
`debug` found to learn most from a small budget (`docs/results.md`); `debug` is the stack, `debug-paper` the layer,
`debug-best` the best. The paper's models of its table have its widths and tables; of its runs at about 100M parameters no
shape is published: 112M has the tables of 28M, which every kind of parallelism can split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import MambaConfig, PreTrainedConfig

from fla_harmonic.models.harmonic import HarmonicConfig
from fla_harmonic.titan.models.hf_model import HFModelArgs
from fla_harmonic.titan.models.llama import LlamaArgs


@dataclass(frozen=True)
class Size:
    """What the flavors of a size have in common, and what follows from its width by no rule."""

    # of the hidden states
    width: int
    # whether embeddings and head are one table
    tied: bool
    # of the MLPs in the stack and in `best`: the largest multiples of 16 and of 8 whose count stays below the paper's
    stack_mlp: int
    best_mlp: int
    # Llama's, of 32, 64 or 96 channels
    heads: int
    # GPT-2's
    vocab_size: int = 50257

    def _hf(self, config: Callable[..., PreTrainedConfig], **fields: Any) -> HFModelArgs:
        shared = {"hidden_size": self.width, "vocab_size": self.vocab_size, "tie_word_embeddings": self.tied}
        return HFModelArgs.of(config(**shared, **fields))

    def paper(self) -> HFModelArgs:
        """The paper's single layer of three levels."""
        return self._hf(HarmonicConfig.paper)

    def stack(self) -> HFModelArgs:
        """Two blocks of Harmonic, whose decays are free and begin in the paper's ranges."""
        return self._hf(HarmonicConfig, intermediate_size=self.stack_mlp, num_hidden_layers=2, timescale_mode="init")

    def best(self) -> HFModelArgs:
        """The best blocks that were found: three of them, short convolutions, faster levels, wider initial weights."""
        return self._hf(
            HarmonicConfig,
            intermediate_size=self.best_mlp,
            num_hidden_layers=3,
            timescales=((1.01, 1.2), (1.2, 8), (8, 1000)),
            timescale_mode="init",
            use_short_conv=True,
            # 0.06 at the width of the search, and the same size of a map's outputs at the others
            initializer_range=round(0.68 * self.width ** -0.5, 3),
        )

    def mamba(self) -> HFModelArgs:
        """Mamba in its stock layout: expand 2, state 16, convolution 4."""
        # mamba-ssm's range. transformers' 0.1 would give an untied head logits of deviation 1.6 at the start, where the other
        # families begin near the uniform distribution
        return self._hf(MambaConfig, num_hidden_layers=5, initializer_range=0.02)

    def llama(self) -> LlamaArgs:
        """Llama with a SwiGLU of about 2.5 times the width."""
        return LlamaArgs(
            dim=self.width,
            vocab_size=self.vocab_size,
            n_layers=3,
            n_heads=self.heads,
            multiple_of=64,
            ffn_dim_multiplier=0.9,
            tie_word_embeddings=self.tied,
        )


# bytes
_DEBUG = Size(width=128, tied=False, stack_mlp=320, best_mlp=64, heads=4, vocab_size=256)
SIZES = {
    "7M": Size(width=128, tied=True, stack_mlp=288, best_mlp=48, heads=4),
    "15M": Size(width=256, tied=True, stack_mlp=592, best_mlp=104, heads=4),
    "28M": Size(width=256, tied=False, stack_mlp=592, best_mlp=104, heads=4),
    "35M": Size(width=512, tied=True, stack_mlp=1184, best_mlp=224, heads=8),
    "112M": Size(width=864, tied=False, stack_mlp=2016, best_mlp=376, heads=9),
}

HARMONIC = {
    "debug": _DEBUG.stack(),
    "debug-paper": _DEBUG.paper(),
    "debug-best": _DEBUG.best(),
    **{name: size.paper() for name, size in SIZES.items()},
    **{f"{name}-stack": size.stack() for name, size in SIZES.items()},
    **{f"{name}-best": size.best() for name, size in SIZES.items()},
}
MAMBA = {"debug": _DEBUG.mamba(), **{name: size.mamba() for name, size in SIZES.items()}}
LLAMA = {"debug": _DEBUG.llama(), **{name: size.llama() for name, size in SIZES.items()}}
