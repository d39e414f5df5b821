import torch


def padding_mask(attention_mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """
    The mask of the current inputs, `[B, T]` and boolean: the last T columns of a 0/1 mask that may cover the past too.

    Args:
        attention_mask (torch.Tensor):
            0/1 mask of shape `[B, S]`, `S >= T`; integers or booleans.
        batch (int):
            B.
        tokens (int):
            T.

    Raises:
        ValueError: for another shape, a floating-point mask, or an integer mask with other values.
    """
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"`attention_mask` must be a 0/1 mask of shape [{batch}, S], a tensor; got {type(attention_mask).__name__}.")
    if attention_mask.is_floating_point():
        raise ValueError(
            f"`attention_mask` must be a 0/1 mask of integers or booleans; got {attention_mask.dtype}. An additive mask (0 "
            "and a large negative number) would be read the wrong way round: pass `mask == 0`.")
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise ValueError(
            f"`attention_mask` must be a 0/1 mask of shape [{batch}, S] with S >= {tokens}; got "
            f"{tuple(attention_mask.shape)}. Attention masks of shape [B, T, T] do not apply to a recurrence.")
    mask = attention_mask[:, -tokens:] if tokens else attention_mask[:, :0]
    if mask.dtype == torch.bool:
        return mask
    if mask.numel() and not torch.compiler.is_compiling():
        low, high = (int(value) for value in mask.aminmax())
        if low < 0 or high > 1:
            raise ValueError(
                f"`attention_mask` must hold 0 and 1 alone; got values from {low} to {high}. To number the documents of a "
                "packed row, pass their borders as `cu_seqlens`.")
    return mask.bool()
