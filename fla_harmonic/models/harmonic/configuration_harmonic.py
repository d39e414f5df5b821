from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from fla_harmonic.layers.harmonic import TIMESCALES, check_options, check_timescales
from fla_harmonic.models.configuration_utils import AttentionConfig, AttentionConfigBase, validate_loss_config


class HarmonicConfig(AttentionConfigBase, PreTrainedConfig):
    """
    Configuration of `HarmonicModel`: blocks of norm, `HarmonicAttention`, norm, gated MLP.

    The options from `expand_ratio` to `conv_bias` are those of `HarmonicAttention`; the others are those of fla's models.
    Beyond them:

    Args:
        gated_mlp (bool):
            SwiGLU MLP, or a plain MLP of the same `intermediate_size`. Default: `True`.
        elementwise_affine (bool):
            Whether the norms of the blocks have weights. Default: `True`.
        max_position_embeddings (int, Optional):
            The training length, for those who ask: lm-eval's window, the end of a `generate` without `max_new_tokens`. It
            limits nothing. Default: 2048.

    Raises:
        ValueError: for an impossible value, naming the field.
    """

    model_type = "harmonic"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        hidden_size: int = 1024,
        expand_ratio: float = 1,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 24,
        attn_mode: str = "chunk",
        timescales: Sequence[Sequence[float]] = TIMESCALES,
        timescale_mode: str = "bounded",
        use_prediction_error: bool = True,
        gate_ratio: int | None = None,
        gate_rank: int | None = None,
        use_output_gate: bool = True,
        use_output_proj: bool = True,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        gated_mlp: bool = True,
        hidden_act: str = "swish",
        max_position_embeddings: int | None = 2048,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        attn: AttentionConfig = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 32000,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.expand_ratio = expand_ratio
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.attn_mode = attn_mode
        # lists, as JSON gives them back
        self.timescales = [list(pair) for pair in check_timescales(timescales)]
        self.timescale_mode = timescale_mode
        self.use_prediction_error = use_prediction_error
        self.gate_ratio = gate_ratio
        self.gate_rank = gate_rank
        self.use_output_gate = use_output_gate
        self.use_output_proj = use_output_proj
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.gated_mlp = gated_mlp
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.elementwise_affine = elementwise_affine
        self.norm_eps = norm_eps
        self.attn = attn
        self.use_cache = use_cache
        self.initializer_range = initializer_range
        self.fuse_norm = fuse_norm
        self.fuse_swiglu = fuse_swiglu
        self.fuse_cross_entropy = fuse_cross_entropy
        self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        self.use_l2warp = use_l2warp
        self.vocab_size = vocab_size

        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        self.validate()

    def __eq__(self, other: object) -> bool:
        # transformers makes a dataclass of each configuration, whose own comparison knows the fields of the base alone
        if not isinstance(other, HarmonicConfig):
            return NotImplemented
        return {**self.to_dict(), "_name_or_path": ""} == {**other.to_dict(), "_name_or_path": ""}

    def validate(self) -> None:
        """Checks the values; transformers calls it before a configuration is written, the model before it is built."""
        check_options(HarmonicConfig.__init__, vars(self))
        # fla's gated MLP knows both activations, the plain one has SiLU
        if self.hidden_act not in (("swish", "powlu") if self.gated_mlp else ("swish",)):
            raise ValueError(f"`hidden_act` must be 'swish', or 'powlu' with `gated_mlp`; got {self.hidden_act!r}.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            # a text may end in several ways
            ids = value if name == "eos_token_id" and isinstance(value, (list, tuple)) and value else [value]
            if value is not None and not all(type(i) is int and 0 <= i < self.vocab_size for i in ids):
                raise ValueError(f"`{name}` must be None or a token id in [0, {self.vocab_size}); got {value!r}.")
        validate_loss_config(
            fuse_cross_entropy=self.fuse_cross_entropy, fuse_linear_cross_entropy=self.fuse_linear_cross_entropy)
        super().validate()

    @classmethod
    def paper(cls, hidden_size: int = 256, vocab_size: int = 50257, **kwargs: Any) -> HarmonicConfig:
        """
        The paper's model: one layer of three levels whose gate and input are MLPs, and a plain MLP; only the levels' norms
        have weights. Parameters: `34 H^2 + 24 H` and one (tied) or two tables of `vocab_size x H`.

        Args:
            hidden_size (int):
                H. Default: 256.
            vocab_size (int):
                Entries of the vocabulary. Default: 50257 (GPT-2).
            **kwargs:
                Any field of `HarmonicConfig`, in place of the paper's.
        """
        paper: dict[str, Any] = dict(
            num_hidden_layers=1,
            gate_ratio=2,
            use_output_gate=False,
            use_output_proj=False,
            gated_mlp=False,
            intermediate_size=4 * hidden_size,
            elementwise_affine=False,
        )
        return cls(hidden_size=hidden_size, vocab_size=vocab_size, **{**paper, **kwargs})
