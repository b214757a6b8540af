"""The pictures of a calibration report, drawn with matplotlib's object interface (no pyplot, no display).

Every picture can be read in grey print and by colour-blind people: luminance-monotone maps (cividis, viridis), hatches,
markers and line styles beside colour, and labels with units.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MAX_COLUMNS = 640  # wider maps are pooled: a picture has no more pixels to show them
OUTLIER_FACTOR = (
    6.0  # a channel is an outlier above this many times the median channel of its layer (LLM.int8 uses 6.0)
)
DPI = 150

_LINES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"), ("X", "-."))
_PRECISION_STYLE = {4: ("#f2e9c9", ""), 8: ("#7b8fb5", "///"), 16: ("#1d2b4f", "xxx")}


def pooled(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows [L, K] with neighbouring channels joined by their maximum until at most `MAX_COLUMNS` are left."""
    width = rows.shape[1]
    if width <= MAX_COLUMNS:
        return rows
    edges = np.linspace(0, width, MAX_COLUMNS + 1).astype(int)[:-1]
    joined: NDArray[np.float64] = np.maximum.reduceat(rows, edges, axis=1)
    return joined


def outlier_share(magnitude: NDArray[np.float64]) -> float:
    """Share of the channels [K] above `OUTLIER_FACTOR` times their median; 0 where the median is 0."""
    median = float(np.median(magnitude))
    return float((magnitude > OUTLIER_FACTOR * median).mean()) if median > 0 else 0.0


def magnitude_map(
    title: str,
    unit: str,
    layers: Sequence[int],
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    borders: Sequence[float],
) -> bytes:
    """Two heat maps of channel magnitude, layers [L] down and channels [K] across: as found, and in stored order.

    `borders` [L] is the stored channel at which 8 bits begin (K or NaN: nowhere); a line marks it in the lower map.
    """
    from matplotlib.colors import LogNorm

    figure = _figure(10, 2.4 + 2 * min(0.07 * len(layers), 3.0))
    axes = figure.subplots(2, 1, sharex=True)
    maps = [pooled(before), pooled(after)]
    positive = np.concatenate([part[part > 0] for part in maps])
    low, high = (np.quantile(positive, 0.001), positive.max()) if positive.size else (0.1, 1.0)
    norm = LogNorm(vmin=min(low, high / 10), vmax=high)
    image: Any = None
    for ax, values, caption in zip(axes, maps, ("before: channels as found", "after: stored order"), strict=True):
        extent = (0, before.shape[1], len(layers) - 0.5, -0.5)
        image = ax.imshow(
            np.ma.masked_less_equal(values, 0),
            aspect="auto",
            interpolation="nearest",
            cmap=_viridis_with_white(),
            norm=norm,
            extent=extent,
        )
        ax.set_title(caption, loc="left", fontsize=10)
        _layer_axis(ax, layers)
    _border(axes[1], borders, before.shape[1])
    axes[1].set_xlabel("channel" + (" (neighbours joined by their maximum)" if before.shape[1] > MAX_COLUMNS else ""))
    figure.colorbar(image, ax=list(axes), label=unit, pad=0.01)
    figure.suptitle(title, fontsize=12)
    return _png(figure)


