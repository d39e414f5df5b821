from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.layers import attn as fused
from fla.layers.utils import get_layer_cache, update_layer_cache
from fla.modules import RMSNorm as FusedRMSNorm
from fla.modules import RotaryEmbedding

from fla_harmonic.modules.norm import RMSNorm
from fla_harmonic.modules.padding import padding_mask
from fla_harmonic.ops.harmonic.op import check_cu_seqlens

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache


class Attention(fused.Attention):
    """
    fla's causal softmax attention with rotary positions, under its parameter names; without flash-attn on torch's
    `scaled_dot_product_attention`, which runs on every device.

    flash-attn, where it is installed, serves 16-bit inputs on a GPU without a mask and without a cache: fla's own forward
    pass. All else is computed here, so that padding and caches of any kind are exact: positions count unmasked tokens
    alone, and the cache holds, beside keys and values, the position of each (-1 for a pad).

    The options are fla's; `num_kv_heads` divides `num_heads`, heads have an even size, and with `window_size` a token sees
    itself and the `window_size - 1` tokens before it.

    Raises:
        ValueError: for sizes that do not divide, naming the field.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
    ) -> None:
        # not fla's own constructor, which asks for flash-attn
        nn.Module.__init__(self)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if hidden_size % (2 * num_heads):
            raise ValueError(
                f"`num_heads` must give heads of an even size; got {num_heads} with hidden_size={hidden_size}.")
        if num_heads % num_kv_heads:
            raise ValueError(f"`num_kv_heads` must divide num_heads={num_heads}; got {num_kv_heads}.")
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_kv_groups = num_heads // num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.kv_dim = num_kv_heads * self.head_dim
        self.qkv_bias = qkv_bias
        self.qk_norm = qk_norm
        self.window_size = window_size
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.layer_idx = layer_idx

        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if qk_norm:
            self.q_norm: FusedRMSNorm = RMSNorm(self.head_dim, dtype=torch.float32)
            self.k_norm: FusedRMSNorm = RMSNorm(self.head_dim, dtype=torch.float32)
        self.rotary = RotaryEmbedding(dim=self.head_dim, base=rope_theta)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool | None = False,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Cache | None]:
        """
        fla's arguments. Nobody sees the tokens that the mask `[B, S]`, S >= T, leaves out, and their outputs are zero; the
        borders `cu_seqlens` in `kwargs`, `[N + 1]` with B = 1, win over it. A given cache is extended, and knows its pads.

        Raises:
            ValueError: for a wrong mask or borders, packed documents with a cache, or a cache without `layer_idx`.
        """
        B, T, _ = hidden_states.shape
        cu_seqlens = kwargs.get("cu_seqlens")
        lengths: list[int] | None = None
        mask = None
        if cu_seqlens is not None:
            if B != 1:
                raise ValueError(f"`cu_seqlens` needs a batch of 1; got {B}. Flatten the documents into one row first.")
            if past_key_values is not None:
                raise ValueError(
                    "attention layers keep no cache of packed documents; got `cu_seqlens` and `past_key_values`. Pass "
                    "`use_cache=False`, or the documents as rows of a padded batch.")
            lengths = check_cu_seqlens(cu_seqlens, T).diff().tolist()
        elif attention_mask is not None:
            mask = padding_mask(attention_mask, B, T)
            # zero, so that whatever is in a pad, NaN too, meets nothing but zeros in the backward pass
            hidden_states = hidden_states.masked_fill(~mask.unsqueeze(-1), 0)
        if mask is None and past_key_values is None and self._flash_serves(hidden_states):
            return super().forward(hidden_states, cu_seqlens=None if cu_seqlens is None else cu_seqlens.int())

        q = self.q_proj(hidden_states).unflatten(2, (self.num_heads, self.head_dim))
        k = self.k_proj(hidden_states).unflatten(2, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(hidden_states).unflatten(2, (self.num_kv_heads, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)

        state = get_layer_cache(self, past_key_values)
        past = None if state is None else state["attn_state"]
        if past is not None and past[0].shape[0] != B:
            raise ValueError(
                f"`past_key_values` must hold one sequence for each of the {B} rows; it holds {past[0].shape[0]}.")
        position = self._positions(mask, past, B, T, q.device)
        if lengths is not None:
            position = torch.cat([position.new_zeros(0), *(torch.arange(n, device=q.device) for n in lengths)]).unsqueeze(0)
        q, k = self._rotate(q, position), self._rotate(k, position)

        if lengths is not None:
            documents = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
            o = torch.cat([q[:, :0], *(self._attend(*document) for document in documents)], 1)
        else:
            if past is not None:
                k = torch.cat([past[0].unflatten(2, (k.shape[2], self.head_dim)).to(k), k], 1)
                v = torch.cat([past[1].unflatten(2, (v.shape[2], self.head_dim)).to(v), v], 1)
            seen = position if past is None else torch.cat([past[2], position], 1)
            self._remember(past_key_values, T, k, v, seen)
            o = self._attend(q, k, v, None if past is None and mask is None else self._visible(position, seen))
        o = self.o_proj(o.reshape(B, T, self.hidden_size))
        if mask is not None:
            o = o.masked_fill(~mask.unsqueeze(-1), 0)
        return o, None, past_key_values

    @staticmethod
    def _flash_serves(x: torch.Tensor) -> bool:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return kind != "cpu" and fused.flash_attn_func is not None and dtype in (torch.float16, torch.bfloat16)

    @staticmethod
    def _positions(
        mask: torch.Tensor | None,
        past: tuple[torch.Tensor, ...] | None,
        B: int,
        T: int,
        device: torch.device,
    ) -> torch.Tensor:
        """Number of unmasked tokens before each token, `[B, T]`, and -1 for pads."""
        if mask is None:
            position = torch.arange(T, device=device).expand(B, T)
        else:
            position = mask.cumsum(1) - 1
        if past is not None and past[2].shape[1]:
            position = position + past[2].amax(1, keepdim=True) + 1
        return position if mask is None else position.masked_fill(~mask, -1)

    def _rotate(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        half = self.head_dim // 2
        frequency = torch.exp(torch.arange(half, dtype=wide, device=x.device) * (-math.log(self.rope_theta) / half))
        angle = position.clamp_min(0).to(wide)[..., None, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        first, second = x.to(wide).split(half, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)

    def _visible(self, position: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Whether a token sees another, `[B, T, S]`; pads see all, because a softmax over nothing is NaN."""
        rows, columns = position.unsqueeze(2), seen.unsqueeze(1)
        visible = (columns >= 0) & (columns <= rows)
        if self.window_size is not None:
            visible &= columns > rows - self.window_size
        return visible | (rows < 0)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `[B, T, H, D]`; without `visible` the tokens are one causal sequence a row."""
        if q.shape[1] == 0:
            return q
        if visible is None and self.window_size is not None and self.window_size < q.shape[1]:
            position = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
            visible = self._visible(position, position)
        k, v = (x.repeat_interleave(self.num_kv_groups, 2) for x in (k, v))
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=None if visible is None else visible.unsqueeze(1), is_causal=visible is None)
        return o.transpose(1, 2)

    def _remember(
        self,
        past_key_values: Cache | None,
        tokens: int,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
    ) -> None:
        if past_key_values is None:
            return
        k, v = k.flatten(2), v.flatten(2)
        if self.window_size is not None and position.shape[1] > self.window_size:
            # the last tokens, not the last columns: pads first, then the others in their order
            order = (position >= 0).long().argsort(dim=1, stable=True)[:, -self.window_size:]
            k, v = (x.gather(1, order.unsqueeze(-1).expand(-1, -1, self.kv_dim)) for x in (k, v))
            position = position.gather(1, order)
        # put there by hand, because `update` would append, and drop the oldest columns instead of the oldest tokens
        update_layer_cache(self, past_key_values, offset=tokens)["attn_state"] = (k, v, position)
