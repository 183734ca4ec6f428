from collections.abc import Iterator
from types import ModuleType

import pytest

from gnomon.kernels import build


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The native kernels with every instruction set that this CPU can run, built once into the user's cache."""
    try:
        isas = tuple(dict.fromkeys((*build.cpu_isas(), "portable")))
        return build.load(build.ensure(isas=isas))
    except build.BuildError as e:
        if "compiling" in str(e) or "fail" in str(e):
            raise
        pytest.skip(f"no toolchain: {e}")


def _isas() -> list[str]:
    return list(dict.fromkeys((*build.cpu_isas(), "portable")))


@pytest.fixture(params=_isas())
def extension(kernels: ModuleType, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The kernels set to one instruction set after the other, with two threads."""
    kernels.set_isa(request.param)
    kernels.set_threads(2)
    yield kernels
    kernels.set_isa("auto")
