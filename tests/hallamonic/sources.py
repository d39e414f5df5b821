"""Small pretrained models, of random weights, for the tests of their conversion."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config

from fla_harmonic.hallamonic.convert import Conversion, convert_model

VOCAB = 61
COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0)
# tied heads and biases of all kinds
CONFIGS: dict[str, Any] = {
    "llama": lambda **k: LlamaConfig(**{**COMMON, "tie_word_embeddings": True, **k}),
    "llama-bias": lambda **k: LlamaConfig(**{**COMMON, "attention_bias": True, **k}),
    "mistral": lambda **k: MistralConfig(**{**COMMON, "sliding_window": 8, **k}),
    "qwen2": lambda **k: Qwen2Config(**{**COMMON, **k}),
}


def source(name: str, **kwargs: Any) -> PreTrainedModel:
    """With biases that are not zero and norms that are not one, as those of a trained model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](**kwargs))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.3)
            elif key.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def converted(name: str, layers: list[int], init: str = "attention", **kwargs: Any) -> Conversion:
    return convert_model(source(name, **kwargs), layers, init)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape)
