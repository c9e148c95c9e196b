"""vLLM's own server of the OpenAI API, in this process. Importing this file imports neither vLLM nor torch."""

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
    """What a server is told. It gets it through a pipe: no command line holds the token."""

    name: str  # of the model, for its clients
    folder: Path
    config: VllmEngineConfig
    dtype: Dtype
    stop_token_ids: tuple[int, ...]  # that end a reply
    chat_template: str | None = None  # none: the tokenizer's own
    token: str | None = field(default=None, repr=False)  # none: whoever reaches the socket may ask


def run_server(served: Served, listener: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM; ends the engine's process before it returns.

    Raises ValueError where the model cannot be served with these settings, StageError where its weights are not whole.
    """
    import uvloop

    from rlhf_core.models.folders.folder import read_config
    from rlhf_core.models.weights import require_fit
    from rlhf_core.rollout.engine import EngineSettings
    from rlhf_core.rollout.vllm.images import decode_as_training_does
    from rlhf_core.rollout.vllm.settings import engine_arguments

    # Also while the engine starts: what is open then is closed as an exception unwinds.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    require_fit(served.folder, "causal")
    decode_as_training_does()
    settings = EngineSettings(served.config, served.dtype, seed=secrets.randbelow(2**31))  # of requests without one
    arguments = engine_arguments(served.folder, read_config(served.folder), settings)
    del arguments["worker_extension_cls"]  # reads weights back, which no publish asks for here
    arguments |= {"model": str(served.folder), "served_model_name": [served.name], "skip_tokenizer_init": False}
    if served.chat_template is not None:
        arguments["chat_template"] = served.chat_template
    try:
        uvloop.run(_answer(served, arguments, listener))
    except KeyboardInterrupt:
        return


async def _answer(served: Served, arguments: dict[str, Any], listener: socket.socket) -> None:
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
        # vLLM has built it already, so that `add_middleware` comes too late.
        app.middleware_stack = RequireToken(app.middleware_stack or app.build_middleware_stack(), served.token)
        await init_app_state(engine, app.state, args, tasks)
        # vLLM knows the end-of-text token alone, and a template may end a turn by another.
        app.state.openai_serving_chat.default_sampling_params["stop_token_ids"] = list(served.stop_token_ids)
        port = listener.getsockname()[1] if listener.family != socket.AF_UNIX else 0
        ended = await serve_http(app, listener, port=port, log_level="warning", access_log=False)
    await ended


class RequireToken:
    """Answers 401 to requests without the token, but for the server's health: vLLM's own key guards some paths only."""

    def __init__(self, app: Application, token: str | None) -> None:
        self._app = app
        self._header = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if self._header is None or scope["type"] == "lifespan" or scope["path"] == HEALTH or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        from fastapi.responses import JSONResponse

        message = "the token is missing or wrong: send the header `Authorization: Bearer TOKEN`"
        error = {"error": {"message": message, "type": "Unauthorized", "param": None, "code": 401}}
        await JSONResponse(error, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        assert self._header is not None
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._header)
