"""What vLLM calls when it starts, in every process (entry point group `vllm.general_plugins`)."""

from __future__ import annotations

import logging

from w4a4.configs.errors import UnsupportedError
from w4a4.serve.integrations.vllm.versions import require_vllm


def register() -> None:
    """Make quantisation method "w4a4" and attention backend CUSTOM known. May be called again.

    In a vLLM outside the supported range it does nothing but say so: other models must still be served.
    """
    try:
        require_vllm()
    except UnsupportedError as error:
        logging.getLogger(__name__).warning("w4a4 is not registered: %s", error.message)
        return
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from w4a4.serve.integrations.vllm.config import NAME, W4A4Config
    from w4a4.serve.integrations.vllm.kv4_backend import BACKEND_PATH

    register_quantization_config(NAME)(W4A4Config)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
