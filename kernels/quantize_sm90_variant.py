"""What is fixed when a quantise kernel for Hopper is compiled, and which one a layout wants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from w4a4.kernels.layout import LinearLayout

VECTOR = 8  # channels of one 16-byte access
VECTORS = 4  # of one thread
MAX_CHANNELS = 32 * 1024  # of one row: 1,024 threads of 32
FEW_ROWS = 64  # up to which a SwiGLU row is shared by several blocks: one alone computes for microseconds
MAX_CLUSTER = 8
MAX_GROUPS = 15  # named barriers of a block
_SHARED_BYTES = 227 * 1024  # of one multiprocessor, for all its blocks
Source = Literal["plain", "rmsnorm", "rmsnorm_residual", "silu"]


@dataclass(frozen=True)
class QuantizeVariant:
    """What is fixed when the kernel is compiled.

    source:    what makes the channels: x; RMSNorm(x); RMSNorm(x + residual); silu(gate) * up
    channels:  K, a multiple of 8
    bits:      of the activations of each segment: (4,), (8,), (4, 8), (8, 8)
    hadamard:  block size of the online Hadamard, 1 to 128
    permuted:  channels are put in stored order by a permutation
    weighted:  RMSNorm has a gain
    rms_clip:  4-bit scales are also bounded by beta * rms
    stages:    rows on their way to shared memory, per block
    cluster:   blocks that share a row, each with as many whole warps' channels; SwiGLU without a permutation only
    groups:    rows that a block works on at once, each with threads of its own: they share the tables of a permutation
               and of gains
    """

    source: Source
    channels: int
    bits: tuple[int, ...]
    hadamard: int = 1
    permuted: bool = False
    weighted: bool = False
    rms_clip: bool = False
    stages: int = 1
    cluster: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        if self.groups > 1 and (self.cluster > 1 or self.groups > MAX_GROUPS or self.groups * self.threads > 1024):
            raise ValueError(f"{self.name} has too many groups")
        if self.cluster > 1 and (self.source != "silu" or self.permuted or self.channels % (1024 * self.cluster)):
            raise ValueError(f"{self.name} cannot share a row")

    @property
    def name(self) -> str:
        flags = "".join(
            f"-{flag}"
            for flag, is_set in (("perm", self.permuted), ("gain", self.weighted), ("rms", self.rms_clip))
            if is_set
        )
        bits = "a".join(map(str, self.bits))
        flags += f"-s{self.stages}" + (f"-c{self.cluster}" if self.cluster > 1 else "")
        flags += f"-g{self.groups}" if self.groups > 1 else ""
        return f"quantize-{self.source}-{self.channels}-a{bits}-h{self.hadamard}{flags}"

    @property
    def is_normed(self) -> bool:
        return self.source in ("rmsnorm", "rmsnorm_residual")

    @property
    def inputs(self) -> int:
        """Rows of K that are read for one row of codes."""
        return 2 if self.source in ("silu", "rmsnorm_residual") else 1

    @property
    def block_channels(self) -> int:
        """Of a row, one block's."""
        return self.channels // self.cluster

    @property
    def threads(self) -> int:
        return -(-self.block_channels // (32 * VECTOR * VECTORS)) * 32

    @property
    def is_full(self) -> bool:
        """Every thread has channels."""
        return self.threads * VECTOR * VECTORS == self.block_channels

    @property
    def stage_bytes(self) -> int:
        return self.inputs * self.block_channels * 2

    @property
    def sources(self) -> int:
        """Entries of the table of sources."""
        return self.channels if self.permuted else 0

    @property
    def gains(self) -> int:
        """Entries of the table of gains."""
        return self.channels if self.weighted else 0

    @property
    def shared_bytes(self) -> int:
        """Of one block: rows, tables of sources and gains, scratch and the 1 KiB that the hardware takes."""
        rows = self.groups * self.stages * self.stage_bytes
        return rows + 2 * (self.sources + self.gains) + 1024 * self.groups + 2048

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks that are resident together: bounded by registers, shared memory and threads."""
        threads = self.groups * self.threads
        by_registers = 65536 // (threads * self.registers)
        by_memory = _SHARED_BYTES // self.shared_bytes
        return max(1, min(by_registers, by_memory, 2048 // threads, 24))

    @property
    def staggers(self) -> bool:
        """Whether a block asks for its second row when the first is there: others' first rows come sooner.

        Only where enough blocks ask for rows at the same time to keep memory busy.
        """
        return self.stages == 2 and self.groups * self.blocks_per_multiprocessor >= 4

    @property
    def registers(self) -> int:
        """Registers that a thread may use: 32 hold its channels."""
        if self.weighted:
            return 80
        return 72 if self.source == "silu" else 64


def unsupported(layout: LinearLayout) -> str | None:
    """What of a layout these kernels do not quantise, or None."""
    bits = tuple(segment.act_bits for segment in layout.segments)
    if 16 in bits:
        return "16-bit activations"
    if bits not in ((4,), (8,), (4, 8), (8, 8)):
        return f"segments of {bits} bits"
    if not layout.symmetric and 4 in bits:
        return "asymmetric activations"
    if layout.in_features % VECTOR or layout.in_features > MAX_CHANNELS:
        return f"{layout.in_features} channels"
    if any(segment.width % VECTOR for segment in layout.segments):
        return "segments that are no multiple of 8 channels"
    if layout.hadamard > 128 or layout.in_features % layout.hadamard:
        return f"a block Hadamard of {layout.hadamard}"
    return None


def variant_of(source: Source, layout: LinearLayout, permuted: bool, weighted: bool) -> QuantizeVariant:
    """The kernel that quantises for `layout`."""
    bits = tuple(segment.act_bits for segment in layout.segments)
    rms_clip = 4 in bits and layout.clip[1] != float("inf")

    def sized(stages: int, groups: int = 1) -> QuantizeVariant:
        return QuantizeVariant(
            source, layout.in_features, bits, layout.hadamard, permuted, weighted, rms_clip, stages, groups=groups
        )

    one, two = sized(1), sized(2)
    if permuted or weighted:
        # As many rows at once as registers allow, and two in flight for each if there is room.
        most = max(1, min(65536 // one.registers, 1024) // one.threads)
        options = [sized(stages, groups) for groups in range(min(most, MAX_GROUPS), 0, -1) for stages in (2, 1)]
        return next((option for option in options if _fits(option)), one)
    # A second row in flight per block, where it does not cost a resident block.
    return two if two.blocks_per_multiprocessor == one.blocks_per_multiprocessor and _fits(two) else one


def for_few_rows(variant: QuantizeVariant) -> QuantizeVariant:
    """The kernel for up to `FEW_ROWS` rows, which gives the bits of `variant`: a row is a cluster's where it can be."""
    if variant.source != "silu" or variant.permuted or variant.channels % 1024:
        return variant
    cluster = max(size for size in range(1, MAX_CLUSTER + 1) if variant.channels // 1024 % size == 0)
    return replace(variant, stages=1, cluster=cluster) if cluster > 1 else variant


def _fits(variant: QuantizeVariant) -> bool:
    return variant.shared_bytes <= _SHARED_BYTES
