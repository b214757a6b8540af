"""The W4Ax GEMM as a CuTe DSL kernel for Hopper: y = scales (codes . weights) + bias, int32 inside, bf16 out.

Operands are swapped: weights are wgmma's A, read from registers after unpacking, and tokens are its N, so one class
covers decode (8 tokens) and prefill (256) and an odd batch costs only padding. One warp copies (TMA for activations,
bulk copies for the prepacked weights of `prepack_sm90`), the warpgroups unpack and multiply, each 64 rows at a time.

Work: the grid is persistent. A tile is rows x tokens over all of K. The first `whole_tiles` tiles go round robin to the
clusters; what is left is cut, over tiles and K, into equal runs of K steps, one run per cluster (stream-K). Clusters
that share a tile hand their int32 sums to the one that has its last step: integers, so the result is bit-identical in
every run. (The first steps are the first segment's: where there are two, most of what is handed over is one of them.)
That cluster waits for the others, so all clusters of a launch must fit on the GPU: the host sees to it.

Two segments keep two accumulators and meet in the epilogue in float32, each with its own pair of scales. Where these do
not fit in registers (`packs_first`) the first segment's sums wait in 16 bits, and what is wider in the workspace too.

Importing this module imports the DSL; only `gemm_sm90` does, when it compiles.
"""

# No postponed annotations here: the DSL reads them.

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from w4a4.kernels.gemm_sm90_variant import Variant

K_BLOCK = 128  # columns of one activation tile: a full 128-byte swizzle row
NOTHING = -(2**31)  # a sum that cannot be: marks a word of the workspace as not yet written
HIGH_NIBBLES = -252645136  # 0xF0F0F0F0
WIDE_AHEAD = 3  # pairs of columns whose upper bits are on their way when an epilogue starts: as registers allow
WEIGHTS_ONCE = 0x12F0000000000000  # L2 policy evict_first: no other cluster will read them
WEIGHTS_AGAIN = 0x1000000000000000  # evict_normal


