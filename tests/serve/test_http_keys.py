"""Keys of a file: who comes in, what a changed or spoilt file does, how many requests one key may have, and that no key is ever told."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, Job, eventually, live_server, make_app, user
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from test_http_shutdown import running

from gnomon.config import HTTPConfig, resolve
from gnomon.logs import JSONFormatter, TextFormatter
from gnomon.serve.keys import KeyFileError, KeyRing, new_key, parse, read
from gnomon.serve.listen import StartupError, bind

CHAT = "/v1/chat/completions"
# sha256("abc"), FIPS 180-2 appendix B.1.
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def line(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who\n\n" + line("laptop", "one") + line("ci", "two"))
    return path


def client_of(engine: FakeEngine, **http: object) -> TestClient:
    return TestClient(make_app(engine, http=HTTPConfig(**http)), base_url="http://localhost")  # type: ignore[arg-type]


def status(client: TestClient, key: str) -> int:
    return client.get("/v1/models", headers=bearer(key)).status_code


def test_lines() -> None:
    assert parse(f" # x\n\n a:{ABC} \nb.c-d_1:sha256${'0' * 64}") == {
        "a": hashlib.sha256(b"abc").digest(),
        "b.c-d_1": bytes(32),
    }
    ring = KeyRing(parse(f"a:{ABC.upper()}"))
    assert ring.name_of("abc") == "a"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"# x\nnocolon{ABC}", "line 2 has no colon"),
        (f":{ABC}", "line 1: a key's name is"),
        (f"a b:{ABC}", "line 1: a key's name is"),
        (f'a"}}:{ABC}', "line 1: a key's name is"),
        (f"{'a' * 65}:{ABC}", "line 1: a key's name is"),
        (f"api-key-1:{ABC}", "names that begin with api-key-"),
        (f"a:{ABC}\na:{'0' * 64}", "line 2: a was named before"),
        (f"a:{ABC}\nb:{ABC}", "line 2 \\(b\\) holds the same key"),
        ("a:open-secret", "line 1 \\(a\\) holds no SHA-256 digest"),
        (f"a:{ABC}0", "line 1 \\(a\\) holds no SHA-256 digest"),
        ("a:", "line 1 \\(a\\) holds no SHA-256 digest"),
        (f"a:open-secret${ABC}", "line 1 \\(a\\) is hashed in a way other than sha256"),
    ],
)
def test_bad_lines_are_named_and_never_shown(text: str, says: str) -> None:
    with pytest.raises(KeyFileError, match=says) as error:
        parse(text)
    assert "open-secret" not in str(error.value)
    assert ABC not in str(error.value)


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        found = parse(text)
    except KeyFileError:
        return
    assert all(len(digest) == 32 for digest in found.values())


def test_files_that_start_no_server(tmp_path: Path, keys: Path) -> None:
    def refused(path: Path, says: str) -> None:
        with pytest.raises(StartupError, match=says):
            bind(HTTPConfig(port=0, api_key_file=path))

    refused(tmp_path / "none", "can't be read: No such file")
    refused(tmp_path, "is no regular file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is no regular file")
    (tmp_path / "latin").write_bytes(b"\xe9:" + ABC.encode())
    refused(tmp_path / "latin", "is not UTF-8")
    (tmp_path / "empty").write_text("# nobody\n")
    refused(tmp_path / "empty", "holds no key")
    keys.chmod(0o646)
    refused(keys, "can be written by every user")
    keys.chmod(0o644)
    with keys.open("a") as file:
        file.write("#" * (1 << 20))
    refused(keys, "the limit is 1048576")


def test_a_file_opens_other_addresses_like_a_key(keys: Path) -> None:
    bind(HTTPConfig(host="0.0.0.0", port=0, api_key_file=keys)).close()


def test_keys_of_flags_and_file_together(engine: FakeEngine, keys: Path) -> None:
    with client_of(engine, api_keys=("flag",), api_key_file=keys) as client:
        assert [status(client, key) for key in ("flag", "one", "two", "three", "", "laptop")] == [200] * 3 + [401] * 3
        # A stolen file lets nobody in: neither a digest nor a line is a key.
        assert status(client, hashlib.sha256(b"one").hexdigest()) == 401
        assert status(client, line("laptop", "one").strip()) == 401


def test_a_changed_file_counts_from_the_next_request(engine: FakeEngine, keys: Path) -> None:
    with client_of(engine, api_key_file=keys) as client:
        assert (status(client, "one"), status(client, "new")) == (200, 401)
        other = keys.with_name("other")
        other.write_text(line("ci", "two") + line("later", "new"))
        other.replace(keys)
        assert (status(client, "one"), status(client, "two"), status(client, "new")) == (401, 200, 200)
        # The file that becomes empty opens nothing.
        keys.write_text("")
        assert (status(client, "two"), status(client, "new")) == (401, 401)
        assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("damage", ["garbage", "gone", "writable"])
def test_a_spoilt_file_keeps_the_keys_read_before(
    engine: FakeEngine, keys: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(engine, api_key_file=keys) as client:
        text = keys.read_text()
        if damage == "garbage":
            keys.write_text(line("mallory", "three") + "open-secret\n")
        elif damage == "gone":
            keys.unlink()
        else:
            keys.write_text(line("mallory", "three"))
            keys.chmod(0o666)
        assert [status(client, key) for key in ("one", "two", "three")] == [200, 200, 401]
        assert [r.levelname for r in caplog.records if r.name == "gnomon.serve.keys"] == ["ERROR"]
        about = client.get("/stats", headers=bearer("one"))
        assert str(keys) in about.json()["keys"]["error"]
        assert "gnomon_key_file_error 1.0" in client.get("/metrics", headers=bearer("one")).text
        keys.unlink(missing_ok=True)
        keys.write_text(text)
        keys.chmod(0o600)
        assert status(client, "one") == 200
        assert client.get("/stats", headers=bearer("one")).json()["keys"]["error"] is None
    assert "open-secret" not in about.text + caplog.text


def test_a_hangup_reads_the_file_again(keys: Path) -> None:
    with running("blind", 1000, str(keys)) as server:

        def get(key: str) -> int:
            return httpx.get(server.url + "/v1/models", headers=bearer(key)).status_code

        keys.write_text(line("laptop", "new"))
        assert (get("one"), get("new")) == (200, 401)
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: get("new") == 200)
        assert get("one") == 401
        assert server.process.poll() is None
    with running("short", 1000) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.ended() == -signal.SIGHUP


def test_the_limit_of_one_key(keys: Path) -> None:
    go = threading.Event()

    def script(job: Job) -> None:
        job.delta("A")
        assert go.wait(120)
        job.finish()
        job.end()

    http = HTTPConfig(api_key_file=keys, key_concurrency=2)
    with live_server(FakeEngine(script), http=http) as live, httpx.Client(base_url=live.url, timeout=120) as client:

        def post(key: str) -> httpx.Response:
            return client.post(CHAT, json=user("Hi"), headers=bearer(key))

        def under_way(name: str) -> int:
            return client.get("/stats", headers=bearer("two")).json()["keys"]["uses"][name]["open"]

        threads = [threading.Thread(target=post, args=("one",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: under_way("laptop") == 2)
        refused = post("one")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert error["message"] == "key laptop has 2 requests under way; the limit is 2 (--key-concurrency)"
        assert error["code"] == "key_concurrency"
        body = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        other = client.post("/v1/messages", json=body, headers={"x-api-key": "one"})
        assert (other.status_code, other.json()["error"]["type"]) == (429, "rate_limit_error")
        # What generates nothing stays open, as do the places of the other key.
        assert client.get("/v1/models", headers=bearer("one")).status_code == 200
        with client.stream("POST", CHAT, json=user("Hi", stream=True), headers=bearer("two")) as stream:
            assert stream.status_code == 200
            eventually(lambda: under_way("ci") == 1)
        # A client that left has given its place back.
        eventually(lambda: under_way("ci") == 0)
        go.set()
        for thread in threads:
            thread.join(120)
        eventually(lambda: under_way("laptop") == 0)
        assert post("one").status_code == 200
        # So has a request that was refused for its content.
        for _ in range(3):
            assert client.post(CHAT, content=b"{", headers=bearer("one")).status_code == 400
        assert under_way("laptop") == 0


def test_names_are_told_and_keys_are_not(engine: FakeEngine, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sent = "sent-and-unknown"
    with client_of(engine, api_keys=("flag-key",), api_key_file=keys) as client:
        assert client.post(CHAT, json=user("Hi"), headers=bearer("two")).status_code == 200
        wrong = client.get("/v1/models", headers=bearer(sent))
        stats = client.get("/stats", headers=bearer("flag-key"))
        text = client.get("/metrics", headers=bearer("flag-key")).text
    about = stats.json()["keys"]
    assert about["uses"]["ci"] == {"open": 0, "requests": 1, "refused": 0}
    assert set(about["uses"]) == {"api-key-1", "laptop", "ci"}
    assert (about["unknown"], about["file"], about["required"], about["limit"]) == (1, str(keys), True, None)
    samples = {(s.name, s.labels.get("key")): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["gnomon_key_requests_total", "ci"] == 1
    assert samples["gnomon_key_open", "laptop"] == 0
    assert samples["gnomon_key_unknown_total", None] == 1
    access = [r for r in caplog.records if r.name == "gnomon.serve.access"]
    assert TextFormatter().format(access[0]).endswith(" key ci")
    assert json.loads(JSONFormatter().format(access[0]))["key"] == "ci"
    assert "key" not in json.loads(JSONFormatter().format(access[1]))
    everything = wrong.text + stats.text + text + caplog.text
    for secret in (sent, "flag-key", hashlib.sha256(b"two").hexdigest(), hashlib.sha256(b"flag-key").hexdigest()):
        assert secret not in everything


@pytest.mark.parametrize("apart", [False, True])
def test_states_of_a_key_of_its_own(keys: Path, apart: bool) -> None:
    """Whatever route a prompt comes by; a stored response and what follows on it are the key's, too."""
    asked: list[str] = []

    def script(job: Job) -> None:
        asked.append(job.request.namespace)
        job.say("A")

    with client_of(FakeEngine(script), api_key_file=keys, prompt_cache_per_key=apart) as client:
        for key in ("one", "two", "one"):
            bodies: dict[str, dict[str, object]] = {
                CHAT: user("Hi"),
                "/v1/completions": {"prompt": "Hi"},
                "/v1/messages": {"max_tokens": 5, "messages": user("Hi")["messages"]},
                "/v1/responses": {"input": "Hi"},
            }
            for route, body in bodies.items():
                answer = client.post(route, json={"model": "any", **body}, headers=bearer(key))
                assert answer.status_code == 200, answer.text
    one, two = (" of key laptop", " of key ci") if apart else ("", "")
    assert asked == [one] * 4 + [two] * 4 + [one] * 4


def test_without_keys_nothing_is_asked(engine: FakeEngine) -> None:
    with client_of(engine) as client:
        about = client.get("/stats").json()["keys"]
    assert about == {"required": False, "file": None, "error": None, "limit": None, "unknown": 0, "uses": {}}
    notes = resolve(environ={"GNOMON_KEY_CONCURRENCY": "2"}).notes
    assert notes == ("GNOMON_KEY_CONCURRENCY has no effect without --api-key or --api-key-file",)


def test_new_keys(tmp_path: Path) -> None:
    made = [new_key("laptop") for _ in range(50)]
    assert len({key for key, _ in made}) == 50
    # 32 random bytes in base64 without padding.
    assert {len(key) for key, _ in made} == {len("gn-") + 43}
    key, written = made[0]
    path = tmp_path / "keys"
    path.write_text(written + "\n")
    assert KeyRing({}, path, _filed=read(path)).name_of(key) == "laptop"
    assert key not in written
    for bad in ("", "a b", "a:b", "api-key-1", "a\nb", "é"):
        with pytest.raises(ValueError, match="name"):
            new_key(bad)
