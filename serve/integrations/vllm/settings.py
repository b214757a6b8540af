"""What the plug-in itself can be told: the key "w4a4" of vLLM's --additional-config. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from w4a4.configs.errors import UsageError
from w4a4.kernels.layout import ActMode

KEY = "w4a4"


@dataclass(frozen=True)
class PluginSettings:
    """act: activation bits; None: the checkpoint's map on a CPU, 8 everywhere on a GPU.

    per_rank_scales: let each rank of tensor parallelism quantise its own slice of o_proj's and down_proj's input, with
    scales of its own. It exchanges less; without it any number of ranks gives the numbers of one.
    """

    act: ActMode | None = None
    per_rank_scales: bool = False

    @classmethod
    def of(cls, additional_config: Mapping[str, Any] | None) -> PluginSettings:
        """What stands under our key.

        Raises:
            UsageError: a name or value that is none of ours.
        """
        given = (additional_config or {}).get(KEY, {})
        allowed = {"act": (None, "map", "a8", "a16"), "per_rank_scales": (True, False)}
        assert allowed.keys() == {field.name for field in fields(cls)}
        if not isinstance(given, dict) or any(value not in allowed.get(name, ()) for name, value in given.items()):
            raise UsageError(
                f"--additional-config: {KEY} holds {given!r}",
                '{"act": "map" | "a8" | "a16", "per_rank_scales": true | false}, or a part of it',
            )
        return cls(**given)
