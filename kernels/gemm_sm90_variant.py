"""What can be chosen about a Hopper GEMM: the constants of a compiled kernel, and how one product uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_SHARED_BYTES = 232_448  # of one block on sm_90


@dataclass(frozen=True)
class Variant:
    """What is fixed when the kernel is compiled. `gemm_sm90_kernel` explains the words.

    weight_bits:        of each segment: (4,), (8,), (4, 8), (4, 4)
    tokens:             of one tile (wgmma's N): 8, 16, 24, 32 or a multiple of 16 up to 256
    row_blocks:         64-row blocks of one tile, a multiple of `warpgroups`
    warpgroups:         that multiply; one more copies
    stages:             of the shared-memory pipeline
    int4_blocks:        128-column blocks of int4 weights in one K step: 1, or 2 (decode: half the barriers)
    cluster:            thread blocks that share activation tiles by multicast: 1 or 2
    store_buffers:      chunks of 64 tokens or fewer that may wait for their store, per warpgroup
    overlap_launch:     start while the previous kernel drains (programmatic dependent launch)
    weights_once:       weights leave L2 first: right where every weight is read by one cluster only
    looks_ahead:        unpack a K step while the one before is multiplied; doubles the registers of weights
    packs_first:        keep the first segment's sums in 16 bits while the second is multiplied, so that a tile of 256
                        tokens fits in registers; what does not fit in 16 bits waits in the workspace
    shares_tiles:       several clusters may work on one tile along K
    l2_steps:           K steps of weights, beyond the pipeline, fetched into L2 before the previous kernel ends
    """

    weight_bits: tuple[int, ...]
    tokens: int
    row_blocks: int
    warpgroups: int
    stages: int
    int4_blocks: int = 1
    cluster: int = 1
    store_buffers: int = 1
    overlap_launch: bool = True
    weights_once: bool = False
    looks_ahead: bool = False
    packs_first: bool = False
    shares_tiles: bool = False
    l2_steps: int = 0

    def __post_init__(self) -> None:
        if self.row_blocks % self.warpgroups or self.tokens % 8 or not 8 <= self.tokens <= 256:
            raise ValueError(f"{self.name} is no tile")
        if self.shared_bytes > MAX_SHARED_BYTES:
            raise ValueError(f"{self.name} needs {self.shared_bytes} bytes of shared memory of {MAX_SHARED_BYTES}")
        if self.packs_first and self.segments != 2:
            raise ValueError(f"{self.name} has no second segment")
        if self.packs_first and self.shares_tiles:
            raise ValueError(f"{self.name} cannot share tiles: it has no room for the sums of two segments")

    @property
    def name(self) -> str:
        """As a file name."""
        bits = "".join(map(str, self.weight_bits))
        flags = ("p" if self.overlap_launch else "") + ("o" if self.weights_once else "")
        flags += f"l{self.l2_steps}" if self.l2_steps else ""
        flags += (
            ("a" if self.looks_ahead else "") + ("h" if self.packs_first else "") + ("k" if self.shares_tiles else "")
        )
        return (
            f"gemm-w{bits}-t{self.tokens}-r{self.row_blocks}-g{self.warpgroups}-s{self.stages}-b{self.int4_blocks}"
            f"-c{self.cluster}-e{self.store_buffers}{flags}"
        )

    @property
    def threads(self) -> int:
        """Registers can only be given away by a whole warpgroup; else one warp is enough to copy."""
        return 128 * self.warpgroups + (128 if self.moves_registers else 32)

    @property
    def segments(self) -> int:
        return len(self.weight_bits)

    @property
    def blocks_per_warpgroup(self) -> int:
        return self.row_blocks // self.warpgroups

    def step_blocks(self, segment: int) -> int:
        """128-column blocks of one K step."""
        return self.int4_blocks if self.weight_bits[segment] == 4 else 1

    def step_words(self, segment: int) -> int:
        """int32 words of one K step of 64 rows."""
        return 256 * self.weight_bits[segment] * self.step_blocks(segment)

    def step_bytes(self, segment: int) -> int:
        """Bytes that arrive in shared memory for one K step."""
        return self.row_blocks * self.step_words(segment) * 4 + self.tokens * 128 * self.step_blocks(segment)

    @property
    def x_blocks(self) -> int:
        return max(self.step_blocks(s) for s in range(self.segments))

    @property
    def stage_words(self) -> int:
        return self.row_blocks * max(self.step_words(s) for s in range(self.segments))

    @property
    def stage_x_bytes(self) -> int:
        return self.tokens * 128 * self.x_blocks

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block, up to 3 KiB of alignment included."""
        pipeline = self.stages * (self.stage_words * 4 + self.stage_x_bytes + 16)
        scales = self.warpgroups * self.tokens * self.segments * 4 + self.row_blocks * 64 * 16
        stores = self.warpgroups * self.store_buffers * self.store_tokens * 128
        return pipeline + scales + stores + 3072

    @property
    def store_tokens(self) -> int:
        """Tokens of one store: the largest of these that divides the tile."""
        return next(size for size in (64, 48, 32, 16, 8) if self.tokens % size == 0)

    @property
    def store_chunks(self) -> int:
        return self.tokens // self.store_tokens

    @property
    def lends_stages(self) -> bool:
        """Whether the second warpgroup's output waits for its store in the stages, where int8 weights of its rows were.

        That half of a stage stays empty as long as int4 weights arrive, and no other room is left for a second buffer.
        """
        is_half = self.stage_words * 2 == self.store_tokens * 128  # bytes of a chunk
        return (
            self.packs_first
            and self.weight_bits == (4, 8)
            and self.row_blocks == self.warpgroups == 2
            and self.store_buffers == 1
            and is_half
        )

    @property
    def buffers_in_turn(self) -> int:
        """Chunks of one warpgroup that have a place each: the next one takes the place of the first."""
        return 2 if self.lends_stages else self.store_buffers

    @property
    def store_slots(self) -> int:
        """Places for a chunk, counted from the stages on where they are lent."""
        own = self.warpgroups * self.store_buffers
        if not self.lends_stages:
            return own
        return own + self.stages * (self.stage_words * 4 + self.stage_x_bytes) // (self.store_tokens * 128)

    def overwrites(self, segment: int) -> bool:
        """Whether the first product of a segment needs no cleared accumulator.

        It does where a tile may begin in the middle, or where the sums begin with an offset.
        """
        return not self.shares_tiles and not (self.packs_first and segment == 0)

    @property
    def partial_words(self) -> int:
        """int32 sums of one thread."""
        return self.segments * self.tokens // 2 * self.blocks_per_warpgroup

    @property
    def slot_words(self) -> int:
        """Words of one thread in the workspace: its sums, or with `packs_first` the high halves of the first ones."""
        return self.partial_words // 4 if self.packs_first else self.partial_words

    @property
    def moves_registers(self) -> bool:
        """Whether the copying warpgroup gives registers to the multiplying ones: where accumulators are many."""
        return self.warpgroups == 2 and self.partial_words * (3 if self.packs_first else 4) >= 4 * 64

    @property
    def segment_slot_bytes(self) -> int:
        """From one segment's sums to the next in a warpgroup's slot of the workspace."""
        return self.partial_words // self.segments * 128 * 4

    @property
    def handover_batch(self) -> int:
        """16-byte loads in flight while sums are taken over: bounded by registers."""
        if self.partial_words <= 64:
            return 16
        return 4 if self.looks_ahead else 8

    @property
    def producer_registers(self) -> int:
        """The list of shared work needs more than 24, which is enough without."""
        return 40 if self.shares_tiles else 24

    @property
    def consumer_registers(self) -> int:
        """Three warpgroups start with 168 registers each: asking for more than 3 * 168 in all waits forever."""
        return 232 if self.shares_tiles else 240


@dataclass(frozen=True)
class Plan:
    """How one product runs.

    variant:      the compiled kernel
    token_group:  token tiles that are computed side by side before the next weight rows (locality in L2)
    share:        which tiles several clusters work on together along K: "none", "rest" (those that do not fill the GPU
                  in whole rounds) or "all"
    """

    variant: Variant
    token_group: int = 1
    share: Literal["none", "rest", "all"] = "none"
