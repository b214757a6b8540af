"""Writing K and V to pages for sm_90: q/k norm, RoPE, mean off k, Hadamard, quantise, pack, scatter, in one pass.

The CuTe DSL kernel (plumbing: kv4_sm90.py, law: kv4.prepare_qk and kv4.kv_write). A row is one head of one token; a few
lanes share it, each with eight channels and the eight that RoPE pairs them with, so that all accesses are 16 bytes
wide, rotation stays in a lane, and Hadamard's butterfly meets other lanes in its middle stages alone. Every operation
is rounded as the law's own, in the same order (no fused multiply-add), so codes, scales and zero points are its bits;
only the sum of squares of a norm is taken in another order.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from w4a4.kernels import ptx_sm90 as ptx

WARPS = 4
ROUNDS = 2
"""Groups of rows that a warp has in flight."""


class Kv4Write:
    """Compile-time constants of one kernel.

    Tensors of the call (T tokens):
        qkv:        [T, Hq + 2 Hkv, D] float16 or bfloat16
        cos, sin:   float32 [T, D / 2];  k_mean: float32 [Hkv, D] (any, without)
        q_gain, k_gain: [D] like qkv, of the RMSNorm of each q and of each k (any, without)
        slots:      int64 [T], sink_slots: int64 [T] (any, without sinks), see `kv4.KVBatch`
        pages:      uint8 [num_pages, Hkv, head_bytes]
        q_out:      [T, Hq, D] like qkv: q rotated and transformed
    """

    def __init__(
        self,
        head_dim: int,
        page_size: int,
        bits: int,
        num_sinks: int,
        is_bfloat16: bool,
        pages_bfloat16: bool,
        has_norm: bool,
        has_mean: bool,
        use_hadamard: bool,
        overlap_launch: bool,
    ) -> None:
        self.head_dim, self.page_size, self.bits, self.num_sinks = head_dim, page_size, bits, num_sinks
        self.is_bfloat16, self.pages_bfloat16 = is_bfloat16, pages_bfloat16
        self.has_norm, self.has_mean, self.use_hadamard = has_norm, has_mean, use_hadamard
        self.overlap_launch = overlap_launch
        self.lanes = head_dim // 16  # of one row
        self.rows = 32 // self.lanes  # of one warp at a time
        self.head_bytes = page_size * (head_dim + 8 if bits == 4 else 4 * head_dim)

    @cute.jit
    def __call__(
        self,
        qkv: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q_gain: cute.Tensor,
        k_gain: cute.Tensor,
        k_mean: cute.Tensor,
        slots: cute.Tensor,
        sink_slots: cute.Tensor,
        pages: cute.Tensor,
        q_out: cute.Tensor,
        eps: Float32,
        stream: Any,
    ) -> None:
        per_warp = self.rows * ROUNDS
        groups = (qkv.shape[1] + per_warp - 1) // per_warp
        warps = qkv.shape[0] * groups
        self.kernel(qkv, cos, sin, q_gain, k_gain, k_mean, slots, sink_slots, pages, q_out, eps, groups).launch(
            grid=[(warps + WARPS - 1) // WARPS, 1, 1],
            block=[32 * WARPS, 1, 1],
            use_pdl=self.overlap_launch,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        qkv: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q_gain: cute.Tensor,
        k_gain: cute.Tensor,
        k_mean: cute.Tensor,
        slots: cute.Tensor,
        sink_slots: cute.Tensor,
        pages: cute.Tensor,
        q_out: cute.Tensor,
        eps: Float32,
        groups: Int32,
    ) -> None:
        dim, half = self.head_dim, self.head_dim // 2
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = block * WARPS + thread // 32
        lane = thread % 32
        tokens, heads, num_kv_heads = qkv.shape[0], qkv.shape[1], pages.shape[1]
        num_heads = heads - 2 * num_kv_heads
        token = warp // groups
        if cutlass.const_expr(self.overlap_launch):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        if token < tokens:
            first_head = (warp - token * groups) * (self.rows * ROUNDS) + lane // self.lanes
            channel = (lane % self.lanes) * 8
            rows = []
            for turn in cutlass.range_constexpr(ROUNDS):
                head = cutlass.min(first_head + turn * self.rows, heads - 1)
                source = ptx.address_of(qkv) + ((Int64(token) * heads + head) * dim + channel) * 2
                rows.append((*ptx.load_global(source, 4), *ptx.load_global(source + dim, 4)))
            angle = (Int64(token) * half + channel) * 4
            cosines = self.load_floats(ptx.address_of(cos) + angle)
            sines = self.load_floats(ptx.address_of(sin) + angle)
            slot = Int64(slots[token])
            for turn in cutlass.range_constexpr(ROUNDS):
                head = first_head + turn * self.rows
                y = self.unpack(rows[turn])
                is_v = head >= num_heads + num_kv_heads
                is_k = (head >= num_heads) & (head < num_heads + num_kv_heads)
                if cute.arch.vote_any_sync(head < num_heads + num_kv_heads):
                    x = self.unpack(rows[turn])
                    if cutlass.const_expr(self.has_norm):
                        gain = cutlass.select_(is_k, ptx.address_of(k_gain), ptx.address_of(q_gain))
                        x = self.norm(x, gain + channel * 2, eps)
                    x = self.rotate(x, cosines, sines)
                    if cutlass.const_expr(self.has_mean):
                        if is_k:
                            mean = ptx.address_of(k_mean) + ((head - num_heads) * dim + channel) * 4
                            for part in cutlass.range_constexpr(2):
                                values = self.load_floats(mean + part * half * 4)
                                for i in cutlass.range_constexpr(8):
                                    x[part * 8 + i] = ptx.subtract(x[part * 8 + i], values[i])
                    if cutlass.const_expr(self.use_hadamard):
                        self.hadamard(x, lane)
                    for i in cutlass.range_constexpr(16):
                        y[i] = cutlass.select_(is_v, y[i], x[i])
                low, high = y[0], y[0]
                if cutlass.const_expr(self.bits == 4):
                    if cute.arch.vote_any_sync(head >= num_heads):
                        for i in cutlass.range_constexpr(1, 16):
                            low, high = ptx.minimum(low, y[i]), ptx.maximum(high, y[i])
                        for stage in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                            low = ptx.minimum(low, ptx.shuffle_xor(low, 1 << stage))
                            high = ptx.maximum(high, ptx.shuffle_xor(high, 1 << stage))
                if head < num_heads:
                    target = ptx.address_of(q_out) + ((Int64(token) * num_heads + head) * dim + channel) * 2
                    self.store_row(target, y, self.is_bfloat16)
                if (head >= num_heads) & (head < heads) & (slot >= 0):
                    side = Int32(is_v)
                    kv_head = head - num_heads - side * num_kv_heads
                    page = slot // self.page_size
                    offset = Int32(slot - page * self.page_size)
                    base = ptx.address_of(pages) + (page * num_kv_heads + kv_head) * self.head_bytes
                    if cutlass.const_expr(self.bits == 16):
                        target = base + ((side * self.page_size + offset) * dim + channel) * 2
                        self.store_row(target, y, self.pages_bfloat16)
                    else:
                        self.store_codes(base, side, offset, channel, y, low, high)
                        if cutlass.const_expr(self.num_sinks > 0):
                            sink = Int64(sink_slots[token])
                            if sink >= 0:
                                sink_page = sink // self.num_sinks
                                index = Int32(sink - sink_page * self.num_sinks) + side * self.num_sinks
                                row = ptx.address_of(pages) + (sink_page * num_kv_heads + kv_head) * self.head_bytes
                                self.store_row(row + (index * dim + channel) * 2, y, self.pages_bfloat16)

    def load_floats(self, address):
        words = (*ptx.load_global(address, 4), *ptx.load_global(address + 16, 4))
        return [ptx.bits_to_float(word) for word in words]

    def unpack(self, words):
        """16 channels of eight words: own ones, then those half a head further."""
        x = cute.make_rmem_tensor((16,), Float32)
        for i in range(8):
            low, high = ptx.bfloats_to_floats(words[i]) if self.is_bfloat16 else ptx.halves_to_floats(words[i])
            x[2 * i], x[2 * i + 1] = low, high
        return x

    def norm(self, x, gain, eps):
        """`reference.rms_norm` of the row: rounded to its type before the gain and after it."""
        total = Float32(0.0)
        for i in range(16):
            total = total + x[i] * x[i]
        distance = 1
        while distance < self.lanes:
            total = total + ptx.shuffle_xor(total, distance)
            distance *= 2
        factor = ptx.reciprocal_root(total * (1.0 / self.head_dim) + eps)
        gains = self.unpack((*ptx.load_global(gain, 4), *ptx.load_global(gain + self.head_dim, 4)))
        unpack, pack = (
            (ptx.bfloats_to_floats, ptx.floats_to_bfloats)
            if self.is_bfloat16
            else (ptx.halves_to_floats, ptx.floats_to_halves)
        )
        y = cute.make_rmem_tensor((16,), Float32)
        for i in range(8):
            low, high = unpack(pack(x[2 * i] * factor, x[2 * i + 1] * factor))
            y[2 * i], y[2 * i + 1] = unpack(pack(low * gains[2 * i], high * gains[2 * i + 1]))
        return y

    def rotate(self, x, cosines, sines):
        y = cute.make_rmem_tensor((16,), Float32)
        for i in range(8):
            y[i] = ptx.subtract(ptx.multiply(x[i], cosines[i]), ptx.multiply(x[i + 8], sines[i]))
            y[i + 8] = ptx.add(ptx.multiply(x[i + 8], cosines[i]), ptx.multiply(x[i], sines[i]))
        return y

    @cute.jit
    def hadamard(self, y, lane):
        """`reference.block_hadamard` over the row: sums and differences at distance 1, 2, 4, 8, ..., D / 2."""
        for stage in cutlass.range_constexpr(3):
            distance = 1 << stage
            for i in cutlass.range_constexpr(16):
                if cutlass.const_expr(i & distance == 0):
                    low, high = y[i], y[i + distance]
                    y[i], y[i + distance] = ptx.add(low, high), ptx.subtract(low, high)
        distance = 1
        while cutlass.const_expr(distance < self.lanes):
            sign = cutlass.select_((lane & distance) != 0, Float32(-1.0), Float32(1.0))
            for i in cutlass.range_constexpr(16):
                y[i] = ptx.multiply_add(
                    y[i], sign, ptx.shuffle_xor(y[i], distance)
                )  # one rounding: the product is exact
            distance *= 2
        for i in cutlass.range_constexpr(8):
            low, high = y[i], y[i + 8]
            y[i] = ptx.multiply(ptx.add(low, high), Float32(self.head_dim**-0.5))
            y[i + 8] = ptx.multiply(ptx.subtract(low, high), Float32(self.head_dim**-0.5))

    def store_row(self, address, y, is_bfloat16):
        pack = ptx.floats_to_bfloats if is_bfloat16 else ptx.floats_to_halves
        words = [pack(y[2 * i], y[2 * i + 1]) for i in range(8)]
        ptx.store_global(address, *words[:4])
        ptx.store_global(address + self.head_dim, *words[4:])

    @cute.jit
    def store_codes(self, base, side, offset, channel, y, low, high):
        """`reference.quantize_kv` of the row, its nibbles packed, and its scale and zero point."""
        dim = self.head_dim
        scale_bits = ptx.floats_to_halves(ptx.divide(ptx.subtract(high, low), Float32(15.0)), low)
        scale, zero = ptx.halves_to_floats(scale_bits)
        inverse = Float32(0.0)
        if scale > 0.0:
            inverse = ptx.divide(Float32(1.0), scale)
        words = []
        for part in cutlass.range_constexpr(2):
            word = Int32(0)
            for i in cutlass.range_constexpr(8):
                code = ptx.round_to_int(ptx.multiply(ptx.subtract(y[part * 8 + i], zero), inverse))
                word = word | (cutlass.max(cutlass.min(code, Int32(15)), Int32(0)) << (4 * i))
            words.append(word)
        row = base + (side * self.page_size + offset) * (dim // 2) + channel // 2
        ptx.store_global(row, words[0])
        ptx.store_global(row + dim // 4, words[1])
        if channel == 0:
            ptx.store_global(base + self.page_size * dim + offset * 8 + side * 4, scale_bits)
