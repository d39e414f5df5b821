from typing import Any

import torch
import torch.nn.functional as F
from fla.modules import ShortConvolution as FusedShortConvolution


class ShortConvolution(FusedShortConvolution):
    """fla's causal depthwise convolution with state and packed documents; in plain torch on the CPU."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            x (torch.Tensor):
                Inputs of shape `[B, T, D]`; `B = 1` with `cu_seqlens`.
            residual (torch.Tensor, Optional):
                Added to the output, `[B, T, D]`. Default: `None`.
            mask (torch.Tensor, Optional):
                0/1 mask of shape `[B, T]`; masked inputs count as zero. Default: `None`.
            cache (torch.Tensor, Optional):
                The last W inputs of each sequence, `[N, D, W]`; never written to on the CPU. Default: zero.
            output_final_state (bool):
                Whether to return the new cache. Default: `False`.
            cu_seqlens (torch.Tensor, Optional):
                Borders of packed documents, `[N + 1]`. Default: `None`.

        Returns:
            y (torch.Tensor):
                Outputs of shape `[B, T, D]`.
            final_state (torch.Tensor | None):
                The new cache of shape `[N, D, W]`, or `None`.

        Raises:
            ValueError: if both a mask and `cu_seqlens` are given.
        """
        if x.device.type != "cpu":
            return super().forward(x, residual, mask, cache, output_final_state, cu_seqlens, **kwargs)
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("`mask` and `cu_seqlens` exclude one another; got both. Pack the documents without a mask.")
            x = x * mask.unsqueeze(-1)
        B, T, D = x.shape
        W = self.kernel_size[0]
        if cu_seqlens is None:
            start, stop = torch.arange(B) * T, torch.arange(1, B + 1) * T
        else:
            start, stop = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        rows = x.reshape(B * T, D)
        if cache is None:
            cache = rows.new_zeros(len(start), D, W)
        sequence = torch.repeat_interleave(torch.arange(len(start)), stop - start)
        position = torch.arange(B * T) - start[sequence]

        weight = self.weight.squeeze(1)
        y = rows * weight[:, -1]
        for back in range(1, W):
            source = rows.roll(back, 0)
            # the first tokens of a sequence read what came before it from the cache
            early = (position < back).nonzero().flatten()
            source = source.index_copy(0, early, cache[sequence[early], :, W + position[early] - back].to(rows))
            y = y + source * weight[:, W - 1 - back]
        if self.bias is not None:
            y = y + self.bias
        if self.activation is not None:
            y = F.silu(y)
        y = y.view(B, T, D)
        if residual is not None:
            y = y + residual
        return y, self._final_state(rows, cache, start, stop) if output_final_state else None

    @staticmethod
    def _final_state(rows: torch.Tensor, cache: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        W = cache.shape[2]
        # position, counted from the sequence's start, of each of its last W inputs; negative ones are still in the cache
        position = (stop - start)[:, None] + torch.arange(-W, 0)
        cached = cache.to(rows).gather(2, (W + position).clamp(0, W - 1)[:, None].expand(-1, cache.shape[1], -1))
        if rows.shape[0] == 0:
            return cached
        fresh = rows[(start[:, None] + position).clamp(0, rows.shape[0] - 1)].transpose(1, 2)
        return torch.where(position[:, None] < 0, cached, fresh)
