"""Serve a memory over HTTP: many clients search while others add and remove patterns.

To run: python -m examples.serve memory.safetensors --save-every 60

Needs pip install "ahop-layers[serve]". The memory needs ids. A row has as many values as a pattern; null is unknown.

    POST /search   {"rows": [[0.1, null, 0.7]], "k": 3}        returns k hits of each row: id, score and confidence
    POST /explain  {"rows": [[0.1, null, 0.7]]}                also returns what each value adds to the score of a hit
    POST /add      {"rows": [[0.1, 0.2, 0.7]], "ids": ["a"]}   replaces a stored id; "labels" if the memory has them
    POST /remove   {"ids": ["a"]}
    GET  /health                                               returns the numbers of patterns and of unsaved changes

Searches that wait are computed together. Invalid requests get status 400 or 422, and too large ones 413.
With --save-every, changes are saved in the file of the memory, also at shutdown. Without it, they are lost at shutdown.
"""

import argparse
import asyncio
import contextlib
import copy
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, FailFast, Field

import ahop_layers as ah

MOST_BYTES = 2**22  # of the body of a request
MOST_ROWS = 1024  # of a request, times k; searches that are computed together have fewer than twice as many
Rows = Annotated[list[Annotated[list[float | None], FailFast()]], FailFast(), Field(max_length=MOST_ROWS)]
Names = Annotated[list[str | int], FailFast(), Field(max_length=MOST_ROWS)]
Waiting = tuple[torch.Tensor, int, asyncio.Future[Any]]  # rows, k and the answer of a valid search


class Asked(BaseModel, strict=True, extra="forbid"):
    """Queries, and how many hits each of them gets."""

    rows: Rows
    k: int = Field(1, ge=1)


class Given(BaseModel, strict=True, extra="forbid"):
    """Patterns, their ids, and their labels. Patterns with an id that is stored already are replaced."""

    rows: Rows
    ids: Names
    labels: Names = Field(None)


class Removed(BaseModel, strict=True, extra="forbid"):
    """Ids of patterns to remove."""

    ids: Names


