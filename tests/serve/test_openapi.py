"""The OpenAPI document tells the truth: requests drawn from it, valid and not, get the answers it describes, and none is a 500."""

from __future__ import annotations

import pytest
from fake_engine import CALLING, FakeEngine, make_app

from gnomon.config import HTTPConfig
from gnomon.engine.api import FlushReport


def fuzzed(examples: int, *phases: str) -> tuple[int, list[str]]:
    """How many requests were sent to the application (schemathesis: boundary values, random ones, chains of requests), and what was
    wrong with their answers."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import Status, from_schema
    from schemathesis.engine.events import NonFatalError, ScenarioFinished

    engine = FakeEngine(context_length=100_000)
    engine.report = FlushReport(True)
    app = make_app(engine, template=CALLING, http=HTTPConfig(allowed_hosts=("testserver",)))
    document = schemathesis.openapi.from_asgi("/openapi.json", app, config=SchemathesisConfig())
    document.config.generation.update(max_examples=examples, deterministic=True, no_shrink=True)
    document.config.phases.update(phases=list(phases))
    # A document can't say which fields exclude or need each other, nor what makes a schema within it sound.
    document.config.checks.update(excluded_check_names=["positive_data_acceptance"])
    wrong: list[str] = []
    sent = 0
    # The stream of statistics ends with the server.
    for event in from_schema(document.exclude(path="/stats/stream")).execute():
        if isinstance(event, NonFatalError):
            wrong.append(f"{event.label}: {event.info.format()}")
        elif isinstance(event, ScenarioFinished):
            sent += len(event.recorder.interactions)
            for checks in event.recorder.checks.values():
                for check in checks:
                    if check.status is Status.FAILURE and check.failure_info is not None:
                        found = check.failure_info
                        wrong.append(f"{event.recorder.label}: {found.failure.message}\n{found.code_sample}")
    return sent, wrong


def test_the_document() -> None:
    sent, wrong = fuzzed(4, "fuzzing", "stateful")
    assert not wrong, "\n\n".join(wrong)
    assert sent > 50


@pytest.mark.slow
def test_the_document_at_length() -> None:
    sent, wrong = fuzzed(300, "coverage", "fuzzing", "stateful")
    assert not wrong, "\n\n".join(wrong)
    assert sent > 5000
