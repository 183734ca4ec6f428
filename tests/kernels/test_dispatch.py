import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gnomon.kernels import dispatch, native
from gnomon.kernels.dispatch import Operation


def make(stock: Callable[[], str], extension: ModuleType) -> Callable[[], str]:
    def operation() -> str:
        return "native" if dispatch.thread.active else stock()

    return operation


@pytest.fixture
def owner() -> Iterator[Any]:
    owner = SimpleNamespace(operation=lambda: "stock")
    dispatch.install([Operation("operation", owner, "operation", make, "")], ModuleType("extension"))
    yield owner
    dispatch.choose(False)
    dispatch.uninstall()
    assert owner.operation.__name__ == "<lambda>"


def test_only_a_step_of_a_thread_that_chose_native_takes_kernels(owner: Any) -> None:
    assert owner.operation() == "stock"
    with dispatch.step():
        assert owner.operation() == "stock"
        dispatch.choose(True)
        assert owner.operation() == "native"
    assert owner.operation() == "stock"
    with dispatch.step():
        with dispatch.step():
            assert owner.operation() == "native"
        assert owner.operation() == "native"


def test_a_step_that_fails_ends(owner: Any) -> None:
    dispatch.choose(True)
    with pytest.raises(RuntimeError), dispatch.step():
        raise RuntimeError
    assert owner.operation() == "stock"
    assert not dispatch.in_step()


def test_two_engines_in_one_process(owner: Any) -> None:
    results: dict[bool, str] = {}
    together = threading.Barrier(2)

    def engine(chosen: bool) -> None:
        dispatch.choose(chosen)
        with dispatch.step():
            together.wait()
            results[chosen] = owner.operation()
            together.wait()

    threads = [threading.Thread(target=engine, args=(chosen,)) for chosen in (True, False)]
    for t in threads:
        t.start()
    assert owner.operation() == "stock"
    for t in threads:
        t.join()
    assert results == {True: "native", False: "stock"}


def test_installing_again_changes_nothing(owner: Any) -> None:
    first = owner.operation
    dispatch.install([Operation("operation", owner, "operation", make, "")], ModuleType("extension"))
    assert owner.operation is first


def test_policy_stock_builds_nothing(tmp_path: Any) -> None:
    assert not native.start("stock", cache=tmp_path).native
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("0-1", {0, 1})])
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert native._cpu_list(text) == cpus


def test_default_threads_is_at_least_one() -> None:
    assert 1 <= native.default_threads() <= native.MOST_DEFAULT_THREADS
