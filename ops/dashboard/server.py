"""The server of the page: three questions, answered from memory or files; none changes anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ops.dashboard.plot import PAGE
from ops.dashboard.watched_run import WatchedRun

#: Nothing is loaded from elsewhere, and nobody shows the page inside another one.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def application(run: WatchedRun) -> Starlette:
    """Returns the application that shows one run."""

    async def page(_: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers=_HEADERS)

    async def frame(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        return JSONResponse(run.frame(int(since) if since.isdigit() else 0))

    async def version(request: Request) -> Response:
        path = request.path_params
        found = await run.version(path["fragment"], path["version"])
        if found is None:
            return JSONResponse({"error": "nothing is known of this version here"}, status_code=404)
        return JSONResponse(found)

    @contextlib.asynccontextmanager
    async def following(_: Starlette) -> AsyncIterator[None]:
        follower = asyncio.create_task(run.follow())
        yield
        follower.cancel()

    routes = [
        Route("/", page),
        Route("/frame", frame),
        Route("/version/{fragment:int}/{version:int}", version),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return Starlette(routes=routes, lifespan=following)
