"""Single PTX instructions as functions, for kernels that choose their own registers (sm_90, CuTe DSL).

Shared-memory addresses are Int32 (shared window), global addresses Int64. Each function is one instruction or a fixed
handful of them; nothing here branches.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass.cute.arch.nvvm_wrappers import inline_ptx


def load_shared(address: Any, words: int) -> tuple[Any, ...]:
    """1, 2 or 4 consecutive 32-bit words of shared memory; the address is aligned to their size."""
    return _load("ld.shared", address, words)


def load_global(address: Any, words: int) -> tuple[Any, ...]:
    """1, 2 or 4 consecutive 32-bit words of global memory that this kernel does not write."""
    return _load("ld.global.nc", address, words)


def load_global_coherent(address: Any, words: int) -> tuple[Any, ...]:
    """As `load_global` past L1, for words that another CTA of this launch may have written."""
    return _load("ld.global.cg", address, words)


def _load(instruction: str, address: Any, words: int) -> tuple[Any, ...]:
    if words == 1:
        value = inline_ptx(f"{instruction}.b32 {{$w0}}, [{{$r0}}];", write_only_types=[Int32], read_only_args=[address])
        return (value,)
    names = ", ".join(f"{{$w{i}}}" for i in range(words))
    code = f"{instruction}.v{words}.b32 {{{names}}}, [{{$r0}}];"
    return inline_ptx(code, write_only_types=[Int32] * words, read_only_args=[address])


def store_shared(address: Any, *values: Any) -> None:
    """1, 2 or 4 Float32 or Int32 values to consecutive words of shared memory."""
    _store("st.shared", address, values)


def store_global(address: Any, *values: Any) -> None:
    """1, 2 or 4 Float32 or Int32 values to consecutive words of global memory."""
    _store("st.global", address, values)


def _store(instruction: str, address: Any, values: tuple[Any, ...]) -> None:
    kind = "f32" if isinstance(values[0], Float32) else "b32"
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    if len(values) == 1:
        code = f"{instruction}.{kind} [{{$r0}}], {names};"
    else:
        code = f"{instruction}.v{len(values)}.{kind} [{{$r0}}], {{{names}}};"
    inline_ptx(code, read_only_args=[address, *values])


def mbarrier_init(address: Any, count: int) -> None:
    inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[address, Int32(count)])


def mbarrier_expect(address: Any, num_bytes: int) -> None:
    """Arrive, and expect num_bytes more to be copied before the phase ends."""
    code = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};"
    inline_ptx(code, read_only_args=[address, Int32(num_bytes)])


def mbarrier_try(address: Any, phase: Any) -> Any:
    """Whether the phase of this parity has ended (Int32 0 or 1); sleeps a while before it says no."""
    code = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[address, phase])


def copy_bulk(shared: Any, source: Any, num_bytes: int, barrier: Any) -> None:
    """Asynchronous copy of num_bytes (a multiple of 16, aligned to 16) from global to shared; one thread issues it."""
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
    inline_ptx(code, read_only_args=[shared, source, Int32(num_bytes), barrier])


def copy_async(shared: Any, source: Any) -> None:
    """Asynchronous copy of 16 bytes from global to shared by this thread, see `copy_async_wait`."""
    inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[shared, source])


def copy_async_commit() -> None:
    """End a group: the `copy_async` of this thread since the last one."""
    inline_ptx("cp.async.commit_group;")


def copy_async_wait(groups: int) -> None:
    """Wait for all groups of this thread but the last `groups`; a barrier then shows the bytes to the others."""
    inline_ptx(f"cp.async.wait_group {groups};")


def mma_f16(accumulator: Any, base: int, a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    """accumulator[base : base + 4] += A B, one m16n8k16 product of float16 with float32 sums.

    Thread t of the warp (g = t // 4, c = t % 4) holds, as pairs of float16: a = rows (g, g + 8, g, g + 8) at columns
    (2c, 2c + 1) and, for the last two, (2c + 8, 2c + 9); b = those same k for column g of B. The accumulator holds rows
    g, g, g + 8, g + 8 at columns 2c, 2c + 1. Subnormal float16 operands count in full.
    """
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    sums = [accumulator[base + i] for i in range(4)]
    result = inline_ptx(code, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *sums])
    for i in range(4):
        accumulator[base + i] = result[i]


def transpose_8x8(x: Any) -> Any:
    """Transpose an 8 x 8 matrix of 16-bit values; thread t of a warp holds row t // 4, columns 2 (t % 4) + {0, 1}."""
    return inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )


