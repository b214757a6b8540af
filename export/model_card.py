"""The README.md of a packed checkpoint: what it is, how it was made, what was measured, how to run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from w4a4.configs.recipe import Recipe


def model_card(
    source_name: str, recipe: Recipe, calibration: Mapping[str, Any], summary: Mapping[str, Any],
    quality: Mapping[str, Any] | None,
) -> str:  # fmt: skip
    """Markdown text.

    Args:
        calibration: text, samples, seq, seed, token_sha256. summary: `summarize_checkpoint(...).to_json()`.
        quality: what the quality gate measured, or None.
    """
    lines = [
        "---",
        "library_name: w4a4",
        f"base_model: {source_name}",
        f"tags: [w4a4, {recipe.name}]",
        "---",
        "",
        f"# {source_name}, packed by w4a4",
        "",
        f"Recipe `{recipe.name}`: {recipe.summary}.",
        "",
        "| | |",
        "|---|---|",
        f"| average weight bits (linears) | {summary['weight_bits']:.3f} |",
        f"| average activation bits (by MACs) | {summary['act_bits']:.3f} |",
        f"| share of MACs with 4-bit activations | {100 * summary['mac_share_4bit']:.1f} % |",
        f"| KV cache | {recipe.kv_bits} bits |",
        f"| calibration | {calibration['text']}, {calibration['samples']} x {calibration['seq']} tokens, "
        f"seed {calibration['seed']} |",
    ]
    if quality is not None:
        lines += [
            f"| perplexity, source | {quality['source_perplexity']:.3f} |",
            f"| perplexity, this checkpoint | {quality['perplexity']:.3f} ({quality['path']}) |",
            f"| on | {quality['text']}, {quality['tokens_scored']} tokens scored, windows of {quality['seq']} |",
        ]
    lines += ["", "```", 'w4a4 generate . "The capital of France is"', "w4a4 serve . --port 8000", "```", ""]
    return "\n".join(lines)