def outlier_lines(layers: Sequence[int], shares: dict[str, NDArray[np.float64]]) -> bytes:
    """Per cent of outlier channels against the layer; one line per point, `shares[point]` [L], NaN: no value."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(10, 3.4)
    ax = figure.subplots()
    for (name, values), (marker, line) in zip(shares.items(), _LINES, strict=False):
        ax.plot(
            layers, 100 * values, marker=marker, linestyle=line, markersize=5, label=name, color=_colour(name, shares)
        )
    ax.set_xlabel("layer")
    ax.set_ylabel(f"channels above {OUTLIER_FACTOR:g} x median, %")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(True, linewidth=0.4, alpha=0.6)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _png(figure)


def precision_bars(layers: Sequence[int], maps: dict[str, list[NDArray[np.int64]]]) -> bytes:
    """The precision map in stored order: a bar per layer and point, cut where the activation bits change.

    `maps[point][i]` holds the bits (4, 8 or 16) of each block of layer `layers[i]`; empty where there is none.
    """
    from matplotlib.patches import Patch

    figure = _figure(10, 1.6 + min(0.16 * len(layers), 9.0))
    axes = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for ax, (name, rows) in zip(axes, maps.items(), strict=True):
        for row, bits in enumerate(rows):
            cuts = np.flatnonzero(np.diff(bits)) + 1
            edges = [0, *cuts.tolist(), len(bits)]
            for start, stop in zip(edges[:-1], edges[1:], strict=True):
                if start == stop:
                    continue
                colour, hatch = _PRECISION_STYLE[int(bits[start])]
                span = (100 * start / len(bits), 100 * (stop - start) / len(bits))
                ax.broken_barh(
                    [span], (row - 0.42, 0.84), facecolor=colour, hatch=hatch, edgecolor="#333", linewidth=0.3
                )
        ax.set_title(name, fontsize=10)
        ax.set_xlim(0, 100)
        ax.set_ylim(len(layers) - 0.5, -0.5)
        ax.set_xlabel("channels, %")
        _layer_axis(ax, layers)
        if ax is not axes[0]:
            ax.set_ylabel("")
    styles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#333", label=f"{bits}-bit activations")
        for bits, (colour, hatch) in _PRECISION_STYLE.items()
        if any((row == bits).any() for rows in maps.values() for row in rows)
    ]
    figure.legend(handles=styles, loc="outside upper center", ncols=len(styles), frameon=False)
    return _png(figure)


def error_map(layers: Sequence[int], linears: Sequence[str], errors: NDArray[np.float64]) -> bytes:
    """Relative squared output error [linears, layers] as a labelled heat map; NaN where a linear has no value."""
    from matplotlib.colors import LogNorm

    figure = _figure(10, 1.7 + 0.36 * len(linears))
    ax = figure.subplots()
    masked = np.ma.masked_invalid(np.where(errors > 0, errors, np.nan))
    low, high = (float(masked.min()), float(masked.max())) if masked.count() else (0.01, 1.0)
    norm = LogNorm(vmin=min(low, high / 2), vmax=high)
    image = ax.imshow(masked, aspect="auto", interpolation="nearest", cmap="cividis", norm=norm)
    ax.set_yticks(range(len(linears)), linears)
    step = max(1, -(-len(layers) // 40))
    ax.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.set_xlabel("layer")
    if len(layers) <= 40:
        for row in range(len(linears)):
            for column in range(len(layers)):
                if errors[row, column] > 0:
                    colour = "black" if float(norm(errors[row, column])) > 0.55 else "white"
                    text = f"{100 * errors[row, column]:.2g}" if errors[row, column] < 0.995 else ">99"
                    ax.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
    figure.colorbar(image, ax=ax, label="relative squared error", pad=0.01)
    ax.set_title("numbers in the cells are per cent" if len(layers) <= 40 else "", loc="left", fontsize=9)
    return _png(figure)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _layer_axis(ax: Axes, layers: Sequence[int]) -> None:
    step = max(1, -(-len(layers) // 12))
    ax.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.set_ylabel("layer")


def _border(ax: Axes, borders: Sequence[float], width: int) -> None:
    from matplotlib.patheffects import Normal, Stroke

    for row, border in enumerate(borders):
        if border < width:
            (line,) = ax.plot([border, border], [row - 0.5, row + 0.5], color="white", linewidth=1.0)
            line.set_path_effects([Stroke(linewidth=2.4, foreground="black"), Normal()])


def _viridis_with_white() -> Any:
    """viridis, white where a channel is dead (magnitude 0)."""
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad="white")


def _colour(name: str, names: dict[str, Any]) -> Any:
    """Evenly spaced viridis colours, the brightest end left out because it fades on paper."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.85 * list(names).index(name) / max(1, len(names) - 1))
