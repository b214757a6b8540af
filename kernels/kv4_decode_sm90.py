"""Decode attention over KV4 pages for sm_90: the CuTe DSL kernel (plumbing: kv4_sm90.py, law: kv4.py).

One launch of a fixed grid. The work of a step is a line of tiles of 16 tokens, ordered by sequence, kv-head and
position; each CTA takes an equal run of it, wherever sequences begin and end, so a long sequence among short ones is
spread over as many CTAs as its tiles deserve. Lengths are read on the device. Inside a CTA every warp is on its own: it
copies every fourth (or eighth) tile of the run into its private ring of shared memory (bulk copies, one mbarrier a
stage) and keeps its own running softmax; warps meet when the run leaves a kv-head, the copies of the next one already
under way. A kv-head that several CTAs share goes through a workspace, and whoever arrives last merges it, in the order
of the parts; sinks belong to the first of them.

The arithmetic, per tile and 8 query heads (FlashDecoding with operands swapped, so that K and V are the wide side):
  S^T = K q^T, then O^T += V^T P^T, both m16n8k16 on float16.
A nibble is the low bits of a float16: as it stands that is the subnormal c * 2^-24, which tensor cores take in full, so
unpacking eight nibbles is four ANDs and a shift. Nibbles at bit 4 of a half count 16 times as much: the K side divides
q by 16 there, the V side divides the output rows. Scales and zero points meet scores and probabilities only.
Which channel or token a register holds does not matter to a product as long as both operands agree, so pages stay in
plain order, and q is permuted instead, once per kv-head.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from w4a4.kernels import ptx_sm90 as ptx

TILE = 16
FIRST = 0x000F000F
"""Nibble 0 of both halves of a word, as subnormal float16."""
SECOND = 0x00F000F0
"""Nibble 1 of both halves, 16 times as large."""
NEVER = -1e38
"""Score of a hidden key; finite so that differences are never NaN."""
NOTHING = -1e30
"""Running maximum before the first key."""
FAR = 0x7FFFFFFF
AT_ONCE = 4
"""Ends of 32 sequences each that a warp reads before it searches: one wait instead of several up to 128 sequences."""
MERGED_AT_ONCE = 16
"""Parts of a kv-head times quads of channels that a thread reads at a time when parts are merged: loads in flight."""
MIN_TILES = 8
"""Tiles of a CTA's run at least: what a part costs to merge is worth that many."""
SLACK = 6.0
"""Scores may exceed the running maximum by this much (in powers of two) before it is moved: probabilities up to 64 are
as exact in float16, and the reduction over lanes is skipped in nearly every tile."""


