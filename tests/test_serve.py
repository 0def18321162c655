"""The service of the examples: a memory over HTTP on loopback."""

import json
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch

import ahop_layers as ah
from tests.samples import repeated_in_threads

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")
pytest.importorskip("fastapi", reason="fastapi is not installed: pip install '.[serve]'")
pytestmark = pytest.mark.slow


@pytest.fixture
def served():
    """A memory whose patterns hold their number, and a function that sends requests to its service."""
    from examples.serve import make_app

    rows = torch.arange(40.0)[:, None].expand(40, 6).clone()
    memory = ah.AssociativeMemory(rows, "l1", ids=[f"row {i}" for i in range(40)])
    server = uvicorn.Server(uvicorn.Config(make_app(memory), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    def post(route, **body):
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{route}", data, kind)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    yield memory, post
    server.should_exit = True
    thread.join()


def test_clients_search_while_others_add_and_remove(served):
    memory, post = served
    random = [torch.Generator().manual_seed(seed) for seed in range(4)]

    def search(thread):
        number = torch.randint(40, (), generator=random[thread]).item()
        ((hit, second),) = post("search", rows=[[number + 0.1, None, *[number] * 4]], k=2)
        assert hit["id"] == f"row {number}"
        assert hit["score"] > second["score"]

    with repeated_in_threads(search, 4):
        for number in range(100, 130):
            assert post("add", rows=[[number] * 6], ids=[f"row {number}"]) == 41 + (number - 99) // 2
            if number % 2:
                post("remove", ids=[f"row {number}"])
    assert memory.ids == [f"row {i}" for i in [*range(40), *range(100, 130, 2)]]


def test_hits_of_a_fitted_memory_have_a_confidence(small_fit):
    from examples.serve import find

    rows = torch.rand(60, 8, generator=torch.Generator().manual_seed(0))
    memory = ah.AssociativeMemory(rows, ids=range(60))
    memory.fit(seed=0)
    for number, (hit, second) in enumerate(find(memory, rows[:5], 2)):
        assert hit["id"] == number
        assert 0 <= second["confidence"] <= hit["confidence"] <= 1


def test_a_refused_request_says_why(served):
    _, post = served
    for route, body, reason in (
        ("search", {"rows": [[1.0, 2.0]]}, "queries x must be"),
        ("search", {"rows": [[None] * 6]}, "a known value in each row"),
        ("add", {"rows": [[1.0] * 6], "ids": []}, "ids must be one for each of 1 patterns"),
        ("remove", {"ids": ["nobody"]}, "ids must be ids of stored patterns"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(route, **body)
        assert refused.value.code == 422
        assert reason in json.loads(refused.value.read())["detail"]
