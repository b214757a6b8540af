"""`w4a4 generate`: continue one prompt, printing text as it comes."""

from __future__ import annotations

import queue
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from w4a4.cli.console import Console
from w4a4.cli.newest_checkpoint import newest_checkpoint
from w4a4.cli.options import common_options, generation_config_option, option, pass_console, runtime_options
from w4a4.cli.scored_model import packed_folder
from w4a4.configs.errors import NumericsError, UsageError

if TYPE_CHECKING:
    from w4a4.serve.request import Output
    from w4a4.serve.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128


@click.command(
    "generate",
    help="Continue PROMPT with the packed checkpoint in DIR (default: the newest one), streaming. PROMPT - is read "
    "from standard input.",
)
@click.argument("arguments", metavar="[DIR] PROMPT", nargs=-1, required=True)
@option("--max-tokens", type=click.IntRange(min=1), help="New tokens. Default: 128, or what the model's length leaves.")
@option("--temperature", type=click.FloatRange(min=0), help="0: greedy. Default: the model's, or 0.")
@option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), help="Default: the model's, or 1 (off).")
@option("--top-k", type=click.IntRange(min=0), help="0: off. Default: the model's, or 0.")
@option("--min-p", type=click.FloatRange(min=0, max=1), help="0: off. Default: the model's, or 0.")
@option("--repetition-penalty", type=click.FloatRange(min=0.01, max=100), help="1: off. Default: the model's, or 1.")
@generation_config_option
@option("--seed", type=int, help="Seed of the draws; default: another one each time.")
@option("--chat", is_flag=True, help="Put PROMPT into the model's chat template, as a user's message.")
@option("--system", metavar="TEXT", help="With --chat: the system message.")
@runtime_options
@common_options
@pass_console
def command(
    console: Console,
    arguments: tuple[str, ...],
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
    generation_config: str,
    seed: int | None,
    chat: bool,
    system: str | None,
    act: str | None,
    kv: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    folder, prompt = _arguments(console, arguments)
    if system is not None and not chat:
        raise UsageError("--system needs --chat")
    from w4a4.configs.generation_config import NOTHING_SAID, PartialSampling, read_generation_config
    from w4a4.export.checkpoint import open_checkpoint
    from w4a4.serve.engine import Engine, EngineConfig
    from w4a4.serve.model_runner import load_runner
    from w4a4.serve.request import FinishReason, Request, SamplingParams
    from w4a4.serve.settings import ServeSettings
    from w4a4.serve.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder, open_checkpoint(folder).config.vocab_size)
    defaults = read_generation_config(folder).sampling if generation_config == "auto" else NOTHING_SAID
    sampling = PartialSampling(temperature, top_p, top_k, min_p, repetition_penalty).or_else(defaults)
    try:
        params = SamplingParams(**{"temperature": 0.0, **sampling.said}, seed=seed, max_tokens=max_tokens)
        ids = _chat_ids(tokenizer, prompt, system) if chat else tokenizer.encode(prompt)
    except ValueError as error:
        raise UsageError(str(error)) from error
    settings = ServeSettings(
        checkpoint=folder,
        device=device,
        act=act,
        kv_bits=int(kv) if kv else None,
        max_num_seqs=1,
        kv_cache_bytes=256 << 20,
    )
    begin = time.monotonic()
    runner = load_runner(settings)
    console.say(f"{folder}: loaded in {time.monotonic() - begin:.1f} s, {runner.info.path}")
    if defaults.said:
        console.say(f"from generation_config.json: {defaults}; --generation-config none leaves it out")
    if max_tokens is None:
        room = max(1, runner.info.max_model_len - len(ids))
        params = replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, room))
    news: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def listen(outputs: list[Output]) -> None:
        for output in outputs:
            news.put(output)

    config = EngineConfig(max_num_seqs=1, eos_ids=tokenizer.eos_ids)
    engine = Engine(runner, lambda tokens, skip: tokenizer.decode(tokens, skip), config, listen)
    engine.start()
    try:
        try:
            engine.submit([Request("generate", tuple(ids), params)])
        except ValueError as error:
            raise UsageError(str(error)) from error
        total: Output | None = None
        while total is None or total.finish_reason is None:
            output = news.get()
            if not as_json:
                sys.stdout.write(output.text)
                sys.stdout.flush()
            if total is None:
                total = output
            else:
                total.extend(output)
    finally:
        engine.shutdown()
    if engine.failure is not None:
        raise engine.failure
    if total.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise NumericsError(f"the generation ended early: {total.error}", "w4a4 verify")
    seconds, rate = _speed(total)
    if as_json:
        console.document(
            "generation",
            {"checkpoint": folder, "path": runner.info.path, "prompt": prompt, "text": total.text}
            | {"finish_reason": str(total.finish_reason), "num_prompt_tokens": total.num_prompt_tokens}
            | {"num_output_tokens": total.num_output_tokens, "seconds": seconds, "tokens_per_second": rate},
        )
        return
    click.echo()
    console.say(f"{total.num_output_tokens} tokens, {rate:.1f} per second after the first ({total.finish_reason})")


def _arguments(console: Console, arguments: tuple[str, ...]) -> tuple[Path, str]:
    """(checkpoint folder, prompt) from `[DIR] PROMPT`."""
    if len(arguments) > 2:
        raise UsageError(f"expected [DIR] PROMPT, got {len(arguments)} arguments", "put quotes around the prompt")
    prompt = arguments[-1]
    if len(arguments) == 1:
        folder = newest_checkpoint()
        console.say(f"the newest checkpoint, {folder}")
    else:
        folder = packed_folder(arguments[0])
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise UsageError("the prompt is empty")
    return folder, prompt


def _chat_ids(tokenizer: Tokenizer, prompt: str, system: str | None) -> list[int]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    text = tokenizer.render_chat([*messages, {"role": "user", "content": prompt}], {})
    return tokenizer.encode(text, add_special_tokens=False)


def _speed(output: Output) -> tuple[float, float]:
    """(seconds from submission to end, tokens per second after the first token)."""
    times = output.times
    if times is None or not times.finished:
        return 0.0, 0.0
    decoding = times.finished - times.first_token
    rate = (output.num_output_tokens - 1) / decoding if decoding > 0 and output.num_output_tokens > 1 else 0.0
    return times.finished - times.arrived, rate
