"""vLLM's server of the OpenAI API, in this process. Importing this module imports neither vLLM nor torch."""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config.base import Dtype
from rlhf_core.config.engines.rollout import VllmEngineConfig

HEALTH = "/health"

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Served:
    """Settings of a server, passed through a pipe so that no command line contains the token."""

    name: str  # of the model, for its clients
    folder: Path
    config: VllmEngineConfig
    dtype: Dtype
    stop_token_ids: tuple[int, ...]  # that end a reply
    chat_template: str | None = None  # None: the tokenizer's own
    token: str | None = field(default=None, repr=False)  # None: no authentication


def run_server(served: Served, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, and end the engine's process before returning.

    Raises ValueError if the model cannot be served with these settings, StageError if its weights are incomplete.
    """
    import uvloop

    from rlhf_core.models.folders.folder import read_config
    from rlhf_core.models.weights import require_fit
    from rlhf_core.rollout.engine import EngineSettings
    from rlhf_core.rollout.vllm.images import decode_as_training_does
    from rlhf_core.rollout.vllm.settings import engine_arguments

    # Before the engine starts, so that a signal during its start raises an exception, which closes resources.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    require_fit(served.folder, "causal")
    decode_as_training_does()
    settings = EngineSettings(served.config, served.dtype, seed=secrets.randbelow(2**31))  # of requests without one
    arguments = engine_arguments(served.folder, read_config(served.folder), settings)
    del arguments["worker_extension_cls"]  # reads weights back, which is needed for publishes only
    arguments |= {"model": str(served.folder), "served_model_name": [served.name], "skip_tokenizer_init": False}
    if served.chat_template is not None:
        arguments["chat_template"] = served.chat_template
    try:
        uvloop.run(_serve(served, arguments, listener))
    except KeyboardInterrupt:
        return


async def _serve(served: Served, arguments: dict[str, Any], listener: socket.socket) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.launcher import serve_http
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(args).update(arguments)
    async with build_async_engine_client(args) as engine:
        tasks: Any = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        # vLLM has built the stack already: `add_middleware` would be too late.
        app.middleware_stack = RequireToken(app.middleware_stack or app.build_middleware_stack(), served.token)
        await init_app_state(engine, app.state, args, tasks)
        # vLLM stops at the end-of-text token only, while a template may end a turn with another.
        app.state.openai_serving_chat.default_sampling_params["stop_token_ids"] = list(served.stop_token_ids)
        port = listener.getsockname()[1] if listener.family != socket.AF_UNIX else 0
        shutdown = await serve_http(app, listener, port=port, log_level="warning", access_log=False)
    await shutdown


class RequireToken:
    """Respond with 401 to requests without the token, except health checks: vLLM's own key guards some paths only."""

    def __init__(self, app: Application, token: str | None) -> None:
        self._app = app
        self._header = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if self._header is None or scope["type"] == "lifespan" or scope["path"] == HEALTH or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        from fastapi.responses import JSONResponse

        message = "the token is missing or wrong: send the header `Authorization: Bearer TOKEN`"
        error = {"error": {"message": message, "type": "Unauthorized", "param": None, "code": 401}}
        await JSONResponse(error, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        assert self._header is not None
        header = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(header, self._header)