class Kv4Decode:
    """Compile-time constants of one kernel.

    Tensors of the call (B sequences of one query row each):
        q, out:       [rows, Hq, D] float16 or bfloat16; q as `kv4.prepare_qk` leaves it
        pages:        uint8 [num_pages, Hkv, head_bytes]
        tables:       int32 [B, max_pages];  lengths: int32 [B];  sink_pages: int32 [B] (any, without sinks)
        tile_ends:    int32 [B], running sum of each sequence's visible tiles (at least 1 each)
        partial:      float32 [2 * grid, G, D + 4], counters: int32 [B * Hkv], zero before and after
    """

    def __init__(
        self,
        head_dim: int,
        group_size: int,
        page_size: int,
        num_sinks: int,
        is_bfloat16: bool,
        sinks_bfloat16: bool,
        warps: int,
        blocks_per_sm: int,
        overlap_launch: bool,
    ) -> None:
        self.warps, self.log2_warps = warps, warps.bit_length() - 1
        self.head_dim, self.group_size, self.page_size = head_dim, group_size, page_size
        self.num_sinks, self.is_bfloat16, self.sinks_bfloat16 = (num_sinks, is_bfloat16, sinks_bfloat16)
        self.octets = -(-group_size // 8)  # groups of 8 query heads
        self.tile_bytes = TILE * (head_dim + 8)
        self.log2_stages = 3 if head_dim == 64 else 2
        self.stages = 1 << self.log2_stages
        self.blocks_per_sm, self.overlap_launch = blocks_per_sm, overlap_launch
        self.ring_bytes = self.warps * self.stages * self.tile_bytes
        self.query_bytes = group_size * head_dim * 2
        self.sink_bytes = 2 * num_sinks * head_dim * 2

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        pages: cute.Tensor,
        tables: cute.Tensor,
        lengths: cute.Tensor,
        tile_ends: cute.Tensor,
        sink_pages: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
        window: Int32,
        num_blocks: Int32,
        stream: Any,
    ) -> None:
        self.kernel(q, pages, tables, lengths, tile_ends, sink_pages, partial, counters, out, scale, window).launch(
            grid=[num_blocks, 1, 1],
            block=[32 * self.warps, 1, 1],
            min_blocks_per_mp=self.blocks_per_sm,
            preferred_smem_carveout=100,
            use_pdl=self.overlap_launch,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        pages: cute.Tensor,
        tables: cute.Tensor,
        lengths: cute.Tensor,
        tile_ends: cute.Tensor,
        sink_pages: cute.Tensor,
        partial: cute.Tensor,
        counters: cute.Tensor,
        out: cute.Tensor,
        scale: Float32,
        window: Int32,
    ) -> None:
        dim, stages, group = self.head_dim, self.stages, self.group_size
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32

        smem = cutlass.utils.SmemAllocator()
        bar = smem.allocate_array(Int64, self.warps * stages).toint()
        ring = smem.allocate(self.ring_bytes, byte_alignment=128).toint()
        # f32 [warp, head, D], see sum_address; while tiles are attended to, the sinks: 16 bit [K or V, sink, D]
        sums = smem.allocate(max(self.warps * group * dim * 4, self.sink_bytes), byte_alignment=16).toint()
        stats = smem.allocate(self.warps * group * 8, byte_alignment=16).toint()  # f32 [warp, head, (max, sum)]
        sink_scores = smem.allocate(group * 16, byte_alignment=16).toint()  # f32 [head, 4]
        flag = smem.allocate(16, byte_alignment=16).toint()
        queries = smem.allocate(2 * self.query_bytes, byte_alignment=16).toint()  # of this kv-head and the next
        bar = bar + warp * (stages * 8)
        ring = ring + warp * (stages * self.tile_bytes)

        if lane < stages:
            ptx.mbarrier_init(bar + lane * 8, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.overlap_launch):
            cute.arch.griddepcontrol_wait()  # what went before wrote the query, the pages and perhaps the lengths

        num_kv_heads = pages.shape[1]
        num_sequences = lengths.shape[0]
        ends = cute.make_rmem_tensor((AT_ONCE,), Int32)
        ends.fill(FAR)
        for i in cutlass.range_constexpr(AT_ONCE):
            if i * 32 + lane < num_sequences:
                ends[i] = tile_ends[i * 32 + lane]
        first_lengths = Int32(0)
        if lane < num_sequences:
            first_lengths = lengths[lane]
        quota, total = self.share(tile_ends[0], tile_ends[num_sequences - 1], num_sequences, num_kv_heads, blocks)
        x = block * quota
        x_end = cutlass.min(total, x + quota)
        consumed = Int32(0)  # tiles of this warp so far: ring position and phase

        if x < x_end:
            known = (ends, first_lengths)
            at = self.locate(tile_ends, lengths, known, x, x_end, num_kv_heads, window, lane)
            turn = Int32(0)
            table = self.start(q, pages, tables, at, bar, ring, queries, consumed, thread, warp, lane)
            if cutlass.const_expr(self.num_sinks > 0):
                self.fetch_sinks(pages, sink_pages, at, x, sums, thread)
            ptx.copy_async_wait(1 if self.num_sinks else 0)
            cute.arch.sync_threads()
            while x < x_end:
                acc = cute.make_rmem_tensor((self.octets * dim // 4,), Float32)
                acc.fill(0.0)
                state = cute.make_rmem_tensor((self.octets * 6,), Float32)  # per octet: max, sum, zero sum of 2 heads
                state.fill(0.0)
                for octet in cutlass.range_constexpr(self.octets):
                    state[octet * 6] = Float32(NOTHING)
                    state[octet * 6 + 1] = Float32(NOTHING)
                query, factors = self.load_query(queries + turn * self.query_bytes, scale, lane)
                count = at[3]
                mine = self.tiles_of(at, warp)
                for k in cutlass.range(mine, unroll=1):
                    stage = consumed & (stages - 1)
                    self.wait(bar + stage * 8, (consumed >> self.log2_stages) & 1)
                    position = (at[2] + k * self.warps + warp) * TILE
                    self.attend(
                        ring + stage * self.tile_bytes, acc, state, query, factors, position, at[7], at[6], lane
                    )
                    cute.arch.sync_warp()
                    ahead = k + stages
                    if ahead & 31 == 0:
                        table = self.page_ids(tables, at, ahead, warp, lane)
                    if ahead < mine:
                        self.issue(pages, at, table, ahead, bar + stage * 8, ring + stage * self.tile_bytes, warp, lane)
                    consumed = consumed + 1
                x = x + count
                done = at
                turn = 1 - turn
                if x < x_end:
                    at = self.advance(tile_ends, lengths, at, x_end, num_kv_heads, window)
                    table = self.start(
                        q, pages, tables, at, bar, ring, queries + turn * self.query_bytes, consumed, thread, warp, lane
                    )
                elif cutlass.const_expr(self.overlap_launch):
                    cute.arch.griddepcontrol_launch_dependents()  # not earlier: CTAs that wait would take the SMs' room
                tensors = (q, pages, partial, counters, out)
                buffers = (sums, stats, sink_scores, flag, queries + (1 - turn) * self.query_bytes)
                self.finish(tensors, acc, state, done, quota, block, scale, buffers, thread, warp, lane)
                if cutlass.const_expr(self.num_sinks > 0):
                    if x < x_end:
                        cute.arch.sync_threads()  # the last readers of sums are done
                        self.fetch_sinks(pages, sink_pages, at, x, sums, thread)

    @cute.jit
    def share(self, first_end, last_end, num_sequences, num_kv_heads, blocks):
        """Tiles of one CTA's run, and of the line. Where sequences look alike, runs end with kv-heads or equal parts of
        them if that costs a sixteenth at most: a CTA then finishes one kv-head instead of two.
        """
        total = last_end * num_kv_heads
        quota = ptx.quotient(total + blocks - 1, blocks)
        if last_end == first_end * num_sequences:
            aligned = first_end
            if first_end >= quota:
                parts = ptx.quotient(first_end, quota)
                aligned = ptx.quotient(first_end + parts - 1, parts)
            else:
                aligned = ptx.quotient(quota + first_end - 1, first_end) * first_end
            if aligned * 16 <= quota * 17:
                quota = aligned
        return cutlass.max(quota, Int32(MIN_TILES)), total

    @cute.jit
    def locate(self, tile_ends, lengths, known, x, x_end, num_kv_heads, window, lane):
        """Where tile x of the line is, and how far its kv-head reaches in this CTA's run.

        known: what lanes hold of the first sequences already: their ends, 32 a word, and lengths, 32 of them.
        Returns: sequence, head, first tile (of the sequence, counted from position 0), tiles, the kv-head's bounds on
        the line, the context length, the first key in the window.
        """
        num_sequences = lengths.shape[0]
        ends, first_lengths = known
        sequence = Int32(0)
        row = ptx.quotient(x, num_kv_heads)
        for i in cutlass.range_constexpr(AT_ONCE):
            sequence = sequence + ptx.count_lanes(Int32(ends[i] <= row))
        for base in cutlass.range(32 * AT_ONCE, num_sequences, 32, unroll=4):
            i = base + lane
            before = Int32(0)
            if i < num_sequences:
                before = Int32(tile_ends[i] <= row)
            sequence = sequence + ptx.count_lanes(before)
        begin, end = (ptx.shuffle_from(ends[0], sequence - 1), ptx.shuffle_from(ends[0], sequence))
        length = ptx.shuffle_from(first_lengths, sequence)
        if sequence >= 32:
            begin, end, length = (tile_ends[sequence - 1], tile_ends[sequence], lengths[sequence])
        if sequence == 0:
            begin = Int32(0)
        tiles = end - begin
        inside = x - begin * num_kv_heads
        head = ptx.quotient(inside, tiles)
        tile = inside - head * tiles
        count = cutlass.min(tiles - tile, x_end - x)
        first_key = cutlass.max(length - window, Int32(0))
        parts_from = x - tile
        return (sequence, head, (first_key >> 4) + tile, count, parts_from, parts_from + tiles, length, first_key)

    @cute.jit
    def advance(self, tile_ends, lengths, at, x_end, num_kv_heads, window):
        """The kv-head after `at`, from its first tile."""
        sequence, head, tile, count, parts_from, parts_to, length, first_key = at
        tiles = parts_to - parts_from
        head = head + 1
        if head == num_kv_heads:
            head = Int32(0)
            sequence = sequence + 1
            tiles = tile_ends[sequence] - tile_ends[sequence - 1]
            length = lengths[sequence]
            first_key = cutlass.max(length - window, Int32(0))
        count = cutlass.min(tiles, x_end - parts_to)
        return (sequence, head, first_key >> 4, count, parts_to, parts_to + tiles, length, first_key)

    @cute.jit
    def tiles_of(self, at, warp):
        """How many tiles of this kv-head's run are the warp's: none of an empty slot, where nothing is read."""
        mine = (at[3] - warp + self.warps - 1) >> self.log2_warps
        if at[6] == 0:
            mine = Int32(0)
        return mine

    def page_of(self, position):
        """position // page_size."""
        log2 = self.page_size.bit_length() - 1
        return position >> log2 if self.page_size == 1 << log2 else ptx.quotient(position, Int32(self.page_size))

    @cute.jit
    def page_ids(self, tables, at, k, warp, lane):
        """Lane i: the page of this warp's tile k + i (0 past the context, so that it is a page whatever the table)."""
        sequence, head, tile, count, parts_from, parts_to, length, first_key = at
        index = (k + lane) * self.warps + warp
        page = Int32(0)
        if index < count:
            position = (tile + index) * TILE
            if position < length:
                page = tables[sequence, self.page_of(position)]
        return page

    @cute.jit
    def start(self, q, pages, tables, at, bar, ring, query, consumed, thread, warp, lane):
        """Issue the first copies of a kv-head's run, and its queries'; the ring is empty. Returns `page_ids` of 0."""
        sequence, head, length = at[0], at[1], at[6]
        row = ptx.address_of(q) + (Int64(sequence) * q.shape[1] + head * self.group_size) * (self.head_dim * 2)
        for turn in cutlass.range_constexpr(-(-self.query_bytes // (512 * self.warps))):
            offset = (turn * 32 * self.warps + thread) * 16
            if (offset < self.query_bytes) & (length > 0):
                ptx.copy_async(query + offset, row + offset)
        ptx.copy_async_commit()
        mine = self.tiles_of(at, warp)
        table = self.page_ids(tables, at, Int32(0), warp, lane)
        for k in cutlass.range(cutlass.min(mine, Int32(self.stages)), unroll=1):
            stage = (consumed + k) & (self.stages - 1)
            self.issue(pages, at, table, k, bar + stage * 8, ring + stage * self.tile_bytes, warp, lane)
        return table

    @cute.jit
    def fetch_sinks(self, pages, sink_pages, at, x, target, thread):
        """Copy the sinks' K and V if the kv-head begins at tile x of the line: who has its first tile adds them."""
        if (x == at[4]) & (at[6] > 0):
            head_bytes = self.page_size * (self.head_dim + 8)
            page = Int64(sink_pages[at[0]])
            source = ptx.address_of(pages) + (page * pages.shape[1] + at[1]) * head_bytes
            for turn in cutlass.range_constexpr(-(-self.sink_bytes // (512 * self.warps))):
                offset = (turn * 32 * self.warps + thread) * 16
                if offset < self.sink_bytes:
                    ptx.copy_async(target + offset, source + offset)
        ptx.copy_async_commit()

    @cute.jit
    def issue(self, pages, at, table, k, barrier, buffer, warp, lane):
        """Copy this warp's tile k: K codes, V codes and parameters of 16 tokens, one after the other."""
        dim, head, tile = self.head_dim, at[1], at[2]
        page = ptx.shuffle_from(table, k & 31)
        if lane == 0:
            head_bytes = self.page_size * (dim + 8)
            source = ptx.address_of(pages) + (Int64(page) * pages.shape[1] + head) * head_bytes
            ptx.mbarrier_expect(barrier, self.tile_bytes)
            if cutlass.const_expr(self.page_size == TILE):
                ptx.copy_bulk(buffer, source, self.tile_bytes, barrier)
            else:
                offset = ((tile + k * self.warps + warp) * TILE) % self.page_size
                codes = source + offset * (dim // 2)
                side = TILE * dim // 2
                ptx.copy_bulk(buffer, codes, side, barrier)
                ptx.copy_bulk(buffer + side, codes + self.page_size * dim // 2, side, barrier)
                ptx.copy_bulk(buffer + 2 * side, source + self.page_size * dim + offset * 8, TILE * 8, barrier)

    @cute.jit
    def wait(self, barrier, phase):
        ready = Int32(0)
        while ready == 0:
            ready = ptx.mbarrier_try(barrier, phase)

    @cute.jit
    def load_query(self, source, scale, lane):
        """B operands of S^T = K q^T, and per own head (2c, 2c + 1) what a score and a zero point are multiplied by.

        q is scaled by a power of two per head so that its largest element lies in [64, 128): in float16 the elements
        divided by 16 then stay clear of the subnormals.
        """
        dim, group = self.head_dim, self.group_size
        g, c = lane // 4, lane % 4
        run = min(dim // 4, 32)  # consecutive channels of one lane
        query = cute.make_rmem_tensor((self.octets * dim // 8,), Int32)
        factors = cute.make_rmem_tensor((self.octets * 4,), Float32)
        for octet in cutlass.range_constexpr(self.octets):
            values = cute.make_rmem_tensor((dim // 4,), Float32)
            values.fill(0.0)
            own = octet * 8 + g
            if own < group:
                row = source + (own * dim + c * run) * 2
                for chunk in cutlass.range_constexpr(dim // 4 // run):
                    for part in cutlass.range_constexpr(run // 8):
                        words = ptx.load_shared(row + chunk * 256 + part * 16, 4)
                        for i in cutlass.range_constexpr(4):
                            low, high = self.floats(words[i])
                            values[chunk * run + part * 8 + 2 * i] = low
                            values[chunk * run + part * 8 + 2 * i + 1] = high
            largest = Float32(0.0)
            for i in cutlass.range_constexpr(dim // 4):
                largest = ptx.maximum(largest, ptx.maximum(values[i], -values[i]))
            largest = ptx.maximum(largest, ptx.shuffle_xor(largest, 1))
            largest = ptx.maximum(largest, ptx.shuffle_xor(largest, 2))
            exponent = cutlass.max(ptx.float_to_bits(largest) >> 23, Int32(20))
            up, down = (ptx.bits_to_float((260 - exponent) << 23), ptx.bits_to_float((exponent - 6) << 23))
            total = Float32(0.0)
            for word in cutlass.range_constexpr(dim // 32):
                for i in cutlass.range_constexpr(4):  # nibbles (0, 4), (1, 5), (2, 6), (3, 7) of the word
                    small = 0.0625 if i % 2 else 1.0
                    pair = ptx.floats_to_halves(
                        values[8 * word + i] * up * small, values[8 * word + i + 4] * up * small
                    )
                    query[(octet * dim // 32 + word) * 4 + i] = pair
                    low, high = ptx.halves_to_floats(pair)
                    total = total + (low + high) * (1.0 / small)
            total = total + ptx.shuffle_xor(total, 1)
            total = total + ptx.shuffle_xor(total, 2)
            for j in cutlass.range_constexpr(2):
                owner = (2 * c + j) * 4  # the lane that loaded this head
                factor = ptx.shuffle_from(down, owner) * scale
                factors[octet * 4 + 2 * j] = factor * 16777216.0  # codes are subnormals, c * 2^-24
                factors[octet * 4 + 2 * j + 1] = factor * ptx.shuffle_from(total, owner)
        return query, factors

    def floats(self, word):
        return ptx.bfloats_to_floats(word) if self.is_bfloat16 else ptx.halves_to_floats(word)

    @cute.jit
    def attend(self, buffer, acc, state, query, factors, position, first_key, length, lane):
        """One tile: scores of 16 tokens, their probabilities, and V times those into acc."""
        dim, octets = self.head_dim, self.octets
        g, c = lane // 4, lane % 4
        first_key = cutlass.max(first_key, Int32(self.num_sinks))  # sinks are attended to from their own page
        words_per_chunk = 2 if dim == 64 else 4
        chunks = dim // 32 // words_per_chunk
        scores = cute.make_rmem_tensor((octets * 8,), Float32)  # two chains per octet: half the latency
        scores.fill(0.0)
        key = buffer + g * (dim // 2) + c * (words_per_chunk * 4)
        for chunk in cutlass.range_constexpr(chunks):
            upper = ptx.load_shared(key + chunk * 64, words_per_chunk)
            lower = ptx.load_shared(key + chunk * 64 + 4 * dim, words_per_chunk)  # 8 tokens on
            for word in cutlass.range_constexpr(words_per_chunk):
                up, down = upper[word], lower[word]
                for half in cutlass.range_constexpr(2):
                    a = (up & FIRST, down & FIRST, up & SECOND, down & SECOND)
                    for octet in cutlass.range_constexpr(octets):
                        at = (octet * dim // 32 + chunk * words_per_chunk + word) * 4 + 2 * half
                        ptx.mma_f16(scores, octet * 8 + 4 * half, a, (query[at], query[at + 1]))
                    up, down = up >> 8, down >> 8

        value_scales = []
        key_parameters = []
        for row in cutlass.range_constexpr(2):
            first, second = ptx.load_shared(buffer + TILE * dim + (g + 8 * row) * 8, 2)
            key_parameters.append(ptx.halves_to_floats(first))
            value_scales.append(ptx.halves_to_floats(second))

        is_visible = []
        for row in cutlass.range_constexpr(2):
            token = position + g + 8 * row
            is_visible.append((token >= first_key) & (token < length))
            # a page's unused tokens may hold anything, so 0 times that must not be NaN
            value_scales[row] = tuple(cutlass.select_(is_visible[row], x, Float32(0.0)) for x in value_scales[row])
        weights = []  # B operands of O^T += V^T P^T
        for octet in cutlass.range_constexpr(octets):
            s = []
            for row in cutlass.range_constexpr(2):
                k_scale, k_zero = key_parameters[row]
                for j in cutlass.range_constexpr(2):
                    i = octet * 8 + 2 * row + j
                    product = (scores[i] + scores[i + 4]) * factors[octet * 4 + 2 * j]
                    score = product * k_scale + k_zero * factors[octet * 4 + 2 * j + 1]
                    s.append(cutlass.select_(is_visible[row], score, Float32(NEVER)))
            at = octet * 6
            high = (ptx.maximum(s[0], s[2]), ptx.maximum(s[1], s[3]))
            if cute.arch.vote_any_sync((high[0] > state[at] + SLACK) | (high[1] > state[at + 1] + SLACK)):
                for j in cutlass.range_constexpr(2):
                    top = high[j]
                    for distance in cutlass.range_constexpr(3):
                        top = ptx.maximum(top, ptx.shuffle_xor(top, 4 << distance))
                    top = ptx.maximum(top, state[at + j])
                    shrink = ptx.exp2(state[at + j] - top)
                    state[at + j] = top
                    state[at + 2 + j] = state[at + 2 + j] * shrink
                    state[at + 4 + j] = state[at + 4 + j] * shrink
                    for i in cutlass.range_constexpr(dim // 16):
                        base = (octet * dim // 16 + i) * 4 + j
                        acc[base] = acc[base] * shrink
                        acc[base + 2] = acc[base + 2] * shrink
            for row in cutlass.range_constexpr(2):
                v_scale, v_zero = value_scales[row]
                p = []
                for j in cutlass.range_constexpr(2):
                    probability = ptx.exp2(s[2 * row + j] - state[at + j])
                    state[at + 2 + j] = state[at + 2 + j] + probability
                    state[at + 4 + j] = state[at + 4 + j] + probability * v_zero
                    p.append(ptx.minimum(probability * v_scale, Float32(65504.0)))
                weights.append(ptx.transpose_8x8(ptx.floats_to_halves(p[0], p[1])))

        words = dim // 64
        swap = (c // 2 if cutlass.const_expr(dim == 64) else c) % 2  # lanes take their two tokens in turns: banks
        low_selector = cutlass.select_(swap == 1, Int32(0x1054), Int32(0x5410))
        high_selector = cutlass.select_(swap == 1, Int32(0x3276), Int32(0x7632))
        value = buffer + TILE * dim // 2 + g * (dim // 16) + 2 * c * (dim // 2)
        tokens = []
        for i in cutlass.range_constexpr(2):
            tokens.append(ptx.load_shared(value + i * 4 * dim + swap * (dim // 2), words))
            tokens.append(ptx.load_shared(value + i * 4 * dim + (1 - swap) * (dim // 2), words))
        for word in cutlass.range_constexpr(words):
            for pair in cutlass.range_constexpr(2):
                selector = high_selector if pair else low_selector
                x = ptx.permute_bytes(tokens[0][word], tokens[1][word], selector)
                y = ptx.permute_bytes(tokens[2][word], tokens[3][word], selector)
                for half in cutlass.range_constexpr(2):
                    a = (x & FIRST, x & SECOND, y & FIRST, y & SECOND)
                    for octet in cutlass.range_constexpr(octets):
                        block = (word * 2 + pair) * 2 + half
                        b = (weights[2 * octet], weights[2 * octet + 1])
                        ptx.mma_f16(acc, (octet * dim // 16 + block) * 4, a, b)
                    x, y = x >> 8, y >> 8

    @cute.jit
    def finish(self, tensors, acc, state, at, quota, block, scale, buffers, thread, warp, lane):
        """Merge the warps' states; write the output, or this CTA's part of it, and merge the parts if it is last."""
        q, pages, partial, counters, out = tensors
        sums, stats, sink_scores, flag, query = buffers
        sequence, head, parts_from, parts_to = at[0], at[1], at[4], at[5]
        dim, group = self.head_dim, self.group_size
        g, c = lane // 4, lane % 4
        ptx.copy_async_wait(0)
        cute.arch.sync_threads()  # the last readers of sums are done
        adds_sinks = (parts_from >= block * quota) & (at[6] > 0)
        if cutlass.const_expr(self.num_sinks > 0):
            sink_values = cute.make_rmem_tensor((self.num_sinks * 4,), Float32)
            if adds_sinks:
                self.read_sinks(sums, query, sink_scores, sink_values, at, scale, thread)
            cute.arch.sync_threads()
        for octet in cutlass.range_constexpr(self.octets):
            for j in cutlass.range_constexpr(2):
                own = octet * 8 + 2 * c + j
                for distance in cutlass.range_constexpr(3):
                    for i in cutlass.range_constexpr(2):
                        slot = octet * 6 + 2 + 2 * i + j
                        state[slot] = state[slot] + ptx.shuffle_xor(state[slot], 4 << distance)
                if own < group:
                    if g == 0:
                        ptx.store_shared(
                            stats + (warp * group + own) * 8, state[octet * 6 + j], state[octet * 6 + 2 + j]
                        )
                    zero = state[octet * 6 + 4 + j]
                    for i in cutlass.range_constexpr(dim // 32):
                        base = (octet * dim // 16 + 2 * i) * 4 + j
                        ptx.store_shared(
                            self.sum_address(sums, warp, own, g * (dim // 32) + i),
                            acc[base] * 16777216.0 + zero,
                            acc[base + 2] * 1048576.0 + zero,
                            acc[base + 4] * 16777216.0 + zero,
                            acc[base + 6] * 1048576.0 + zero,
                        )
        cute.arch.sync_threads()

        first_part, num_parts = block, Int32(1)
        if (parts_from < block * quota) | (parts_to > block * quota + quota):
            first_part = ptx.quotient(parts_from, quota)
            num_parts = ptx.quotient(parts_to - 1, quota) - first_part + 1
        is_last = Int32(1)
        items = group * dim // 4
        merged = cute.make_rmem_tensor((6 * (-(-items // (32 * self.warps))),), Float32)
        for turn in cutlass.range_constexpr(-(-items // (32 * self.warps))):
            item = thread + turn * 32 * self.warps
            if item < items:
                own, quad = item // (dim // 4), item % (dim // 4)
                top = Float32(NOTHING)
                for w in cutlass.range_constexpr(self.warps):
                    top = ptx.maximum(top, ptx.bits_to_float(ptx.load_shared(stats + (w * group + own) * 8, 1)[0]))
                values = [Float32(0.0) for _ in range(5)]
                for w in cutlass.range_constexpr(self.warps):
                    stat = ptx.load_shared(stats + (w * group + own) * 8, 2)
                    shrink = ptx.exp2(ptx.bits_to_float(stat[0]) - top)
                    words = ptx.load_shared(self.sum_address(sums, w, own, quad), 4)
                    values[4] = values[4] + ptx.bits_to_float(stat[1]) * shrink
                    for i in cutlass.range_constexpr(4):
                        values[i] = values[i] + ptx.bits_to_float(words[i]) * shrink
                for i in cutlass.range_constexpr(5):
                    merged[turn * 6 + i] = values[i]
                merged[turn * 6 + 5] = top
                if cutlass.const_expr(self.num_sinks > 0):
                    if adds_sinks:
                        self.add_sinks(merged, turn * 6, sink_scores, sink_values, own)

        if num_parts > 1:
            slot = 2 * block + Int32(parts_from >= block * quota)
            for turn in cutlass.range_constexpr(-(-items // (32 * self.warps))):
                item = thread + turn * 32 * self.warps
                if item < items:
                    own, quad = item // (dim // 4), item % (dim // 4)
                    row = ptx.address_of(partial) + (Int64(slot) * group + own) * ((dim + 4) * 4)
                    base = turn * 6
                    ptx.store_global(
                        row + quad * 16, merged[base], merged[base + 1], merged[base + 2], merged[base + 3]
                    )
                    if quad == 0:
                        ptx.store_global(row + dim * 4, merged[base + 5], merged[base + 4])
            cute.arch.sync_threads()
            counter = ptx.address_of(counters) + (sequence * pages.shape[1] + head) * 4
            if thread == 0:
                arrived = ptx.add_release(counter, 1)
                ptx.store_shared(flag, Int32(arrived == num_parts - 1))
                if arrived == num_parts - 1:
                    ptx.store_global(counter, Int32(0))
            cute.arch.sync_threads()
            is_last = ptx.load_shared(flag, 1)[0]
            if is_last == 1:
                self.merge_parts(partial, merged, first_part, num_parts, thread)

        if is_last == 1:
            for turn in cutlass.range_constexpr(-(-items // (32 * self.warps))):
                item = thread + turn * 32 * self.warps
                if item < items:
                    own, quad = item // (dim // 4), item % (dim // 4)
                    base = turn * 6
                    share = Float32(0.0)
                    if merged[base + 4] > 0.0:
                        share = 1.0 / merged[base + 4]
                    low = self.pack(merged[base] * share, merged[base + 1] * share)
                    high = self.pack(merged[base + 2] * share, merged[base + 3] * share)
                    row = ptx.address_of(out) + (Int64(sequence) * q.shape[1] + head * group + own) * (dim * 2)
                    ptx.store_global(row + quad * 8, low, high)

    def sum_address(self, sums, warp, own, quad):
        """Where a warp's sums for four channels of a head stand: swizzled against bank conflicts of their writers."""
        return sums + ((warp * self.group_size + own) * (self.head_dim // 4) + (quad ^ ((own >> 1) & 3))) * 16

    @cute.jit
    def merge_parts(self, partial, merged, first_part, num_parts, thread):
        """merged[6 turn :] = four sums, the sum of probabilities and the maximum over all parts, in their order."""
        dim, group = self.head_dim, self.group_size
        items = group * dim // 4
        turns = -(-items // (32 * self.warps))
        at_once = max(2, MERGED_AT_ONCE // turns)
        merged.fill(0.0)
        for turn in cutlass.range_constexpr(turns):
            merged[6 * turn + 5] = Float32(NOTHING)
        for start in cutlass.range(0, num_parts, at_once, unroll=1):
            stats, quads = [], []
            for i in cutlass.range_constexpr(at_once):
                part = cutlass.min(start + i, num_parts - 1)
                slot = 2 * (first_part + part) + Int32(part == 0)
                for turn in cutlass.range_constexpr(turns):
                    item = cutlass.min(thread + turn * 32 * self.warps, Int32(items - 1))
                    own, quad = item // (dim // 4), item % (dim // 4)
                    row = ptx.address_of(partial) + (Int64(slot) * group + own) * ((dim + 4) * 4)
                    stats.append(ptx.load_global_coherent(row + dim * 4, 2))
                    quads.append(ptx.load_global_coherent(row + quad * 16, 4))
            for turn in cutlass.range_constexpr(turns):
                base = 6 * turn
                top = merged[base + 5]
                for i in cutlass.range_constexpr(at_once):
                    top = ptx.maximum(top, ptx.bits_to_float(stats[i * turns + turn][0]))
                shrink = ptx.exp2(merged[base + 5] - top)
                for i in cutlass.range_constexpr(5):
                    merged[base + i] = merged[base + i] * shrink
                for i in cutlass.range_constexpr(at_once):
                    stat, words = stats[i * turns + turn], quads[i * turns + turn]
                    weight = ptx.exp2(ptx.bits_to_float(stat[0]) - top)
                    weight = cutlass.select_(start + i < num_parts, weight, Float32(0.0))
                    merged[base + 4] = merged[base + 4] + ptx.bits_to_float(stat[1]) * weight
                    for j in cutlass.range_constexpr(4):
                        merged[base + j] = merged[base + j] + ptx.bits_to_float(words[j]) * weight
                merged[base + 5] = top

    def pack(self, low, high):
        return ptx.floats_to_bfloats(low, high) if self.is_bfloat16 else ptx.floats_to_halves(low, high)

    def sink_floats(self, word):
        return ptx.bfloats_to_floats(word) if self.sinks_bfloat16 else ptx.halves_to_floats(word)

    @cute.jit
    def read_sinks(self, sinks, query, sink_scores, sink_values, at, scale, thread):
        """Scores of the sinks, eight lanes each, hidden ones NEVER; and this thread's four channels of their V."""
        dim, num_sinks = self.head_dim, self.num_sinks
        pairs = self.group_size * num_sinks
        for turn in cutlass.range_constexpr(-(-pairs // (4 * self.warps))):
            pair = turn * 4 * self.warps + thread // 8
            own, sink = (cutlass.min(pair, Int32(pairs - 1)) // num_sinks, pair % num_sinks)
            score = Float32(0.0)
            for chunk in cutlass.range_constexpr(dim // 64):
                offset = (chunk * 64 + thread % 8 * 8) * 2
                a = ptx.load_shared(query + own * dim * 2 + offset, 4)
                b = ptx.load_shared(sinks + sink * dim * 2 + offset, 4)
                for i in cutlass.range_constexpr(4):
                    left, right = self.floats(a[i]), self.sink_floats(b[i])
                    score = score + left[0] * right[0] + left[1] * right[1]
            for distance in cutlass.range_constexpr(3):
                score = score + ptx.shuffle_xor(score, 1 << distance)
            if (thread % 8 == 0) & (pair < pairs):
                is_visible = (sink < at[6]) & (sink >= at[7])
                score = cutlass.select_(is_visible, score * scale, Float32(NEVER))
                ptx.store_shared(sink_scores + (own * 4 + sink) * 4, score)
        quad = thread % (dim // 4)
        for sink in cutlass.range_constexpr(num_sinks):
            words = ptx.load_shared(sinks + (num_sinks + sink) * dim * 2 + quad * 8, 2)
            low, high = self.sink_floats(words[0]), self.sink_floats(words[1])
            for i in cutlass.range_constexpr(4):
                sink_values[4 * sink + i] = (low + high)[i]

    @cute.jit
    def add_sinks(self, merged, base, sink_scores, sink_values, own):
        for sink in cutlass.range_constexpr(self.num_sinks):
            score = ptx.bits_to_float(ptx.load_shared(sink_scores + (own * 4 + sink) * 4, 1)[0])
            top = ptx.maximum(merged[base + 5], score)
            old, new = ptx.exp2(merged[base + 5] - top), ptx.exp2(score - top)
            for i in cutlass.range_constexpr(4):  # the page of a shorter sequence may hold anything
                value = cutlass.select_(score > NEVER, sink_values[4 * sink + i], Float32(0.0))
                merged[base + i] = merged[base + i] * old + value * new
            merged[base + 4] = merged[base + 4] * old + new
            merged[base + 5] = top
