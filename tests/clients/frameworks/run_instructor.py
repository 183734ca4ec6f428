"""Instructor: answers parsed into types, by a call that is insisted on and by a form of the answer, streamed and not."""

import json
import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    population: int


client = OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
ask = {"model": "any", "response_model": City, "messages": [{"role": "user", "content": "A city"}], "max_retries": 0}
made = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    patched = instructor.from_openai(client, mode=mode)
    made[mode.name] = patched.chat.completions.create(**ask).model_dump()
patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
*_, last = patched.chat.completions.create_partial(**ask)
made["partial"] = last.model_dump()
print(json.dumps(made))
