"""`zerodrift serve`: the exact engine behind the routes of vLLM and OpenAI."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zerodrift.cli import console
from zerodrift.cli.bar import Bar
from zerodrift.cli.serve_shadow import check_receipts, checked, run_shadow
from zerodrift.cli.served_at import ServedAt
from zerodrift.core.errors import ConfigError, MissingExtra

PORT, RESCORE_EVERY, RECEIPT_TOKENS = 8000, 100, 1024
ROLES = ("serving", "training")
OF_ENGINE = (
    "state",
    "served_model_name",
    "max_model_len",
    "max_num_seqs",
    "max_waiting",
    "max_logprobs",
    "max_loras",
    "max_lora_rank",
)
"""Options that say nothing to a proxy."""
OF_SHADOW = (
    "shadow_key_env",
    "rescore_every",
    "drain_updates",
    "receipts",
    "receipt_key",
    "receipt_tokens",
    "require_receipt",
)


CALLERS = "Who may call"
"""A table of its own in the help: beside the ranges of numbers the longest of these names would be cut."""


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a model, or testbed:NAME.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Control routes answer here alone.")
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            help="serving, or training: nobody generates without the token.", rich_help_panel=CALLERS
        ),
    ] = "serving",
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that clients must send to generate.", rich_help_panel=CALLERS),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token of control routes; a new one is made without it.",
            rich_help_panel=CALLERS,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name that clients reach it by.", rich_help_panel=CALLERS),
    ] = None,
    unsafe_allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--unsafe-allow-unauthenticated",
            help="Generate for whoever reaches the port.",
            rich_help_panel=CALLERS,
        ),
    ] = False,
    weight_root: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory below which weight updates are read.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep versions here, and go on with them at the next start."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64: the trainer's.")] = "float32",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Prompt and output together.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that run together.")] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Samples that may wait; more get 429.")] = 1024,
    max_logprobs: Annotated[int, typer.Option(min=1, help="Alternatives that a request may ask for.")] = 100,
    max_loras: Annotated[int, typer.Option(min=1, help="LoRA adapters that are held together.")] = 16,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Of an adapter that is loaded.")] = 64,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Of one request.")] = 8,
    drain_s: Annotated[float, typer.Option(min=0.1, help="After SIGTERM, for what is in flight.")] = 60.0,
    shadow_of: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Be a proxy before the vLLM there; MODEL is the trainer's."),
    ] = None,
    shadow_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with that vLLM's --api-key.")
    ] = None,
    rescore_every: Annotated[
        int, typer.Option(min=0, help="Of a proxy: score one answer in so many by MODEL; 0 none.")
    ] = RESCORE_EVERY,
    drain_updates: Annotated[
        bool, typer.Option("--drain-updates", help="Of a proxy: no request is alive across an update.")
    ] = False,
    receipts: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a proxy: take a receipt at each update, into DIR.")
    ] = None,
    receipt_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What seals them: `zerodrift sync key FILE` makes it.")
    ] = None,
    receipt_tokens: Annotated[
        int, typer.Option(min=256, help="Canary tokens that both sides are asked about.")
    ] = RECEIPT_TOKENS,
    require_receipt: Annotated[
        bool,
        typer.Option("--require-receipt", help="Of a proxy: nobody generates by an update without one."),
    ] = False,
) -> None:
    """Serve a model to RL clients, with the trainer's own bits.

    Speaks OpenAI's /v1/completions and /v1/chat/completions (SSE too),
    vLLM's /inference/v1/generate, and vLLM's control routes: /pause,
    /update_weights and the others that TRL, prime-rl and vLLM's own client
    call. What is not honoured is refused by name; nothing is ignored.

    $ zerodrift serve ./model --weight-root ./checkpoints
    $ curl -s http://127.0.0.1:8000/v1/completions \\
        -H 'content-type: application/json' \\
        -d '{"prompt": "3+4=", "max_tokens": 8, "logprobs": 0}'

    Control routes always need the admin token, whose file is named at the
    start; clients that send no headers take it in the address:

    VLLMClient(base_url="http://zd:TOKEN@127.0.0.1:8000")

    Is it right? Ask the auditor, from another shell:

    $ zerodrift audit ./model --engine vllm --url http://127.0.0.1:8000

    SIGTERM lets what is in flight come to its end first.

    With --shadow-of URL it is a proxy before a vLLM: requests pass as they
    are, with a cache salt that changes with the weights, one answer in so
    many is scored by MODEL, and with --receipts every update is measured.
    See docs/serve.md, "In front of a vLLM".
    """
    if role not in ROLES:
        raise ConfigError(f"--role is {role!r}; use one of {', '.join(ROLES)}")
    _check_options(ctx, shadow=shadow_of is not None)
    _require_extra()
    from zerodrift.serve.access import check_exposure
    from zerodrift.serve.limits import ServeLimits
    from zerodrift.serve.settings import ServeSettings
    from zerodrift.web.access import read_token

    token = None if token_file is None else read_token("--token-file", token_file)
    if role == "training" and token is None:
        raise ConfigError("--role training lets nobody generate without a token; give --token-file FILE")
    check_exposure(host, has_token=token is not None, unsafe=unsafe_allow_unauthenticated)
    if weight_root is not None and not weight_root.is_dir():
        raise ConfigError(
            f"--weight-root {weight_root} is no directory; make it, and let the trainer save below it"
        )
    limits = ServeLimits(
        logprobs=max_logprobs,
        loras=max_loras,
        lora_rank=max_lora_rank,
        body_bytes=max_body_mb * 2**20,
        bodies_bytes=max(8 * max_body_mb, 64) * 2**20,
        drain_s=drain_s,
    )
    scores = rescore_every > 0 or receipts is not None
    if shadow_of is not None and not scores and (weight_root is not None or _is_typed(ctx, "dtype")):
        raise ConfigError(
            "--weight-root and --dtype are of what scores, and --rescore-every 0 scores nothing; leave them out"
        )
    check_receipts(receipts, receipt_key, weight_root, required=require_receipt)
    key = None if shadow_of is None else checked(shadow_of, shadow_key_env)
    where = ServedAt(host, port, admin_port, allow_host or [], token, admin_token_file)
    if shadow_of is not None:
        run_shadow(
            where,
            model=model,
            url=shadow_of,
            key=key,
            rescore_every=rescore_every,
            dtype=dtype,
            weight_root=weight_root,
            drains=drain_updates,
            receipts=receipts,
            receipt_key=receipt_key,
            receipt_tokens=receipt_tokens,
            requires_receipt=require_receipt,
            limits=limits,
        )
        return
    settings = ServeSettings(
        model=served_model_name or model, role=role, weight_root=weight_root, state=state, limits=limits
    )
    engine = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_waiting": max_waiting,
    }
    console.note(f"loading {model}; the address is told when it listens")
    _run(model, engine, where, settings)


def _run(model: str, options: dict[str, Any], where: ServedAt, settings: Any) -> None:
    import tempfile

    from zerodrift.serve.server import RolloutServer

    with tempfile.TemporaryDirectory(prefix="zerodrift-serve-") as directory:
        access, path = where.access(Path(directory))
        with Bar() as bar:
            bar.stage("load the model")
            from zerodrift.engine.engine import Engine

            engine = Engine(model, **options)
        server = RolloutServer(engine, access, settings)
        server.run(where.sockets, ready=lambda: where.say(path))
    console.note("stopped")


def _check_options(ctx: typer.Context, *, shadow: bool) -> None:
    """An option of the other kind of server would be ignored."""
    for name in OF_ENGINE if shadow else OF_SHADOW:
        if _is_typed(ctx, name):
            why = "is of the engine, which runs elsewhere" if shadow else "needs --shadow-of URL"
            raise ConfigError(f"--{name.replace('_', '-')} {why}; leave it out")


def _is_typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _require_extra() -> None:
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra("serving needs uvicorn: pip install 'zerodrift[serve]'") from error
