"""What a server may be told, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from w4a4.configs.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `w4a4 serve`. The command line resolves flag > W4A4_* > --config > these defaults.

    `max_model_len` None is the model's own length, as far as the KV pages allow. `kv_cache_bytes` sizes the pages on
    a CPU; on a GPU `gpu_memory_utilization` of its memory is used, weights included. `device` None is the best that is
    here, `act` None what suits it. `request_timeout` is how long a client may take to send a request;
    `shutdown_timeout` how long requests may go on after SIGTERM.
    """

    checkpoint: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    served_model_name: str = ""
    chat_template: Path | None = None
    device: str | None = None
    act: str | None = None
    kv_bits: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int = 1 << 30
    max_queued: int = 1024
    is_prefix_caching: bool = True
    is_eager: bool = False
    seed: int | None = None
    max_body_bytes: int = 8 << 20
    request_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "max_num_batched_tokens", "max_body_bytes", "request_timeout", "kv_cache_bytes")
        for name in positive:
            if getattr(self, name) <= 0:
                raise UsageError(f"{flag(name)} is {getattr(self, name)}, expected more than 0")
        for name in ("max_queued", "shutdown_timeout"):
            if getattr(self, name) < 0:
                raise UsageError(f"{flag(name)} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise UsageError(f"--max-model-len is {self.max_model_len}, expected more than 0")
        if not 0.05 <= self.gpu_memory_utilization <= 1:
            raise UsageError(f"--gpu-memory-utilization is {self.gpu_memory_utilization}, expected 0.05 to 1")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise UsageError("--api-key is empty or not ASCII", hint="leave it out to serve without keys")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.checkpoint.resolve().name


def flag(name: str) -> str:
    """The option that sets a field: max_num_seqs -> --max-num-seqs."""
    assert any(field.name == name for field in fields(ServeSettings))
    return "--" + name.removeprefix("is_").replace("_", "-")
