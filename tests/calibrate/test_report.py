import io
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from w4a4.calibrate import figures
from w4a4.calibrate.report import LinearError, PointProfile, ReportData, draw, write_report

LAYERS = 6
WIDTHS = {"attn_in": 576, "attn_out": 576, "mlp_in": 576, "mlp_hidden": 1536}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def profile(layer: int, point: str, width: int, outliers: int) -> PointProfile:
    generator = torch.Generator().manual_seed(layer * 100 + width)
    magnitude = torch.empty(width).log_normal_(0.0, 0.4, generator=generator)
    magnitude[torch.randperm(width, generator=generator)[:outliers]] *= 30
    permutation = magnitude.argsort()
    block_precision = torch.full((width // 64,), 4, dtype=torch.uint8)
    block_precision[-2:] = 8
    return PointProfile(layer, point, magnitude, permutation, block_precision)


def report_data(model: str = "SmolLM2-135M", layers: int = LAYERS) -> ReportData:
    points = tuple(
        profile(layer, point, width, outliers=1 + 2 * layer)
        for layer in range(layers)
        for point, width in WIDTHS.items()
    )
    errors = tuple(
        LinearError(layer, name, 0.02 * (1 + layer) * (1 + index))
        for layer in range(layers)
        for index, name in enumerate(LINEARS)
    )
    facts = {"model": model, "calibration": "wikitext2, 16 x 2,048 tokens, seed 0"}
    return ReportData(model, points, errors, facts, ("Layer 0 was promoted.",))


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png))[..., :3]


