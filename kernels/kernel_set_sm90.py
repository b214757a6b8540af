"""Which compiled kernels a model needs on Hopper: so that they can be compiled ahead of time, without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from w4a4.kernels import gemm_sm90, prepack_sm90, quantize_sm90, tuning_sm90
from w4a4.kernels.compile_cache import Kernel
from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.quantize_sm90_variant import Source, for_few_rows, variant_of
from w4a4.kernels.quantize_sm90_variant import unsupported as unquantizable

TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens in one step at which a plan may change."""


@dataclass(frozen=True)
class LinearUse:
    """A linear as it runs: its layout (activation mode applied, equal inputs fused) and what makes its input."""

    layout: LinearLayout
    sources: tuple[Source, ...]
    permuted: bool
    weighted: bool  # the RMSNorm in front of it has a gain


def kernels_of(uses: Iterable[LinearUse], tokens: Iterable[int] = TOKENS) -> dict[str, Kernel]:
    """Every kernel that some of `uses` launches for some number of `tokens`, by name.

    A layout for which no kernel is written (16-bit activations, say) runs through PyTorch and adds nothing.
    """
    kernels: dict[str, Kernel] = {}
    sizes = tuple(tokens)
    for use in uses:
        layout = use.layout
        if prepack_sm90.unsupported(layout) is None:
            bits = tuple(segment.weight_bits for segment in layout.segments)
            for count in sizes:
                variant = tuning_sm90.choose(bits, layout.out_features, layout.in_features, count).variant
                kernels.setdefault(variant.name, gemm_sm90.kernel_of(variant))
        if unquantizable(layout) is None:
            for source in use.sources:
                weighted = use.weighted and source in ("rmsnorm", "rmsnorm_residual")
                chosen = variant_of(source, layout, use.permuted, weighted)
                for one in (chosen, for_few_rows(chosen)):
                    kernels.setdefault(one.name, quantize_sm90.kernel_of(one))
    return kernels
