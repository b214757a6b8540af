from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from w4a4.cli.bench import kernel_per_op, parse_batches
from w4a4.configs.errors import UsageError

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
QUICK = ("--random-weights", "--device", "cpu", "--seq", "12", "--gen", "3", "-r", "2")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder / "config.json"


def test_table_of_a_shape_with_random_weights(invoke: Any, config_file: Path) -> None:
    result = invoke("bench", config_file, *QUICK, "--baseline", "bf16")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[0] == "model" and "over bf16" in lines[0]
    assert len(lines) == 5 and all("tiny-shape (random weights)" in line for line in lines[1:])
    assert "pp12" in lines[1] and "tg3@12" in lines[2] and "reference-cpu" in lines[1]
    assert "say nothing about GPUs" in result.err
    assert result.err.index("checked: logits of") < result.err.index("tokens/s")


def test_json_holds_the_header_and_every_record(invoke: Any, config_file: Path, tmp_path: Path) -> None:
    result = invoke("bench", config_file.parent, *QUICK, "--batch", "1,2", "-o", "json", "--plot", tmp_path / "plots")
    assert result.code == 0, result.err
    document = result.document
    assert document["schema"] == "w4a4.bench"
    assert [(r["test"], r["batch"]) for r in document["records"]] == [
        ("pp12", 1), ("pp12", 2), ("tg3@12", 1), ("tg3@12", 2),
    ]  # fmt: skip
    assert document["check"]["relative_error"] == 0.0
    assert document["kernels"]["w4a4"]["down_proj"] == "reference-cpu"
    assert document["versions"]["torch"] and document["device"]
    assert document["model"] == {"weights": "random weights", "seed": 0}
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert plots == {f"{name}.{ending}" for name in ("decode-batch", "memory") for ending in ("png", "svg", "json")}


def test_csv(invoke: Any, config_file: Path) -> None:
    result = invoke("bench", config_file, *QUICK, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert [row["test"] for row in rows] == ["pp12", "tg3@12"]
    assert float(rows[1]["tok_s"]) > 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("llama9-1b", "--random-weights"), 2, "shape of 'llama9-1b' is not known"),
        (("llama3-8b",), 2, "not a packed checkpoint"),
        ((), 3, "no checkpoint was named"),
        (("llama3-8b", "--random-weights", "--batch", "1,two"), 2, "'two' is not a batch size"),
        (("llama3-8b", "--random-weights", "--batch", "\u0663"), 2, "is not a batch size"),
        (("llama3-8b", "--random-weights", "--batch", "\u00b2"), 2, "is not a batch size"),
        (("llama3-8b", "--random-weights", "--seq", "8192"), 2, "more than the model's 8192 positions"),
        (("llama3-8b", "--random-weights", "--gen", "9000"), 2, "more than the model's 8192 positions"),
        (("--server", "http://127.0.0.1:9", "--goodput", "ttft:nan"), 2, "'ttft:nan' is not a limit"),
        (("--server", "http://127.0.0.1:9", "--goodput", "ttft:\u0663"), 2, "is not a limit"),
        (("llama3-8b", "--random-weights", "--baseline", "fp4"), 2, "no baseline 'fp4'"),
        (("--server", "http://127.0.0.1:9"), 3, "no server answers"),
        (("--server", "http://127.0.0.1:9", "--rate", "0"), 2, "0.0 is not in the range x>0"),
        ((__file__, "--random-weights"), 5, "not JSON"),
        (("--server", "ftp://x"), 2, "not an http URL"),
        (("llama3-8b", "llama3-70b", "--random-weights"), 2, "one model at a time"),
    ],
)
def test_what_cannot_be_measured(invoke: Any, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = invoke("bench", *arguments, "--device", "cpu")
    assert result.code == code, result.err
    assert words in result.err


def test_batches() -> None:
    assert parse_batches("8,1,max,8") == (1, 8, "max")
    with pytest.raises(UsageError):
        parse_batches("0")


def test_one_path_stands_for_all_layers() -> None:
    class Model:
        def paths(self) -> dict[str, str]:
            return {f"model.layers.{i}.mlp.down_proj": "int8" if i else "bf16" for i in range(3)}

        def attention_path(self) -> str:
            return "kv4"

        def head_path(self) -> str:
            return "cublas"

    assert kernel_per_op(Model()) == {"down_proj": "bf16, int8", "attention": "kv4", "lm_head": "cublas"}


def test_stages_of_quantising(invoke: Any, model_folder: Any) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = model_folder("llama", tokenizer=True, **sizes)
    before = {path.name for path in model.iterdir()}
    result = invoke("bench", "quantize", model, "--seq", "32", "--device", "cpu", "-o", "json")
    assert result.code == 0, result.err
    stages = result.document["records"]
    assert [stage["stage"] for stage in stages] == [
        "open the source",
        "read and tokenise the text",
        "calibrate",
        "quantise: plan, promotions, first layer",
        "quantise: 1 further layers",
        "embedding, head, hashes, publish",
    ]
    assert all(stage["seconds"] >= 0 and stage["resident_gib"] > 0 for stage in stages)
    assert {path.name for path in model.iterdir()} == before


def test_operations_of_a_layer(invoke: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from w4a4.configs.architecture import ModelConfig
    from w4a4.serve.bench import kernels

    shape = kernels.KernelShape("tiny", ModelConfig.from_hf(CONFIG), (1, 5))
    monkeypatch.setattr(kernels, "shapes_for", lambda device: [shape])
    monkeypatch.setattr(kernels, "MAX_COPIES", 2)
    result = invoke("bench", "kernels", "--device", "cpu", "-r", "1", "-o", "json", "--plot", tmp_path / "plots")
    assert result.code == 0, result.err
    points = json.loads((tmp_path / "plots" / "roofline.json").read_text())
    assert len(points) == 8 and (tmp_path / "plots" / "roofline.svg").stat().st_size > 1000
    records = result.document["records"]
    for tokens in (1, 5):
        assert [record["op"] for record in records if record["m"] == tokens] == [
            "qkv", "o", "gate_up", "down", "rmsnorm + quantise", "quantise", "swiglu + quantise",
        ]  # fmt: skip
    # q, k and v read 128 channels and have 128 + 64 + 64 rows, in int8 on a CPU
    assert records[1]["shape"] == "256 x 128" and records[1]["operations"] == 2 * 5 * 256 * 128
    assert records[1]["bytes"] == 256 * 128 + 5 * (128 + 2 * 256)
    assert all(record["us"] > 0 for record in records) and "bf16_us" in records[0] and "bf16_us" not in records[-1]


def test_tuning_asks_for_kernels_and_a_hopper_gpu(invoke: Any) -> None:
    model = invoke("bench", "smollm2-135m", "--tune", "--device", "cpu")
    assert (model.code, "--tune is about kernels" in model.err) == (2, True)
    layer = invoke("bench", "kernels", "--tune", "--layers", "qkv,gate", "--device", "cpu")
    assert (layer.code, "no layer 'gate'" in layer.err) == (2, True)
    cpu = invoke("bench", "kernels", "--tune", "--device", "cpu")
    assert (cpu.code, "sm_90" in cpu.err) == (4, True)


def test_batches_whose_pages_do_not_fit_are_refused(invoke: Any, config_file: Path) -> None:
    result = invoke("bench", config_file, *QUICK, "--batch", 10**9)
    assert result.code == 7
    assert "the KV pages of 1000000000 sequences of 15 tokens do not fit on cpu" in result.err
    assert "or fewer" in result.err
