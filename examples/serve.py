"""Serve a memory over HTTP: many clients search while others add and remove patterns.

To run: python -m examples.serve memory.safetensors

Needs pip install "ahop-layers[serve]". Queries that arrive while others are being searched are searched together. In
JSON, null is an unknown value. The routes are POST /search, /add and /remove.

    curl localhost:8000/search -H "Content-Type: application/json" -d '{"rows": [[0.1, null, 0.7]], "k": 3}'
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import ahop_layers as ah

Id = str | int


class Asked(BaseModel):
    """Queries, and how many hits each of them gets."""

    rows: list[list[float | None]]
    k: int = 1


class Given(BaseModel):
    """Patterns, and their ids. Patterns with an id that is stored already are replaced."""

    rows: list[list[float | None]]
    ids: list[Id]


class Removed(BaseModel):
    """Ids of patterns to remove."""

    ids: list[Id]


def as_rows(rows: list[list[float | None]]) -> torch.Tensor:
    """Returns rows as a tensor, with NaN in place of null."""
    if len({len(row) for row in rows}) != 1:
        raise ah.AHopError(f"rows must be at least one, of equal length, got {len(rows)} rows")
    return torch.tensor([[torch.nan if value is None else value for value in row] for row in rows])


def find(memory: ah.AssociativeMemory, rows: torch.Tensor, k: int) -> list[list[dict[str, Any]]]:
    """Returns the hits of each query: their ids, scores and confidence, which is None unless the memory is fitted."""
    hits = memory.search(rows, k)
    confidence = hits.confidence
    unknown = [[None] * k for _ in rows]
    columns = zip(hits.ids, hits.scores.tolist(), unknown if confidence is None else confidence.tolist(), strict=True)
    names = ("id", "score", "confidence")
    return [[dict(zip(names, each, strict=True)) for each in zip(*row, strict=True)] for row in columns]


def make_app(memory: ah.AssociativeMemory, most: int = 256) -> FastAPI:
    """Returns a service for a memory with ids. Up to ``most`` requests that wait are searched together."""
    waiting: asyncio.Queue[tuple[torch.Tensor, int, asyncio.Future[Any]]] = asyncio.Queue()

    async def answer() -> None:
        while True:
            asked = [await waiting.get()]
            while not waiting.empty() and len(asked) < most:
                asked.append(waiting.get_nowait())
            alike = len({rows.shape[1:] for rows, _, _ in asked}) == 1
            for group in [asked] if alike else [[each] for each in asked]:
                rows, k = torch.cat([each[0] for each in group]), max(each[1] for each in group)
                try:
                    found = iter(await run_in_threadpool(find, memory, rows, k))
                    for some, own, future in group:
                        future.set_result([next(found)[:own] for _ in some])
                except Exception as error:  # the clients get it, and the service goes on
                    for _, _, future in group:
                        future.set_exception(error)

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(answer())
        yield
        task.cancel()

    app = FastAPI(title="Associative memory", lifespan=running)

    @app.exception_handler(ah.AHopError)
    async def refuse(request: Request, error: ah.AHopError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.post("/search")
    async def search(asked: Asked) -> list[list[dict[str, Any]]]:
        future = asyncio.get_running_loop().create_future()
        await waiting.put((as_rows(asked.rows), min(asked.k, len(memory)), future))
        answered: list[list[dict[str, Any]]] = await future
        return answered

    @app.post("/add")
    def add(given: Given) -> int:
        memory.add(as_rows(given.rows), ids=given.ids, replace=True)
        return len(memory)

    @app.post("/remove")
    def remove(removed: Removed) -> int:
        memory.remove(ids=removed.ids)
        return len(memory)

    return app


def main() -> None:
    """Loads a memory and serves it until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("memory", help="a file that AssociativeMemory.save wrote, of a memory with ids")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(make_app(ah.AssociativeMemory.load(options.memory)), port=options.port)


if __name__ == "__main__":
    main()
