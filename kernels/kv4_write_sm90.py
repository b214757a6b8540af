"""Writing K and V to pages for sm_90: q/k norm, RoPE, mean off k, Hadamard, quantise, pack, scatter, in one pass.

The CuTe DSL kernel (plumbing: kv4_sm90.py, law: kv4.prepare_qk and kv4.kv_write). A row is one head of one token. A few
lanes share it, each with some runs of eight channels, chosen so that all loads are 16 bytes wide, RoPE's pairs meet in
one lane, and Hadamard's butterfly crosses lanes in its middle stages alone. A warp takes as many rows at a time as its
lanes allow, one group; all groups of all tokens form one line, of which every warp takes an equal run, the next group's
loads always on their way while one is computed. Every operation is rounded as the law's own, in the same order (no
fused multiply-add), so codes, scales and zero points are its bits; only the sum of squares of a norm is taken in
another order.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from w4a4.kernels import ptx_sm90 as ptx

WARPS = 4
MAGIC = 12582912.0
"""1.5 * 2^23: added to a small float it rounds to an integer, ties to even, which then stands in the low bits."""
MAGIC_BITS = 0x4B400000
RUN = 8
"""Channels side by side in a lane: 16 bytes."""
WIDTH = 16
"""Channels of a lane: a run, and the one that RoPE pairs it with."""


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
        blocks_per_sm: int,
        overlap_launch: bool,
    ) -> None:
        self.head_dim, self.page_size, self.bits, self.num_sinks = (head_dim, page_size, bits, num_sinks)
        self.is_bfloat16, self.pages_bfloat16 = is_bfloat16, pages_bfloat16
        self.has_norm, self.has_mean, self.use_hadamard = (has_norm, has_mean, use_hadamard)
        self.blocks_per_sm, self.overlap_launch = blocks_per_sm, overlap_launch
        self.width = WIDTH  # channels of a lane: runs at distance lanes * RUN
        self.lanes = head_dim // self.width  # of one row
        self.rows = 32 // self.lanes  # of one group
        self.runs = self.width // RUN
        self.step = self.lanes * RUN  # channels from one run to the next
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
        max_blocks: Int32,
        stream: Any,
    ) -> None:
        rotated = qkv.shape[1] - pages.shape[1]  # heads of q and of k
        rotated_groups = (rotated + self.rows - 1) // self.rows
        groups = rotated_groups + (pages.shape[1] + self.rows - 1) // self.rows
        blocks = cutlass.min((qkv.shape[0] * groups + WARPS - 1) // WARPS, max_blocks)
        self.kernel(
            qkv, cos, sin, q_gain, k_gain, k_mean, slots, sink_slots, pages, q_out, eps, rotated_groups, groups
        ).launch(
            grid=[blocks, 1, 1],
            block=[32 * WARPS, 1, 1],
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=0,
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
        rotated_groups: Int32,
        groups: Int32,
    ) -> None:
        dim, half = self.head_dim, self.head_dim // 2
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(block * WARPS + thread // 32)
        lane = thread % 32
        channel = (lane % self.lanes) * RUN
        num_kv_heads = pages.shape[1]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        total = qkv.shape[0] * groups
        share = total // (blocks * WARPS)
        rest = total - share * (blocks * WARPS)
        count = share + Int32(warp < rest)
        first = warp * share + cutlass.min(warp, rest)
        gains = (ptx.address_of(q_gain), ptx.address_of(k_gain))
        if cutlass.const_expr(self.overlap_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if count > 0:
            token = first // groups
            group = first - token * groups
            head, is_row = self.head_of(group, rotated_groups, num_heads, num_kv_heads, lane)
            words = self.load_row(qkv, token, head, channel)
            cosines = cute.make_rmem_tensor((self.width // 2,), Float32)
            sines = cute.make_rmem_tensor((self.width // 2,), Float32)
            while count > 0:
                self.load_floats(cosines, ptx.address_of(cos) + (Int64(token) * half + channel) * 4)
                self.load_floats(sines, ptx.address_of(sin) + (Int64(token) * half + channel) * 4)
                q_row = ptx.address_of(q_out) + (Int64(token) * (num_heads * dim) + channel) * 2
                places = self.places(slots, sink_slots, pages, token)
                here = cutlass.min(groups - group, count)
                count = count - here
                for k in cutlass.range(here, unroll=1):
                    x = self.unpack(words)
                    own, is_own, is_rotated = head, is_row, group < rotated_groups
                    group = group + 1
                    if k + 1 == here:
                        group = Int32(0)
                        token = token + 1
                    head, is_row = self.head_of(group, rotated_groups, num_heads, num_kv_heads, lane)
                    if (k + 1 < here) | (count > 0):
                        words = self.load_row(qkv, token, head, channel)
                    self.transform(x, own, is_rotated, cosines, sines, gains, k_mean, eps, num_heads, channel, lane)
                    if is_own & (own < num_heads):
                        self.store_row(q_row + own * (dim * 2), x, self.is_bfloat16)
                    if cute.arch.vote_any_sync(own >= num_heads):
                        self.write_row(x, own, is_own, places, num_heads, num_kv_heads, channel)

    @cute.jit
    def places(self, slots, sink_slots, pages, token):
        """Where a token goes: the address of its page and its place there (-1: nowhere); the same of its sink page."""
        page_bytes = pages.shape[1] * self.head_bytes
        found: list[Any] = []
        for targets, size in ((slots, self.page_size), (sink_slots, self.num_sinks)):
            page, place = Int32(0), Int32(-1)
            if cutlass.const_expr(size > 0):
                slot = Int32(targets[token])
                if slot >= 0:
                    page = slot // size
                    place = slot - page * size
            found.extend((ptx.address_of(pages) + Int64(page) * page_bytes, place))
        return tuple(found)

    @cute.jit
    def transform(self, x, head, is_rotated, cosines, sines, gains, k_mean, eps, num_heads, channel, lane):
        """What the law does to q and k before they are stored."""
        if is_rotated:
            is_k = head >= num_heads
            if cutlass.const_expr(self.has_norm):
                self.norm(x, cutlass.select_(is_k, gains[1], gains[0]) + channel * 2, eps)
            self.rotate(x, cosines, sines)
            if cutlass.const_expr(self.has_mean):
                if cute.arch.vote_any_sync(is_k):
                    cute.arch.sync_warp()  # makes this a branch: predicated, it would cost q as much
                    if is_k:
                        mean = cute.make_rmem_tensor((self.width,), Float32)
                        row = (head - num_heads) * self.head_dim + channel
                        self.load_floats(mean, ptx.address_of(k_mean) + row * 4)
                        for i in cutlass.range_constexpr(self.width):
                            x[i] = ptx.subtract(x[i], mean[i])
            if cutlass.const_expr(self.use_hadamard):
                self.hadamard(x, lane)

    @cute.jit
    def write_row(self, x, head, is_row, places, num_heads, num_kv_heads, channel):
        """A row of k or v to its page, quantised, and to its sink page if it has one."""
        page, place, sink_page, sink_place = places
        low, high = x[0], x[0]
        if cutlass.const_expr(self.bits == 4):
            for i in cutlass.range_constexpr(1, self.width):
                low, high = ptx.minimum(low, x[i]), ptx.maximum(high, x[i])
            for stage in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                low = ptx.minimum(low, ptx.shuffle_xor(low, 1 << stage))
                high = ptx.maximum(high, ptx.shuffle_xor(high, 1 << stage))
        side = Int32(head >= num_heads + num_kv_heads)
        inside = (head - num_heads - side * num_kv_heads) * self.head_bytes
        is_kv = is_row & (head >= num_heads)
        if is_kv & (place >= 0):
            if cutlass.const_expr(self.bits == 16):
                row = (side * self.page_size + place) * self.head_dim + channel
                self.store_row(page + (inside + row * 2), x, self.pages_bfloat16)
            else:
                self.store_codes(page + inside, side, place, channel, x, low, high)
        if cutlass.const_expr(self.num_sinks > 0):
            if cute.arch.vote_any_sync(sink_place >= 0):
                cute.arch.sync_warp()
                if is_kv & (place >= 0) & (sink_place >= 0):
                    row = (side * self.num_sinks + sink_place) * self.head_dim + channel
                    self.store_row(sink_page + (inside + row * 2), x, self.pages_bfloat16)

    @cute.jit
    def head_of(self, group, rotated_groups, num_heads, num_kv_heads, lane):
        """The head that this lane has a part of, and whether there is one: groups of q and k come first, then of v."""
        rotated = num_heads + num_kv_heads
        index = group * self.rows + lane // self.lanes
        end = rotated
        if group >= rotated_groups:
            index = index - rotated_groups * self.rows + rotated
            end = rotated + num_kv_heads
        return cutlass.min(index, end - 1), index < end

    def load_row(self, qkv, token, head, channel):
        source = ptx.address_of(qkv) + ((Int64(token) * qkv.shape[1] + head) * self.head_dim + channel) * 2
        words: list[Any] = []
        for run in range(self.runs):
            words.extend(ptx.load_global(source + run * self.step * 2, 4))
        return tuple(words)

    def load_floats(self, target, address):
        """Runs of float32 like a row's channels, into target."""
        for run in range(target.shape[0] // RUN):
            for part in range(2):
                words = ptx.load_global(address + run * self.step * 4 + part * 16, 4)
                for i in range(4):
                    target[run * RUN + part * 4 + i] = ptx.bits_to_float(words[i])

    def unpack(self, words):
        x = cute.make_rmem_tensor((self.width,), Float32)
        for i in range(self.width // 2):
            low, high = ptx.bfloats_to_floats(words[i]) if self.is_bfloat16 else ptx.halves_to_floats(words[i])
            x[2 * i], x[2 * i + 1] = low, high
        return x

    def norm(self, x, gain, eps):
        """`reference.rms_norm` of the row: rounded to its type before the gain and after it."""
        total = Float32(0.0)
        for i in range(self.width):
            total = total + x[i] * x[i]
        distance = 1
        while distance < self.lanes:
            total = total + ptx.shuffle_xor(total, distance)
            distance *= 2
        factor = ptx.reciprocal_root(total * (1.0 / self.head_dim) + eps)
        words: list[Any] = []
        for run in range(self.runs):
            words.extend(ptx.load_global(gain + run * self.step * 2, 4))
        gains = self.unpack(words)
        unpack, pack = (
            (ptx.bfloats_to_floats, ptx.floats_to_bfloats)
            if self.is_bfloat16
            else (ptx.halves_to_floats, ptx.floats_to_halves)
        )
        for i in range(self.width // 2):
            low, high = unpack(pack(x[2 * i] * factor, x[2 * i + 1] * factor))
            x[2 * i], x[2 * i + 1] = unpack(pack(low * gains[2 * i], high * gains[2 * i + 1]))

    def rotate(self, x, cosines, sines):
        half = self.width // 2
        for i in range(half):
            low, high = x[i], x[i + half]
            x[i] = ptx.subtract(ptx.multiply(low, cosines[i]), ptx.multiply(high, sines[i]))
            x[i + half] = ptx.add(ptx.multiply(high, cosines[i]), ptx.multiply(low, sines[i]))

    @cute.jit
    def hadamard(self, x, lane):
        """`reference.block_hadamard` over the row: sums and differences at distance 1, 2, 4, 8, ..., D / 2."""
        for stage in cutlass.range_constexpr(3):
            self.butterfly(x, 1 << stage)
        distance = 1
        while cutlass.const_expr(distance < self.lanes):
            sign = cutlass.select_((lane & distance) != 0, Float32(-1.0), Float32(1.0))
            for i in cutlass.range_constexpr(self.width):
                # one rounding: the product is exact
                x[i] = ptx.multiply_add(x[i], sign, ptx.shuffle_xor(x[i], distance))
            distance *= 2
        distance = RUN
        while cutlass.const_expr(distance < self.width):
            self.butterfly(x, distance)
            distance *= 2
        for i in cutlass.range_constexpr(self.width):
            x[i] = ptx.multiply(x[i], Float32(self.head_dim**-0.5))

    def butterfly(self, x, distance):
        for i in range(self.width):
            if i & distance == 0:
                low, high = x[i], x[i + distance]
                x[i], x[i + distance] = ptx.add(low, high), ptx.subtract(low, high)

    def fifteenth(self, x):
        """x / 15, correctly rounded: one step of Markstein's division with the rounded 1 / 15."""
        approximate = ptx.multiply(x, Float32(1 / 15))
        return ptx.multiply_add(ptx.multiply_add(approximate, Float32(-15.0), x), Float32(1 / 15), approximate)

    def reciprocal(self, x):
        """1 / x, correctly rounded for all float16 values x > 0: one step of Newton's iteration."""
        approximate = ptx.reciprocal(x)
        return ptx.multiply_add(ptx.multiply_add(-x, approximate, Float32(1.0)), approximate, approximate)

    def store_row(self, address, x, is_bfloat16):
        pack = ptx.floats_to_bfloats if is_bfloat16 else ptx.floats_to_halves
        words = [pack(x[2 * i], x[2 * i + 1]) for i in range(self.width // 2)]
        for run in range(self.runs):
            ptx.store_global(address + run * self.step * 2, *words[4 * run : 4 * run + 4])

    @cute.jit
    def store_codes(self, base, side, offset, channel, x, low, high):
        """`reference.quantize_kv` of the row, its nibbles packed, and its scale and zero point."""
        dim = self.head_dim
        scale_bits = ptx.floats_to_halves(self.fifteenth(ptx.subtract(high, low)), low)
        scale, zero = ptx.halves_to_floats(scale_bits)
        inverse = cutlass.select_(scale > 0.0, self.reciprocal(scale), Float32(0.0))
        row = base + (side * self.page_size + offset) * (dim // 2) + channel // 2
        bias = sum(MAGIC_BITS << (4 * i) for i in range(RUN)) & 0xFFFFFFFF
        for run in cutlass.range_constexpr(self.runs):
            word = Int32(-bias)
            for i in cutlass.range_constexpr(RUN):
                code = ptx.multiply(ptx.subtract(x[run * RUN + i], zero), inverse)
                code = ptx.minimum(ptx.maximum(code, Float32(0.0)), Float32(15.0))  # 0 of a NaN, too
                word = word + (ptx.float_to_bits(ptx.add(code, Float32(MAGIC))) << (4 * i))
            ptx.store_global(row + run * (self.step // 2), word)
        if channel == 0:
            ptx.store_global(base + self.page_size * dim + offset * 8 + side * 4, scale_bits)
