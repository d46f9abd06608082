"""How many prompts one batch takes: measured on the device, not guessed."""

from __future__ import annotations

import torch
from torch import nn

from .decode import Calls, forward

# Tokens of one forward pass beyond which a device gains nothing; on a GPU it also keeps offsets within 32 bits.
CPU_TOKENS, GPU_TOKENS = 1 << 14, 1 << 18
MOST_ROWS = 512


@torch.inference_mode()
def choose_rows(model: nn.Module, calls: Calls, chunk_tokens: int, length: int) -> int:
    """Rows of ``chunk_tokens`` that fit the device, the caches at ``length`` tokens included.

    On a GPU two short batches are run and their peaks give the bytes a row; at most 70 % of the free memory is filled.
    """
    device = next(model.parameters()).device
    chunk = min(chunk_tokens, length) if calls.chunks else length
    if device.type != "cuda":
        return max(1, min(MOST_ROWS, CPU_TOKENS // chunk))

    def peak(rows: int) -> int:
        ids = torch.zeros(rows, chunk, dtype=torch.long, device=device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _, cache = forward(model, calls, ids, None)
        if calls.chunks and length > chunk:
            # The second chunk runs while the first one's cache is held.
            forward(model, calls, ids, cache)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak(1)
    small, large = peak(2), peak(6)
    per_row = max(1.0, (large - small) / 4)
    fixed = max(0.0, small - 2 * per_row)
    # A cache that grows with the text holds this much more at the end than after two chunks.
    per_row += _growth(model, calls, chunk, device) * max(0, length - 2 * chunk)
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fit = int((0.7 * (free + reserved) - fixed) // per_row)
    return max(1, min(MOST_ROWS, GPU_TOKENS // chunk, fit))


def _growth(model: nn.Module, calls: Calls, chunk: int, device: torch.device) -> float:
    """Bytes by which one row's cache grows with each token."""

    def held(num_tokens: int) -> int:
        before = torch.cuda.memory_allocated(device)
        cache = forward(model, calls, torch.zeros(1, num_tokens, dtype=torch.long, device=device), None)[1]
        size = torch.cuda.memory_allocated(device) - before
        del cache
        return size

    return max(0.0, (held(chunk) - held(chunk // 2 or 1)) / max(1, chunk - chunk // 2))
