"""The script that runs llama.cpp: its metrics by hand from a server's timings, refusal of other work, and the report's command lines."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module("llama_cpp_server")


class Server(ThreadingHTTPServer):
    """Answers completions with llama.cpp's timings: 4 ms a prompt token that wasn't cached, 10 ms a further token."""

    orders: list[dict[str, Any]]
    short = 0
    forgets = False


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = max((len(o["prompt"]) for o in self.server.orders if o["cache_prompt"]), default=0)
        cached = known if order["cache_prompt"] and not self.server.forgets else 0
        self.server.orders.append(order)
        size, count = len(order["prompt"]), order["max_tokens"] - self.server.short
        body = {
            "usage": {
                "prompt_tokens": size,
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
            "timings": {"prompt_ms": 4.0 * (size - cached), "predicted_ms": 10.0 * (count - 1)},
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.orders = []
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def ids(count: int, row: int) -> list[int]:
    return [100 + row] * count


def test_rates_come_from_the_timings(script: ModuleType, server: Server) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    assert script.measure(address, "prompt:50", ids)["prefill_tokens_per_second"] == pytest.approx(250)
    assert script.measure(address, "decode:9@0", ids)["decode_tokens_per_second"] == pytest.approx(100)
    assert script.measure(address, "decode:9@32", ids)["decode_tokens_per_second"] == pytest.approx(100)
    assert [len(o["prompt"]) for o in server.orders] == [50, 1, 32, 33]
    assert all(o["ignore_eos"] and o["temperature"] == 0 for o in server.orders)
    batch = script.measure(address, "batch:3x4", ids)
    assert batch["aggregate_tokens_per_second"] == pytest.approx(12 / batch["total_seconds"])
    assert sorted(o["prompt"][0] for o in server.orders[4:]) == [100, 101, 102]


def test_other_work_than_ordered_is_refused(script: ModuleType, server: Server) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    server.forgets = True
    with pytest.raises(RuntimeError, match="0 tokens stood in the cache, ordered were 32"):
        script.measure(address, "decode:9@32", ids)
    server.short = 1
    with pytest.raises(RuntimeError, match=r"\(50, 0\), ordered were \(50, 1\)"):
        script.measure(address, "prompt:50", ids)
    with pytest.raises(ValueError, match="is none of"):
        script.measure(address, "stream:1x4", ids)


def test_the_report_runs_the_binary_that_is_given(tmp_path: Path) -> None:
    report = module("full_report")
    command = report.llama_cpp(tmp_path / "a b.gguf", tmp_path / "llama-server", 2, tmp_path)
    words = shlex.split(command)
    assert words[:3] == [str(tmp_path / "llama-server"), "-m", str(tmp_path / "a b.gguf")]
    assert words[-2:] == ["--port", "{port}"]
    assert words[words.index("-c") + 1] == "32768"
    assert words[words.index("-np") + 1] == "8"


@pytest.mark.parametrize("group", [32, 64])
def test_a_gguf_file_of_mlx_weights_holds_their_numbers(group: int) -> None:
    script = module("mlx_to_gguf")
    packed = mx.quantize(mx.random.normal((6, 128), key=mx.random.key(group)), group, 4)
    scales, biases = (part.astype(mx.float16).astype(mx.float32) for part in packed[1:])
    rows = script.q4_1(*packed)
    found = quants.dequantize(rows, GGMLQuantizationType.Q4_1)
    assert np.allclose(found, np.array(mx.dequantize(packed[0], scales, biases, group, 4)), rtol=0, atol=1e-7)


def test_rows_of_a_head_are_put_in_the_order_of_rotated_pairs() -> None:
    # Two heads of six rows: row 0 turns with row 3, 1 with 4, 2 with 5; llama.cpp keeps those side by side.
    rows = np.arange(12, dtype=np.uint8)[:, None]
    assert module("mlx_to_gguf").turned(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
