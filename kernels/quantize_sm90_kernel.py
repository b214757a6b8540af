"""The quantising kernels in CuTe DSL for Hopper: one row of bf16 in, int8 codes and one scale per segment out.

One class does RMSNorm (+ residual add), SwiGLU or nothing, then permutes, runs the block Hadamard and quantises. A
block of K / 32 threads owns a row; the grid is persistent. A bulk copy brings the next rows to shared memory while the
current one stands in registers as float32: between reading bf16 and writing codes nothing is rounded. All of a row is
one block's, so a token's codes do not depend on its batch. Where rows are few and wide (`cluster`) several blocks share
one: each has the channels of some of its warps and tells the others their maxima and sums, which every block then takes
in the same order as one block would.

Thread t holds 32 channels, as four vectors of eight: its vector j starts at channel 128 (t / 4) + 32 j + 8 (t % 4). So
of the seven Hadamard stages of a block of 128, distances 1, 2, 4, 32 and 64 stay in the thread and only 8 and 16 are
shuffles, and every global access covers whole 32-byte sectors.

Importing this module imports the DSL; only `quantize_sm90` does, when it compiles.
"""

# No postponed annotations here: the DSL reads them.

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint16
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from w4a4.kernels.ptx_sm90 import bfloats_to_floats
from w4a4.kernels.quantize_sm90_variant import VECTOR, VECTORS, QuantizeVariant

WORDS = VECTOR // 2
LOG2_E = 1.4426950408889634
NIBBLES_UP = -252645136  # 0xF0F0F0F0


