from collections.abc import Iterator
from types import ModuleType

import pytest

from gnomon.kernels import coded, dispatch, operations
from kernels.built import all_isas, load_kernels


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    return load_kernels()


@pytest.fixture(params=all_isas())
def extension(kernels: ModuleType, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The kernels set to one instruction set after the other, with two threads."""
    kernels.set_isa(request.param)
    kernels.set_threads(2)
    yield kernels
    kernels.set_isa("auto")


@pytest.fixture
def native(kernels: ModuleType) -> Iterator[ModuleType]:
    """This thread's steps take native kernels."""
    kernels.set_isa("auto")
    kernels.set_threads(2)
    dispatch.uninstall()  # an engine of an earlier test has left those of its own build
    dispatch.install(operations.ALL, kernels)
    dispatch.choose(True)
    yield kernels
    dispatch.choose(False)
    dispatch.uninstall()
    dispatch.stock_calls.clear()


@pytest.fixture(autouse=True)
def nothing_installed(request: pytest.FixtureRequest) -> None:
    """Tests of CUDA's operations on a CPU: an engine of an earlier test has left those of the CPU. Views are taken as in any engine."""
    if request.module.__name__.startswith("test_cuda"):
        dispatch.uninstall()
        coded.install()
