"""The server of the pages: routes, the token, and errors as pages. It listens on loopback unless told otherwise."""

from __future__ import annotations

import asyncio
import secrets
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web

from deployments.ui.pages import Pages
from deployments.ui.reading import NotFoundError
from rlhf_core.errors import AlignmentError
from rlhf_core.report.templating import asset, bokeh

_WEEK = 7 * 24 * 3600
# Pages show text that models wrote: no script but ours runs, and nothing is loaded from elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Page = Callable[[Mapping[str, str], Mapping[str, str]], str]


def application(pages: Pages, token: str, hosts: frozenset[str]) -> web.Application:
    """Return the application. hosts: names under which it answers, as browsers send them.

    A page of another site could make a browser ask for ours under a name of its own; it would read the answer.
    """
    app = web.Application(
        middlewares=[_known_host(hosts), _authorised(token), _errors_as_pages(pages)], client_max_size=64 << 10
    )
    app.add_routes([
        web.get("/static/bokeh.js", _file(bokeh(), "text/javascript")),
        web.get("/static/charts.js", _file(asset("charts.js"), "text/javascript")),
        web.get("/static/page.css", _file(asset("page.css"), "text/css")),
        web.get("/static/tokens.js", _file(asset("tokens.js"), "text/javascript")),
        web.get("/", _page(pages.runs)),
        web.get("/runs/{run}", _page(pages.run)),
        web.get("/runs/{run}/{node}", _page(pages.node)),
        web.get("/runs/{run}/{node}/steps/{step}", _page(pages.step)),
        web.get("/runs/{run}/{node}/steps/{step}/groups/{group}", _page(pages.group)),
        web.get("/runs/{run}/{node}/steps/{step}/groups/{group}/{completion}", _page(pages.completion)),
        web.get("/runs/{run}/{node}/images/{sha256}", _image(pages)),
        web.get("/compare", _page(pages.compare)),
        web.get("/data", _page(pages.data)),
        web.get("/loops", _page(pages.loops)),
        web.get("/loops/{loop}", _page(pages.loop)),
        web.get("/models", _page(pages.models)),
        web.get("/services", _page(pages.services)),
        web.get("/models/{model}", _page(pages.model)),
        web.post("/models/{model}/{action}", _move(pages)),
    ])  # fmt: skip
    return app


def _page(render: Page) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return _html(await asyncio.to_thread(render, request.match_info, _query(request)))

    return handle


def _move(pages: Pages) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        # A page of another server on this host is of the same site: its forms would bring our cookie along.
        if request.headers.get("Origin") != f"http://{request.host}":
            raise web.HTTPForbidden(text="this form is not of one of our pages")
        form = {name: value for name, value in (await request.post()).items() if isinstance(value, str)}
        if refused := await asyncio.to_thread(pages.move, request.match_info, form):
            return _html(refused, status=409)
        raise web.HTTPSeeOther(f"/models/{quote(request.match_info['model'], safe='')}")

    return handle


def _html(page: str, status: int = 200) -> web.Response:
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}
    return web.Response(text=page, status=status, content_type="text/html", headers=headers)


def _query(request: web.Request) -> Mapping[str, str]:
    """Return the query; the values of a name that is given several times are separated by spaces."""
    return {name: " ".join(request.query.getall(name)) for name in request.query}


def _image(pages: Pages) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        data = await asyncio.to_thread(pages.image, request.match_info)
        return web.Response(
            body=data, headers={"Cache-Control": "max-age=31536000, immutable"}, content_type="image/png"
        )

    return handle


def _file(content: str, kind: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=content, content_type=kind, headers={"Cache-Control": "max-age=3600"})

    return handle


def _known_host(hosts: frozenset[str]) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.host.rpartition(":")[0] not in hosts and request.host not in hosts:
            raise web.HTTPForbidden(text=f"this server is not called {request.host[:100]}")
        return await handler(request)

    return check


def _cookie(request: web.Request) -> str:
    """Return the name of the token's cookie: browsers send a cookie to all ports of its host."""
    return f"alignment-ui-{request.url.port}"


def _authorised(token: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if given := request.query.get("token"):
            if not secrets.compare_digest(given.encode(), token.encode()):
                raise web.HTTPUnauthorized(
                    text="the token is another one: use the URL that `alignment ui` printed last"
                )
            response = web.HTTPFound(str(request.rel_url.without_query_params("token")))
            # Lax: a link in a chat or a notebook opens its view. Forms are protected by their origin.
            response.set_cookie(_cookie(request), token, max_age=_WEEK, httponly=True, samesite="Lax")
            raise response
        kept = request.cookies.get(_cookie(request), "")
        if not secrets.compare_digest(kept.encode(), token.encode()):
            raise web.HTTPUnauthorized(text="open the URL that `alignment ui` printed: it has a token")
        return await handler(request)

    return check


def _errors_as_pages(pages: Pages) -> Any:
    @web.middleware
    async def show(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPNotFound:
            response = _html(pages.error(f"there is no page {request.path}"), status=404)
        except NotFoundError as error:
            response = _html(pages.error(str(error)), status=404)
        except AlignmentError as error:
            response = _html(pages.error(str(error)), status=502)
        except web.HTTPException:
            raise
        except Exception as error:  # an error of ours: a page says so, in place of an empty answer
            print(f"{request.method} {request.rel_url}", file=sys.stderr)
            traceback.print_exc()
            text = f"this is a defect of alignment, {type(error).__name__}: what `alignment ui` printed says where"
            response = _html(pages.error(text), status=500)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"  # with `no-referrer`, forms have the origin `null`
        return response

    return show
