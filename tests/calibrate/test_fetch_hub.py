"""Downloads from a hub of our own on the loopback interface: what is asked for, in which order, and how it fails."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from w4a4.calibrate.source import open_source
from w4a4.configs.errors import NotFoundError, ResourceError, UnsupportedError, W4A4Error

PACKABLE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of one folder as org/model, and remembers which were asked for."""

    def __init__(self) -> None:
        self.folder = Path()
        self.asked: list[str] = []
        self.failure: tuple[int, str] | None = None
        self.declared_size: int | None = None

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.failure is not None:
            status, code = self.failure
            return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
        if path.startswith("/api/models/org/model"):
            siblings = [
                {"rfilename": file.name, "size": self.declared_size or file.stat().st_size, "blobId": "0" * 40}
                for file in sorted(self.folder.iterdir())
            ]
            body = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode()
            return 200, {"Content-Type": "application/json"}, body
        path = path.replace("/resolve/main/", f"/resolve/{COMMIT}/")
        prefix = f"/org/model/resolve/{COMMIT}/"
        file = self.folder / path.removeprefix(prefix)
        if not path.startswith(prefix) or not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body = file.read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, headers, body = served.answer(path)
            if self.command == "GET" and "/resolve/" in path:
                served.asked.append(path.rpartition("/")[2])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_is_fetched_once_config_first(hub: Hub, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    hub.folder = model_folder("llama", shard_size="300KB", tokenizer=True, **PACKABLE)
    (hub.folder / "pytorch_model.bin").write_bytes(b"never fetched")
    (hub.folder / "modeling.py").write_text("never fetched")
    source = open_source("org/model")
    assert source.identity.revision == COMMIT
    assert source.identity.kind == "hub"
    assert hub.asked[0] == "config.json"
    assert hub.asked[-1].endswith(".safetensors")
    assert not {"pytorch_model.bin", "modeling.py"} & set(hub.asked)
    expected = {name: tensor for file in hub.folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in source.names():
        assert torch.equal(source.tensor(name), expected[name]), name
    assert source.tokenizer().eos_token_id == 257

    hub.failure = (500, "down")
    asked = len(hub.asked)
    for name in ("org/model@" + COMMIT, "org/model"):
        assert open_source(name, offline=True).identity.revision == COMMIT
    assert open_source("org/model").identity.revision == COMMIT
    assert len(hub.asked) == asked  # the cache is asked first


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.folder = tmp_path / "moe"
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    (hub.folder / "model.safetensors").write_bytes(b"0" * 1000)
    with pytest.raises(UnsupportedError, match="mixture of experts"):
        open_source("org/model")
    assert "model.safetensors" not in hub.asked


@pytest.mark.parametrize(
    ("failure", "said", "hint"),
    [
        ((403, "GatedRepo"), "gated", "hf auth login"),
        ((404, "RepoNotFound"), "no model org/model", "check the name"),
        ((404, "RevisionNotFound"), "no revision 'main'", "org/model@main"),
        ((500, "InternalError"), "did not deliver", "hf download org/model"),
    ],
)
def test_refusals_of_the_hub_end_with_3_and_what_to_type(
    hub: Hub, failure: tuple[int, str], said: str, hint: str
) -> None:
    hub.failure = failure
    with pytest.raises(W4A4Error, match=said) as refused:
        open_source("org/model")
    assert refused.value.exit_code == NotFoundError.exit_code
    assert hint in refused.value.hint


def test_a_model_that_does_not_fit_the_disk_is_told_before(hub: Hub, model_folder: Callable[..., Path]) -> None:
    hub.folder = model_folder("llama", **PACKABLE)
    hub.declared_size = 10**18
    with pytest.raises(ResourceError, match="1000000000.0 GB"):
        open_source("org/model")
    assert "model.safetensors" not in hub.asked


def test_pickled_weights_are_refused_before_they_are_fetched(hub: Hub, model_folder: Callable[..., Path]) -> None:
    hub.folder = model_folder("llama", **PACKABLE)
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="no safetensors"):
        open_source("org/model")
    assert "pytorch_model.bin" not in hub.asked
