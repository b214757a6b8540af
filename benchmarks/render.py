"""Write the generated blocks of the pages in `docs/`, and the plots, from `benchmarks/results`.

    python benchmarks/render.py            write
    python benchmarks/render.py --check    change nothing; exit 1 if a page is out of step with the results

A block whose results are absent stays empty. The same results always give the same pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # the modules beside this script belong to no package

import accuracy_tables  # noqa: E402
import bench_tables  # noqa: E402
import performance_plots  # noqa: E402
import performance_tables  # noqa: E402
import quantize_layer_table  # noqa: E402
from markdown_tables import block_names, replace_block  # noqa: E402

PAGES = ("accuracy.md", "performance.md", "recipe.md")
BLOCKS: dict[str, Callable[[Path], str]] = {
    "accuracy": accuracy_tables.accuracy,
    "accuracy-ablation": accuracy_tables.ablation,
    "accuracy-tasks": accuracy_tables.tasks,
    "bench": performance_tables.bench,
    "bench-ablation": bench_tables.ablation,
    "bench-breakdown": performance_tables.breakdown,
    "bench-engine": bench_tables.engine,
    "bench-others": bench_tables.others,
    "bench-perplexity": bench_tables.perplexity,
    "gemm": performance_tables.gemm,
    "quantize": performance_tables.quantize,
    "quantize-layer": quantize_layer_table.quantize_layer,
    "kv4": performance_tables.kv4,
    "kv4-write": performance_tables.kv4_write,
    "kv-capacity": performance_tables.kv_capacity,
}
PLOTS = {
    "bench-plots": ("decode-batch",),
    "bench-breakdown-plots": ("step-time",),
    "bench-memory-plots": ("memory",),
    "gemm-plots": ("roofline", "gemm"),
    "kv4-plots": ("kv4-context",),
}


def render(page: str, results: Path, plots: dict[str, bytes]) -> str:
    """The page with every generated block filled. Raises ValueError for a block that nothing generates."""
    for name in block_names(page):
        if name in BLOCKS:
            body = BLOCKS[name](results)
        elif name in PLOTS:
            shown = [plot for plot in plots if plot.startswith(PLOTS[name])]
            body = "\n\n".join(f"![{Path(plot).stem.replace('-', ' ')}](plots/{plot})" for plot in shown)
        else:
            raise ValueError(f"no generated block is called {name!r}; known: {', '.join([*BLOCKS, *PLOTS])}")
        page = replace_block(page, name, body)
    return page


def out_of_step(docs: Path, results: Path) -> list[str]:
    """Names of the pages that differ from what the results give, and of plots that are missing or stand alone."""
    plots = performance_plots.plots(results)
    stale = [name for name in PAGES if (text := (docs / name).read_text("utf-8")) != render(text, results, plots)]
    present = {path.name for path in (docs / "plots").glob("*.svg")}
    return stale + sorted(f"plots/{name}" for name in present ^ set(plots))


def write(docs: Path, results: Path) -> None:
    plots = performance_plots.plots(results)
    for name in PAGES:
        page = docs / name
        page.write_text(render(page.read_text("utf-8"), results, plots), "utf-8")
    folder = docs / "plots"
    for old in folder.glob("*.svg"):
        if old.name not in plots:
            old.unlink()
    for name, svg in plots.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(svg)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill the generated blocks of docs/ from benchmarks/results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is out of step")
    check = parser.parse_args().check
    docs, results = ROOT / "docs", ROOT / "benchmarks" / "results"
    if not check:
        write(docs, results)
        return 0
    stale = out_of_step(docs, results)
    for name in stale:
        print(f"docs/{name} is out of step with benchmarks/results; run: make docs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