def limited(app: Any) -> Any:
    """Refuses bodies of more than MOST_BYTES, and reads no more of them."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES:
                raise HTTPException(413, f"the body must have at most {MOST_BYTES} bytes", {"Connection": "close"})
            return message

        await app(scope, counted, send)

    return call


def as_rows(rows: list[list[float | None]], dim: int, k: int = 1) -> torch.Tensor:
    """Returns rows as a tensor, with NaN in place of null."""
    if len(rows) * k > MOST_ROWS:
        raise HTTPException(413, f"rows times k must be at most {MOST_ROWS}, got {len(rows)} rows and k = {k}")
    if (lengths := {len(row) for row in rows}) != {dim}:
        raise ah.AHopError(f"rows must be at least one, of {dim} values, got {len(rows)} rows of {[*lengths]} values")
    values = torch.tensor([[torch.nan if each is None else each for each in row] for row in rows], dtype=torch.double)
    if (wrong := values.isinf().any(1) | values.isnan().all(1)).any():
        raise ah.AHopError(f"rows must have a known value and no infinity, got row {wrong.nonzero()[0].item()}")
    return values


def find(memory: ah.AssociativeMemory, rows: torch.Tensor, k: int, explain: bool = False) -> list[list[dict[str, Any]]]:
    """Returns the hits of each query: ids, scores, confidence, None unless the memory is fitted, and reasons."""
    now = copy.copy(memory)  # one state, whatever others add and remove
    hits = now.search(rows, min(k, len(now)))
    number, k = hits.indices.shape
    confidence = [[None] * k] * number if hits.confidence is None else hits.confidence.tolist()
    columns = [hits.ids, hits.scores.tolist(), confidence]  # a score of -inf is null in JSON
    if explain:
        values = now.explain(rows.repeat_interleave(k, 0), hits.indices.flatten())
        columns.append(values.reshape(number, k, -1).tolist())
    names = ("id", "score", "confidence", "values")
    return [
        [dict(zip(names, hit, strict=False)) for hit in zip(*row, strict=True)] for row in zip(*columns, strict=True)
    ]


def make_app(memory: ah.AssociativeMemory, path: str | None = None, seconds: float | None = None) -> FastAPI:
    """Returns a service for a memory with ids, which saves changes in ``path`` every ``seconds`` and at shutdown."""
    dim, changes, saved = memory.patterns[0].numel(), 0, 0
    waiting: asyncio.Queue[Waiting] = asyncio.Queue()
    stopped = asyncio.Event()

    async def answer() -> None:
        while True:
            asked = [await waiting.get()]
            while not waiting.empty() and sum(len(rows) * k for rows, k, _ in asked) < MOST_ROWS:
                asked.append(waiting.get_nowait())
            for alike in {each[1] for each in asked}:
                await answer_together([each for each in asked if each[1] == alike])

    async def answer_together(asked: list[Waiting]) -> None:
        try:
            found = iter(await run_in_threadpool(find, memory, torch.cat([rows for rows, _, _ in asked]), asked[0][1]))
        except Exception as error:  # the client gets it, and the service goes on
            if len(asked) == 1:
                asked[0][2].set_exception(error)
            for each in asked if len(asked) > 1 else ():
                await answer_together([each])
        else:
            for rows, _, future in asked:
                future.set_result([next(found) for _ in rows])

    async def save() -> None:
        nonlocal saved
        while not stopped.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped.wait(), seconds)
            before = changes
            try:
                if path is not None and saved < before:
                    await run_in_threadpool(memory.save, path)
                    saved = before
            except Exception as error:  # the next one may succeed
                logging.getLogger("uvicorn.error").error("changes are not saved: %s", error)

    async def change(function: Any, *args: Any, **keywords: Any) -> int:
        nonlocal changes
        await run_in_threadpool(function, *args, **keywords)
        changes += 1
        return len(memory)

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        answering, saving = asyncio.create_task(answer()), asyncio.create_task(save())
        yield
        answering.cancel()
        stopped.set()
        await saving

    app = FastAPI(title="Associative memory", lifespan=running)
    app.add_middleware(limited)

    @app.exception_handler(ah.AHopError)
    async def refuse(request: Request, error: ah.AHopError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # without the input, which need not be text
        where, status = ".".join(map(str, first["loc"])), 413 if first["type"] == "too_long" else 422
        return JSONResponse({"detail": f"{where}: {first['msg']}"}, status_code=status)

    @app.post("/search")
    async def search(asked: Asked) -> list[list[dict[str, Any]]]:
        k, future = min(asked.k, len(memory)), asyncio.get_running_loop().create_future()
        waiting.put_nowait((as_rows(asked.rows, dim, k), k, future))
        found: list[list[dict[str, Any]]] = await future
        return found

    @app.post("/explain")
    def explain(asked: Asked) -> list[list[dict[str, Any]]]:
        k = min(asked.k, len(memory))
        return find(memory, as_rows(asked.rows, dim, k), k, explain=True)

    @app.post("/add")
    async def add(given: Given) -> int:
        keywords = {"ids": given.ids, "labels": given.labels, "replace": True}
        return await change(memory.add, as_rows(given.rows, dim), **keywords)

    @app.post("/remove")
    async def remove(removed: Removed) -> int:
        return await change(memory.remove, ids=removed.ids)

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"patterns": len(memory), "unsaved": changes - saved}

    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Loads a memory and serves it until interrupted."""
    shown = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": argparse.SUPPRESS}
    parser = argparse.ArgumentParser(description=__doc__, **shown)
    parser.add_argument("memory", help="a file that AssociativeMemory.save wrote, of a memory with ids")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1 (default: 8000)")
    parser.add_argument("--save-every", type=float, metavar="SECONDS", help="save changes in the file of the memory")
    options = parser.parse_args(arguments)
    try:
        if options.save_every is not None and not options.save_every > 0:
            raise ah.AHopError(f"--save-every must be a positive number, got {options.save_every}")
        memory = ah.AssociativeMemory.load(options.memory)
        if memory.ids is None:
            raise ah.AHopError(f"the memory must have ids, got none in {options.memory!r}")
        listening = socket.create_server(("127.0.0.1", options.port))
    except (ah.AHopError, OSError, OverflowError) as error:
        parser.error(str(error))
    app = make_app(memory, options.save_every and options.memory, options.save_every)
    print(f"serving {len(memory)} patterns on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app)).run(sockets=[listening])


if __name__ == "__main__":
    main()