class GemmKernel:
    """The kernel of one `Variant`; everything in the variant is a compile-time constant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,  # int8 [T, K], segments side by side
        token_scales: cute.Tensor,  # f32 [T * segments]
        words: cute.Tensor,  # int32 [N_padded / 64, words of 64 rows]
        rows: cute.Tensor,  # f32 [N_padded * 4]: scale of each segment, bias, 0
        out: cute.Tensor,  # bf16 [T, N]
        partials: cute.Tensor,  # int32, all NOTHING before and after: sums of clusters that share a tile
        num_clusters: Int32,
        whole_tiles: Int32,
        token_group: Int32,  # token tiles visited per weight tile: locality in L2
        first_width: Int32,  # columns of the first segment as the activations have them
        first_steps: Int32,  # K steps of each segment, padding included
        second_steps: Int32,
        first_shift: Int32,  # the first segment's products are multiples of 2**first_shift
        stream: Any,
    ) -> None:
        v = self.variant
        op = warpgroup.MmaI8Op(
            Int8,
            Int8,
            Int32,
            (64, v.tokens, 32),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        self.op = op
        tiled_mma = cute.make_tiled_mma(cute.make_mma_atom(op), (v.warpgroups, 1, 1))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Int8)
        x_layout = cute.tile_to_shape(atom, (v.tokens, K_BLOCK, v.stages * v.x_blocks), order=(0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp() if v.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        x_atom, x_tma = cpasync.make_tiled_tma_atom(
            load, codes, cute.slice_(x_layout, (None, None, 0)), (v.tokens, K_BLOCK), num_multicast=v.cluster
        )
        y_swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        y_layout = cute.tile_to_shape(y_swizzle, (v.store_tokens, 64, v.store_slots), order=(0, 1, 2))
        y_atom, y_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, cute.slice_(y_layout, (None, None, 0)), (v.store_tokens, 64)
        )

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, v.stages * 2]
            token_scales: cute.struct.Align[cute.struct.MemRange[Float32, v.tokens * v.segments * v.warpgroups], 16]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, v.row_blocks * 64 * 4], 16]
            words: cute.struct.Align[cute.struct.MemRange[Int32, v.stage_words * v.stages], 1024]
            x: cute.struct.Align[cute.struct.MemRange[Int8, v.stage_x_bytes * v.stages], 1024]
            y: cute.struct.Align[
                cute.struct.MemRange[BFloat16, v.store_tokens * 64 * v.warpgroups * v.store_buffers], 1024
            ]

        self.storage = Storage
        self.kernel(
            tiled_mma,
            x_layout,
            x_atom,
            x_tma,
            y_layout,
            y_atom,
            y_tma,
            token_scales,
            words,
            rows,
            partials,
            whole_tiles,
            token_group,
            first_width,
            first_steps,
            second_steps,
            first_shift,
        ).launch(
            grid=[num_clusters * v.cluster, 1, 1],
            block=[v.threads, 1, 1],
            cluster=[v.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=v.overlap_launch,
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        x_atom: cute.CopyAtom,
        x_tma: cute.Tensor,
        y_layout: cute.ComposedLayout,
        y_atom: cute.CopyAtom,
        y_tma: cute.Tensor,
        token_scales: cute.Tensor,
        words: cute.Tensor,
        rows: cute.Tensor,
        partials: cute.Tensor,
        whole_tiles: Int32,
        token_group: Int32,
        first_width: Int32,
        first_steps: Int32,
        second_steps: Int32,
        first_shift: Int32,
    ) -> None:
        v = self.variant
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        rank = cute.arch.make_warp_uniform(block % v.cluster)
        cluster = block // v.cluster
        num_clusters = grid // v.cluster

        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        full = storage.barriers.data_ptr()
        empty = full + v.stages
        if warp == 0:
            cpasync.prefetch_descriptor(x_atom)
            cpasync.prefetch_descriptor(y_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(v.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, 4 * v.warpgroups * v.cluster)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(v.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        x_smem = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        words_smem = storage.words.data_ptr()

        if group == v.warpgroups:
            if cutlass.const_expr(v.moves_registers):
                cute.arch.setmaxregister_decrease(v.producer_registers)
            if warp == 4 * v.warpgroups:
                token_tiles, row_tiles, steps, run, num_items = self.extent(
                    cute.size(y_tma, mode=[0]), cute.size(words, mode=[0]), first_steps + second_steps, whole_tiles,
                    cluster, num_clusters,
                )  # fmt: skip
                x_first = cute.local_tile(x_tma, (v.tokens, K_BLOCK), (None, None))
                x_second = cute.local_tile(
                    cute.domain_offset((0, first_width), x_tma), (v.tokens, K_BLOCK), (None, None)
                )
                cta_layout = cute.make_layout(v.cluster)
                smem_x, gmem_first = cpasync.tma_partition(
                    x_atom, rank, cta_layout, cute.group_modes(x_smem, 0, 2), cute.group_modes(x_first, 0, 2)
                )
                _, gmem_second = cpasync.tma_partition(
                    x_atom, rank, cta_layout, cute.group_modes(x_smem, 0, 2), cute.group_modes(x_second, 0, 2)
                )
                row_words = cute.size(words, mode=[1])
                last_block = cute.size(words, mode=[0]) - 1
                stage = Int32(0)
                phase = Int32(1)
                ahead = Int32(0)
                if cutlass.const_expr(v.overlap_launch):
                    # Weights do not depend on the previous kernel: fill the pipeline with them before waiting for it.
                    cute.arch.griddepcontrol_launch_dependents()
                    tile_0, start_0, stop_0 = self.work(Int32(0), run, steps, whole_tiles, cluster, num_clusters)
                    _, row_tile_0 = self.place(tile_0, token_group, token_tiles, row_tiles)
                    row_block_0 = (row_tile_0 * v.cluster + rank) * v.row_blocks
                    ahead = cutlass.min(stop_0 - start_0, v.stages)
                    for i in cutlass.range(ahead, unroll=1):
                        self.load_words(
                            words, words_smem, full, i, row_block_0, last_block, row_words, start_0 + i, first_steps
                        )
                    for i in cutlass.range(ahead, cutlass.min(stop_0 - start_0, v.stages + v.l2_steps), unroll=1):
                        self.prefetch_words(words, row_block_0, last_block, row_words, start_0 + i, first_steps)
                    cute.arch.griddepcontrol_wait()
                for item in cutlass.range(num_items, unroll=1):
                    tile, start, stop = self.work(item, run, steps, whole_tiles, cluster, num_clusters)
                    token_tile, row_tile = self.place(tile, token_group, token_tiles, row_tiles)
                    row_block = (row_tile * v.cluster + rank) * v.row_blocks
                    for step in cutlass.range(start, stop, unroll=1):
                        if ahead > 0:
                            ahead -= 1
                        else:
                            cute.arch.mbarrier_wait(empty + stage, phase)
                            self.load_words(
                                words, words_smem, full, stage, row_block, last_block, row_words, step, first_steps
                            )
                        if step < first_steps:
                            for sub in cutlass.range_constexpr(v.step_blocks(0)):
                                self.load_x(
                                    x_atom,
                                    gmem_first[None, token_tile, step * v.step_blocks(0) + sub],
                                    smem_x[None, stage * v.x_blocks + sub],
                                    full + stage,
                                )
                        elif cutlass.const_expr(v.segments == 2):
                            for sub in cutlass.range_constexpr(v.step_blocks(1)):
                                self.load_x(
                                    x_atom,
                                    gmem_second[None, token_tile, (step - first_steps) * v.step_blocks(1) + sub],
                                    smem_x[None, stage * v.x_blocks + sub],
                                    full + stage,
                                )
                        stage, phase = self.advance(stage, phase)
                if cutlass.const_expr(v.cluster > 1):
                    # A peer may still signal this block's barriers: stay until every stage came back.
                    for _ in cutlass.range(v.stages, unroll=1):
                        cute.arch.mbarrier_wait(empty + stage, phase)
                        stage, phase = self.advance(stage, phase)
        else:
            if cutlass.const_expr(v.moves_registers):
                cute.arch.setmaxregister_increase(v.consumer_registers)
            if cutlass.const_expr(v.overlap_launch):
                cute.arch.griddepcontrol_wait()
            token_tiles, row_tiles, steps, run, num_items = self.extent(
                cute.size(y_tma, mode=[0]), cute.size(words, mode=[0]), first_steps + second_steps, whole_tiles,
                cluster, num_clusters,
            )  # fmt: skip
            consumer = group
            lane = thread % 128
            slice_mma = tiled_mma.get_slice(thread)
            b_fragment = tiled_mma.make_fragment_B(slice_mma.partition_B(x_smem))
            shape_a = tiled_mma.partition_shape_A((64 * v.row_blocks, K_BLOCK))
            shape_c = tiled_mma.partition_shape_C((64 * v.row_blocks, v.tokens))
            accumulators = [tiled_mma.make_fragment_C(shape_c)]
            packed = accumulators[0]
            if cutlass.const_expr(v.packs_first):
                packed = cute.make_rmem_tensor(cute.size(accumulators[0]) // 2, Int32)
                accumulators = [accumulators[0], accumulators[0]]
            elif cutlass.const_expr(v.segments == 2):
                accumulators = [accumulators[0], tiled_mma.make_fragment_C(shape_c)]
            fragments = [
                [tiled_mma.make_fragment_A(shape_a) for _ in range(v.x_blocks)]
                for _ in range(2 if v.looks_ahead else 1)
            ]
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            all_scales = storage.token_scales.get_tensor(
                cute.make_layout((v.tokens * v.segments, v.warpgroups), stride=(1, v.tokens * v.segments))
            )
            scales_smem = all_scales[None, consumer]
            rows_smem = storage.rows.get_tensor(cute.make_layout((4, 64, v.row_blocks), stride=(1, 4, 256)))
            y_smem = storage.y.get_tensor(y_layout.outer, swizzle=y_layout.inner)
            y_base = storage.y.data_ptr().toint()
            # Where this warpgroup's chunks wait for their store, and how far the next one is.
            slot, slot_step, in_flight = consumer, Int32(v.warpgroups), Int32(0)
            if cutlass.const_expr(v.lends_stages):
                y_smem = cute.make_tensor(cute.recast_ptr(words_smem, y_layout.inner, dtype=BFloat16), y_layout.outer)
                y_base = words_smem.toint()
                slot, slot_step, in_flight = self.store_slots(consumer, first_steps)
            wide = Int64(0)
            is_wide = Int32(0)
            if cutlass.const_expr(v.packs_first):
                wide = self.slot(partials, cluster, rank, consumer, lane)
            stage = Int32(0)
            phase = Int32(0)
            for item in cutlass.range(num_items, unroll=1):
                tile, start, stop = self.work(item, run, steps, whole_tiles, cluster, num_clusters)
                token_tile, row_tile = self.place(tile, token_group, token_tiles, row_tiles)
                row_block = (row_tile * v.cluster + rank) * v.row_blocks
                self.fetch_scales(token_scales, rows, scales_smem, rows_smem, token_tile, row_block, consumer, lane)
                if cutlass.const_expr(v.packs_first):
                    accumulators[0].fill(Int32(2**15) << first_shift)
                elif cutlass.const_expr(not v.overwrites(0)):
                    accumulators[0].fill(0)
                stage, phase = self.accumulate(
                    0, cutlass.max(cutlass.min(stop, first_steps) - start, 0), tiled_mma, fragments, b_fragment,
                    accumulators[0], words_smem, full, empty, stage, phase, consumer, lane,
                )  # fmt: skip
                if cutlass.const_expr(v.segments == 2):
                    if cutlass.const_expr(v.packs_first):
                        is_wide = self.pack(accumulators[0], packed, first_shift, wide)
                    if cutlass.const_expr(not v.overwrites(1)):
                        accumulators[1].fill(0)
                    stage, phase = self.accumulate(
                        1, cutlass.max(stop - cutlass.max(start, first_steps), 0), tiled_mma, fragments, b_fragment,
                        accumulators[1], words_smem, full, empty, stage, phase, consumer, lane,
                    )  # fmt: skip
                cute.arch.cp_async_wait_group(0)
                is_complete = Int32(1)
                if cutlass.const_expr(v.shares_tiles):
                    if stop - start < steps:
                        is_complete = self.meet(
                            accumulators, partials, (tile - whole_tiles) * steps, start, stop, first_steps, steps,
                            run, cluster, rank, consumer, lane,
                        )  # fmt: skip
                if is_complete == 1:
                    unit = Float32(Int32(1) << first_shift)
                    if cutlass.const_expr(v.packs_first):
                        if is_wide == 1:
                            self.store(
                                True, accumulators, packed, wide, unit, scales_smem, rows_smem, y_smem, y_base, y_atom,
                                y_tma, slot, slot_step, in_flight, token_tile, row_block, consumer, lane,
                            )  # fmt: skip
                    if is_wide == 0:
                        self.store(
                            False, accumulators, packed, wide, unit, scales_smem, rows_smem, y_smem, y_base, y_atom,
                            y_tma, slot, slot_step, in_flight, token_tile, row_block, consumer, lane,
                        )  # fmt: skip
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    # Where the work is. Every warp computes the same list, so none is passed around.

    @cute.jit
    def extent(
        self, tokens: Int32, row_blocks: Int32, steps: Int32, whole_tiles: Int32, cluster: Int32, num_clusters: Int32
    ):  # type: ignore[no-untyped-def]
        """Token tiles, row tiles, steps of a tile, this cluster's run of shared steps, and its number of pieces."""
        v = self.variant
        token_tiles = cute.ceil_div(tokens, v.tokens)
        row_tiles = cute.ceil_div(row_blocks, v.row_blocks * v.cluster)
        run = (Int32(0),) * 6
        num_items = (whole_tiles - cluster + num_clusters - 1) // num_clusters
        if cutlass.const_expr(v.shares_tiles):
            shared_steps = (token_tiles * row_tiles - whole_tiles) * steps
            length = shared_steps // num_clusters
            longer = shared_steps - length * num_clusters
            start = self.run_start(cluster, length, longer)
            stop = self.run_start(cluster + 1, length, longer)
            first_tile = start // steps
            num_shared = Int32(0)
            if stop > start:
                num_shared = (stop - 1) // steps - first_tile + 1
            num_items += num_shared
            run = (start, stop, first_tile, num_shared, length, longer)
        return token_tiles, row_tiles, steps, run, num_items

    @cute.jit
    def run_start(self, cluster: Int32, length: Int32, longer: Int32):  # type: ignore[no-untyped-def]
        """First shared step of a cluster: runs have `length` steps, the first `longer` of them one more."""
        return cluster * length + cutlass.min(cluster, longer)

    @cute.jit
    def work(
        self,
        item: Int32,
        run: tuple[Int32, ...],
        steps: Int32,
        whole_tiles: Int32,
        cluster: Int32,
        num_clusters: Int32,
    ):  # type: ignore[no-untyped-def]
        """The item-th piece of this cluster's work: tile, first step, step after the last. Shared tiles come first.

        They come last to first: what others wait for is done before waiting for others.
        """
        start = Int32(0)
        stop = steps
        if cutlass.const_expr(self.variant.shares_tiles):
            run_start, run_stop, first_tile, num_shared, _, _ = run
            tile = cluster + (item - num_shared) * num_clusters
            if item < num_shared:
                shared = first_tile + num_shared - 1 - item
                start = cutlass.max(run_start - shared * steps, 0)
                stop = cutlass.min(run_stop - shared * steps, steps)
                tile = whole_tiles + shared
        else:
            tile = cluster + item * num_clusters
        return tile, start, stop

    @cute.jit
    def place(self, tile: Int32, token_group: Int32, token_tiles: Int32, row_tiles: Int32):  # type: ignore[no-untyped-def]
        """Token and row tile of a tile: `token_group` token tiles side by side, then down the rows."""
        token_tile = Int32(0)
        row_tile = tile
        if token_tiles > 1:
            per_group = token_group * row_tiles
            group = tile // per_group
            first = group * token_group
            size = cutlass.min(token_tiles - first, token_group)
            rest = tile - group * per_group
            row_tile = rest // size
            token_tile = first + rest - row_tile * size
        return token_tile, row_tile

    @cute.jit
    def advance(self, stage: Int32, phase: Int32):  # type: ignore[no-untyped-def]
        stage += 1
        if stage == self.variant.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    # Copies in

    @cute.jit
    def load_words(
        self,
        words: cute.Tensor,
        words_smem: cute.Pointer,
        full: cute.Pointer,
        stage: Int32,
        row_block: Int32,
        last_block: Int32,
        row_words: Int32,
        step: Int32,
        first_steps: Int32,
    ) -> None:
        """Announce one K step and copy its weights: contiguous for 64 rows, so one bulk copy for each block."""
        v = self.variant
        offset, count, expected = self.locate(step, first_steps)
        barrier = (full + stage).toint().to(Int32)
        base = words_smem.toint().to(Int32) + stage * (v.stage_words * 4)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, expected)
            for b in cutlass.range_constexpr(v.row_blocks):
                source = cutlass.min(row_block + b, last_block).to(Int64) * row_words + offset
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                    "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
                    read_only_args=[
                        base + b * (count * 4),
                        words.iterator.toint() + source * 4,
                        count * 4,
                        barrier,
                        Int64(WEIGHTS_ONCE if v.weights_once else WEIGHTS_AGAIN),
                    ],
                )

    @cute.jit
    def prefetch_words(
        self, words: cute.Tensor, row_block: Int32, last_block: Int32, row_words: Int32, step: Int32, first_steps: Int32
    ) -> None:
        """Bring one K step into L2: what does not fit in shared memory need not wait for the previous kernel either."""
        offset, count, _ = self.locate(step, first_steps)
        with cute.arch.elect_one():
            for b in cutlass.range_constexpr(self.variant.row_blocks):
                source = cutlass.min(row_block + b, last_block).to(Int64) * row_words + offset
                cute.arch.inline_ptx(
                    "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
                    read_only_args=[words.iterator.toint() + source * 4, count * 4],
                )

    @cute.jit
    def locate(self, step: Int32, first_steps: Int32):  # type: ignore[no-untyped-def]
        """Where a K step stands in the words of 64 rows, how many it has, and all bytes that arrive with it."""
        v = self.variant
        offset = step * v.step_words(0)
        count = Int32(v.step_words(0))
        expected = Int32(v.step_bytes(0))
        if cutlass.const_expr(v.segments == 2):
            if step >= first_steps:
                offset = first_steps * v.step_words(0) + (step - first_steps) * v.step_words(1)
                count = Int32(v.step_words(1))
                expected = Int32(v.step_bytes(1))
        return offset, count, expected

    @cute.jit
    def load_x(self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer) -> None:
        if cutlass.const_expr(self.variant.cluster == 1):
            cute.copy(atom, source, target, tma_bar_ptr=barrier)
        else:
            mask = cutlass.Int16((1 << self.variant.cluster) - 1)
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=mask)

    @cute.jit
    def fetch_scales(
        self,
        token_scales: cute.Tensor,
        rows: cute.Tensor,
        scales_smem: cute.Tensor,
        rows_smem: cute.Tensor,
        token_tile: Int32,
        row_block: Int32,
        consumer: Int32,
        lane: Int32,
    ) -> None:
        """Start copying the tile's scales: they are needed a whole main loop later.

        Each warpgroup has its own copy, so that none must wait for another before the next tile.
        """
        v = self.variant
        first = token_tile * (v.tokens * v.segments)
        last = cute.size(token_scales) - 1
        for i in cutlass.range_constexpr(math.ceil(v.tokens * v.segments / 128)):
            index = i * 128 + lane
            if index < v.tokens * v.segments:
                source = token_scales.iterator.toint() + cutlass.min(first + index, last).to(Int64) * 4
                target = scales_smem.iterator.toint().to(Int32) + index * 4
                cute.arch.inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[target, source])
        if lane < 64:
            for m in cutlass.range_constexpr(v.blocks_per_warpgroup):
                b = m * v.warpgroups + consumer
                row = cutlass.min((row_block + b) * 64 + lane, cute.size(rows) // 4 - 1)
                source = rows.iterator.toint() + row.to(Int64) * 16
                target = rows_smem.iterator.toint().to(Int32) + (b * 64 + lane) * 16
                cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def release(self, barrier: cute.Pointer, lane: Int32) -> None:
        """Each warp tells every block of the cluster that it has read this stage."""
        if cutlass.const_expr(self.variant.cluster == 1):
            if lane % 32 == 0:
                cute.arch.mbarrier_arrive(barrier)
        else:
            if lane % 32 < self.variant.cluster:
                cute.arch.mbarrier_arrive(barrier, lane % 32)

    # Main loop

    @cute.jit
    def accumulate(
        self,
        segment: cutlass.Constexpr,
        count: Int32,
        tiled_mma: cute.TiledMma,
        fragments: cutlass.Constexpr,
        b_fragment: cute.Tensor,
        accumulator: cute.Tensor,
        words_smem: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        stage: Int32,
        phase: Int32,
        consumer: Int32,
        lane: Int32,
    ):  # type: ignore[no-untyped-def]
        """accumulator += `count` K steps of one segment, or = if it `overwrites`; returns the next stage and phase.

        With `looks_ahead` a step is unpacked while the tensor cores still work on the one before.
        """
        v = self.variant
        if cutlass.const_expr(v.looks_ahead):
            previous = Int32(-1)
            for _ in cutlass.range(count // 2, unroll=1):
                for parity in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    self.step(
                        segment,
                        previous >= 0,
                        tiled_mma,
                        fragments[parity],
                        b_fragment,
                        accumulator,
                        words_smem,
                        stage,
                        consumer,
                        lane,
                    )
                    warpgroup.wait_group(1)
                    if previous >= 0:
                        self.release(empty + previous, lane)
                    previous = stage
                    stage, phase = self.advance(stage, phase)
            if count % 2 == 1:
                cute.arch.mbarrier_wait(full + stage, phase)
                self.step(
                    segment, previous >= 0, tiled_mma, fragments[0], b_fragment, accumulator, words_smem, stage,
                    consumer, lane,
                )  # fmt: skip
                warpgroup.wait_group(1)
                if previous >= 0:
                    self.release(empty + previous, lane)
                previous = stage
                stage, phase = self.advance(stage, phase)
            warpgroup.wait_group(0)
            if previous >= 0:
                self.release(empty + previous, lane)
        else:
            for index in cutlass.range(count, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                self.step(
                    segment, index > 0, tiled_mma, fragments[0], b_fragment, accumulator, words_smem, stage, consumer,
                    lane,
                )  # fmt: skip
                if cutlass.const_expr(v.lends_stages and segment == 0):
                    # What stores still read of the stages is read before the first of them is given back.
                    if lane < 32:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                warpgroup.wait_group(0)
                self.release(empty + stage, lane)
                stage, phase = self.advance(stage, phase)
        return stage, phase

    @cute.jit
    def step(
        self,
        segment: cutlass.Constexpr,
        is_later: cutlass.Boolean,
        tiled_mma: cute.TiledMma,
        fragments: cutlass.Constexpr,
        b_fragment: cute.Tensor,
        accumulator: cute.Tensor,
        words_smem: cute.Pointer,
        stage: Int32,
        consumer: Int32,
        lane: Int32,
    ) -> None:
        """Unpack one K step into A fragments and issue its products as one group.

        Where a segment `overwrites`, the first product of its first step does: nobody clears accumulators.
        """
        v = self.variant
        bits = v.weight_bits[segment]
        blocks = v.blocks_per_warpgroup
        block_words = v.step_words(segment)  # of 64 rows
        layout = cute.make_layout(
            (4, 128, block_words // 512, v.row_blocks, v.stages), stride=(1, 4, 512, block_words, v.stage_words)
        )
        flat = cute.make_tensor(words_smem, layout)
        first_mma = tiled_mma
        if cutlass.const_expr(v.overwrites(segment)):
            first_mma = cute.make_tiled_mma(cute.make_mma_atom(self.op), (v.warpgroups, 1, 1))
            first_mma.set(warpgroup.Field.ACCUMULATE, is_later)
        for sub in cutlass.range_constexpr(v.step_blocks(segment)):
            registers = cute.recast_tensor(fragments[sub], Int32)
            for m in cutlass.range_constexpr(blocks):
                block = m * v.warpgroups + consumer
                if cutlass.const_expr(bits == 4):
                    loaded = cute.make_rmem_tensor((4, 2), Int32)
                    for half in cutlass.range_constexpr(2):
                        cute.autovec_copy(flat[None, lane, sub * 2 + half, block, stage], loaded[None, half])
                    for j in cutlass.range_constexpr(8):
                        word = loaded[j % 4, j // 4]
                        index = 4 * (m + blocks * (j // 2)) + 2 * (j % 2)
                        registers[index] = (word << 4) & Int32(HIGH_NIBBLES)
                        registers[index + 1] = word & Int32(HIGH_NIBBLES)
                else:
                    loaded = cute.make_rmem_tensor((4, 4), Int32)
                    for kk in cutlass.range_constexpr(4):
                        cute.autovec_copy(flat[None, lane, sub * 4 + kk, block, stage], loaded[None, kk])
                        for r in cutlass.range_constexpr(4):
                            registers[4 * (m + blocks * kk) + r] = loaded[r, kk]
            warpgroup.fence()
            for kk in cutlass.range_constexpr(K_BLOCK // 32):
                cute.gemm(
                    first_mma if sub == 0 and kk == 0 else tiled_mma,
                    accumulator,
                    fragments[sub][None, None, kk],
                    b_fragment[None, None, kk, stage * v.x_blocks + sub],
                    accumulator,
                )
        warpgroup.commit_group()

    # First sums of a tile that has no registers for two of each

    @cute.jit
    def pack(self, sums: cute.Tensor, packed: cute.Tensor, shift: Int32, address: Int64):  # type: ignore[no-untyped-def]
        """Sums of the first segment, in units of 2**shift, as 16 bits each; 1 if one of this warp needs more.

        They come with an offset of 2**15 units, so the low 16 bits of what fits are all there is of it. Where something
        does not fit, the bits above wait in the workspace.
        """
        above = Int32(0)
        for pair in cutlass.range_constexpr(cute.size(packed)):
            above = above | sums[2 * pair] | sums[2 * pair + 1]
        is_wide = Int32(0)
        if cute.arch.vote_any_sync((above >> (shift + 16)) != 0):
            is_wide = Int32(1)
            for q in cutlass.range_constexpr(cute.size(packed) // 4):
                words = [
                    ((sums[2 * pair] >> (shift + 16)) & Int32(0xFFFF)) | (sums[2 * pair + 1] >> (shift + 16) << 16)
                    for pair in range(4 * q, 4 * q + 4)
                ]
                cute.arch.inline_ptx(
                    "st.relaxed.gpu.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[address + q * 2048, *words],
                )
        if shift == 8:  # 4-bit codes on both sides: whole bytes
            for pair in cutlass.range_constexpr(cute.size(packed)):
                packed[pair] = cute.arch.inline_ptx(
                    "prmt.b32 {$w0}, {$r0}, {$r1}, 0x6521;",
                    write_only_types=[Int32],
                    read_only_args=[sums[2 * pair], sums[2 * pair + 1]],
                )
        else:
            for pair in cutlass.range_constexpr(cute.size(packed)):
                packed[pair] = cute.arch.inline_ptx(
                    "{.reg .b32 l, h; shr.u32 l, {$r0}, {$r2}; shl.b32 h, {$r1}, {$r3}; prmt.b32 {$w0}, l, h, 0x7610;}",
                    write_only_types=[Int32],
                    read_only_args=[sums[2 * pair], sums[2 * pair + 1], shift, 16 - shift],
                )
        return is_wide

    @cute.jit
    def unpack(self, word: Int32):  # type: ignore[no-untyped-def]
        """The two sums of a packed word as floats: 16 bits under the exponent of 2**23, less that and the offset."""
        return cute.arch.inline_ptx(
            "{.reg .b32 l, h; prmt.b32 l, {$r0}, 0x4B000000, 0x7410; prmt.b32 h, {$r0}, 0x4B000000, 0x7432; "
            "add.f32 {$w0}, l, 0fCB008000; add.f32 {$w1}, h, 0fCB008000;}",
            write_only_types=[Float32, Float32],
            read_only_args=[word],
        )

    @cute.jit
    def load_wide(self, address: Int64, quad: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        """Four of the words that `pack` left in the workspace: the upper bits of two columns of eight tokens."""
        return cute.arch.inline_ptx(
            "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address + quad * 2048],
        )

    @cute.jit
    def widen(self, sums: cute.Tensor, words: cutlass.Constexpr) -> None:
        """Add the upper bits of a column's four sums: exact, and rounded once, as an int32 would be."""
        for half in cutlass.range_constexpr(2):
            sums[2 * half, 0] = Float32(words[half] << 16 >> 16) * 65536.0 + sums[2 * half, 0]
            sums[2 * half + 1, 0] = Float32(words[half] >> 16) * 65536.0 + sums[2 * half + 1, 0]

    # Tiles that several clusters share

    @cute.jit
    def meet(
        self,
        accumulators: cutlass.Constexpr,
        partials: cute.Tensor,
        tile_start: Int32,
        start: Int32,
        stop: Int32,
        first_steps: Int32,
        steps: Int32,
        run: tuple[Int32, ...],
        cluster: Int32,
        rank: Int32,
        consumer: Int32,
        lane: Int32,
    ):  # type: ignore[no-untyped-def]
        """Join the sums of a shared tile; 1 for the cluster that has its last step and now all sums, 0 for the others.

        Which cluster has which shared steps is known (`run_start`), and a cluster ends at most once inside a tile: one
        slot each. A thread reads exactly the words that its counterpart wrote, and a word says by itself whether it is
        there, so neither fences nor counters are needed. Nobody waits in a circle: who waits holds a tile's last step,
        who is waited for an earlier one, and that comes first in its work.
        """
        v = self.variant
        is_owner = Int32(0)
        if stop < steps:
            mine = self.slot(partials, cluster, rank, consumer, lane)
            for segment in cutlass.range_constexpr(v.segments):
                if self.touches(segment, start, stop, first_steps):
                    self.hand_over(accumulators[segment], mine + segment * v.segment_slot_bytes)
        else:
            is_owner = Int32(1)
            _, _, _, _, length, longer = run
            other = cluster - 1
            their_stop = start
            while their_stop > 0:
                their_start = cutlass.max(self.run_start(other, length, longer) - tile_start, 0)
                theirs = self.slot(partials, other, rank, consumer, lane)
                for segment in cutlass.range_constexpr(v.segments):
                    if self.touches(segment, their_start, their_stop, first_steps):
                        self.take_over(accumulators[segment], theirs + segment * v.segment_slot_bytes)
                their_stop = their_start
                other -= 1
        return is_owner

    @cute.jit
    def touches(self, segment: cutlass.Constexpr, start: Int32, stop: Int32, first_steps: Int32):  # type: ignore[no-untyped-def]
        """Whether steps start..stop of a tile reach into a segment."""
        result = start < first_steps
        if cutlass.const_expr(segment == 1):
            result = stop > first_steps
        return result

    @cute.jit
    def hand_over(self, accumulator: cute.Tensor, address: Int64) -> None:
        quads = cute.size(accumulator) // 4
        flat = cute.make_tensor(accumulator.iterator, cute.make_layout((4, quads)))
        for q in cutlass.range_constexpr(quads):
            cute.arch.inline_ptx(
                "st.relaxed.gpu.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[address + q * 2048, flat[0, q], flat[1, q], flat[2, q], flat[3, q]],
            )

    @cute.jit
    def take_over(self, accumulator: cute.Tensor, address: Int64) -> None:
        """Add sums as they appear, as many loads in flight as registers allow, and leave the slot as it was."""
        quads = cute.size(accumulator) // 4
        batch = min(quads, self.variant.handover_batch)
        flat = cute.make_tensor(accumulator.iterator, cute.make_layout((4, quads)))
        for first in cutlass.range_constexpr(0, quads, batch):
            loaded = cute.make_rmem_tensor((4, batch), Int32)
            missing = Int32(1)
            while missing == 1:
                missing = Int32(0)
                for b in cutlass.range_constexpr(batch):
                    loaded[0, b], loaded[1, b], loaded[2, b], loaded[3, b] = cute.arch.inline_ptx(
                        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                        write_only_types=[Int32, Int32, Int32, Int32],
                        read_only_args=[address + (first + b) * 2048],
                    )
                for b in cutlass.range_constexpr(batch):
                    for e in cutlass.range_constexpr(4):
                        if loaded[e, b] == Int32(NOTHING):
                            missing = Int32(1)
            for b in cutlass.range_constexpr(batch):
                for e in cutlass.range_constexpr(4):
                    flat[e, first + b] = flat[e, first + b] + loaded[e, b]
                cute.arch.inline_ptx(
                    "st.relaxed.gpu.global.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                    read_only_args=[address + (first + b) * 2048, Int32(NOTHING)],
                )

    @cute.jit
    def slot(self, partials: cute.Tensor, cluster: Int32, rank: Int32, consumer: Int32, lane: Int32):  # type: ignore[no-untyped-def]
        """Address of one thread's first 16-byte word in a cluster's slot; its next ones are 128 threads further on."""
        v = self.variant
        index = (cluster * v.cluster + rank) * v.warpgroups + consumer
        return partials.iterator.toint() + (index.to(Int64) * (v.slot_words * 128) + lane * 4) * 4

    @cute.jit
    def sync(self, consumer: Int32) -> None:
        cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=128)

    # Epilogue

    @cute.jit
    def store_slots(self, consumer: Int32, first_steps: Int32):  # type: ignore[no-untyped-def]
        """Of a variant that `lends_stages`: a warpgroup's first slot, the way to its second, 1 if there is a second.

        The first warpgroup has both buffers. The second has, of two stages, the halves with the int8 weights of its own
        rows: it has read them, and the int4 weights of the next tile's first steps do not reach there. Where those are
        fewer than there are stages, int8 weights may: then each warpgroup has one buffer.
        """
        v = self.variant
        buffers = v.store_slots - v.warpgroups
        slot, step, in_flight = buffers + consumer, Int32(0), Int32(0)
        if first_steps >= v.stages:
            in_flight = Int32(1)
            slot = Int32(buffers)
            step = Int32(1)
            if consumer == 1:
                slot = Int32(1)
                step = Int32(2)
        return slot, step, in_flight

    @cute.jit
    def store(
        self,
        is_wide: cutlass.Constexpr,
        accumulators: cutlass.Constexpr,
        packed: cute.Tensor,
        wide: Int64,
        unit: Float32,
        scales_smem: cute.Tensor,
        rows_smem: cute.Tensor,
        y_smem: cute.Tensor,
        y_base: Int32,
        y_atom: cute.CopyAtom,
        y_tma: cute.Tensor,
        slot: Int32,
        slot_step: Int32,
        in_flight: Int32,
        token_tile: Int32,
        row_block: Int32,
        consumer: Int32,
        lane: Int32,
    ) -> None:
        """Scale, round, transpose through shared memory, and let TMA store while the next tile is multiplied.

        Token scales are loaded some columns ahead: a load cannot pass the `stmatrix` before it. So are the upper bits
        of wide sums, from L2, two more for every two columns that free their registers.
        """
        v = self.variant
        warp = lane // 32
        quad_row = lane % 32 // 4
        # stmatrix: lane l addresses row l % 8 of matrix l / 8; matrices are (rows 0-7 | rows 8-15) x (8 | 8 tokens)
        matrix = lane % 32 // 8
        chunk = (warp * 2 + matrix % 2) ^ (lane % 8)
        address = y_base.to(Int32) + (matrix // 2 * 8 + lane % 8) * 128 + chunk * 16
        scales_address = scales_smem.iterator.toint().to(Int32) + lane % 4 * (8 * v.segments)
        blocks = v.blocks_per_warpgroup
        columns = v.store_tokens // 8
        ahead = min(8 // v.segments, blocks * v.store_chunks * columns)
        scales = []
        quads = blocks * v.tokens // 16
        uppers = [self.load_wide(wide, quad) for quad in range(min(WIDE_AHEAD, quads) if is_wide else 0)]
        low = cute.make_rmem_tensor(4, Float32)
        high = cute.make_rmem_tensor(4, Float32)
        for chunk_index in cutlass.range_constexpr(blocks * v.store_chunks):
            m = chunk_index // v.store_chunks
            part = chunk_index % v.store_chunks
            buffer = slot + chunk_index % v.buffers_in_turn * slot_step
            b = m * v.warpgroups + consumer
            if cutlass.const_expr(chunk_index == 0 or chunk_index >= v.store_buffers):
                if lane < 32:
                    if cutlass.const_expr(chunk_index == 0):
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    elif cutlass.const_expr(v.lends_stages):
                        if in_flight == 1:
                            cute.arch.cp_async_bulk_wait_group(1, read=True)
                        else:
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                    else:
                        cute.arch.cp_async_bulk_wait_group(v.store_buffers - 1, read=True)
                self.sync(consumer)
            if cutlass.const_expr(chunk_index == 0):
                scales = [self.token_scales(scales_address, column) for column in range(ahead)]
            if cutlass.const_expr(part == 0):
                cute.autovec_copy(rows_smem[None, warp * 16 + quad_row, b], low)
                cute.autovec_copy(rows_smem[None, warp * 16 + quad_row + 8, b], high)
                if cutlass.const_expr(v.packs_first):
                    low[0] = low[0] * unit
                    high[0] = high[0] * unit
            target = address + buffer * (v.store_tokens * 128)
            for j in cutlass.range_constexpr(columns):
                column = part * columns + j
                index = 4 * (m * (v.tokens // 8) + column)
                sums = cute.make_rmem_tensor((4, v.segments), Float32)
                for segment in cutlass.range_constexpr(v.segments):
                    for e in cutlass.range_constexpr(4):
                        if cutlass.const_expr(not (v.packs_first and segment == 0)):
                            sums[e, segment] = Float32(accumulators[segment][index + e])
                if cutlass.const_expr(v.packs_first):
                    for half in cutlass.range_constexpr(2):
                        sums[2 * half, 0], sums[2 * half + 1, 0] = self.unpack(packed[index // 2 + half])
                    if cutlass.const_expr(is_wide):
                        quad = index // 8
                        if cutlass.const_expr(j % 2 == 0):
                            upper = uppers[quad]
                            more = range(len(uppers), min(len(uppers) + 2, quads))
                            uppers += [self.load_wide(wide, later) for later in more]
                        self.widen(sums, upper[2 * (j % 2) : 2 * (j % 2) + 2])
                rounded = cute.make_rmem_tensor(4, BFloat16)
                of_tokens = scales.pop(0)
                for e in cutlass.range_constexpr(4):
                    row = low if e < 2 else high
                    value = row[2]
                    for segment in cutlass.range_constexpr(v.segments):
                        s = v.segments - 1 - segment
                        value = value + sums[e, s] * (row[s] * of_tokens[e % 2 * v.segments + s])
                    rounded[e] = value.to(BFloat16)
                if cutlass.const_expr(index // 4 + ahead < blocks * (v.tokens // 8)):
                    scales.append(self.token_scales(scales_address, (column + ahead) % (v.tokens // 8)))
                pair = cute.recast_tensor(rounded, Int32)
                if cutlass.const_expr(v.store_tokens == 8):
                    cute.arch.inline_ptx(
                        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], {{$r1}, {$r2}};",
                        read_only_args=[target, pair[0], pair[1]],
                    )
                elif cutlass.const_expr(j % 2 == 0):
                    even = (pair[0], pair[1])
                else:
                    cute.arch.inline_ptx(
                        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                        read_only_args=[target + (j - 1) * 1024, even[0], even[1], pair[0], pair[1]],
                    )
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(consumer)
            if lane < 32:
                gmem = cute.local_tile(y_tma, (v.store_tokens, 64), (None, None))
                y_from, y_to = cpasync.tma_partition(
                    y_atom, 0, cute.make_layout(1), cute.group_modes(y_smem, 0, 2), cute.group_modes(gmem, 0, 2)
                )
                cute.copy(
                    y_atom,
                    y_from[None, buffer],
                    y_to[None, token_tile * v.store_chunks + part, row_block + b],
                )
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def token_scales(self, address: Int32, column: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        """The scales of this thread's two tokens among the eight of a column: segment by segment, token by token."""
        count = 2 * self.variant.segments
        names = ", ".join(f"{{$w{i}}}" for i in range(count))
        return cute.arch.inline_ptx(
            f"ld.shared.v{count}.f32 {{{names}}}, [{{$r0}}];",
            write_only_types=[Float32] * count,
            read_only_args=[address + column * (32 * self.variant.segments)],
        )


def compile_kernel(variant: Variant) -> Any:
    """Compile one variant for the architecture in CUTE_DSL_ARCH; the result can be exported."""
    tokens, columns, rows_64 = cute.sym_int(), cute.sym_int(divisibility=16), cute.sym_int()
    return cute.compile(
        GemmKernel(variant),
        make_fake_compact_tensor(Int8, (tokens, columns), stride_order=(1, 0), assumed_align=16),
        make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4),
        make_fake_compact_tensor(
            Int32, (rows_64, cute.sym_int(divisibility=512)), stride_order=(1, 0), assumed_align=16
        ),
        make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=16),
        make_fake_compact_tensor(
            BFloat16, (tokens, cute.sym_int(divisibility=8)), stride_order=(1, 0), assumed_align=16
        ),
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=16),
        Int32(1),
        Int32(0),
        Int32(1),
        Int32(0),
        Int32(1),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
