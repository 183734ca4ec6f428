"""`generate` and `chat` against a server: what is sent, what is printed, and what is said when the server fails."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from cli_process import gnomon
from rich.console import Console
from scripted_server import chat, scripted

from gnomon.chat.reasoning import Segment
from gnomon.cli._screen import Screen
from gnomon.cli._talk import Ended, Reading


@pytest.fixture
def server():
    with scripted() as script:
        yield script


def test_generate_streams_the_answer(server):
    server.answers = [chat({"content": "Par"}, {"content": "is."})]
    done = gnomon(
        "generate", "--server", server.url, "--prompt", "Capital?", "--system", "Short.", "--temp", "0", "--seed", "7"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris.\n", "")
    path, body, _ = server.asked[-1]
    assert path == "/v1/chat/completions"
    assert body == {
        "messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Capital?"}],
        "model": "scripted-model",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "max_tokens": 256,
        "seed": 7,
    }


def test_generate_reads_stdin_and_v1_urls_and_sends_the_key(server):
    server.answers = [chat({"content": "ok\n"})]
    flags = ("--model", "m", "--thinking", "off", "--stop", "X")
    done = gnomon("gen", "--server", server.url + "/v1/", *flags, stdin="hi", GNOMON_API_KEY="k1,k2")
    assert done.stdout == "ok\n"
    path, body, headers = server.asked[-1]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer k1"
    assert (body["model"], body["stop"], body["messages"]) == ("m", ["X"], [{"role": "user", "content": "hi"}])
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "temperature" not in body


def test_generate_raw(server):
    server.answers = [[{"choices": [{"index": 0, "text": " there"}]}, "data: [DONE]"]]
    done = gnomon(
        "generate", "--raw", "--server", server.url, "--prompt", "Hello", "--max-tokens", "5", "--hlg-sampling"
    )
    assert done.stdout == " there\n"
    path, body, _ = server.asked[-1]
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "Hello", 5)
    assert body["hlg"] == {
        "enabled": True,
        "width": 4.0,
        "shoulder": 4.0,
        "toe": 6.0,
        "pivot": "top",
        "pivot_offset": 6.0,
    }


def test_thoughts_go_to_stderr_on_a_pipe(server):
    server.answers = [chat({"reasoning_content": "hm", "reasoning": "hm"}, {"content": "yes"})]
    done = gnomon("generate", "--server", server.url, "--prompt", "?")
    assert (done.stdout, done.stderr) == ("yes\n", "hm")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((400, {"error": {"message": "top_k must be at least 0"}}), "answered 400: top_k must be at least 0"),
        ((502, "<html>bad gateway</html>"), "answered 502: <html>bad gateway</html>"),
        ([{"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "device lost"}}], "broke off: device lost"),
        (chat({"content": "a"}, done=False), "closed the stream before its end"),
        (["data: nonsense"], "sent 'nonsense' where a JSON object was due"),
    ],
)
def test_a_failing_server_is_reported(server, answer, says):
    server.answers = [answer]
    done = gnomon("generate", "--server", server.url, "--prompt", "?")
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = gnomon("generate", "--server", f"http://127.0.0.1:{port}", "--prompt", "?")
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert gnomon("generate", "--server", "localhost:1", "--prompt", "?").returncode == 2


class UnixServer(socketserver.ThreadingUnixStreamServer):
    def get_request(self):
        request, _ = super().get_request()
        return request, ("local", 0)


def test_a_unix_socket(tmp_path):
    with scripted(UnixServer, str(tmp_path / "s")) as script:
        script.answers = [chat({"content": "near"})]
        done = gnomon("generate", "--server", script.url, "--prompt", "?")
    assert (done.stdout, done.stderr) == ("near\n", "")


def test_chat_keeps_the_conversation(server, tmp_path):
    server.answers = [
        chat({"reasoning_content": "think"}, {"content": "one"}),
        (500, {"error": {"message": "hiccup"}}),
        chat({"content": "two"}),
        chat({"content": "three"}),
    ]
    said = "first\n\nlost\nsecond\n/system Be brief.\n/what\n/system\nthird\n/exit\nnever\n"
    done = gnomon("chat", "--server", server.url, "--cache", str(tmp_path), stdin=said)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one\ntwo\nthree\n"
    assert "hiccup" in done.stderr
    assert "There is no command /what" in done.stderr
    assert "System message: Be brief." in done.stderr
    bodies = [body["messages"] for path, body, _ in server.asked if path.endswith("completions")]
    one = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "one", "reasoning_content": "think"}]
    assert bodies == [
        one[:1],
        [*one, {"role": "user", "content": "lost"}],
        [*one, {"role": "user", "content": "second"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "third"}],
    ]


def test_a_script_whose_last_turn_failed_fails(server):
    server.answers = [(500, {"error": {"message": "hiccup"}})]
    assert gnomon("chat", "--server", server.url, stdin="a\n").returncode == 1


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, *argv: str, **environ: str) -> None:
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environ}
        env.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gnomon.cli.main", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def until(self, text: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{text!r} never came; seen {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode("utf-8", "replace")

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.master, text.encode())

    def close(self) -> int:
        try:
            return self.process.wait(300)
        finally:
            self.process.kill()
            os.close(self.master)


def test_chat_on_a_terminal(server, tmp_path):
    server.answers = [chat({"reasoning_content": "secret thought"}, {"content": "an\x1b[31mswer"})]
    terminal = Terminal("chat", "--server", server.url, "--cache", str(tmp_path))
    terminal.until("Talking with scripted-model")
    terminal.until("> ")
    terminal.type("hello\r")
    terminal.until("swer")
    assert "\x1b[2msecret thought" in terminal.seen
    assert "an␛[31mswer" in terminal.seen
    terminal.until("> ")
    terminal.type("/exit\r")
    assert terminal.close() == 0
    history = tmp_path / "chat_history"
    assert "hello" in history.read_text()
    assert history.stat().st_mode & 0o77 == 0


def test_chat_on_a_dumb_terminal(server, tmp_path):
    server.answers = [chat({"reasoning_content": "thought"}, {"content": "answer"})]
    terminal = Terminal("chat", "--server", server.url, "--cache", str(tmp_path), TERM="dumb")
    terminal.until("> ")
    terminal.type("hello\r")
    terminal.until("answer")
    assert "\x1b" not in terminal.seen
    assert terminal.seen.index("(thinking)") < terminal.seen.index("thought") < terminal.seen.index("(answer)")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_ctrl_c_breaks_an_answer_off_and_the_chat_goes_on(server, tmp_path):
    never = threading.Event()
    server.answers = [chat({"content": "never ending"}, never.wait), chat({"content": "again"})]
    terminal = Terminal("chat", "--server", server.url, "--cache", str(tmp_path))
    try:
        terminal.until("> ")
        terminal.type("go\r")
        terminal.until("never ending")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("> ")
        terminal.type("more\r")
        terminal.until("again")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.close() == 0
    finally:
        never.set()
    assert server.asked[-1][1]["messages"] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "never ending"},
        {"role": "user", "content": "more"},
    ]


def screen(terminal: bool) -> tuple[Screen, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return (
        Screen(Console(file=out, force_terminal=terminal, width=20), Console(file=err, force_terminal=False)),
        out,
        err,
    )


def events(*made):
    yield from made


def test_long_lines_are_not_folded_and_markup_is_text():
    shown, out, _ = screen(terminal=False)
    text = "[bold]" + "x" * 50 + " :smile:"
    answer = shown.show(events(Reading(1, 2), Segment("content", text), Ended("stop", 1, 2)))
    assert out.getvalue() == text + "\n"
    assert (answer.content, answer.ended) == (text, Ended("stop", 1, 2))


def test_a_terminal_keeps_newlines_and_loses_control_characters():
    shown, out, _ = screen(terminal=True)
    shown.show(events(Segment("content", "a\n\tb\x07\x9b"), Ended("stop", 1, 2)))
    assert out.getvalue().replace("\x1b[0m", "").startswith("a\n")
    assert "\x07" not in out.getvalue()
    assert "\x9b" not in out.getvalue()
