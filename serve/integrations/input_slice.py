"""The share of a linear's input that one rank of a tensor-parallel group owns, and the stored columns that go with it.

A rank owns an equal, contiguous slice of the input's channels, and takes every stored column that reads one of them, in
stored order. An integer column stands alone, so any order can be cut; what ties columns together is the online Hadamard
and a group of columns with one scale, and those must lie inside a slice. Ranks may get segments of different widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from w4a4.kernels.layout import LinearLayout
from w4a4.kernels.packing import pack_int4, unpack_int4


def cut_problem(layout: LinearLayout, perm: Tensor | None, num_ranks: int) -> str | None:
    """Why the input of a linear cannot be cut into `num_ranks` slices; None: it can."""
    if num_ranks == 1:
        return None
    width = layout.in_features
    if width % num_ranks:
        return f"{width} channels do not divide by {num_ranks}"
    owners = _owners(layout, perm, num_ranks)
    for name, run in (("Hadamard", layout.hadamard), ("group of one scale", layout.group_size or 1)):
        if run > 1 and bool((owners.view(-1, run) != owners.view(-1, run)[:, :1]).any()):
            return f"a {name} of {run} channels would be cut (a slice has {width // num_ranks})"
    for rank in range(num_ranks):
        int4 = sum(width for bits, width in _weight_widths(layout, owners == rank) if bits == 4)
        if int4 % 8:
            return f"rank {rank} would get {int4} int4 columns, not a multiple of 8"
    return None


@dataclass(frozen=True)
class InputSlice:
    """One rank's share.

    layout: what it runs. perm: int32 [K / ranks] or None, counted inside the slice. Of the stored tensors it takes
    these columns, all int64: int4, int8 and bf16 of each weight tensor, scales of `.weight_scale`.
    """

    layout: LinearLayout
    perm: Tensor | None
    int4: Tensor
    int8: Tensor
    bf16: Tensor
    scales: Tensor

    @classmethod
    def of(cls, layout: LinearLayout, perm: Tensor | None, rank: int, num_ranks: int) -> InputSlice:
        """The share of `rank`.

        Raises:
            ValueError: the input cannot be cut (`cut_problem` says why).
        """
        problem = cut_problem(layout, perm, num_ranks)
        if problem:
            raise ValueError(problem)
        mine = _owners(layout, perm, num_ranks) == rank
        kinds: dict[int, list[Tensor]] = {4: [], 8: [], 16: []}
        segments, scales = [], []
        column, scale = 0, 0
        for segment in layout.segments:
            part = mine[column : column + segment.width]
            kinds[segment.weight_bits].append(part)
            count = int(part.sum())
            if count:
                segments.append(replace(segment, width=count))
                if segment.weight_bits < 16:
                    scales.append(scale)
            column += segment.width
            scale += segment.weight_bits < 16
        if layout.group_size:
            scales = mine.view(-1, layout.group_size)[:, 0].nonzero().flatten().tolist()
        int4, int8, bf16 = (_columns(parts) for parts in kinds.values())
        own_perm = None
        if perm is not None:
            own_perm = (perm.long().cpu()[mine] - rank * (layout.in_features // num_ranks)).to(torch.int32)
        kept = torch.tensor(scales, dtype=torch.int64, device="cpu")
        return cls(replace(layout, segments=tuple(segments)), own_perm, int4, int8, bf16, kept)

    def cut(self, suffix: str, stored: Tensor) -> Tensor:
        """The rank's part of the stored tensor of that suffix, on its device."""
        if suffix == "weight_packed":
            return pack_int4(unpack_int4(stored).index_select(1, self.int4.to(stored.device)))
        columns = {"weight_int8": self.int8, "weight_outlier": self.bf16, "weight_scale": self.scales}
        return stored.index_select(1, columns[suffix].to(stored.device))


def segment_weights(layout: LinearLayout, stored: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """One weight per segment of `layout`, from stored tensors by suffix (whole ones or a rank's)."""
    kinds = {
        4: unpack_int4(stored["weight_packed"]) if "weight_packed" in stored else None,
        8: stored.get("weight_int8"),
        16: stored.get("weight_outlier"),
    }
    position = dict.fromkeys(kinds, 0)
    parts = []
    for segment in layout.segments:
        whole, start = kinds[segment.weight_bits], position[segment.weight_bits]
        assert whole is not None
        parts.append(whole[:, start : start + segment.width].contiguous())
        position[segment.weight_bits] = start + segment.width
    return tuple(parts)


def _owners(layout: LinearLayout, perm: Tensor | None, num_ranks: int) -> Tensor:
    """int64 [K] on the CPU, whatever the default device is while a model is built: the rank of each stored column."""
    channels = torch.arange(layout.in_features, device="cpu") if perm is None else perm.long().cpu()
    return channels // (layout.in_features // num_ranks)


def _weight_widths(layout: LinearLayout, mine: Tensor) -> list[tuple[int, int]]:
    counts = torch.split(mine, [segment.width for segment in layout.segments])
    return [(segment.weight_bits, int(part.sum())) for segment, part in zip(layout.segments, counts, strict=True)]


def _columns(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).nonzero().flatten() if parts else torch.empty(0, dtype=torch.int64, device="cpu")
