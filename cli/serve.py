"""`w4a4 serve`: a packed checkpoint behind OpenAI's HTTP interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from w4a4.cli.console import Console
from w4a4.cli.newest_checkpoint import newest_checkpoint
from w4a4.cli.options import common_options, generation_config_option, option, pass_console, runtime_options
from w4a4.cli.scored_model import packed_folder
from w4a4.cli.vllm_engine import EngineCommand, serve_in_vllm
from w4a4.configs.errors import UsageError


@click.command(
    "serve",
    cls=EngineCommand,
    help="Serve the packed checkpoint in DIR (default: the newest one): /v1/completions, /v1/chat/completions, more. "
    "SIGTERM lets running requests finish. With --engine vllm, options that are not listed here are vLLM's.",
)
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@option("--engine", type=click.Choice(["w4a4", "vllm"]), default="w4a4", help="vllm: many GPUs, by our plug-in.")
@option("-tp", "--tensor-parallel-size", type=click.IntRange(min=1), default=1, help="GPUs of one model; vllm only.")
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", type=click.IntRange(0, 65535), default=8000, help="0: any free one.")
@option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    envvar="W4A4_API_KEY",
    help="Accept this key; may be repeated. Default: no keys.",
)
@option("--allow-origin", "allow_origins", multiple=True, metavar="URL", help="CORS origin; may be repeated.")
@option("--served-model-name", default="", metavar="NAME", help="Default: the folder's name.")
@option("--chat-template", type=click.Path(path_type=Path, dir_okay=False), help="Jinja file instead of the model's.")
@option("--max-num-seqs", type=int, default=64, help="Sequences that run at once.")
@option("--max-num-batched-tokens", type=int, default=2048, help="Tokens in one step, prefill and decode together.")
@option("--max-model-len", type=int, help="Tokens of one sequence; default: the model's, as far as the pages reach.")
@option("--gpu-memory-utilization", type=float, default=0.9, help="Share of the GPU's memory, weights included.")
@option(
    "--kv-cache-memory",
    type=click.FloatRange(min=0, max=2**20, min_open=True),
    default=1.0,
    help="GiB of KV pages on a CPU.",
)
@option("--max-queued", type=int, default=1024, help="Requests that may wait; more get 503.")
@option("--prefix-caching/--no-prefix-caching", default=True, help="Reuse the KV pages of equal beginnings.")
@option("--eager", is_flag=True, help="No CUDA graphs.")
@option("--seed", type=int, help="Seed for requests that bring none.")
@generation_config_option
@option("--max-body-bytes", type=int, default=8 << 20, help="Greatest request; more gets 413.")
@option("--request-timeout", type=float, default=30.0, help="Seconds that a client may take to send a request.")
@option("--shutdown-timeout", type=float, default=30.0, help="Seconds that requests may go on after SIGTERM.")
@option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@option("--explain", is_flag=True, help="Print bits and kernel of every linear that would run, and stop.")
@runtime_options
@common_options
@pass_console
def command(
    console: Console,
    /,
    folder: Path | None,
    engine: str,
    tensor_parallel_size: int,
    act: str | None,
    kv: str | None,
    device: str | None,
    kv_cache_memory: float,
    prefix_caching: bool,
    eager: bool,
    generation_config: str,
    explain: bool,
    as_json: bool,
    **values: Any,
) -> int:
    if folder is None:
        folder = newest_checkpoint()
        console.say(f"serving the newest checkpoint, {folder}")
    folder = packed_folder(str(folder))
    if engine == "vllm":
        chosen = {"tensor_parallel_size": tensor_parallel_size, "act": act, "kv": kv}
        return serve_in_vllm(console, click.get_current_context(), folder, chosen)
    if tensor_parallel_size > 1:
        raise UsageError(f"our own engine runs on one GPU, got -tp {tensor_parallel_size}", "add --engine vllm")
    from w4a4.configs.generation_config import NOTHING_SAID, read_generation_config
    from w4a4.export.checkpoint import open_checkpoint
    from w4a4.serve.model_runner import load_runner
    from w4a4.serve.process import ServerProcess, bind, explain_lines
    from w4a4.serve.settings import ServeSettings
    from w4a4.serve.tokenizer import load_tokenizer

    settings = ServeSettings(
        checkpoint=folder,
        device=device,
        act=act,
        kv_bits=int(kv) if kv else None,
        kv_cache_bytes=int(kv_cache_memory * 2**30),
        is_prefix_caching=prefix_caching,
        is_eager=eager,
        **values,
    )
    if explain:
        lines = explain_lines(load_runner(settings))
        if as_json:
            console.document("explanation", {"checkpoint": folder, "linears": lines})
        else:
            console.table(list(lines[0]), [list(line.values()) for line in lines])
        return 0

    def on_ready(url: str) -> None:
        if as_json:
            console.document("server", {"url": url, "model": settings.model_name})
        else:
            console.say(f"ready: {url}   (try: curl {url}/v1/models)")

    with bind(settings.host, settings.port) as bound:  # before the model is loaded: a port in use is told at once
        vocab_size = open_checkpoint(folder).config.vocab_size
        tokenizer = load_tokenizer(folder, vocab_size, chat_template=settings.chat_template)
        sampling = read_generation_config(folder).sampling if generation_config == "auto" else NOTHING_SAID
        runner = load_runner(settings)
        info = runner.info
        console.say(
            f"{settings.model_name} on {info.device}: {info.path}; {info.num_pages} pages hold "
            f"{info.num_pages * info.page_size:,} tokens, up to {info.max_model_len:,} in one sequence"
        )
        if sampling.said:
            console.say(f"where a request does not say: {sampling} (generation_config.json)")
        return ServerProcess(settings, bound, runner, tokenizer, tokenizer.eos_ids, on_ready, sampling).run()
