from __future__ import annotations

import csv
import io
import json

from w4a4.serve.bench.records import Record, as_csv, header, markdown, rows

RECORD = Record(
    model="m (random weights)", size_gib=5.1234, recipe="dual", act="a8", kv=4, path="int8", test="tg128@1024", batch=8,
    seq=1024, gen=128, tok_s=4321.98765, spread=0.0123456, repetitions=5, step_ms=1.850962, peak_gib=12.5,
    kv_tokens=3_500_000, roofline=0.61,
)  # fmt: skip
OTHER = Record(
    model="m", size_gib=15.0, recipe="baseline", act="16", kv=16, path="bf16-cublas", test="pp1024", batch=1, seq=1024,
    gen=0, tok_s=99.5, spread=0.0, repetitions=1, step_ms=10.0,
)  # fmt: skip


def test_dict_has_the_documented_keys_and_leaves_absent_ones_out() -> None:
    values = RECORD.with_baselines({"bf16": 2000.04999}).to_dict()
    assert values["tok_s"] == 4322.0 and values["spread"] == 0.0123 and values["kv_tokens"] == 3_500_000
    assert values["baselines"] == {"bf16": 2000.0}
    assert {"model", "recipe", "act", "kv", "test", "batch", "seq", "gen", "step_ms", "peak_gib"} <= values.keys()
    assert not {"peak_gib", "kv_tokens", "roofline", "composed", "baselines"} & OTHER.to_dict().keys()
    json.dumps(values)


def test_rows_show_ratios_and_spread() -> None:
    records = [RECORD.with_baselines({"bf16": 2000.0, "fp8": 4000.0}), OTHER]
    assert header(records)[-2:] == ["over bf16", "over fp8"]
    ours, other = rows(records)
    assert ours[-2:] == ["2.16x", "1.08x"] and other[-2:] == ["-", "-"]
    assert ours[6] == "4,322 ± 1.2 %" and other[6] == "99.5"
    assert ours[2] == "dual/a8/4" and other[2] == "bf16/16/16"
    assert ours[9] == "61 %" and other[9] == "-"
    assert len(ours) == len(header(records))


def test_markdown_and_csv_hold_the_same_records() -> None:
    records = [RECORD.with_baselines({"bf16": 2000.0}), OTHER]
    lines = markdown(records).splitlines()
    assert len(lines) == 4 and all(line.count("|") == lines[0].count("|") for line in lines)
    table = list(csv.DictReader(io.StringIO(as_csv(records))))
    assert table[0]["tok_s"] == "4322.0" and table[0]["bf16_tok_s"] == "2000.0"
    assert table[1]["kv_tokens"] == "" and table[1]["bf16_tok_s"] == ""
