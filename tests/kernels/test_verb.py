from types import ModuleType, SimpleNamespace

import mlx.core as mx
import pytest

from gnomon.cli import kernels as verb
from gnomon.config import Config
from gnomon.kernels import build, native
from gnomon.kernels.verify import verify


def run(action: str) -> int:
    return verb.run(SimpleNamespace(action=action, rebuild=False, all=False, config=Config()))  # pyright: ignore[reportArgumentType]


def test_verify_passes_here(kernels: ModuleType) -> None:
    checks = list(verify(kernels))
    assert {c.isa for c in checks} == set(kernels.isas())
    names = {"quantized_matmul", "int8", "matmul", "rms_norm", "attention", "encode", "coded_attention"}
    assert names <= {c.operation for c in checks}
    assert [c for c in checks if not c.passed] == []


def test_verify_sees_a_wrong_kernel_and_a_dependent_row(kernels: ModuleType) -> None:
    names = ("isa", "isas", "set_isa", "dense_matmul", "rms_norm", "layer_norm", "gated", "logsumexp", "attention")
    wrong = SimpleNamespace(**{name: getattr(kernels, name) for name in (*names, "CodesForm")})

    def product(x: mx.array, *rest: object) -> mx.array:
        return kernels.quantized_matmul(x, *rest) * (1 + 1e-2 * x.shape[0])

    def encode(x: mx.array, form: object) -> mx.array:
        return kernels.encode(x * (1 + 0.2 * x.shape[0]), form)

    def coded_attention(q: mx.array, *rest: object) -> mx.array:
        return kernels.coded_attention(q, *rest) * (1 + 1e-2 * q.shape[2])

    wrong.quantized_matmul, wrong.encode, wrong.coded_attention = product, encode, coded_attention
    found = [c for c in verify(wrong) if not c.passed]  # pyright: ignore[reportArgumentType]
    assert {c.operation for c in found} == {"quantized_matmul", "int8", "encode", "coded_attention"}
    assert any(c.error > 1 for c in found)
    assert not any(c.invariant for c in found)


def test_list_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    said = capsys.readouterr().out
    assert f"instruction set: {build.cpu_isas()[0]}\n" in said
    assert "quantized_matmul" in said
    assert "--kernels int8" in said
    assert f"means {native.meant('auto')}" in said


def test_verify_prints_a_verdict(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "_load", lambda config, rebuild, all_isas: (kernels, None))
    assert run("verify") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith(": ok") for line in lines)
