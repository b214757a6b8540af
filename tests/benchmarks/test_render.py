"""The documents are in step with the results, and the tables say what the results say."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def write(folder: Path, name: str, records: list[dict[str, Any]], **header: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({**header, "records": records}))


HEADER = {"gpu": "NVIDIA H200", "driver": "570.1", "versions": {"torch": "2.11"}, "commit": "0123456789abcdef"}


def accuracy(**changes: Any) -> dict[str, Any]:
    record = {
        "model": "SmolLM2-135M",
        "source": "dequantised GGUF (Q4_1)",
        "recipe": "dual",
        "act": "map",
        "kv": 4,
        "text": "wikitext2 test",
        "tokens": 32_752,
        "window": 2048,
        "calibration": {"samples": 64, "seq": 2048, "seed": 0},
        "weight_bits": 4.53,
        "mac_share_4bit": 0.803,
        "ppl": 24.0,
        "ratio": 1.2,
        "kl": 0.21,
        "top1": 0.75,
        "commit": "0123456789abcdef",
    }
    return record | changes


def gemm(**changes: Any) -> dict[str, Any]:
    record = {"model": "Llama-3-8B", "layer": "qkv", "layout": "w4", "m": 16, "n": 6144, "k": 4096}
    record |= {"weight_bytes": 12_582_912, "ours_us": 4.0, "bf16_us": 16.0, "fp8_us": 8.0, "int8_us": 12.0}
    return record | changes


def test_documents_are_in_step_with_the_results(render: ModuleType) -> None:
    assert render.out_of_step(ROOT / "docs", ROOT / "benchmarks" / "results") == [], "run: make docs"


def test_without_results_blocks_are_empty_and_the_rest_stays(render: ModuleType, tmp_path: Path) -> None:
    page = "# Title\n\n<!-- generated: gemm -->\nold\n<!-- end: gemm -->\n\ntail\n"
    rendered = render.render(page, tmp_path, {})
    assert rendered == "# Title\n\n<!-- generated: gemm -->\n<!-- end: gemm -->\n\ntail\n"
    assert render.render(rendered, tmp_path, {}) == rendered


@pytest.mark.parametrize(
    "page",
    [
        "<!-- generated: gemm -->\n",
        "<!-- generated: gemm -->\n<!-- end: kv4 -->\n",
        "<!-- generated: kv4 -->\n<!-- end: kv4 -->\n<!-- generated: kv4 -->\n<!-- end: kv4 -->\n",
        "<!-- generated: unheard-of -->\n<!-- end: unheard-of -->\n",
    ],
)
def test_broken_marks_are_refused(render: ModuleType, tmp_path: Path, page: str) -> None:
    with pytest.raises(ValueError, match="generated block"):
        render.render(page, tmp_path, {})


def test_accuracy_table_gives_mean_and_range_over_seeds(render: ModuleType, tmp_path: Path) -> None:
    runs = [
        accuracy(ppl=20 * ratio, ratio=ratio, calibration={"samples": 64, "seq": 2048, "seed": seed})
        for seed, ratio in enumerate([1.20, 1.26, 1.23])
    ]
    write(tmp_path, "accuracy.json", [accuracy(recipe="rtn", ppl=20_000.0, ratio=1000.0, kl=7.5, top1=0.01), *runs])
    page = render.BLOCKS["accuracy"](tmp_path)
    lines = page.splitlines()
    assert lines[0] == "### SmolLM2-135M, wikitext2 test"
    assert "32,752 tokens scored in windows of 2,048; source: dequantised GGUF (Q4_1)" in lines[2]
    assert "seeds 0, 1, 2; commit 0123456789ab." in lines[2]
    assert "| source | 16 bit | 16 bit |  |  | 20.00 | 1 | 0 | 100 % |  |" in lines
    assert (
        "| dual | 4/8 bit map | 4 bit | 4.53 | 80.3 % | 24.60 (24.00–25.20) | 1.230 (1.200–1.260) "
        "| 0.210 (0.210–0.210) | 75.0 % | 3 |"
    ) in lines
    assert lines.index(next(line for line in lines if line.startswith("| dual"))) < lines.index(
        next(line for line in lines if line.startswith("| rtn"))
    )


def test_precisions_stand_from_gentle_to_harsh(render: ModuleType, tmp_path: Path) -> None:
    records = [accuracy(act=act, kv=kv) for act in ("map", "a16", "a8") for kv in (4, 16)]
    write(tmp_path, "accuracy.json", records)
    rows = [
        line.split(" | ")[1:3] for line in render.BLOCKS["accuracy"](tmp_path).splitlines() if line.startswith("| dual")
    ]
    assert rows == [[act, kv] for act in ("16 bit", "8 bit", "4/8 bit map") for kv in ("16 bit", "4 bit")]


def test_records_against_different_sources_are_refused(render: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "accuracy.json", [accuracy(), accuracy(recipe="quik", ppl=30.0, ratio=1.2)])
    with pytest.raises(ValueError, match="not scored against the same source"):
        render.BLOCKS["accuracy"](tmp_path)


def test_variants_make_the_ablation_alone(render: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "accuracy-ablation.json", [accuracy(variant="int4 in the 8-bit segment")])
    assert render.BLOCKS["accuracy"](tmp_path) == ""
    assert "| dual | int4 in the 8-bit segment | 4/8 bit map |" in render.BLOCKS["accuracy-ablation"](tmp_path)


def test_variants_stand_in_the_order_of_their_file(render: ModuleType, tmp_path: Path) -> None:
    names = ("as shipped", "no GPTQ", "30 %")
    write(tmp_path, "accuracy-ablation.json", [accuracy(variant=name) for name in names])
    page = render.BLOCKS["accuracy-ablation"](tmp_path)
    places = [page.index(f"| {name} |") for name in names]
    assert places == sorted(places)


def test_unknown_and_missing_keys_are_named(render: ModuleType, tmp_path: Path) -> None:
    broken = accuracy(perplexity=3)
    del broken["kl"]
    write(tmp_path, "accuracy.json", [broken])
    with pytest.raises(ValueError, match=r"accuracy.json: a record lacks \['kl'\] and has unknown \['perplexity'\]"):
        render.BLOCKS["accuracy"](tmp_path)
    write(tmp_path, "kv4-h200.json", [{"heads_q": 32}])
    with pytest.raises(ValueError, match="kv4-h200.json: record 0 lacks base16_name"):
        render.BLOCKS["kv4"](tmp_path)


def test_gemm_summary_is_a_geometric_mean(render: ModuleType, tmp_path: Path) -> None:
    records = [gemm(), gemm(layer="o", n=4096, bf16_us=9.0, ours_us=9.0)]
    write(tmp_path, "gemm-h200.json", records, **HEADER)
    page = render.BLOCKS["gemm"](tmp_path)
    operations = 2 * 16 * 4096 * (6144 + 4096)
    over_bf16, over_fp8 = math.sqrt(4.0 * 1.0), math.sqrt(2.0 * 8.0 / 9.0)
    expected = f"| Llama-3-8B | w4 | 16 | {operations / 13.0 / 1e6:.0f} | {over_bf16:.2f}x | {over_fp8:.2f}x |"
    assert expected in page
    assert "Measured on NVIDIA H200; driver 570.1; torch 2.11; commit 0123456789ab." in page
    assert "| qkv | 6144 x 4096 | 4.0 (4.00x) |" in page
    share = 100 * 12_582_912 / 4e-6 / 4.27e12
    assert f"| Llama-3-8B qkv | w4 | 12.6 | 16 | 3.15 | {share:.0f} % |" in page


def test_gemm_summary_counts_the_quantise_kernel_where_every_layer_was_timed_with_it(
    render: ModuleType, tmp_path: Path
) -> None:
    records = [gemm(bf16_us=9.0, with_quantise_us=6.0), gemm(layer="o", n=4096, bf16_us=8.0, with_quantise_us=3.0)]
    write(tmp_path, "gemm-h200.json", [*records, gemm(m=512)], **HEADER)
    rows = [line for line in render.BLOCKS["gemm"](tmp_path).splitlines() if line.startswith("| Llama-3-8B | w4")]
    assert rows[0].endswith("| 2.00x |") and rows[1].endswith("|  |")


def test_a_later_kernel_stands_beside_the_one_before(render: ModuleType, tmp_path: Path) -> None:
    later = [gemm(commit="fedcba9876543210", ours_us=4.0, before_us=5.0), gemm(layer="o", ours_us=2.0, before_us=10.0)]
    write(tmp_path, "gemm-h200.json", [gemm(), gemm(layer="o")], **HEADER, later=later)
    page = render.BLOCKS["gemm"](tmp_path)
    assert "The kernel of commit fedcba987654 and" in page
    assert "| qkv | w4 | 5.0 | 4.0 | 1.250x | 2.000x |\n| o | w4 | 10.0 | 2.0 | 5.000x | 4.000x |" in page
    assert "| geometric mean | w4 |  |  | 2.500x | 2.828x |" in page
    write(tmp_path, "gemm-h200.json", [gemm(), gemm(layer="o")], **HEADER, later=later[:1])
    assert "geometric mean |" not in render.BLOCKS["gemm"](tmp_path)


def test_kv4_and_quantize_tables(render: ModuleType, tmp_path: Path) -> None:
    case = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "batch": 64, "context": 4096}
    case |= {"ours_us": 100.0, "base16_us": 280.0, "base16_name": "Triton split-KV", "bytes": 285_212_672}
    write(tmp_path, "kv4-h200.json", [case], **HEADER)
    assert "| 32/8 x 128 | 64 | 4,096 | 100.0 | 280.0 | Triton split-KV | 2.80x | 67 % |" in render.BLOCKS["kv4"](
        tmp_path
    )
    record = {"kernel": "rmsnorm", "m": 2048, "k": 8192, "bytes": 85_400_000, "ours_us": 25.0}
    write(tmp_path, "quantize-h200.json", [record], **HEADER)
    assert "| rmsnorm | 2,048 | 8,192 | 25.0 | 3.42 | 80 % |" in render.BLOCKS["quantize"](tmp_path)


def test_kv4_write_table(render: ModuleType, tmp_path: Path) -> None:
    assert render.BLOCKS["kv4-write"](tmp_path) == ""
    record = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "tokens": 2048, "us": 15.0, "bytes": 45_252_608}
    write(tmp_path, "kv4-h200.json", [], write=[record | {"fraction": 0.706}], **HEADER)
    assert "| 32/8 x 128 | 2,048 | 15.0 | 3.02 | 71 % |" in render.BLOCKS["kv4-write"](tmp_path)


def test_capacity_is_that_of_the_page_format(render: ModuleType, tmp_path: Path) -> None:
    page = render.BLOCKS["kv-capacity"](tmp_path)
    assert "| Llama-3-8B | 131,072 | 34,816 | 762,939 | 2,872,242 | 3.76x |" in page


def test_bench_table_compares_with_each_baseline(render: ModuleType, tmp_path: Path) -> None:
    record = {"model": "Llama-3-8B", "recipe": "dual", "act": "a8", "kv": 4, "test": "tg128@1024", "batch": 64}
    record |= {"tok_s": 16_000.0, "step_ms": 4.0, "peak_gib": 20.5, "baselines": {"bf16": 8000.0, "fp8": 10_000.0}}
    write(tmp_path, "bench-h200.json", [record], **HEADER)
    page = render.BLOCKS["bench"](tmp_path)
    assert "| tg128@1024 | dual | a8 | 4 bit | 64 | 16,000 | 4.00 | 20.5 | 2.00x | 1.60x |" in page
    write(tmp_path, "bench-cpu.json", [record | {"tok_s": 12.34, "baselines": {}}], device="CPU")
    assert "say nothing about GPUs" in render.BLOCKS["bench"](tmp_path)
    assert "| 12.3 |" in render.BLOCKS["bench"](tmp_path)


def test_plots_are_drawn_deterministic_and_shown(render: ModuleType, tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    docs.mkdir()
    write(results, "gemm-h200.json", [gemm(m=m, ours_us=4.0 + m / 8, bf16_us=9.0 + m) for m in (1, 16, 256)], **HEADER)
    (docs / "accuracy.md").write_text("<!-- generated: accuracy -->\n<!-- end: accuracy -->\n")
    (docs / "performance.md").write_text("<!-- generated: gemm-plots -->\n<!-- end: gemm-plots -->\n")
    (docs / "recipe.md").write_text("<!-- generated: accuracy-ablation -->\n<!-- end: accuracy-ablation -->\n")
    assert render.out_of_step(docs, results) == ["performance.md", "plots/gemm-w4.svg", "plots/roofline-w4.svg"]
    render.write(docs, results)
    assert render.out_of_step(docs, results) == []
    assert "![roofline w4](plots/roofline-w4.svg)" in (docs / "performance.md").read_text()
    first = (docs / "plots" / "roofline-w4.svg").read_bytes()
    render.write(docs, results)
    assert (docs / "plots" / "roofline-w4.svg").read_bytes() == first
    assert first.count(b"<use") > 20, "points and labels are drawn"
    (results / "gemm-h200.json").unlink()
    render.write(docs, results)
    assert list((docs / "plots").iterdir()) == []


def bench_record(**changes: Any) -> dict[str, Any]:
    record = {"model": "Llama-3-8B (random weights)", "recipe": "dual", "act": "a8", "kv": 4, "batch": 16}
    return record | {"test": "tg128@1024", "tok_s": 6000.0, "step_ms": 2.67} | changes


def test_tables_of_the_whole_model_stay_empty_without_their_keys(render: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "bench-h200.json", [bench_record()], **HEADER)
    for block in ("bench-ablation", "bench-breakdown", "bench-engine", "bench-others", "bench-perplexity"):
        assert render.BLOCKS[block](tmp_path) == ""
    assert list(render.performance_plots.plots(tmp_path)) == ["decode-batch.svg"]


def test_other_programs_stand_beside_the_same_test_and_batch(render: ModuleType, tmp_path: Path) -> None:
    others = [
        {
            "model": "Llama-3-8B",
            "what": "decode",
            "test": "tg128@1024",
            "batch": 16,
            "tok_s": {"bf16": 2800, "fp8": 4000},
        },
        {"model": "Llama-3-8B", "what": "prefill", "test": "pp1024", "batch": 8, "tok_s": {"bf16": 42000}},
    ]
    records = [
        bench_record(),
        bench_record(recipe="baseline", act="16", tok_s=3000.0),
        bench_record(batch=8, tok_s=1.0),
    ]
    write(tmp_path, "bench-h200.json", records, **HEADER, others=others)
    lines = render.BLOCKS["bench-others"](tmp_path).splitlines()
    assert lines[0] == ("| model |  | vLLM bf16 | vLLM fp8 | our bf16 | our fp8 | w4a4 | over the best of vLLM |")
    assert lines[2] == "| Llama-3-8B | decode | 2,800 | 4,000 | 3,000 |  | 6,000 | 1.50x |"
    assert lines[3] == "| Llama-3-8B | prefill | 42,000 |  |  |  |  |  |"


def test_engine_ablation_and_perplexity_are_told(render: ModuleType, tmp_path: Path) -> None:
    steady = {
        "batch": 64,
        "step_ms": 3.84,
        "graph_step_ms": 3.7,
        "kernel_sum_ms": 5.5,
        "kernel_busy_ms": 3.79,
        "idle": 0.04,
    }
    requests = {"requests": 256, "prompt": 1024, "output": 512, "tok_s": 15955.0, "seconds": 8.2, "steps": 544}
    ablation = [{"model": "8B", "batch": 1, "step_us": 2400.0, "saved_us": {"qkv": 180.0, "KV write": 80.0}}]
    perplexity = [
        {"model": "S", "act": "a8", "path": "decode", "tokens": 16376, "reference": 20.949, "gpu": 20.991,
         "loss_difference": 0.002, "loss_difference_stderr": 0.0022, "agreement": 0.9, "agreement_clear": 0.992}
    ]  # fmt: skip
    split = {"8B w4a4": {"linears": 3.6, "KV pages": 116.0}}
    step = {"model": "8B", "batch": 1, "step_us": 2400.0, "parts_us": {"linears": 2000.0}, "gap_us": 400.0}
    step |= {"launches": {"linears": 128}}
    write(
        tmp_path, "bench-h200.json", [bench_record()], **HEADER, engine={"steady": [steady], "requests": requests},
        ablation=ablation, perplexity=perplexity, memory_split_gib=split, breakdown=[step],
    )  # fmt: skip
    engine = render.BLOCKS["bench-engine"](tmp_path)
    assert "| 64 | greedy | 3.84 | 3.70 | 5.50 | 3.79 | 4.0 % |" in engine
    assert "256 requests of 1,024 tokens in and 512 out, at once: 15,955 output tokens/s (8.20 s, 544 steps)." in engine
    assert "| 8B | 1 | 2,400 | 180 | 80 |" in render.BLOCKS["bench-ablation"](tmp_path)
    expected = "| S | a8 | decode | 16,376 | 20.949 | 20.991 | +0.0020 ± 0.0022 | 90.0 % | 99.20 % |"
    assert expected in render.BLOCKS["bench-perplexity"](tmp_path)
    plots = render.performance_plots.plots(tmp_path)
    assert sorted(plots) == ["decode-batch.svg", "memory.svg", "step-time.svg"]
    assert all(svg.startswith(b"<?xml") for svg in plots.values())
