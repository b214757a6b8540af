"""Reading 4-bit pages back into contiguous keys and values, in Triton: the workspace of a prompt's attention."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from w4a4.kernels.kv4 import KVPageLayout


@triton.jit
def _dequantize(
    pages,  # uint8 [num_pages, Hkv, HEAD_BYTES]
    table,  # int32 [n]
    keys,  # [Hkv, n * PAGE, DIM]
    values,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
):
    column, head = tl.program_id(0), tl.program_id(1)
    num_columns, num_kv_heads = tl.num_programs(0), tl.num_programs(1)
    base = pages + (tl.load(table + column).to(tl.int64) * num_kv_heads + head) * HEAD_BYTES
    tokens, pairs, channels = tl.arange(0, PAGE), tl.arange(0, DIM // 2), tl.arange(0, DIM)
    parameters = (base + PAGE * DIM).to(tl.pointer_type(tl.float16)) + tokens * 4
    row = (head.to(tl.int64) * num_columns + column) * PAGE + tokens
    for side in tl.static_range(2):
        packed = tl.load(base + side * (PAGE * DIM // 2) + tokens[:, None] * (DIM // 2) + pairs[None, :])
        codes = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
        scale = tl.load(parameters + 2 * side).to(tl.float32)
        zero = tl.load(parameters + 2 * side + 1).to(tl.float32)
        result = codes * scale[:, None] + zero[:, None]
        target = keys if side == 0 else values
        tl.store(target + row[:, None] * DIM + channels[None, :], result.to(target.dtype.element_ty))


def dequantize_pages(pages: Tensor, table: Tensor, layout: KVPageLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [Hkv, n * page_size, D] of the pages table [n] (int32) of a pool, as `dtype`."""
    shape = (layout.num_kv_heads, table.shape[0] * layout.page_size, layout.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=pages.device) for _ in range(2))
    _dequantize[(table.shape[0], layout.num_kv_heads)](
        pages, table, keys, values, DIM=layout.head_dim, PAGE=layout.page_size, HEAD_BYTES=layout.head_bytes
    )
    return keys, values
