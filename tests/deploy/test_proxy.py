"""Replicas behind nginx, with the configuration that is given away: conversations stay where their states are."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, Live, live_server, parse_stream

from gnomon.config import HTTPConfig
from gnomon.serve import sessions

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
TEXT = CONFIGURATION.read_text("utf-8")
CHAT = "/v1/chat/completions"


def test_the_configuration_says_what_the_server_is() -> None:
    """Read without a proxy: names and limits are those of the code."""
    lines = [line.split("#")[0].strip() for line in TEXT.splitlines()]
    plain = " ".join(line for line in lines if line)
    assert plain.count("{") == plain.count("}")
    # nginx names a header by its variable.
    assert f"$http_{sessions.HEADER.replace('-', '_')}" in plain
    assert re.search(r"hash \$gnomon_conversation consistent;", plain)
    limit = re.search(r"client_max_body_size (\d+)m;", plain)
    assert limit is not None
    assert int(limit[1]) << 20 == HTTPConfig().body_limit
    for needed in ("proxy_buffering off;", "proxy_http_version 1.1;", "proxy_set_header Host 127.0.0.1;"):
        assert needed in plain
    assert "non_idempotent" not in plain


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The system's, or Debian's package unpacked."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found:
        return found
    if shutil.which("apt-get") is None:
        pytest.skip("neither nginx nor apt-get is here")
    directory = tmp_path_factory.mktemp("nginx")
    try:
        said = subprocess.run(
            ["apt-get", "download", "-qq", "nginx"], cwd=directory, capture_output=True, text=True, timeout=120
        ).stderr
    except subprocess.TimeoutExpired as error:
        said = str(error)
    packages = list(directory.glob("nginx_*.deb"))
    if not packages:
        pytest.skip(f"nginx can't be fetched: {said.strip()[-200:]}")
    subprocess.run(["dpkg", "-x", str(packages[0]), str(directory / "root")], check=True)
    return str(directory / "root" / "usr" / "sbin" / "nginx")


@contextmanager
def proxied(nginx: str, directory: Path, ports: list[int]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = TEXT.replace("127.0.0.1:8081", f"127.0.0.1:{ports[0]}").replace("127.0.0.1:8082", f"127.0.0.1:{ports[1]}")
    text = text.replace("listen 8080;", f"listen 127.0.0.1:{port};")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {directory}/{kind}; " for kind in kinds)
    text = text.replace("http {", "http { access_log off; " + temporary, 1)
    file = directory / "nginx.conf"
    file.write_text(text)
    directives = f"daemon off; pid {directory}/pid; error_log stderr;"
    command = [nginx, "-p", str(directory), "-c", str(file), "-e", "stderr", "-g", directives]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 300
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                assert time.monotonic() < end
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=300)


def places(lives: list[Live[FakeEngine]]) -> list[int]:
    return [len(live.engine.submitted) for live in lives]


@pytest.mark.slow
def test_conversations_stay_with_their_replica(nginx: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        lives = [stack.enter_context(live_server(FakeEngine())) for _ in range(2)]
        url = stack.enter_context(proxied(nginx, tmp_path, [live.port for live in lives]))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}

        def replica(session: str) -> int:
            before = places(lives)
            answer = client.post(CHAT, json=body, headers={sessions.HEADER: session})
            assert answer.status_code == 200
            return [after - one for after, one in zip(places(lives), before, strict=True)].index(1)

        homes = {f"conversation {n}": replica(f"conversation {n}") for n in range(20)}
        assert len(Counter(homes.values())) == 2
        for _ in range(3):
            assert {name: replica(name) for name in homes} == homes
        # A stream comes through as it is made.
        with client.stream("POST", CHAT, json={**body, "stream": True}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert parse_stream(stream.read().decode())[-1] == "[DONE]"
        # Errors are the server's own.
        refused = client.post(CHAT, content=b"{")
        assert json.loads(refused.content)["error"]["code"] == "invalid_json"
        assert client.get("/stats").status_code == 404
        assert client.get("/v1/models").status_code == 200


@pytest.mark.slow
def test_a_replica_that_is_gone_takes_nobody_along(nginx: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stays = stack.enter_context(live_server(FakeEngine()))
        with socket.create_server(("127.0.0.1", 0)) as gone:
            dead = gone.getsockname()[1]
        url = stack.enter_context(proxied(nginx, tmp_path, [stays.port, dead]))
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for n in range(20):
            answer = httpx.post(url + CHAT, json=body, headers={sessions.HEADER: f"conversation {n}"}, timeout=300)
            assert answer.status_code == 200
        assert len(stays.engine.submitted) == 20