def permute_bytes(low: Any, high: Any, selector: Any) -> Any:
    """prmt: byte i of the result is byte (nibble i of selector) of the eight bytes low, high."""
    code = "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[low, high, selector])


def halves_to_floats(x: Any) -> tuple[Any, Any]:
    """The two float16 of a word, low one first, as Float32."""
    code = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
    return inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[x])


def bfloats_to_floats(x: Any) -> tuple[Any, Any]:
    """The two bfloat16 of a word, low one first, as Float32."""
    return bits_to_float(x << 16), bits_to_float(x & Int32(-65536))


def floats_to_halves(low: Any, high: Any) -> Any:
    """Two Float32 rounded to float16 in one word."""
    code = "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[low, high])


def floats_to_bfloats(low: Any, high: Any) -> Any:
    """Two Float32 rounded to bfloat16 in one word."""
    code = "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[low, high])


def bits_to_float(x: Any) -> Any:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def float_to_bits(x: Any) -> Any:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def quotient(x: Any, y: Any) -> Any:
    """x // y of Int32, x >= 0, y > 0: two thirds of the instructions that signs would take."""
    return inline_ptx("div.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[x, y])


def add(x: Any, y: Any) -> Any:
    """x + y, never fused with a product."""
    return inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def subtract(x: Any, y: Any) -> Any:
    """x - y, never fused with a product."""
    return inline_ptx("sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def multiply(x: Any, y: Any) -> Any:
    """x y, never fused with a sum."""
    return inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def multiply_add(x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    code = "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};"
    return inline_ptx(code, write_only_types=[Float32], read_only_args=[x, y, z])


def reciprocal(x: Any) -> Any:
    """1 / x, to about 1 unit in the last place."""
    return inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def reciprocal_root(x: Any) -> Any:
    """1 / sqrt(x), to about 2 units in the last place."""
    return inline_ptx("rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def exp2(x: Any) -> Any:
    return inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def maximum(x: Any, y: Any) -> Any:
    return inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def minimum(x: Any, y: Any) -> Any:
    return inline_ptx("min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def shuffle_xor(x: Any, distance: int) -> Any:
    """The Float32 of lane (own lane xor distance)."""
    code = "shfl.sync.bfly.b32 {$w0}, {$r0}, " + str(distance) + ", 0x1f, 0xffffffff;"
    return inline_ptx(code, write_only_types=[Float32], read_only_args=[x])


def shuffle_from(x: Any, lane: Any) -> Any:
    """The Float32 or Int32 of another lane."""
    kind = Float32 if isinstance(x, Float32) else Int32
    code = "shfl.sync.idx.b32 {$w0}, {$r0}, {$r1}, 0x1f, 0xffffffff;"
    return inline_ptx(code, write_only_types=[kind], read_only_args=[x, lane])


def count_lanes(condition: Any) -> Any:
    """How many lanes of the warp have condition (Int32, non-zero) true."""
    code = (
        "{ .reg .pred p; .reg .b32 t; setp.ne.s32 p, {$r0}, 0; "
        "vote.sync.ballot.b32 t, p, 0xffffffff; popc.b32 {$w0}, t; }"
    )
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[condition])


def add_release(address: Any, value: int) -> Any:
    """Atomic add to an Int32 in global memory, acquire and release at GPU scope; the old value."""
    code = "atom.add.acq_rel.gpu.global.s32 {$w0}, [{$r0}], {$r1};"
    return inline_ptx(code, write_only_types=[Int32], read_only_args=[address, Int32(value)])


def address_of(tensor: Any) -> Any:
    """The global address of a tensor's first element."""
    return Int64(tensor.iterator.toint())