@pytest.fixture(scope="module")
def pictures() -> dict[str, np.ndarray]:
    return {picture.name: pixels(picture.png) for picture in draw(report_data())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written report, `statistics/report.html` and its figures."""
    page = write_report(report_data(), tmp_path_factory.mktemp("report") / "statistics")
    return page.parent


def test_every_picture_is_there_and_none_is_blank(pictures: dict[str, np.ndarray]) -> None:
    expected = {f"magnitude-{point}" for point in WIDTHS} | {"outlier-share", "precision-map", "layer-error"}
    assert set(pictures) == expected
    for name, image in pictures.items():
        assert image.std() > 0.05, name
        middle = image[image.shape[0] // 4 : 3 * image.shape[0] // 4, image.shape[1] // 4 : 3 * image.shape[1] // 4]
        assert middle.std() > 0.02, f"the middle of {name} is blank"


def test_order_shows_in_the_second_map_only(pictures: dict[str, np.ndarray]) -> None:
    """Sorted channels make neighbouring columns alike; as found they are noise."""
    image = pictures["magnitude-mlp_in"].mean(2)
    height, width = image.shape
    columns = slice(width // 8, 3 * width // 4)
    roughness = np.abs(np.diff(image[:, columns], axis=1)).mean(1)
    upper, lower = roughness[: height // 2].max(), roughness[int(height * 0.62) : int(height * 0.8)].mean()
    assert upper > 5 * lower


def test_pictures_are_deterministic() -> None:
    data = report_data(layers=1)
    assert [picture.png for picture in draw(data)] == [picture.png for picture in draw(data)]


def test_page_needs_no_other_file_and_pngs_stand_beside_it(folder: Path) -> None:
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 7
    assert not re.search(r"""(src|href)=["'](?!data:image/png;base64,|#)""", html), "nothing is loaded from elsewhere"
    assert html.count('alt="') == 7
    assert "Layer 0 was promoted." in html and "16 x 2,048 tokens" in html
    assert "<td>5</td><td>12.00</td>" in html, "layer 5, q_proj: 0.02 * 6"
    pngs = sorted(path.name for path in (folder / "figures").iterdir())
    assert len(pngs) == 7 and all(name.endswith(".png") for name in pngs)


def test_shares_in_the_table_are_those_of_the_data(folder: Path) -> None:
    html = (folder / "report.html").read_text(encoding="utf-8")
    row = re.search(r"<tr><td>mlp_hidden: input of down</td><td>1,536</td>\s*(.*?)</tr>", html, re.S)
    assert row is not None
    numbers = re.findall(r"<td>([\d.]+) %</td>", row.group(1))
    assert numbers == [f"{100 * 6 / 1536:.2f}", f"{100 * 11 / 1536:.2f}", f"{100 * 2 / 24:.1f}"]


def test_what_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    hostile = '<script>alert("x")</script>&'
    data = ReportData(
        hostile,
        (PointProfile(0, "attn_in", torch.rand(64) + 0.1),),
        (LinearError(0, hostile, 0.5),),
        {hostile: hostile},
        (hostile,),
    )
    html = write_report(data, tmp_path).read_text(encoding="utf-8")
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 6, "title, heading, fact twice, note, column of the error table"


def test_a_point_cannot_name_a_file_elsewhere() -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        PointProfile(0, "../../attn_in", torch.rand(64))


def test_statistics_alone_make_a_report(tmp_path: Path) -> None:
    data = ReportData("m", (PointProfile(0, "attn_in", torch.rand(64) + 0.1),))
    html = write_report(data, tmp_path).read_text(encoding="utf-8")
    assert "not chosen" in html
    assert [picture.name for picture in draw(data)] == ["outlier-share", "magnitude-attn_in"]


def test_dead_channels_are_told_apart_and_an_all_dead_layer_draws() -> None:
    magnitude = torch.rand(64) + 0.1
    magnitude[:3] = 0
    caption = draw(ReportData("m", (PointProfile(0, "attn_in", magnitude),)))[1].caption
    assert "3 dead channels" in caption
    assert pixels(draw(ReportData("m", (PointProfile(0, "attn_in", torch.zeros(64)),)))[1].png).std() > 0


def test_stored_order_follows_the_permutation_or_the_given_magnitudes() -> None:
    magnitude = torch.tensor([3.0, 1.0, 2.0])
    permuted = PointProfile(0, "attn_in", magnitude, torch.tensor([1, 2, 0]))
    assert permuted.after.tolist() == [1.0, 2.0, 3.0]
    rotated = PointProfile(0, "attn_in", magnitude, stored_magnitude=torch.tensor([2.0, 2.0, 2.0]))
    assert rotated.after.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match=r"permutation must be \[3\]"):
        PointProfile(0, "attn_in", magnitude, torch.tensor([0, 1]))


def test_pooling_keeps_outliers() -> None:
    rows = np.ones((2, 28_672))
    rows[1, 12_345] = 900.0
    joined = figures.pooled(rows)
    assert joined.shape == (2, figures.MAX_COLUMNS)
    assert joined.max() == 900.0 and (joined == 900.0).sum() == 1
    assert int(joined[1].argmax()) == 12_345 * figures.MAX_COLUMNS // 28_672


def test_outlier_share_counts_above_six_medians() -> None:
    magnitude = np.ones(200)
    magnitude[:3] = [6.0, 6.01, 100.0]
    assert figures.outlier_share(magnitude) == 0.01
    assert figures.outlier_share(np.zeros(8)) == 0.0


def test_figures_use_no_global_state() -> None:
    import matplotlib.pyplot

    before = matplotlib.pyplot.get_fignums()
    draw(report_data(layers=1))
    assert matplotlib.pyplot.get_fignums() == before


@pytest.mark.e2e
def test_page_opens_in_a_browser(folder: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    page = folder / "report.html"
    shot = tmp_path / "shot.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,4200"]
    subprocess.run(
        [browser, *options, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True, timeout=90
    )
    image = imread(shot)[..., :3]
    bands = np.array_split(image, 8, axis=0)
    colourful = [float((band.max(2) - band.min(2)).max()) > 0.3 for band in bands]
    assert image.std() > 0.1
    assert sum(colourful) >= 6, f"images are missing: {colourful}"
