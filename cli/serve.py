"""`w4a4 serve`: a checkpoint behind OpenAI's HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from w4a4.cli.console import Console
from w4a4.cli.options import common_options, option, pass_console, runtime_options

MIB = 1 << 20


@click.command(
    "serve",
    help="Answer HTTP requests in OpenAI's format with the packed checkpoint in DIR, and chat at /. Ctrl-C or SIGTERM "
    "lets running requests finish first.",
)
@click.argument("checkpoint", metavar="DIR", type=click.Path(path_type=Path))
@option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 = every interface.")
@option("--port", type=click.IntRange(0, 65535), default=8000, help="0 = any free port.")
@option("--api-key", "api_keys", multiple=True, envvar="W4A4_API_KEY", help="Ask clients for one of these; repeatable.")
@option("--served-model-name", metavar="NAME", help="Name in the API. Default: the folder's.")
@option("--chat-template", type=click.Path(path_type=Path), help="Jinja file instead of the checkpoint's template.")
@option("--max-model-len", type=click.IntRange(min=1), help="Tokens of prompt and answer. Default: the model's.")
@option("--max-num-seqs", type=click.IntRange(min=1), default=64, help="Requests that run at once.")
@option("--max-num-batched-tokens", type=click.IntRange(min=1), default=2048, help="New tokens in one step.")
@option("--max-queued", type=click.IntRange(min=0), default=1024, help="Requests that may wait; then 503.")
@option("--gpu-memory-utilization", type=float, default=0.9, help="Share of the GPU's memory to use.")
@option("--kv-cache-memory", type=click.IntRange(min=1), default=1024, metavar="MIB", help="KV pages on a CPU.")
@option("--prefix-caching/--no-prefix-caching", default=True, help="Keep and share the pages of equal prompts.")
@option("--eager", is_flag=True, help="No CUDA graphs.")
@option("--seed", type=int, help="Fixes the draws of requests without a seed.")
@option("--max-body", type=click.IntRange(min=1), default=8, metavar="MIB", help="Largest request body; then 413.")
@option("--request-timeout", type=float, default=30.0, help="Seconds a client may take to send a request.")
@option("--shutdown-timeout", type=float, default=30.0, help="Seconds for running requests when stopped.")
@option("--allow-origin", "allow_origins", multiple=True, help="Web origin that may call (CORS); repeatable.")
@option("--explain", is_flag=True, help="Print bits and kernel of every layer as they would run, and stop.")
@runtime_options
@common_options
@pass_console
def command(
    console: Console,
    checkpoint: Path,
    kv_cache_memory: int,
    max_body: int,
    prefix_caching: bool,
    eager: bool,
    explain: bool,
    as_json: bool,
    kv: str | None,
    act: str | None,
    device: str | None,
    served_model_name: str | None,
    **options: Any,
) -> int:
    from w4a4.serve.settings import ServeSettings

    settings = ServeSettings(
        checkpoint=checkpoint,
        served_model_name=served_model_name or "",
        kv_cache_bytes=kv_cache_memory * MIB,
        max_body_bytes=max_body * MIB,
        is_prefix_caching=prefix_caching,
        is_eager=eager,
        device=device or "auto",
        act=act or "auto",
        kv_bits=int(kv) if kv else None,
        log_level="debug" if console.verbosity > 0 else "warning" if console.verbosity < 0 else "info",
        **options,
    )
    if explain:
        return _explain(console, settings, as_json)
    return _serve(console, settings, as_json)


def _explain(console: Console, settings: Any, as_json: bool) -> int:
    from w4a4.serve.model_runner import load_runner
    from w4a4.serve.process import explain_lines

    runner = load_runner(settings)
    layers = explain_lines(runner)
    runner.close()
    if as_json:
        console.document("explanation", {"device": runner.info.device, "path": runner.info.path, "layers": layers})
        return 0
    console.say(f"{settings.model_name} on {runner.info.device}: {runner.info.path}")
    console.table(
        ["layer", "N x K", "weights", "activations", "kernel"],
        [[str(cell) for cell in layer.values()] for layer in layers],
    )
    return 0


def _serve(console: Console, settings: Any, as_json: bool) -> int:
    from w4a4.serve.process import ServerProcess, bind

    bound = bind(settings.host, settings.port)  # a port in use is told before the model is loaded
    try:
        from w4a4.serve.model_runner import load_runner
        from w4a4.serve.tokenizer import load_tokenizer

        console.say(f"loading {settings.checkpoint}")
        runner = load_runner(settings)
        tokenizer = load_tokenizer(settings.checkpoint, chat_template=settings.chat_template)
        info = runner.info
        console.say(f"{settings.model_name} on {info.device}: {info.path}")
        console.say(
            f"KV cache: {info.num_pages} pages of {info.page_size} tokens = {info.num_pages * info.page_size} tokens; "
            f"up to {settings.max_num_seqs} requests at once of at most {info.max_model_len} tokens"
        )

        def announce(url: str) -> None:
            console.say(f"ready: {url} (chat), {url}/v1 (OpenAI API)")
            if as_json:
                console.document("server", {"url": url, "model": settings.model_name, "path": info.path})

        process = ServerProcess(settings, bound, runner, tokenizer, tokenizer.eos_ids, announce)
        return process.run()
    finally:
        bound.close()
