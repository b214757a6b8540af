"""The table of what quantising a large model costs, from `results/quantize-layer-h200.json` (schema: README.md)."""

from __future__ import annotations

import json
from pathlib import Path

from markdown_tables import table

FILE = "quantize-layer-h200.json"


def quantize_layer(results: Path) -> str:
    if not (results / FILE).exists():
        return ""
    found = json.loads((results / FILE).read_text(encoding="utf-8"))
    rows = []
    for record in found["records"]:
        stages = record["stage_seconds"]
        files = sum(stages[name] for name in ("read weights", "save stream", "pack and write", "assemble and publish"))
        rows.append(
            [
                record["model"],
                f"{record['layers']}",
                f"{stages['calibrate']:.1f}",
                f"{stages['promotions']:.1f}",
                f"{stages['transform'] + stages['round']:.1f}",
                f"{files:.1f}",
                f"{record['seconds_per_layer']:.1f}",
                f"{sum(record['once_seconds'].values()):.0f}",
                f"{record['minutes']:.1f}",
                f"{record['peak_device_gib']:.1f}",
            ]
        )
    headers = ["model", "layers", "calibrate, s", "promotions, s", "transform and round, s", "files, s", "a layer, s"]
    headers += ["once, s", "model, minutes", "peak of GPU memory, GiB"]
    first = found["records"][0]
    text = (
        f"{found['gpu']}, torch {found['versions']['torch']}, commit {found['commit'][:12]}; {first['samples']} x "
        f"{first['seq']:,} calibration tokens; one layer with random weights times the number of layers."
    )
    return f"{text}\n\n{table(headers, rows)}"
