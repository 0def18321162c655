"""The service of the examples: a memory over HTTP on loopback."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import ahop_layers as ah
from tests.samples import repeated_in_threads

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")
pytest.importorskip("fastapi", reason="fastapi is not installed: pip install '.[serve]'")
pytestmark = pytest.mark.slow
ROWS = torch.arange(40.0)[:, None].expand(40, 6).clone()  # each holds its number
NAMES = [f"row {i}" for i in range(40)]


def sender(port):
    """Returns a function that sends a request, and returns the status and the value of the answer."""

    def send(route, data=None, kind="application/json", **body):
        data = json.dumps(body).encode() if data is None and body else data
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST" if data else "GET", f"/{route}", data, {"Content-Type": kind} if kind else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    return send


@contextmanager
def service(memory, *args):
    """Runs the service of a memory, and gives a function that sends requests, and its port."""
    from examples.serve import make_app

    server = uvicorn.Server(uvicorn.Config(make_app(memory, *args), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield sender(port), port
    server.should_exit = True
    thread.join()


@pytest.fixture
def served():
    memory = ah.AssociativeMemory(ROWS, "l1", ids=NAMES)
    with service(memory) as (send, port):
        yield memory, send, port


def test_clients_search_while_others_add_and_remove_and_one_is_refused(served):
    memory, send, _ = served
    random = [torch.Generator().manual_seed(seed) for seed in range(4)]

    def search(thread):
        if thread == 4:
            assert send("search", rows=[[None] * 6], k=2)[0] == send("search", rows=[[1] * 6], k=0)[0] == 422
            return
        number = torch.randint(40, (), generator=random[thread]).item()
        status, found = send("search", rows=[[number + 0.1, None, *[number] * 4]], k=2)
        assert (status, found[0][0]["id"]) == (200, f"row {number}")
        assert found[0][0]["score"] > found[0][1]["score"]

    with repeated_in_threads(search, 5):
        for number in range(100, 130):
            added = send("add", rows=[[number] * 6], ids=[f"row {number}"])
            assert added == (200, 41 + (number - 99) // 2)
            if number % 2:
                send("remove", ids=[f"row {number}"])
    assert memory.ids == [f"row {i}" for i in [*range(40), *range(100, 130, 2)]]


def test_a_search_that_fails_is_answered_alone():
    def search(thread):
        assert send("search", rows=[[None if thread else 7.0, *[7.0] * 5]])[0] == (422 if thread else 200)

    memory = ah.AssociativeMemory(ROWS, lambda x, y: -torch.cdist(x, y), ids=NAMES)  # refuses unknown values
    with service(memory) as (send, _), repeated_in_threads(search, 4):
        time.sleep(1)


def test_hits_of_a_fitted_memory_have_a_confidence_and_are_explained(small_fit):
    rows = torch.rand(60, 8, generator=torch.Generator().manual_seed(0))
    rows[1::2] = 0.5 + rows[1::2] / 2
    memory = ah.AssociativeMemory(rows, labels=["a", "b"] * 30, ids=range(60))
    memory.fit(seed=0)
    with service(memory) as (send, _):
        for number, hits in enumerate(send("explain", rows=rows[:5].tolist(), k=2)[1]):
            assert hits[0]["id"] == number
            assert all(sum(hit["values"]) == pytest.approx(hit["score"], abs=1e-4) for hit in hits)
            assert 0 <= hits[1]["confidence"] <= hits[0]["confidence"] <= 1
        assert send("add", rows=[[2.0] * 8], ids=[99], labels=["c"]) == (200, 61)
        assert send("search", rows=[[2.0] * 8], k=100)[1][0][0]["id"] == 99


def test_patterns_without_a_known_value_in_common_have_no_score():
    with service(ah.AssociativeMemory([[1.0, torch.nan], [1.0, 2.0]], ids=["a", "b"])) as (send, _):
        assert [hit["score"] is None for hit in send("search", rows=[[None, 2.0]], k=2)[1][0]] == [False, True]


REFUSED = (
    ("search", {"rows": [[1.0, 2.0]]}, 422, "rows must be at least one, of 6 values, got 1 rows of [2] values"),
    ("search", {"rows": []}, 422, "rows must be at least one"),
    ("search", {"rows": [[1.0] * 6, [None] * 6]}, 422, "a known value and no infinity, got row 1"),
    ("explain", b'{"rows": [[1e999, 1, 1, 1, 1, 1]]}', 422, "a known value and no infinity, got row 0"),
    ("search", {"rows": [[1.0] * 6], "k": 0}, 422, "body.k: Input should be greater than or equal to 1"),
    ("search", {"rows": [["1"] * 6] * 9}, 422, "body.rows.0.0: Input should be a valid number"),
    ("search", {"rows": [[1.0] * 6], "K": 3}, 422, "body.K: Extra inputs are not permitted"),
    ("search", b'{"rows": [], "\\ud800": 3}', 422, "body: Input should be a valid string"),
    ("search", {"rows": [[1.0] * 6] * 1025}, 413, "body.rows: List should have at most 1024 items"),
    ("explain", {"rows": [[1.0] * 6] * 300, "k": 7}, 413, "rows times k must be at most 1024, got 300 rows and k = 7"),
    ("remove", {"ids": [*range(1025)]}, 413, "body.ids: List should have at most 1024 items"),
    ("add", {"rows": [[1.0] * 6], "ids": []}, 422, "ids must be one for each of 1 patterns"),
    ("add", {"rows": [[1.0] * 6], "ids": ["\ud800"]}, 422, "ids must be valid Unicode"),
    ("add", {"rows": [[1.0] * 6], "ids": [True]}, 422, "body.ids.0.str: Input should be a valid string"),
    ("add", {"rows": [[1.0] * 6], "ids": ["a"], "labels": ["b"]}, 422, "labels must not be given"),
    ("remove", {"ids": ["nobody"]}, 422, "ids must be ids of stored patterns"),
    ("search", b"\xff\xfe\x00", 400, "error parsing the body"),
    ("search", b"[" * 10**5, 400, "error parsing the body"),
    ("add", b"1" * (2**22 + 1), 413, "the body must have at most 4194304 bytes"),
)


def test_a_refused_request_says_why(served):
    memory, send, _ = served
    for route, body, status, reason in REFUSED:
        got, answer = send(route, body) if isinstance(body, bytes) else send(route, **body)
        assert (got, reason in answer["detail"]) == (status, True), answer
        assert send("search", rows=[[7.0] * 6])[1][0][0]["id"] == "row 7"
    assert send("search", b"\xff\xfe", kind=None)[0] == 422
    assert memory.ids == NAMES


def test_a_large_body_is_refused_before_it_is_read(served):
    with socket.create_connection(("127.0.0.1", served[2]), timeout=30) as client:
        client.sendall(
            b"POST /add HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 999999999\r\n\r\n"
        )
        client.sendall(b" " * (2**22 + 1))
        assert client.recv(2**16).startswith(b"HTTP/1.1 413 ")


def test_changes_are_saved_while_it_runs_and_at_shutdown(tmp_path):
    path = tmp_path / "memory.safetensors"
    memory = ah.AssociativeMemory(ROWS, "l1", ids=NAMES)
    with service(memory, path, 0.05) as (send, _):
        assert send("add", rows=[[50] * 6], ids=["new"]) == (200, 41)
        while send("health") != (200, {"patterns": 41, "unsaved": 0}):
            time.sleep(0.02)
        assert ah.AssociativeMemory.load(path).ids == [*NAMES, "new"]
        path.unlink()
        path.mkdir()  # it cannot be saved
        send("remove", ids=["new"])
        time.sleep(0.2)
        assert send("health")[1]["unsaved"] == 1
        path.rmdir()
    command = [sys.executable, "-m", "examples.serve", path, "--port", "0", "--save-every", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        send = sender(int(re.search(r"serving 40 patterns on http://127.0.0.1:(\d+)", process.stdout.readline())[1]))
        assert send("health") == (200, {"patterns": 40, "unsaved": 0})
        send("add", rows=[[50] * 6], ids=["newer"])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert ah.AssociativeMemory.load(path).ids == [*NAMES, "newer"]


def test_what_cannot_be_served_ends_in_one_line(tmp_path, refused):
    from examples.serve import main

    good, junk, unnamed = (tmp_path / f"{name}.safetensors" for name in ("good", "junk", "unnamed"))
    ah.AssociativeMemory(ROWS, ids=NAMES).save(good)
    ah.AssociativeMemory(ROWS).save(unnamed)
    junk.write_bytes(b"\xff" * 100)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, message in (
            ((tmp_path / "none",), "path must be a file that AssociativeMemory.save wrote, got .*none"),
            ((tmp_path,), "path must be a file"),
            ((junk,), "path must be a file"),
            ((unnamed,), "the memory must have ids, got none in .*unnamed"),
            ((good, "--port", 70000), "port must be 0-65535"),
            ((good, "--port", "many"), "argument --port: invalid int value: 'many'"),
            ((good, "--port", taken.getsockname()[1]), "Address already in use"),
            ((good, "--save-every", 0), "--save-every must be a positive number, got 0.0"),
        ):
            assert re.search(f"error: .*{message}", refused(main, *arguments, usage=False))
