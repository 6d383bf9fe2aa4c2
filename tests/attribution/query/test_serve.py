"""The server of a store's queries: answers are those of `grads query`, and what is refused; the page in Chromium."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import struct
import threading
import time

import pytest
from changed_store import collected
from small_model import make

from gradwire import cli
from gradwire.attribution.query import serve
from gradwire.attribution.query.searcher import Searcher
from gradwire.attribution.store import store

CHROMIUM = shutil.which("chromium")
PROMPT = "gradient <b>wire</b> rank"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A store on a free port, with documents that contain markup: its folder, the port and the documents."""
    base = tmp_path_factory.mktemp("serve")
    small = make(base)
    collected(small.model, small.shards, base / "run", 32, "--projection", "sjlt")
    texts = json.loads(small.corpus.read_text())
    for one in texts:
        one["text"] += "<img src=x onerror=alert(1)>"
    (base / "texts.json").write_text(json.dumps(texts))
    searcher = Searcher(base / "run" / "dim32", {"corpus": base / "texts.json"}, "cpu")
    searcher.load()
    with serve.server(searcher, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield searcher.store.path, server.server_port, base / "texts.json"
        server.shutdown()
        thread.join()


def call(port, method, path, body=None, headers=JSON):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.headers), answer.read()
    connection.close()
    return found


def ids(path):
    return store.read_ids(path / "all_ids.pkl")


def asked(port, query):
    status, _, body = call(port, "POST", "/query", query if isinstance(query, bytes) else json.dumps(query))
    return status, json.loads(body)


@pytest.mark.parametrize("query", [{"prompt": PROMPT, "metric": "dot"}, {"prompt": PROMPT}, {"sample_id": ""}])
def test_an_answer_is_that_of_the_verb(served, capsys, query):
    path, port, texts = served
    query = {"sample_id": ids(path)[3]} if "sample_id" in query else query
    words = [word for name, value in {**query, "top_k": 4}.items() for word in (f"--{name}", str(value))]
    assert cli.main(["grads", "query", "--store", str(path), "--corpus", str(texts), "--json", *words]) == 0
    wanted = json.loads(capsys.readouterr().out)["top"]
    status, answer = asked(port, {**query, "top_k": 4})
    assert status == 200 and len(wanted) == 4
    assert [{**one, "score": pytest.approx(one["score"], rel=1e-6)} for one in wanted] == answer["top"]


def test_queries_at_once_get_their_own_answers(served):
    path, port, _ = served
    first = {}
    threads = [
        threading.Thread(target=lambda id_=id_: first.update({id_: asked(port, {"sample_id": id_})[1]["top"][0]}))
        for id_ in ids(path)[:5]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id_: one["sample_id"] for id_, one in first.items()} == {id_: id_ for id_ in ids(path)[:5]}


def test_the_page_may_fetch_from_here_only(served):
    _, port, _ = served
    status, headers, body = call(port, "GET", "/", headers={})
    assert status == 200 and headers["Content-Type"].startswith("text/html") and b"<textarea" in body
    assert "default-src 'none'" in headers["Content-Security-Policy"] and b"http" not in body


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"prompt": "x " * 200}, "shorten it"),
        ({"prompt": ""}, "nothing to predict"),
        ({"sample_id": "doc/99"}, "has no sample 'doc/99'"),
        ({}, "one of prompt, messages and sample_id"),
        ({"prompt": PROMPT, "sample_id": "doc/1é"}, "one of prompt, messages and sample_id"),
        ({"prompt": ["a"]}, "prompt must be text"),
        ({"prompt": PROMPT, "metric": "cosin"}, "cosine"),
        ({"prompt": PROMPT, "top_k": 0}, "top_k must be greater than or equal to 1, got 0."),
        ({"prompt": PROMPT, "top_k": True}, "top_k must be an integer, got true."),
        ({"prompt": PROMPT, "topk": 3}, "top_k"),
        ([PROMPT], "must be a mapping"),
        (b"{", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"prompt": "\\ud800 b c"}', "not JSON"),
    ],
)
def test_a_query_that_is_refused(served, query, message):
    status, answer = asked(served[1], query)
    assert status == 400 and message in answer["error"]
    assert asked(served[1], {"prompt": PROMPT})[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/../manifest.json", {}, 404),
        ("GET", "/", {"Host": "example.com:80"}, 403),
        ("POST", "/query", {**JSON, "Host": "localhost.example.com:80"}, 403),
        ("POST", "/query", {"Content-Type": "text/plain"}, 415),
        ("POST", "/query", {"Origin": "http://example.com"}, 415),  # a page's request without a type
        ("POST", "/query", {**JSON, "Content-Length": str(1 << 40)}, 413),
        ("POST", "/query", {**JSON, "Content-Length": "-1"}, 413),
        ("POST", "/query", {**JSON, "Content-Length": "9" * 5000}, 413),
        ("POST", "/", JSON, 404),
    ],
)
def test_other_requests_are_refused(served, method, path, headers, status):
    assert call(served[1], method, path, json.dumps({"prompt": PROMPT}), headers)[0] == status


