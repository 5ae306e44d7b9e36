"""The server of the page: answers three questions from memory or files, and changes nothing.

A page always has a question open here. So it is told when the server ends, and need not guess why nobody answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ops.dashboard.plot import PAGE
from ops.dashboard.watched_run import WatchedRun

#: Nothing is loaded from elsewhere, and nobody shows the page inside another one.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


#: How long a page waits for its next frame, and how soon one that waits is told that the server ends.
EVERY_S, LOOK_EVERY_S = 0.5, 0.05


def application(run: WatchedRun, ending: Callable[[], bool] = lambda: False) -> Starlette:
    """Returns the application that shows one run.

    Args:
        run: The run to show.
        ending: Says whether the server has been asked to end.
    """

    async def page(_: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers=_HEADERS)

    async def frame(request: Request) -> Response:
        asked = request.query_params
        since = asked.get("since", "0")
        looks = round(EVERY_S / LOOK_EVERY_S) if "wait" in asked else 0
        while looks and not ending():
            await asyncio.sleep(LOOK_EVERY_S)
            looks -= 1
        return JSONResponse(run.frame(int(since) if since.isdigit() else 0) | {"last": ending()})

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
