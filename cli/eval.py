"""`w4a4 eval`: perplexity of a packed checkpoint or a source model, and how far it is from its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from w4a4.cli.console import Console
from w4a4.cli.newest_checkpoint import newest_checkpoint
from w4a4.cli.options import common_options, option, pass_console, runtime_options, source_options
from w4a4.configs.errors import NumericsError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from w4a4.serve.evaluate import LazyLogits


@click.command(
    "eval",
    help="Score the packed checkpoint in DIR, or a source MODEL: perplexity on windows of text that do not overlap, "
    "and with --source the KL divergence and top-1 agreement with that model.",
)
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@option("--source", metavar="MODEL", help="The model to compare with, usually the one that was quantised.")
@option("--data", default="wikitext2", metavar="NAME|FILE", help="As in `calibrate`; WikiText-2's test split is used.")
@option("--seq", type=click.IntRange(min=2), default=2048, help="Tokens in each window.")
@option("--max-tokens", type=click.IntRange(min=2), help="Stop after this many tokens of the text.")
@option("--fail-if-ppl-above", type=float, metavar="X", help="Exit code 6 when the perplexity exceeds X.")
@runtime_options
@source_options
@common_options
@pass_console
def command(
    console: Console,
    model: str | None,
    source: str | None,
    data: str,
    seq: int,
    max_tokens: int | None,
    fail_if_ppl_above: float | None,
    act: str | None,
    kv: str | None,
    device: str | None,
    revision: str | None,
    offline: bool,
    as_json: bool,
) -> None:
    from w4a4.calibrate.source import open_source
    from w4a4.calibrate.text import load_text, token_hash, windows
    from w4a4.cli.scored_model import lazy_logits, open_scored
    from w4a4.serve.evaluate import evaluate

    if model is None:
        model = str(newest_checkpoint())
        console.say(f"evaluating the newest checkpoint, {model}")
    scored = open_scored(model, act, kv, device, offline=offline, revision=revision)
    limit = scored.config.max_position_embeddings
    if seq > limit:
        raise UsageError(f"--seq {seq} is longer than the model's {limit} positions", f"--seq {limit} or less")
    reference: Callable[[Tensor], LazyLogits] | None = None
    if source is not None:
        from w4a4.calibrate.decoder import FloatModel

        opened = open_source(source, offline=offline)
        if opened.config.vocab_size != scored.config.vocab_size:
            raise UsageError(
                f"{source} has a vocabulary of {opened.config.vocab_size}, {model} of {scored.config.vocab_size}",
                "name the model that was quantised",
            )
        reference = lazy_logits(FloatModel(opened, scored.device))
    text = load_text(data, "test", offline=offline)
    ids = windows(scored.tokenizer, text, seq, max_tokens)
    console.say(f"{ids.shape[0]} windows of {seq} tokens from {text.name} {text.split_name}, {text.origin}")
    with console.progress("window") as progress:
        result = evaluate(scored.logits, ids, reference, progress=progress.step)
    facts: dict[str, Any] = {"model": model, "path": scored.path, "act": scored.act, "kv_bits": scored.kv_bits}
    facts |= {"source": source, "data": f"{text.name} {text.split_name}", "origin": text.origin}
    if as_json:
        console.document("evaluation", facts | {"token_sha256": token_hash(ids)} | result.to_dict())
    else:
        rows: list[tuple[str, Any]] = [
            ("model", f"{model}  ({scored.path}, act {scored.act}, KV {scored.kv_bits} bits)"),
            ("data", f"{facts['data']}, {result.tokens_scored:,} tokens scored in windows of {seq}"),
            ("perplexity", f"{result.perplexity:.4f}"),
        ]
        if result.source_perplexity is not None and result.kl is not None and result.top1_agreement is not None:
            error = f" (± {result.log_ratio_stderr:.4f} in ln)" if result.log_ratio_stderr is not None else ""
            rows += [
                ("source", f"{result.source_perplexity:.4f}, ratio {result.ratio:.4f}{error}"),
                ("KL divergence", f"{result.kl:.5f} nats per token"),
                ("top-1 agreement", f"{result.top1_agreement:.2%}"),
            ]
        console.data("\n".join(f"{name:<16} {value}" for name, value in rows))
    if fail_if_ppl_above is not None and not result.perplexity <= fail_if_ppl_above:
        raise NumericsError(
            f"perplexity {result.perplexity:.4f} exceeds the limit of {fail_if_ppl_above:g}",
            "another recipe, more --samples, or --act a8",
        )
