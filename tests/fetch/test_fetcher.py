"""Attacks on a server that fetches: names that change, redirects inwards, addresses in disguise, bodies that never end."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpcore2
import pytest

from gnomon.fetch import Document, Fetcher, FetchError, Limits

PUBLIC = "93.184.215.14"
"""An address that is nobody's here: connections to it are led to the test's own server."""
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers as the test has it."""

    server: Site
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        fields = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.headers["host"], self.path, fields))
        try:
            self.server.answer(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def say(self, status: int = 200, body: bytes = b"", length: int | None = None, **fields: str) -> None:
        self.send_response(status)
        for name, value in {"content_type": "text/plain", **fields}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


class Site(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.seen: list[tuple[str, str, dict[str, str]]] = []


class Net(httpcore2.AsyncNetworkBackend):
    """Leads what would go to `PUBLIC` to a port of this machine, and keeps account of where connections were wanted."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.wanted: list[tuple[str, int]] = []

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
        self.wanted.append((host, port))
        if host != PUBLIC:
            raise httpcore2.ConnectError(host)
        return await httpcore2.AnyIOBackend().connect_tcp("127.0.0.1", self.port, *args, **kwargs)  # type: ignore[attr-defined]


class Names:
    """A resolver: the addresses of a name, one answer after the other, the last for good."""

    def __init__(self, **names: Sequence[Sequence[str]]) -> None:
        self.names = {name.replace("_", "."): list(answers) for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def site(answer: Answer, names: Names | None = None, **limits: Any) -> Iterator[tuple[Site, Net, Fetcher]]:
    with Site(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        net = Net(server.server_address[1])
        try:
            yield server, net, Fetcher(Limits(**{"seconds": 300.0, **limits}), resolve=names or Names(), network=net)
        finally:
            server.shutdown()
            thread.join()


def fetch(fetcher: Fetcher, url: str) -> Document:
    return asyncio.run(fetcher.fetch(url))


def refused(fetcher: Fetcher, url: str, says: str) -> None:
    with pytest.raises(FetchError, match=says):
        fetch(fetcher, url)


def test_a_document_and_what_is_told_of_us() -> None:
    with site(lambda h: h.say(200, "naïve".encode(), content_type="text/markdown; charset=UTF-8")) as (
        server,
        net,
        fetcher,
    ):
        document = fetch(fetcher, "http://docs.example/a%20b?q=1#part")
        assert (document.kind, document.text, document.size) == ("text/markdown", "naïve", 6)
    [(host, path, headers)] = server.seen
    assert (host, path) == ("docs.example", "/a%20b?q=1")
    assert net.wanted == [(PUBLIC, 80)]
    assert headers["accept-encoding"] == "identity"
    assert not {"authorization", "cookie", "referer"} & set(headers)
    assert fetcher.stats() | {"fetched": 1, "failed": 0, "bytes": 6} == fetcher.stats()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "127.1",
        "017700000001",
        "0",
        "169.254.169.254",
        "[fd00::1]",
        "127。0。0。1",
        "LOCALHOST.",
    ],
)
def test_this_machine_under_all_its_names(host: str) -> None:
    """By the system's own resolver, which is what reads them."""
    fetcher = Fetcher(Limits(seconds=300), network=(net := Net(1)))
    with pytest.raises(FetchError, match=r"without public address|no URL"):
        fetch(fetcher, f"http://{host}/")
    assert net.wanted == []


def test_octal_is_not_read_as_decimal() -> None:
    fetcher = Fetcher(network=(net := Net(1)))
    refused(fetcher, "http://0177.0.0.1/", "is no URL")
    assert net.wanted == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///etc/passwd", "neither http nor https"),
        ("gopher://docs.example/", "neither http nor https"),
        ("//docs.example/", "neither http nor https"),
        ("data:text/plain,hello", "neither http nor https"),
        ("http://user:secret@docs.example/", "credentials"),
        ("http://docs.example@127.0.0.1/", "credentials"),
        ("http://docs.example:22/", "port 22"),
        ("http://docs.example:0/", "port 0"),
        ("http://docs.example\\@127.0.0.1/", "backslash"),
        ("http://127.0.0.1\\.docs.example/", "backslash"),
        ("http://docs.example/\r\nhost: evil", "control character"),
        ("http://docs.exa\tmple/", "control character"),
        (" http://docs.example/", "blank"),
        ("http://[fe80::1%25eth0]/", "names no host|no URL"),
        ("http:///etc", "names no host"),
        ("http://docs.example/" + "a" * 2048, "the limit is 2048"),
    ],
)
def test_urls_that_are_not_asked_for(url: str, says: str) -> None:
    names = Names()
    refused(Fetcher(resolve=names, network=(net := Net(1))), url, says)
    assert (names.asked, net.wanted) == ([], [])


