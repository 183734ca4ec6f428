"""Host, Origin, keys, and how large a request may be."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, live_server, make_app, user
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from gnomon.config import HTTPConfig
from gnomon.serve import listen
from gnomon.serve.auth import host_name
from gnomon.serve.keys import KeyRing
from gnomon.serve.listen import StartupError, answering, bind, is_loopback

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("localhost.", 200),
        ("app.localhost:3000", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("192.168.1.7:8080", 200),
        ("my.box:8080", 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("my.box.evil.example", 403),
        ("", 403),
    ],
)
def test_hosts(engine: FakeEngine, host: str, status: int) -> None:
    app = make_app(engine, http=HTTPConfig(allowed_hosts=("my.box",)))
    with TestClient(app, base_url="http://localhost") as client:
        response = client.get("/health", headers={"host": host})
    assert response.status_code == status
    if status == 403:
        error = response.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert host in error["message"]
        assert ("--allowed-host" if host else "a Host header is required") in error["message"]


def test_a_unix_socket_takes_any_host(engine: FakeEngine) -> None:
    app = make_app(engine, http=HTTPConfig(unix=Path("/tmp/x.sock")))
    with TestClient(app, base_url="http://anything") as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("origin", "status", "cors"),
    [
        (None, 200, None),
        ("http://localhost:8080", 200, None),
        ("https://app.example", 200, "https://app.example"),
        ("http://app.example", 403, None),
        ("http://localhost:3000", 403, None),
        ("https://evil.example", 403, None),
        ("https://app.example.evil.example", 403, None),
        ("null", 403, None),
        ("file://", 403, None),
    ],
)
def test_origins(engine: FakeEngine, origin: str | None, status: int, cors: str | None) -> None:
    app = make_app(engine, http=HTTPConfig(allowed_origins=("https://app.example",)))
    with TestClient(app, base_url="http://localhost:8080") as client:
        response = client.post(CHAT, json=user("Hi"), headers={"origin": origin} if origin else {})
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == cors
    assert bool(engine.submitted) == (status == 200)
    if status == 403:
        assert response.json()["error"]["code"] == "origin_not_allowed"


def test_preflights(engine: FakeEngine) -> None:
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    app = make_app(engine, http=HTTPConfig(allowed_origins=("https://app.example",), api_keys=("secret",)))
    with TestClient(app, base_url="http://localhost") as client:
        allowed = client.options(CHAT, headers={"origin": "https://app.example", **ask})
        # A browser shows a page no response without this header, refusals included.
        refused = client.post(CHAT, json=user("Hi"), headers={"origin": "https://app.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        assert client.options(CHAT, headers={"origin": "https://app.example", **ask}).status_code == 403


@pytest.fixture(scope="module")
def locked() -> Iterator[TestClient]:
    """A client of a server with two keys."""
    app = make_app(FakeEngine(), http=HTTPConfig(api_keys=("one", "two")))
    with TestClient(app, base_url="http://localhost") as made:
        yield made


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"authorization": "Bearer on"}, 401),
        ({"authorization": "Bearer onee"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "one"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "ONE"}, 401),
    ],
)
@pytest.mark.parametrize("route", ["/v1/models", "/v1", "/stats", "/metrics", "/openapi.json", "/unknown"])
def test_keys(locked: TestClient, route: str, headers: dict[str, str], status: int) -> None:
    response = locked.get(route, headers=headers)
    assert locked.get("/health").status_code == 200
    assert response.status_code == (404 if status == 200 and route == "/unknown" else status)
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "one" not in response.json()["error"]["message"].replace("one of", "")


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.text())
def test_only_the_keys_are_known(keys: list[str], other: str) -> None:
    ring = KeyRing.of(HTTPConfig(api_keys=tuple(keys)))
    distinct = list(dict.fromkeys(keys))
    assert [ring.name_of(key) for key in distinct] == [f"api-key-{n}" for n in range(1, len(distinct) + 1)]
    assert (ring.name_of(other) is not None) == (other in keys)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("a.b:80", "a.b"),
        ("A.B", "a.b"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("a.b.:80", "a.b"),
        ("", ""),
    ],
)
def test_host_names(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.7", False),
        ("my.box", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_binding_elsewhere_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "my.box"):
        with pytest.raises(StartupError, match="--api-key"):
            bind(HTTPConfig(host=host, port=0))
    bind(HTTPConfig(host="0.0.0.0", port=0, api_keys=("key",))).close()


def test_a_body_over_the_limit(engine: FakeEngine) -> None:
    app = make_app(engine, http=HTTPConfig(body_limit=1000))
    with TestClient(app, base_url="http://localhost") as client:
        for size, status in ((1000, 400), (1001, 413)):
            response = client.post(CHAT, content=b" " * size)
            assert response.status_code == status
        error = response.json()["error"]
        assert error["message"] == "the request body has 1001 bytes; the limit is 1000 bytes"
        # Without a declared length the bytes are counted as they come.
        response = client.post(CHAT, content=iter([b" " * 600, b" " * 600]))
        assert response.status_code == 413
        assert client.get("/health").status_code == 200


def test_a_declared_length_is_refused_before_the_body_comes(engine: FakeEngine) -> None:
    with (
        live_server(engine, http=HTTPConfig(body_limit=1000)) as live,
        socket.create_connection(("127.0.0.1", live.port), 120) as raw,
    ):
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_encoded_bodies_are_refused(client: TestClient) -> None:
    response = client.post(CHAT, content=b"x", headers={"content-encoding": "gzip"})
    assert (response.status_code, "gzip" in response.json()["error"]["message"]) == (415, True)


def test_heads_over_the_limit(engine: FakeEngine) -> None:
    app = make_app(engine, http=HTTPConfig(header_limit=2000))
    with TestClient(app, base_url="http://localhost") as client:
        response = client.get("/health", headers={"x-long": "x" * 2000})
        assert (response.status_code, response.json()["error"]["code"]) == (431, "head_too_large")
        assert "the limit is 2000" in response.json()["error"]["message"]
        response = client.get("/health?" + "x" * 2000)
        assert response.status_code == 431
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        response = client.get("/health", headers={f"x-{i}": "1" for i in range(130)})
        assert response.status_code == 431
        assert "the limit is 128" in response.json()["error"]["message"]


@pytest.mark.parametrize("trace", ["", "x" * 129, "a b", "a\tb", "ä".encode()])
def test_trace_ids_must_be_plain(client: TestClient, trace: str | bytes) -> None:
    response = client.get("/health", headers={"x-gnomon-trace-id": trace})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-gnomon-trace-id"


def test_log_lines_cannot_be_forged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gnomon.serve.access"):
        client.get("/health")
        client.get("/a%0d%0aGET /forged")
    assert [record.getMessage().rpartition(" 404 ")[0] for record in caplog.records] == ["GET /a%0d%0aGET%20/forged"]


def test_what_is_no_http_gets_the_error_body_too(engine: FakeEngine) -> None:
    with live_server(engine, http=HTTPConfig(header_limit=1000)) as live:
        for raw in (b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 6000):
            with socket.create_connection(("127.0.0.1", live.port), 120) as connection:
                connection.sendall(raw)
                answer = b""
                while part := connection.recv(4096):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b'"code": "invalid_http"' in answer


def test_a_port_that_is_taken(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "PROBE_SECONDS", 120)
    with live_server(engine) as live:
        with pytest.raises(
            StartupError, match=rf"port {live.port} is taken: gnomon .* already serves tests/fake-model"
        ):
            bind(HTTPConfig(port=live.port))
        port = live.port
    assert answering("127.0.0.1", port) is None


def test_a_port_held_by_something_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "PROBE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"can't listen on 127.0.0.1 port {port}"):
            bind(HTTPConfig(port=port))


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = HTTPConfig(unix=path)
    bound = bind(config)
    assert path.stat().st_mode & 0o777 == 0o600
    bound.listen()
    with pytest.raises(StartupError, match="taken"):
        bind(config)
    bound.close()
    # What a dead server left behind is cleared away.
    bind(config).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(StartupError, match="is no socket"):
        bind(config)
    assert path.read_text() == "precious"