def test_a_program_needs_no_content_type(served):
    assert call(served[1], "POST", "/query", json.dumps({"prompt": PROMPT}), {})[0] == 200


RESET = struct.pack("ii", 1, 0)  # close() sends a reset, and waits for nothing


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /query HT",
        b"POST /query HTTP/1.1\r\nHost: localhost:80\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
        b"GET / HTTP/1.1\r\nHost: localhost:80\r\n\r\n",
    ],
)
def test_a_client_that_leaves_is_no_error(served, capfd, sent):
    with socket.create_connection(("127.0.0.1", served[1])) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.sendall(sent)
        time.sleep(0.05)  # until it is read
    assert asked(served[1], {"sample_id": ids(served[0])[0]})[0] == 200
    time.sleep(0.05)  # until its thread has ended
    assert capfd.readouterr() == ("", "")


def test_an_unexpected_error_is_answered_and_shown_to_whoever_serves(served, capfd, monkeypatch):
    def broken(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(Searcher, "stored", broken)
    assert asked(served[1], {"sample_id": "x"}) == (500, {"error": "MemoryError: no room"})
    time.sleep(0.05)
    assert "MemoryError: no room" in capfd.readouterr().err


def test_a_port_in_use_and_a_store_without_its_model(served, tmp_path, capsys):
    path, _, _ = served
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["grads", "serve", "--store", str(path), "--port", str(port), "--device", "cpu"]) == 2
        assert f"--port {port} cannot be opened on 127.0.0.1" in capsys.readouterr().err
    assert cli.main(["grads", "serve", "--store", str(path), "--model_dir", str(tmp_path / "none")]) == 2
    assert "pass its current folder as --model_dir" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="Debian's package chromium is not installed")
def test_one_types_a_prompt_and_reads_the_samples(served):
    sync_api = pytest.importorskip("playwright.sync_api")
    _, port, _ = served
    _, answer = asked(port, {"prompt": PROMPT, "top_k": 3})
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_label("Prompt").fill(PROMPT)
        page.get_by_label("Samples").fill("3")
        page.get_by_role("button", name="Search").click()
        sync_api.expect(page.get_by_role("status")).to_have_text("3 samples")
        items = page.locator("#found li")
        assert [one.locator(".id").inner_text() for one in items.all()] == [one["sample_id"] for one in answer["top"]]
        assert [one.locator("pre").text_content() for one in items.all()] == [one["text"] for one in answer["top"]]
        items.nth(1).get_by_role("button").click()
        sync_api.expect(items.first.locator(".id")).to_have_text(answer["top"][1]["sample_id"])
        assert said == []
        page.get_by_label("Prompt").fill("word " * 100)
        page.get_by_role("button", name="Search").click()
        sync_api.expect(page.get_by_role("status")).to_contain_text("shorten it")
        assert items.count() == 0
        browser.close()