def test_a_name_that_is_rebound_between_check_and_use() -> None:
    """It is asked for once, and the connection goes to what was checked."""
    names = Names(rebound_example=[[PUBLIC], ["127.0.0.1"]])
    with site(lambda h: h.say(200, b"public"), names) as (_, net, fetcher):
        assert fetch(fetcher, "http://rebound.example/").text == "public"
        assert (names.asked, net.wanted) == (["rebound.example"], [(PUBLIC, 80)])
        refused(fetcher, "http://rebound.example/", "without public address")
        assert net.wanted == [(PUBLIC, 80)]


def test_one_private_address_among_public_ones_spoils_them_all() -> None:
    names = Names(mixed_example=[[PUBLIC, "10.0.0.1"]])
    refused(Fetcher(resolve=names, network=(net := Net(1))), "https://mixed.example/", "without public address")
    assert net.wanted == []


def test_what_is_said_tells_nothing_of_the_network_within(caplog: pytest.LogCaptureFixture) -> None:
    async def names(host: str, port: int) -> Sequence[str]:
        if host == "nowhere.corp":
            raise socket.gaierror(-2, "Name or service not known")
        return ["10.1.2.3"]

    said: list[str] = []
    for host in ("nowhere.corp", "build.corp"):
        with pytest.raises(FetchError) as error:
            fetch(Fetcher(resolve=names, network=Net(1)), f"http://{host}/")
        said.append(str(error.value).replace(host, "X"))
    assert said[0] == said[1] == "has a host without public address: X"
    assert "10.1.2.3" in caplog.text


@pytest.mark.parametrize(
    ("onward", "says"),
    [
        ("http://127.0.0.1:80/", "without public address"),
        ("http://169.254.169.254/latest/meta-data/", "without public address"),
        ("//[::1]/", "without public address"),
        ("http://docs.example:8080/", "leads to a URL that has port 8080"),
        ("file:///etc/passwd", "neither http nor https"),
        ("http://a:b@docs.example/", "credentials"),
        ("http://[", "names no host"),
        ("http://docs.example/" + "a" * 2048, "the limit is 2048"),
    ],
)
def test_a_redirect_inwards(onward: str, says: str) -> None:
    names = Names(**{"127_0_0_1": [["127.0.0.1"]], "169_254_169_254": [["169.254.169.254"]], "::1": [["::1"]]})
    with site(lambda h: h.say(302, location=onward), names) as (server, net, fetcher):
        refused(fetcher, "http://docs.example/", says)
        assert len(server.seen) == len(net.wanted) == 1


def test_redirects_end() -> None:
    def chain(handler: Handler) -> None:
        step = int(handler.path[1:])
        handler.say(200, b"there") if step == 0 else handler.say(301, location=f"/{step - 1}")

    with site(chain) as (server, _, fetcher):
        assert fetch(fetcher, "http://docs.example/3").text == "there"
        assert [path for _, path, _ in server.seen] == ["/3", "/2", "/1", "/0"]
        server.seen.clear()
        refused(fetcher, "http://docs.example/99", "leads on more than 3 times")
        assert len(server.seen) == 4
        server.answer = lambda handler: handler.say(307, location=handler.path)
        refused(fetcher, "http://docs.example/loop", "more than 3 times")
        server.answer = lambda handler: handler.say(302)
        refused(fetcher, "http://docs.example/", "without a location")


