"""A model that reads the future in a way of one's choice."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

MIXES = ("shift", "pool 4", "norm over time", "late", "bidirectional")


class Table(nn.Module):
    """Logits of a token by a table, after a mixing of the sequence that may look ahead."""

    def __init__(self, vocab_size: int = 256, mix: str = "none", scale: float = 1.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.normal_(self.table.weight, std=scale)
        self.mix = mix

    def get_input_embeddings(self) -> nn.Embedding:
        return self.table

    def forward(self, tokens: torch.Tensor, use_cache: bool = False, logits_to_keep: int = 0) -> SimpleNamespace:
        x = self.table(tokens)
        if self.mix == "shift":
            x = F.pad(x, (0, 0, 0, 1))[:, 1:]
        elif self.mix == "pool 4":
            pooled = x[:, : x.shape[1] // 4 * 4].unflatten(1, (-1, 4)).mean(2, keepdim=True)
            x = torch.cat([pooled.expand(-1, -1, 4, -1).flatten(1, 2), x[:, pooled.shape[1] * 4:]], 1)
        elif self.mix == "late" and x.shape[1] > 127:
            x = x + F.pad(x[:, 127:128].expand(-1, 127, -1), (0, 0, 0, x.shape[1] - 127))
        elif self.mix == "norm over time":
            x = x / x.std(1, keepdim=True)
        elif self.mix == "bidirectional":
            x = x + x.flip(1).cumsum(1).flip(1)
        return SimpleNamespace(logits=x[:, -logits_to_keep:])
