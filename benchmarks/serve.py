"""A memory in use: threads, then HTTP clients, search while another one adds patterns.

To run: python -m benchmarks.serve [--seconds 60] [--patterns 10000] [--dim 64]

First, eight threads search alone, then while one adds ten patterns a second. Every result is compared with that of a
memory that holds the same patterns and is searched by one thread. Then examples/serve.py serves the memory to eight
clients on loopback, while another one adds patterns, and the same is done with the dot product, one matrix product for
each batch. The clients check that a query finds its own pattern, and that no added pattern is lost.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

import ahop_layers as ah

THREADS, ADDS, K = 8, 10, 3


def in_threads(seconds: float, work: Callable[[int], None], between: Callable[[int], None] | None) -> int:
    """Repeats ``work`` in THREADS threads for some seconds, and ``between`` ADDS times a second; counts the works."""
    done, counts, errors = threading.Event(), [0] * THREADS, []

    def run(number: int) -> None:
        try:
            while not done.is_set():
                work(number)
                counts[number] += 1
        except Exception as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    began, step = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        if between is not None:
            between(step)
            step += 1
        time.sleep(max(0.0, began + (step if between else seconds * ADDS) / ADDS - time.perf_counter()))
    done.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts)


def measure_threads(patterns: Tensor, extra: Tensor, seconds: float) -> dict[str, float]:
    """Returns searches a second alone and beside adds, and how many of the compared results were wrong."""
    memory, seen = ah.AssociativeMemory(patterns), []
    queries = patterns[torch.randint(len(patterns), (64, 4))] + 0.01

    def search(number: int) -> None:
        place = torch.randint(len(queries), ()).item()
        hits = memory.search(queries[place], K)
        if torch.rand(()) < 0.05:
            seen.append((hits._state.stored.count, place, hits.scores, hits.indices))

    def add(step: int) -> None:
        memory.add(extra[step : step + 1])

    in_threads(2.0, search, None)
    alone = in_threads(seconds, search, None) / seconds
    seen.clear()
    busy = in_threads(seconds, search, add) / seconds
    wrong = 0
    everything = torch.cat([patterns, extra])
    for count in sorted({each[0] for each in seen})[::7]:
        serial = ah.AssociativeMemory(everything[:count], memory.similarity)
        for _, place, scores, indices in [each for each in seen if each[0] == count]:
            expected = serial.search(queries[place], K)
            wrong += not (torch.equal(expected.scores, scores) and torch.equal(expected.indices, indices))
    return {"alone": alone, "beside adds": busy, "share": busy / alone, "compared": len(seen), "wrong": wrong}


def measure_http(patterns: Tensor, extra: Tensor, similarity: str, seconds: float) -> dict[str, float]:
    """Returns the latency of searches by HTTP in ms, how many were wrong, and how many patterns were lost."""
    memory = ah.AssociativeMemory(patterns, similarity, ids=list(range(len(patterns))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "memory.safetensors"
        memory.save(file)
        command = [sys.executable, "-m", "examples.serve", str(file), "--port", "8765"]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            return _measure_served(patterns, extra, seconds)
        finally:
            server.terminate()
            server.wait()


def _measure_served(patterns: Tensor, extra: Tensor, seconds: float) -> dict[str, float]:
    local = threading.local()

    def post(route: str, **body: Any) -> Any:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection("127.0.0.1", 8765, timeout=60)
        local.connection.request("POST", f"/{route}", json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(local.connection.getresponse().read())

    for _ in range(200):  # until the server listens
        try:
            post("search", rows=[patterns[0].tolist()])
            break
        except OSError:
            del local.connection
            time.sleep(0.1)
    times, wrong, added = [], [], []

    def search(number: int) -> None:
        place = int(torch.randint(len(patterns), ()))
        began = time.perf_counter()
        ((hit,),) = post("search", rows=[patterns[place].tolist()])
        times.append(time.perf_counter() - began)
        wrong.extend([place] if hit["id"] != place else [])

    def add(step: int) -> None:
        number = len(patterns) + step
        post("add", rows=[extra[step].tolist()], ids=[number])
        added.append(step)

    in_threads(seconds, search, add)
    lost = sum(post("search", rows=[extra[step].tolist()])[0][0]["id"] != len(patterns) + step for step in added)
    cuts = quantiles(times, n=100)
    found = {"p50 ms": 1e3 * cuts[49], "p99 ms": 1e3 * cuts[98], "searches": len(times)}
    return found | {"wrong": len(wrong), "lost": lost}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a measurement (default: 60)")
    parser.add_argument("--patterns", type=int, default=10_000, help="stored patterns (default: 10000)")
    parser.add_argument("--dim", type=int, default=64, help="dimensions of a pattern (default: 64)")
    options = parser.parse_args()
    torch.manual_seed(0)
    patterns = torch.nn.functional.normalize(torch.randn(options.patterns, options.dim), dim=-1)
    extra = torch.nn.functional.normalize(torch.randn(int(options.seconds * ADDS) + 100, options.dim), dim=-1)
    torch.set_num_threads(1)
    results = {"threads": measure_threads(patterns, extra, options.seconds)}
    for similarity in ("auto", "dot"):
        results[f"HTTP, {similarity}"] = measure_http(patterns, extra, similarity, options.seconds)
    for name, values in results.items():
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in values.items()), sep=": ")


if __name__ == "__main__":
    main()