def test_a_body_that_comes_drop_by_drop_ends_with_its_time() -> None:
    stop = threading.Event()

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/plain")
        handler.send_header("content-length", "1000")
        handler.end_headers()
        while not stop.wait(0.02):
            handler.wfile.write(b".")
            handler.wfile.flush()

    with site(drip, seconds=0.5) as (_, __, fetcher):
        refused(fetcher, "http://docs.example/", "not there within 0.5 s")
        stop.set()
    assert fetcher.failed == 1


def test_a_name_that_is_never_answered_ends_with_its_time() -> None:
    async def names(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    refused(Fetcher(Limits(seconds=0.2), resolve=names, network=Net(1)), "http://docs.example/", "within 0.2 s")


def test_huge_bodies() -> None:
    sent: list[int] = []

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/plain")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"10000\r\n" + b"a" * 65_536 + b"\r\n")
            sent.append(65_536)

    with site(lambda h: h.say(200, b"a" * 1000, length=1 << 40), size=10_000, seconds=300) as (server, _, fetcher):
        refused(fetcher, "http://docs.example/", f"has {1 << 40} bytes; the limit is 10000")
        server.answer = endless
        refused(fetcher, "http://docs.example/", "bytes and more; the limit is 10000")
        server.answer = lambda handler: handler.say(200, b"a" * 10_000)
        assert fetch(fetcher, "http://docs.example/").size == 10_000
    # No more than what lay in buffers on the way.
    assert sum(sent) < 64 << 20


def test_what_is_packed_is_not_unpacked() -> None:
    bomb = gzip.compress(b"0" * (1 << 22))
    with site(lambda h: h.say(200, bomb, content_encoding="gzip")) as (server, _, fetcher):
        refused(fetcher, "http://docs.example/", "content-encoding gzip")
        server.answer = lambda handler: handler.say(200, bomb, content_type="text/plain; charset=bz2")
        refused(fetcher, "http://docs.example/", "charset 'bz2'")
        server.answer = lambda handler: handler.say(200, b"+", content_type="text/plain; charset=unicode_escape")
        refused(fetcher, "http://docs.example/", "charset 'unicode_escape'")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"content_type": "image/png"}, "is image/png; what can be read is text/plain"),
        ({"content_type": "application/pdf"}, "is application/pdf"),
        ({"content_type": ""}, "is no content type"),
        ({"body": b"\xff\xfe"}, "is no utf-8 at byte 0"),
        ({"status": 404}, "was answered 404"),
        ({"status": 304}, "was answered 304"),
        ({"status": 206, "body": b"part"}, "was answered 206"),
    ],
)
def test_what_is_no_text(answer: dict[str, Any], says: str) -> None:
    with site(lambda h: h.say(**answer)) as (_, __, fetcher):
        refused(fetcher, "http://docs.example/", says)


def test_what_is_no_http() -> None:
    def garbage(handler: Handler) -> None:
        handler.wfile.write(b"\x00\x01\x02 not http\r\n" * 10)
        handler.close_connection = True

    def endless_head(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(10_000):
            handler.wfile.write(b"x-%d: %s\r\n" % (number, b"a" * 100))
        handler.close_connection = True

    with site(garbage, seconds=300) as (server, _, fetcher):
        refused(fetcher, "http://docs.example/", "could not be had from docs.example: RemoteProtocolError")
        server.answer = endless_head
        refused(fetcher, "http://docs.example/", "could not be had from docs.example")


def test_no_variable_leads_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with site(lambda h: h.say(200, b"direct")) as (_, net, fetcher):
        assert fetch(fetcher, "http://docs.example/").text == "direct"
        assert net.wanted == [(PUBLIC, 80)]


def test_charsets() -> None:
    with site(lambda h: h.say(200, "é".encode("latin-1"), content_type="text/html; charset=ISO-8859-1")) as (
        server,
        _,
        f,
    ):
        assert fetch(f, "http://docs.example/").text == "é"
        server.answer = lambda handler: handler.say(200, "\ufeffé".encode(), content_type="application/json")
        assert fetch(f, "http://docs.example/").text == "é"


def test_private_addresses_where_they_are_allowed() -> None:
    with Site(lambda h: h.say(200, b"within")) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        assert fetch(Fetcher(anywhere=True), url).text == "within"
        refused(Fetcher(), url, "has port")
        server.shutdown()
        thread.join()
