"""What isn't loaded yet where it isn't needed: starting takes the time that it would take."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_models
from gnomon.cli._model import starting_up
from gnomon.deferred import defer

HEAVY = ("transformers", "huggingface_hub", "torch", "mlx_lm.utils", "mlx_lm.tokenizer_utils", "mlx_lm.generate")
CASES = {
    "the web side": ("import gnomon.engine.api, gnomon.serve, gnomon.chat, gnomon.hub", ("mlx.core", *HEAVY)),
    "the command line": (
        "from gnomon.cli.main import build_parser, verbs; build_parser(verbs())",
        ("mlx.core", "numpy", "asyncio", "pydantic", "fastapi", "jinja2", "rich", "httpx", *HEAVY),
    ),
}


def _loaded(code: str, *arguments: str) -> set[str]:
    """The modules that a new process has loaded once it ran `code`."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}\nprint(*sys.modules)", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(ran.stdout.split())


@pytest.mark.parametrize("case", CASES)
def test_is_light(case: str) -> None:
    code, heavy = CASES[case]
    assert not _loaded(code) & set(heavy)


def test_a_first_answer_needs_little(tmp_path: Path) -> None:
    path = tiny_models.save("llama", tmp_path / "llama")
    code = "import gnomon\nwith gnomon.load(sys.argv[1]) as engine: assert engine.generate('a', max_tokens=2).text is not None"
    loaded = _loaded(code, str(path))
    assert "mlx_lm.models.llama" in loaded
    assert not loaded & {*HEAVY, "fastapi", "pydantic", "uvicorn", "rich", "jsonschema", "gguf"}


def test_a_start_searches_for_no_garbage() -> None:
    searched, before = list[bool](), gc.get_freeze_count()

    def fail() -> None:
        with starting_up():
            searched.append(gc.isenabled())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert searched == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose function has the name of one of its modules, as mlx-lm's `generate`, and that is deferred."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text(
        "from .work import work, other\nfrom .tools import tool\nREADY = len(__path__)\n"
    )
    (tmp_path / "late" / "work.py").write_text("def work(): return other()\ndef other(): return 7\n")
    (tmp_path / "late" / "tools.py").write_text("def tool(): return 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    defer("late")
    yield tmp_path / "late"
    for name in [name for name in sys.modules if name.partition(".")[0] == "late"]:
        del sys.modules[name]


def test_a_deferred_packages_modules_run_alone(package: Path) -> None:
    tools = importlib.import_module("late.tools")
    assert tools.tool() == 8
    assert "late.work" not in sys.modules
    assert importlib.import_module("late").tools is tools
    assert "late.work" in sys.modules


def test_a_name_of_a_deferred_package_is_the_packages_own(package: Path) -> None:
    module = importlib.import_module("late.work")
    late = importlib.import_module("late")
    assert late.work is not module
    assert late.work() == 7
    assert type(late) is type(sys)
    assert late.READY == 1
    with pytest.raises(AttributeError, match="absent"):
        _ = late.absent


def test_what_is_set_on_a_deferred_package_stays(package: Path) -> None:
    late = importlib.import_module("late")
    late.work = 3
    assert late.work == 3
    assert late.tool() == 8


def test_a_deferred_package_that_fails_can_be_tried_again(package: Path) -> None:
    late = importlib.import_module("late")
    (package / "work.py").write_text("raise OSError('not yet')\n")
    with pytest.raises(OSError, match="not yet"):
        _ = late.tool
    (package / "work.py").write_text("work = other = None\n")
    importlib.invalidate_caches()
    assert late.tool() == 8


def test_packages_that_are_imported_or_missing_are_not_deferred() -> None:
    defer("json")
    defer("a_package_that_is_not_there")
    assert type(sys.modules["json"]) is type(sys)
    assert "a_package_that_is_not_there" not in sys.modules
