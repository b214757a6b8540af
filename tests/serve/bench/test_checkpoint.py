"""The benchmark of a real packed checkpoint, and the runner that `serve` loads from one."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from w4a4.cli.main import run
from w4a4.serve.model_runner import load_runner
from w4a4.serve.settings import ServeSettings

sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_packed import write_packed

    return write_packed(tmp_path_factory.mktemp("packed"), "llama", "dual")


def test_bench_names_the_checkpoint_by_its_hash(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(packed), "--device", "cpu", "--seq", "20", "--gen", "2", "-r", "1", "--baseline", "bf16"]
    assert run([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    digest = hashlib.sha256((packed / "w4a4_manifest.json").read_bytes()).hexdigest()
    assert document["model"] == {"checkpoint": packed.name, "manifest_sha256": digest}
    assert document["check"]["relative_error"] == 0.0
    assert [record["recipe"] for record in document["records"]] == ["dual", "dual", "baseline", "baseline"]
    assert document["records"][0]["baselines"].keys() == {"bf16"}


def test_the_runner_is_what_the_settings_say(packed: Path) -> None:
    settings = ServeSettings(
        checkpoint=packed, device="cpu", act="a8", max_num_seqs=3, max_model_len=64, kv_cache_bytes=1 << 20
    )
    runner = load_runner(settings)
    assert runner.info.max_model_len == 64 and runner.info.num_sink_slots == 6
    assert {plan.act_bits for plan in runner.explain()} == {"8"}
    runner.close()
    assert not hasattr(runner, "model")
