"""The calibration report: one HTML file that needs nothing else, and its pictures as PNG files beside it.

It draws what it is given in `ReportData` and knows no statistics, recipe or checkpoint.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from w4a4.calibrate import figures

POINT_TITLES = {
    "attn_in": "input of q, k, v",
    "attn_out": "input of o",
    "mlp_in": "input of gate, up",
    "mlp_hidden": "input of down",
}


@dataclass(frozen=True)
class PointProfile:
    """One input of linears in one layer.

    magnitude: f32 [K], per channel as found (absmax over the calibration tokens).
    permutation: int [K], stored channel j reads channel permutation[j]; None: identity.
    block_precision: int [blocks], activation bits (4, 8, 16) of equal blocks in stored order; empty: not chosen yet.
    stored_magnitude: f32 [K] in stored order where a rotation makes it more than a reordering of `magnitude`.
    """

    layer: int
    point: str
    magnitude: Tensor
    permutation: Tensor | None = None
    block_precision: Tensor | None = None
    stored_magnitude: Tensor | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.point):
            raise ValueError(f"a point's name makes a file name: letters, digits, _ and - only, got {self.point!r}")
        width = self.magnitude.numel()
        for name in ("permutation", "stored_magnitude"):
            value = getattr(self, name)
            if value is not None and value.shape != self.magnitude.shape:
                raise ValueError(f"{name} must be [{width}] like magnitude, got {tuple(value.shape)}")

    @property
    def before(self) -> NDArray[np.float64]:
        return _numbers(self.magnitude)

    @property
    def after(self) -> NDArray[np.float64]:
        if self.stored_magnitude is not None:
            return _numbers(self.stored_magnitude)
        return self.before if self.permutation is None else self.before[self.permutation.cpu().numpy()]

    @property
    def bits(self) -> NDArray[np.int64]:
        if self.block_precision is None:
            return np.empty(0, np.int64)
        values: NDArray[np.int64] = self.block_precision.cpu().numpy().astype(np.int64)
        return values

    @property
    def border(self) -> float:
        """The stored channel at which blocks of more than 4 bits begin; NaN if there is none."""
        above = np.flatnonzero(self.bits > 4)
        return float(above[0]) * self.magnitude.numel() / self.bits.size if above.size else float("nan")


@dataclass(frozen=True)
class LinearError:
    """Relative squared output error of one linear, E‖y_q - y‖² / E‖y‖² over calibration tokens."""

    layer: int
    name: str
    relative: float


@dataclass(frozen=True)
class ReportData:
    """What the report shows. `facts` becomes a table of two columns, `notes` a list of sentences."""

    model: str
    points: tuple[PointProfile, ...]
    errors: tuple[LinearError, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    magnitude_unit: str = "largest |x| over the calibration tokens"

    @property
    def layers(self) -> list[int]:
        return sorted({point.layer for point in self.points} | {error.layer for error in self.errors})

    def profiles(self, point: str) -> dict[int, PointProfile]:
        """The profiles of one point by layer, in the order of layers."""
        found = {profile.layer: profile for profile in self.points if profile.point == point}
        if len({profile.magnitude.numel() for profile in found.values()}) > 1:
            raise ValueError(f"the profiles of {point!r} differ in width")
        return dict(sorted(found.items()))

    @property
    def point_names(self) -> list[str]:
        """Known points in the order of the decoder layer, then others by name."""
        names = {profile.point for profile in self.points}
        return [name for name in POINT_TITLES if name in names] + sorted(names - set(POINT_TITLES))


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    caption: str
    png: bytes

    @property
    def data_uri(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


def write_report(data: ReportData, folder: Path) -> Path:
    """Write `report.html` and `figures/*.png` into `folder` and return the path of the page.

    Files appear whole or not at all. Raises OSError as the file system does.
    """
    pictures = draw(data)
    figure_folder = folder / "figures"
    figure_folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        _replace(figure_folder / f"{picture.name}.png", picture.png)
    page = folder / "report.html"
    _replace(page, render(data, pictures).encode("utf-8"))
    return page


def draw(data: ReportData) -> list[Picture]:
    """Every picture the data allows, in the order of the page."""
    pictures = []
    names = data.point_names
    if data.points:
        pictures.append(_outliers(data, names))
    for name in names:
        profiles = data.profiles(name)
        before = np.stack([profile.before for profile in profiles.values()])
        after = np.stack([profile.after for profile in profiles.values()])
        title = _title(name)
        png = figures.magnitude_map(
            f"{name}: {title}",
            data.magnitude_unit,
            list(profiles),
            before,
            after,
            [profile.border for profile in profiles.values()],
        )
        caption = (
            f"Channel magnitude at {name} ({title}, {before.shape[1]:,} channels), one row per layer; both maps share "
            "one logarithmic scale. Above: channels as found. Below: in stored order, where 8-bit blocks "
            "stand last, right of the line."
        )
        dead = int((before == 0).sum())
        if dead:
            caption += f" White: {dead:,} dead {'channel' if dead == 1 else 'channels'} (always 0)."
        pictures.append(Picture(f"magnitude-{name}", f"Channel magnitude, {title}", caption, png))
    if any(profile.bits.size for profile in data.points):
        pictures.append(_precision(data, names))
    if data.errors:
        pictures.append(_errors(data))
    return pictures


def render(data: ReportData, pictures: Iterable[Picture]) -> str:
    """The page as HTML; every value from outside is escaped."""
    from jinja2 import Environment, StrictUndefined

    source = (files("w4a4.calibrate") / "data" / "report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(source)
    linears = list(dict.fromkeys(error.name for error in data.errors))
    relative = {(error.layer, error.name): error.relative for error in data.errors}
    return template.render(
        data=data,
        pictures=list(pictures),
        shares=_share_rows(data),
        linears=linears,
        error_rows=[(layer, [relative.get((layer, name)) for name in linears]) for layer in data.layers],
        factor=figures.OUTLIER_FACTOR,
    )


def _share_rows(data: ReportData) -> list[tuple[str, str, int, float, float, float | None]]:
    """Per point: name, title, K, mean and largest outlier share, mean share of channels above 4 bit."""
    rows = []
    for name in data.point_names:
        profiles = data.profiles(name).values()
        shares = [figures.outlier_share(profile.before) for profile in profiles]
        maps = [profile.bits for profile in profiles if profile.bits.size]
        above = float(np.mean([(bits > 4).mean() for bits in maps])) if maps else None
        width = next(iter(profiles)).magnitude.numel()
        rows.append((name, _title(name), width, float(np.mean(shares)), max(shares), above))
    return rows


def _outliers(data: ReportData, names: list[str]) -> Picture:
    shares = {}
    for name in names:
        profiles = data.profiles(name)
        shares[f"{name} ({_title(name)})" if name in POINT_TITLES else name] = np.array(
            [figures.outlier_share(profiles[layer].before) if layer in profiles else np.nan for layer in data.layers]
        )
    caption = (
        f"Share of channels whose magnitude is more than {figures.OUTLIER_FACTOR:g} times the median of their layer. "
        "These channels would set the step of a 4-bit scale shared by all."
    )
    return Picture("outlier-share", "Outlier channels", caption, figures.outlier_lines(data.layers, shares))


def _precision(data: ReportData, names: list[str]) -> Picture:
    maps = {}
    for name in names:
        profiles = data.profiles(name)
        maps[name] = [profiles[layer].bits if layer in profiles else np.empty(0, np.int64) for layer in data.layers]
    caption = "Activation bits of each layer's channels in stored order. Hatched parts are kept at 8 bits or more."
    return Picture("precision-map", "Precision map", caption, figures.precision_bars(data.layers, maps))


def _errors(data: ReportData) -> Picture:
    linears = list(dict.fromkeys(error.name for error in data.errors))
    layers = sorted({error.layer for error in data.errors})
    values = np.full((len(linears), len(layers)), np.nan)
    for error in data.errors:
        values[linears.index(error.name), layers.index(error.layer)] = error.relative
    caption = (
        "Squared error of each linear's output over its squared output, E‖y_q − y‖² / E‖y‖², on calibration tokens; "
        "activations and weights quantised; brighter is worse."
    )
    return Picture("layer-error", "Error per layer", caption, figures.error_map(layers, linears, values))


def _title(point: str) -> str:
    return POINT_TITLES.get(point, point)


def _numbers(values: Tensor) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = values.detach().double().cpu().numpy()
    return numbers


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
