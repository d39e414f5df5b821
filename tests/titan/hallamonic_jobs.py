"""Small converted models, and jobs that train them."""

from pathlib import Path

import torch
from jobs import CONFIGS
from transformers import LlamaConfig, LlamaForCausalLM

from fla_harmonic.hallamonic import HallamonicForCausalLM
from fla_harmonic.hallamonic.convert import convert_model
from fla_harmonic.text.tokenizers import ByteTokenizer

SEQ = 64


def convert(directory: Path, layers: list[int], **options: object) -> HallamonicForCausalLM:
    """A converted Llama of random weights that reads bytes, written to a directory."""
    torch.manual_seed(0)
    shape: dict = dict(
        vocab_size=256, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None)
    source = LlamaForCausalLM(LlamaConfig(**shape | options))
    model = convert_model(source.eval(), layers).model
    model.save_pretrained(directory)
    ByteTokenizer().save_pretrained(directory)
    return model


def options(directory: Path, out: Path, steps: int, *overrides: str, phase: int = 1, ranks: int = 1) -> list[str]:
    """The debug config of a phase made small, every step logged, 4 windows a step."""
    return [
        f"--job.config_file={CONFIGS / f'hallamonic_debug_phase{phase}.toml'}", f"--job.dump_folder={out}",
        f"--model.hf_assets_path={directory}", f"--training.steps={steps}", f"--training.seq_len={SEQ}",
        "--training.global_batch_size=4", f"--training.local_batch_size={4 // ranks}", "--lr_scheduler.warmup_steps=2",
        "--metrics.log_freq=1", "--metrics.no_enable_tensorboard", "--metrics.disable_color_printing", *overrides,
    ]