class QuantizeKernel:
    """The kernel of one `QuantizeVariant`; everything in the variant is a compile-time constant."""

    def __init__(self, variant: QuantizeVariant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # bf16 [T, K], or [T, 2 K] = [gate | up]
        residual: cute.Tensor | None,  # bf16 [T, K]
        norm_weight: cute.Tensor | None,  # bf16 [K]
        perm: cute.Tensor | None,  # int32 [K]: stored channel j reads input channel perm[j]
        hidden: cute.Tensor | None,  # out: bf16 [T, K] = x + residual
        codes: cute.Tensor,  # out: int32 [T, K / 4], four codes a word
        scales: cute.Tensor,  # out: f32 [T, segments]
        first_width: Int32,  # channels of the first segment
        clip_absmax: Float32,  # c and beta of s4 = min(c absmax, beta rms) / 7
        clip_rms: Float32,
        eps: Float32,
        num_blocks: Int32,
        num_owners: Int32,  # groups of threads, or clusters, that get rows
        stream: Any,
    ) -> None:
        v = self.variant

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, v.groups * v.stages]
            partials: cute.struct.MemRange[Float32, v.groups * 2 * 4 * 32]
            rows: cute.struct.Align[
                cute.struct.MemRange[BFloat16, v.groups * v.stages * v.inputs * v.block_channels], 128
            ]
            sources: cute.struct.Align[cute.struct.MemRange[Uint16, max(VECTOR, v.sources)], 16]
            gains: cute.struct.Align[cute.struct.MemRange[BFloat16, max(VECTOR, v.gains)], 16]

        self.storage = Storage
        self.kernel(
            x, residual, norm_weight, perm, hidden, codes, scales, first_width, clip_absmax, clip_rms, eps, num_owners
        ).launch(
            grid=[num_blocks, 1, 1],
            block=[v.groups * v.threads, 1, 1],
            cluster=[v.cluster, 1, 1] if v.cluster > 1 else None,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=v.blocks_per_multiprocessor,  # bounds the registers
            preferred_smem_carveout=100,  # percent; without it the DSL asks a GPU how much there is
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        residual: cute.Tensor | None,
        norm_weight: cute.Tensor | None,
        perm: cute.Tensor | None,
        hidden: cute.Tensor | None,
        codes: cute.Tensor,
        scales: cute.Tensor,
        first_width: Int32,
        clip_absmax: Float32,
        clip_rms: Float32,
        eps: Float32,
        num_owners: Int32,
    ) -> None:
        v = self.variant
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        tokens = cute.size(codes, mode=[0])
        # What owns rows is a group of a block's threads, or a cluster; from here on a thread is one of all that share a
        # row. Owners that are neighbours are blocks of their own, so that few rows use many multiprocessors.
        group = Int32(0)
        if cutlass.const_expr(v.groups > 1):
            group = cute.arch.make_warp_uniform(thread // v.threads)
        rank = block % v.cluster
        owner = block // v.cluster + group * blocks
        local_thread = thread - group * v.threads
        thread = local_thread + rank * v.threads

        smem = SmemAllocator()
        storage = smem.allocate(self.storage)
        full = storage.full.data_ptr() + group * v.stages
        rows_pointer = storage.rows.data_ptr()
        if cutlass.const_expr(v.groups > 1):
            rows_pointer = rows_pointer + cute.assume(group * (v.stages * v.inputs * v.block_channels), divby=VECTOR)
        rows = cute.make_tensor(rows_pointer, cute.make_layout((v.block_channels, v.inputs, v.stages)))
        # The same rows as vectors of four words, two bf16 each.
        vectors = cute.make_tensor(
            cute.recast_ptr(rows_pointer, dtype=Int32),
            cute.make_layout(
                (WORDS, v.block_channels // VECTOR, v.inputs, v.stages),
                stride=(1, WORDS, v.block_channels // 2, v.block_channels // 2 * v.inputs),
            ),
        )
        partials = cute.make_tensor(storage.partials.data_ptr() + group * 256, cute.make_layout((32, 4, 2)))

        if local_thread == 0:
            for stage in cutlass.range_constexpr(v.stages):
                cute.arch.mbarrier_init(full + stage, 1)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(v.cluster > 1):
            self.sync(group)
        else:
            cute.arch.sync_threads()
        # Programmatic dependent launch: the next kernel may set itself up now, and inputs are complete after the wait.
        cute.arch.griddepcontrol_launch_dependents()
        # What is the model's and no kernel's output: the sources and gains of channels, in shared memory. Groups have
        # one table, of which each prepares a part.
        sources = storage.sources.get_tensor(cute.make_layout((VECTOR, max(1, v.sources // VECTOR))))
        gains = storage.gains.get_tensor(cute.make_layout((VECTOR, max(1, v.gains // VECTOR))))
        if cutlass.const_expr(v.permuted):
            self.prepare_sources(sources, perm, group, thread)
        if cutlass.const_expr(v.weighted):
            self.prepare_gains(gains, sources, norm_weight, group, thread)
        if cutlass.const_expr(v.groups > 1):
            cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        num_rows = (tokens - owner + num_owners - 1) // num_owners
        if owner >= num_owners:
            num_rows = Int32(0)
        if local_thread == 0:
            for stage in cutlass.range_constexpr(1 if v.staggers else v.stages):
                if stage < num_rows:
                    self.fetch(x, residual, rows_pointer, full, Int32(stage), owner + stage * num_owners, rank)

        values = cute.make_rmem_tensor((VECTOR, VECTORS), Float32)
        stage = Int32(0)
        phase = Int32(0)
        slot = Int32(0)
        for i in cutlass.range(num_rows, unroll=1):
            row = owner + i * num_owners
            cute.arch.mbarrier_wait(full + stage, phase)
            if cutlass.const_expr(v.staggers):
                # Everybody's first row comes before anybody's second.
                if i == 0 and local_thread == 0 and row + num_owners < tokens:
                    self.fetch(x, residual, rows_pointer, full, Int32(1), row + num_owners, rank)
            if cutlass.const_expr(v.is_normed):
                squares = self.read_hidden(values, vectors, hidden, row, stage, thread)
                sums = self.reduce(squares, Float32(0), Float32(0), partials, Int32(0), group, thread, False)
                if cutlass.const_expr(not v.permuted):
                    self.refill(
                        x, residual, rows_pointer, full, stage, row + v.stages * num_owners, tokens, rank, local_thread
                    )
                inverse_rms = Float32(1.0) / cute.math.sqrt(sums[0] / Float32(v.channels) + eps)
                if cutlass.const_expr(v.permuted):
                    self.gather(values, rows, sources, stage, thread)
                self.normalize(values, gains, inverse_rms, thread)
            elif cutlass.const_expr(v.permuted):
                self.gather(values, rows, sources, stage, thread)
            else:
                self.read(values, vectors, stage, local_thread)
            if cutlass.const_expr(v.hadamard > 1):
                self.transform(values, thread)
            first_max, second_max, squares = self.extremes(values, first_width, thread)
            bounds = self.reduce(squares, first_max, second_max, partials, slot, group, thread, True)
            if cutlass.const_expr(not v.is_normed or v.permuted):
                self.refill(
                    x, residual, rows_pointer, full, stage, row + v.stages * num_owners, tokens, rank, local_thread
                )
            first_scale = self.scale(v.bits[0], bounds[1], bounds[0], first_width, clip_absmax, clip_rms)
            second_scale = first_scale
            if cutlass.const_expr(len(v.bits) == 2):
                second_scale = self.scale(v.bits[1], bounds[2], bounds[0], first_width, clip_absmax, clip_rms)
            self.write(values, codes, first_scale, second_scale, first_width, row, thread)
            if thread == 0:
                scales[row, 0] = first_scale * Float32(self.lane_scale(0))
                if cutlass.const_expr(len(v.bits) == 2):
                    scales[row, 1] = second_scale * Float32(self.lane_scale(1))
            slot = 1 - slot
            stage = stage + 1
            if stage == v.stages:
                stage = Int32(0)
                phase = 1 - phase

    def lane_scale(self, segment: int) -> float:
        """What a stored scale has beside the scale that made the codes.

        1 / sqrt(block) of the Hadamard is left out of the values, and 4-bit codes stand in the high half of a byte.
        """
        return self.variant.hadamard**-0.5 / (16 if self.variant.bits[segment] == 4 else 1)

    # Where things are

    @cute.jit
    def channel(self, thread: Int32, j: cutlass.Constexpr) -> Int32:
        """First stored channel of a thread's vector j."""
        return thread // 4 * 128 + 32 * j + thread % 4 * VECTOR

    @cute.jit
    def fetch(
        self,
        x: cute.Tensor,
        residual: cute.Tensor | None,
        rows_pointer: cute.Pointer,
        full: cute.Pointer,
        stage: Int32,
        row: Int32,
        rank: Int32,
    ) -> None:
        """Start copying a row, or this block's part of it, to shared memory; called by one thread."""
        v = self.variant
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, v.stage_bytes)
        copies = 2 if v.source == "rmsnorm_residual" or v.cluster > 1 else 1
        size = v.inputs * v.block_channels // copies
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16, num_bits_per_copy=size * 16)
        target = cute.make_tensor(rows_pointer, cute.make_layout((size, copies * v.stages)))
        tokens = cute.size(x, mode=[0])
        for c in cutlass.range_constexpr(copies):
            if cutlass.const_expr(v.cluster > 1):
                halves = cute.make_tensor(
                    x.iterator,
                    cute.make_layout((size, v.cluster, 2, tokens), stride=(1, size, v.channels, 2 * v.channels)),
                )
                source = halves[None, rank, c, row]
            else:
                whole = x if c == 0 else residual
                source = cute.make_tensor(whole.iterator, cute.make_layout((size, tokens), stride=(1, size)))[None, row]
            cute.copy(atom, source, target[None, stage * copies + c], mbar_ptr=full + stage)

    @cute.jit
    def refill(
        self,
        x: cute.Tensor,
        residual: cute.Tensor | None,
        rows_pointer: cute.Pointer,
        full: cute.Pointer,
        stage: Int32,
        upcoming: Int32,
        tokens: Int32,
        rank: Int32,
        local_thread: Int32,
    ) -> None:
        """Reuse a stage that every thread has read (the reduction before this call was a barrier)."""
        if local_thread == 0 and upcoming < tokens:
            self.fetch(x, residual, rows_pointer, full, stage, upcoming, rank)

    @cute.jit
    def sync(self, group: Int32) -> None:
        """A barrier for all threads that share a row."""
        if cutlass.const_expr(self.variant.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        elif cutlass.const_expr(self.variant.groups > 1):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=self.variant.threads)
        else:
            cute.arch.sync_threads()

    # From shared memory to 32 float32 values a thread

    @cute.jit
    def read_hidden(
        self,
        values: cute.Tensor,
        vectors: cute.Tensor,
        hidden: cute.Tensor | None,
        row: Int32,
        stage: Int32,
        thread: Int32,
    ) -> Float32:
        """x (+ residual, rounded to bf16 and written out), and this thread's sum of squares.

        Where channels are to be permuted, the sum replaces x in shared memory.
        """
        v = self.variant
        squares = Float32(0)
        for j in cutlass.range_constexpr(VECTORS):
            channel = self.channel(thread, j)
            words = cute.make_rmem_tensor((WORDS,), Int32)
            words.fill(0)
            if v.is_full or channel < v.channels:
                vector = channel // VECTOR
                cute.autovec_copy(vectors[None, vector, 0, stage], words)
                if cutlass.const_expr(v.source == "rmsnorm_residual"):
                    other = cute.make_rmem_tensor((WORDS,), Int32)
                    cute.autovec_copy(vectors[None, vector, 1, stage], other)
                    for w in cutlass.range_constexpr(WORDS):
                        low, high = bfloats_to_floats(words[w])
                        other_low, other_high = bfloats_to_floats(other[w])
                        words[w] = floats_to_bfloats(low + other_low, high + other_high)
                    out = cute.make_tensor(
                        cute.recast_ptr(hidden.iterator, dtype=Int32),
                        cute.make_layout(
                            (WORDS, v.channels // VECTOR, cute.size(hidden, mode=[0])),
                            stride=(1, WORDS, v.channels // 2),
                        ),
                    )
                    cute.autovec_copy(words, out[None, vector, row])
                    if cutlass.const_expr(v.permuted):
                        cute.autovec_copy(words, vectors[None, vector, 0, stage])
            for w in cutlass.range_constexpr(WORDS):
                low, high = bfloats_to_floats(words[w])
                values[2 * w, j] = low
                values[2 * w + 1, j] = high
                squares = squares + low * low
                squares = squares + high * high
        if cutlass.const_expr(v.permuted and v.source == "rmsnorm_residual"):
            cute.arch.fence_view_async_shared()  # before the next row's bulk copy overwrites the sums
        return squares

    @cute.jit
    def read(self, values: cute.Tensor, vectors: cute.Tensor, stage: Int32, thread: Int32) -> None:
        """x, or silu(gate) * up."""
        v = self.variant
        for j in cutlass.range_constexpr(VECTORS):
            channel = self.channel(thread, j)
            first = cute.make_rmem_tensor((WORDS,), Int32)
            second = cute.make_rmem_tensor((WORDS,), Int32)
            first.fill(0)
            second.fill(0)
            if v.is_full or channel < v.channels:
                cute.autovec_copy(vectors[None, channel // VECTOR, 0, stage], first)
                if cutlass.const_expr(v.source == "silu"):
                    cute.autovec_copy(vectors[None, channel // VECTOR, 1, stage], second)
            for w in cutlass.range_constexpr(WORDS):
                low, high = bfloats_to_floats(first[w])
                other_low, other_high = bfloats_to_floats(second[w])
                values[2 * w, j] = self.combine(low, other_low)
                values[2 * w + 1, j] = self.combine(high, other_high)

    @cute.jit
    def gather(self, values: cute.Tensor, rows: cute.Tensor, sources: cute.Tensor, stage: Int32, thread: Int32) -> None:
        """`read` in stored order."""
        v = self.variant
        for j in cutlass.range_constexpr(VECTORS):
            channel = self.channel(thread, j)
            for e in cutlass.range_constexpr(VECTOR):
                values[e, j] = Float32(0)
            if v.is_full or channel < v.channels:
                places = cute.make_rmem_tensor((VECTOR,), Uint16)
                cute.autovec_copy(sources[None, channel // VECTOR], places)
                for e in cutlass.range_constexpr(VECTOR):
                    place = Int32(places[e])
                    first = Float32(rows[place, 0, stage])
                    second = first
                    if cutlass.const_expr(v.source == "silu"):
                        second = Float32(rows[place, 1, stage])
                    values[e, j] = self.combine(first, second)

    @cute.jit
    def normalize(self, values: cute.Tensor, gains: cute.Tensor, inverse_rms: Float32, thread: Int32) -> None:
        v = self.variant
        for j in cutlass.range_constexpr(VECTORS):
            gain = cute.make_rmem_tensor((VECTOR,), BFloat16)
            if cutlass.const_expr(v.weighted):
                gain.fill(BFloat16(0))
                channel = self.channel(thread, j)
                if v.is_full or channel < v.channels:
                    cute.autovec_copy(gains[None, channel // VECTOR], gain)
            for e in cutlass.range_constexpr(VECTOR):
                values[e, j] = values[e, j] * inverse_rms
                if cutlass.const_expr(v.weighted):
                    values[e, j] = values[e, j] * Float32(gain[e])

    @cute.jit
    def combine(self, value: Float32, factor: Float32) -> Float32:
        """The value itself, or silu(value) * factor."""
        if cutlass.const_expr(self.variant.source == "silu"):
            value = value * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(value * Float32(-LOG2_E), fastmath=True))
            value = value * factor
        return value

    @cute.jit
    def prepare_sources(self, sources: cute.Tensor, perm: cute.Tensor, group: Int32, thread: Int32) -> None:
        """Where this thread's stored channels come from, as 16-bit numbers. All loads start before the first store."""
        v = self.variant
        table = cute.make_tensor(perm.iterator, cute.make_layout((VECTOR, v.channels // VECTOR)))
        found = cute.make_rmem_tensor((VECTOR, VECTORS), Int32)
        for j in cutlass.range_constexpr(VECTORS):
            vector = cutlass.min(self.channel(thread, j), v.channels - VECTOR) // VECTOR
            if self.prepares(j, group):
                cute.autovec_copy(table[None, vector], found[None, j])
        for j in cutlass.range_constexpr(VECTORS):
            channel = self.channel(thread, j)
            if self.prepares(j, group) and (v.is_full or channel < v.channels):
                for e in cutlass.range_constexpr(VECTOR):
                    sources[e, channel // VECTOR] = found[e, j].to(Uint16)

    @cute.jit
    def prepares(self, j: cutlass.Constexpr, group: Int32):  # type: ignore[no-untyped-def]
        """Whether a group puts its threads' vectors j into tables."""
        result = True
        if cutlass.const_expr(self.variant.groups > 1):
            result = group == j % min(self.variant.groups, VECTORS)
        return result

    @cute.jit
    def prepare_gains(
        self, gains: cute.Tensor, sources: cute.Tensor, norm_weight: cute.Tensor, group: Int32, thread: Int32
    ) -> None:
        """The gains of this thread's stored channels: loaded in input order, then permuted in shared memory."""
        v = self.variant
        table = cute.make_tensor(norm_weight.iterator, cute.make_layout((VECTOR, v.channels // VECTOR)))
        flat = cute.make_tensor(gains.iterator, cute.make_layout(v.channels))
        for j in cutlass.range_constexpr(VECTORS):
            channel = self.channel(thread, j)
            if self.prepares(j, group) and (v.is_full or channel < v.channels):
                cute.autovec_copy(table[None, channel // VECTOR], gains[None, channel // VECTOR])
        if cutlass.const_expr(v.permuted):
            cute.arch.sync_threads()
            found = cute.make_rmem_tensor((VECTOR, VECTORS), BFloat16)
            for j in cutlass.range_constexpr(VECTORS):
                channel = self.channel(thread, j)
                if self.prepares(j, group) and (v.is_full or channel < v.channels):
                    for e in cutlass.range_constexpr(VECTOR):
                        found[e, j] = flat[Int32(sources[e, channel // VECTOR])]
            cute.arch.sync_threads()
            for j in cutlass.range_constexpr(VECTORS):
                channel = self.channel(thread, j)
                if self.prepares(j, group) and (v.is_full or channel < v.channels):
                    for e in cutlass.range_constexpr(VECTOR):
                        gains[e, channel // VECTOR] = found[e, j]

    @cute.jit
    def transform(self, values: cute.Tensor, thread: Int32) -> None:
        """The butterfly of `reference.block_hadamard`, stage by stage in the same order, short of its last factor."""
        v = self.variant
        distance = 1
        while cutlass.const_expr(distance < v.hadamard):
            if cutlass.const_expr(distance < VECTOR):
                for j in cutlass.range_constexpr(VECTORS):
                    for e in cutlass.range_constexpr(VECTOR):
                        if cutlass.const_expr(e & distance == 0):
                            low, high = values[e, j], values[e | distance, j]
                            values[e, j], values[e | distance, j] = low + high, low - high
            elif cutlass.const_expr(distance < 4 * VECTOR):
                lane = distance // VECTOR
                sign = Float32(1.0)
                if thread & lane != 0:
                    sign = Float32(-1.0)
                for j in cutlass.range_constexpr(VECTORS):
                    for e in cutlass.range_constexpr(VECTOR):
                        other = cute.arch.shuffle_sync_bfly(values[e, j], offset=lane)
                        values[e, j] = values[e, j] * sign + other
            else:
                step = distance // (4 * VECTOR)
                for j in cutlass.range_constexpr(VECTORS):
                    if cutlass.const_expr(j & step == 0):
                        for e in cutlass.range_constexpr(VECTOR):
                            low, high = values[e, j], values[e, j | step]
                            values[e, j], values[e, j | step] = low + high, low - high
            distance = distance * 2

    # Scales

    @cute.jit
    def extremes(self, values: cute.Tensor, first_width: Int32, thread: Int32):  # type: ignore[no-untyped-def]
        """This thread's absmax of each segment, and the sum of squares of the first."""
        v = self.variant
        first_max = Float32(0)
        second_max = Float32(0)
        squares = Float32(0)
        for j in cutlass.range_constexpr(VECTORS):
            largest = Float32(0)
            energy = Float32(0)
            for e in cutlass.range_constexpr(VECTOR):
                value = values[e, j]
                largest = cute.arch.fmax(largest, absolute(value))
                if cutlass.const_expr(v.rms_clip):
                    energy = energy + value * value
            other = Float32(0)
            if cutlass.const_expr(len(v.bits) == 2):
                if self.channel(thread, j) >= first_width:
                    other = largest
                    largest = Float32(0)
                    energy = Float32(0)
            first_max = cute.arch.fmax(first_max, largest)
            second_max = cute.arch.fmax(second_max, other)
            squares = squares + energy
        return first_max, second_max, squares

    @cute.jit
    def reduce(
        self,
        total: Float32,
        first_max: Float32,
        second_max: Float32,
        partials: cute.Tensor,  # f32 [32, 4, 2]
        slot: Int32,
        group: Int32,
        thread: Int32,
        with_max: cutlass.Constexpr,
    ):  # type: ignore[no-untyped-def]
        """Over the row: the sum alone, or the maxima of values >= 0 and, if they clip, the sum. One barrier.

        Nobody overwrites what another still reads: rows alternate between two slots, and an RMSNorm's sum has its own.
        """
        v = self.variant
        num_warps = v.cluster * v.threads // 32
        has_second = len(v.bits) == 2
        if cutlass.const_expr(v.rms_clip or not with_max):
            total = cute.arch.warp_reduction(total, operator.add)
        if cutlass.const_expr(with_max):
            first_max = warp_max(first_max)
            if cutlass.const_expr(has_second):
                second_max = warp_max(second_max)
        if cutlass.const_expr(num_warps == 1):
            cute.arch.sync_warp()
        else:
            warp, lane = thread // 32, thread % 32
            if cutlass.const_expr(with_max):
                if lane < v.cluster:  # lane i tells block i
                    if cutlass.const_expr(v.rms_clip):
                        self.tell(total, partials, warp, 1, slot, lane)
                    self.tell(first_max, partials, warp, 2, slot, lane)
                    if cutlass.const_expr(has_second):
                        self.tell(second_max, partials, warp, 3, slot, lane)
                self.sync(group)
                total = Float32(0)
                first_max = Float32(0)
                second_max = Float32(0)
                if lane < num_warps:
                    if cutlass.const_expr(v.rms_clip):
                        total = partials[lane, 1, slot]
                    first_max = partials[lane, 2, slot]
                    if cutlass.const_expr(has_second):
                        second_max = partials[lane, 3, slot]
                if cutlass.const_expr(v.rms_clip):
                    total = cute.arch.warp_reduction(total, operator.add)
                first_max = warp_max(first_max)
                if cutlass.const_expr(has_second):
                    second_max = warp_max(second_max)
            else:
                if lane == 0:
                    partials[warp, 0, 0] = total
                self.sync(group)
                total = Float32(0)
                if lane < num_warps:
                    total = partials[lane, 0, 0]
                total = cute.arch.warp_reduction(total, operator.add)
        return total, first_max, second_max

    @cute.jit
    def tell(
        self, value: Float32, partials: cute.Tensor, warp: Int32, kind: cutlass.Constexpr, slot: Int32, rank: Int32
    ) -> None:
        """partials[warp, kind, slot] = value in the block `rank` of the cluster."""
        if cutlass.const_expr(self.variant.cluster == 1):
            partials[warp, kind, slot] = value
        else:
            own = (partials.iterator + partials.layout((warp, kind, slot))).toint().to(Int32)
            cute.arch.inline_ptx(
                "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1}; st.shared::cluster.f32 [a], {$r2}; }",
                read_only_args=[own, rank, value],
            )

    @cute.jit
    def scale(
        self,
        bits: cutlass.Constexpr,
        absmax: Float32,
        squares: Float32,
        width: Int32,
        clip_absmax: Float32,
        clip_rms: Float32,
    ) -> Float32:
        """`reference.quantize_symmetric`'s scale."""
        scale = absmax / Float32(127.0)
        if cutlass.const_expr(bits == 4):
            bound = clip_absmax * absmax
            if cutlass.const_expr(self.variant.rms_clip):
                bound = cute.arch.fmin(bound, clip_rms * cute.math.sqrt(squares / Float32(width)))
            scale = bound / Float32(7.0)
        return scale

    @cute.jit
    def write(
        self,
        values: cute.Tensor,
        codes: cute.Tensor,
        first_scale: Float32,
        second_scale: Float32,
        first_width: Int32,
        row: Int32,
        thread: Int32,
    ) -> None:
        """Round, clamp, pack four codes to a word, two words to a store; 4-bit codes to the high half of their byte.

        A 4-bit code is rounded first and becomes 16 times itself, which saturates as a byte where the code would: at
        -128, and at 127, which is 7 in the high half. An 8-bit one is no larger than 127 by its scale.
        """
        v = self.variant
        out = cute.make_tensor(
            codes.iterator,
            cute.make_layout((2, v.channels // VECTOR, cute.size(codes, mode=[0])), stride=(1, 2, v.channels // 4)),
        )
        first_inverse = inverse(first_scale)
        second_inverse = inverse(second_scale)
        units = [16.0 if bits == 4 else 1.0 for bits in v.bits]
        kept = [NIBBLES_UP if bits == 4 else -1 for bits in v.bits]
        for j in cutlass.range_constexpr(VECTORS):
            channel = self.channel(thread, j)
            unit, mask = Float32(units[0]), Int32(kept[0])
            factor = first_inverse
            if cutlass.const_expr(len(v.bits) == 2):
                if channel >= first_width:
                    factor = second_inverse
                    unit, mask = Float32(units[1]), Int32(kept[1])
            words = cute.make_rmem_tensor((2,), Int32)
            for half in cutlass.range_constexpr(2):
                scaled = [values[4 * half + e, j] * factor for e in range(4)]
                if cutlass.const_expr(4 in v.bits):
                    scaled = [rounded(value, unit) for value in scaled]
                words[half] = packed(scaled)
                if cutlass.const_expr(4 in v.bits):
                    words[half] = words[half] & mask
            if v.is_full or channel < v.channels:
                cute.autovec_copy(words, out[None, channel // VECTOR, row])


def floats_to_bfloats(low: Float32, high: Float32) -> Int32:
    """Two values rounded to bf16 in one word, the first lowest."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


@cute.jit
def absolute(value: Float32) -> Float32:
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


@cute.jit
def warp_max(value: Float32) -> Float32:
    """Largest of 32 values >= 0: as integers their bits have the same order."""
    bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
    largest = cute.arch.warp_redux_sync(bits, "max")
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[largest])


@cute.jit
def inverse(scale: Float32) -> Float32:
    """1 / scale, or 0 where the scale is 0."""
    result = Float32(0)
    if scale > Float32(0):
        result = Float32(1.0) / scale
    return result


def rounded(value: Float32, unit: Float32) -> Float32:
    """unit times value rounded half to even, |value| < 2**22: in 1.5 * 2**23 + value the last bit counts ones.

    The addition says how it rounds, or it would be contracted with the product before it.
    """
    return cute.arch.inline_ptx(
        "{ .reg .f32 f; add.rn.f32 f, {$r0}, 0f4B400000; fma.rn.f32 {$w0}, f, {$r1}, {$r2}; }",
        write_only_types=[Float32],
        read_only_args=[value, unit, unit * Float32(-12582912.0)],
    )


def packed(values: list[Float32]) -> Int32:
    """Four values rounded half to even and saturated, as the bytes of a word, the first lowest."""
    rounding = "".join(f"cvt.rni.s32.f32 i{e}, {{$r{e}}}; " for e in range(4))
    return cute.arch.inline_ptx(
        "{ .reg .s32 i0, i1, i2, i3; .reg .b32 w; "
        + rounding
        + "cvt.pack.sat.s8.s32.b32 w, i3, i2, 0; cvt.pack.sat.s8.s32.b32 {$w0}, i1, i0, w; }",
        write_only_types=[Int32],
        read_only_args=values,
    )


def build(variant: QuantizeVariant) -> Any:
    """Compile for sm_90a; needs no GPU (`CUTE_DSL_ARCH=sm_90a`)."""
    v = variant
    tokens = cute.sym_int()

    def bf16(width: int) -> Any:
        return make_fake_compact_tensor(BFloat16, (tokens, width), stride_order=(1, 0), assumed_align=16)

    return cute.compile(
        QuantizeKernel(v),
        bf16(2 * v.channels if v.source == "silu" else v.channels),
        bf16(v.channels) if v.source == "rmsnorm_residual" else None,
        make_fake_compact_tensor(BFloat16, (v.channels,), assumed_align=16) if v.weighted else None,
        make_fake_compact_tensor(Int32, (v.channels,), assumed_align=16) if v.permuted else None,
        bf16(v.channels) if v.source == "rmsnorm_residual" else None,
        make_fake_compact_tensor(Int32, (tokens, v.channels // 4), stride_order=(1, 0), assumed_align=8),
        make_fake_compact_tensor(Float32, (tokens, len(v.bits)), stride_order=(1, 0), assumed_align=4),
        Int32(0),
        Float32(0),
        Float32(0),
        Float32(0),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
