"""A model that calls tools, scripted: two cities' weather, then a word on both."""

from __future__ import annotations

from fake_engine import Job

CITIES = ("Paris", "Zürich")
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in CITIES
)


def script(job: Job) -> None:
    """What the prompt says decides on the answer."""
    text = job.text
    if "fail" in text:
        job.delta("A")
        job.fail("row 0 met a NaN")
    elif job.request.constraint is not None:
        job.say('{"name": "Paris", "population": 2}')
    elif "wait" in text:
        job.delta("A")
    elif "<tool>" in text:
        job.say("Sunny in both.")
    elif "<tools>" in text:
        job.say(f"two cities</think>Let me see.\n{CALLS}" if text.endswith("<think>\n") else CALLS)
    elif text.endswith("<think>\n"):
        job.say("because</think>\n\nSo", "length")
    else:
        job.say("Héllo")
