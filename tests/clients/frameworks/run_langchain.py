"""LangChain: tools streamed and not, their results sent back, an answer parsed into a type."""

import json
import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    population: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


model = ChatOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none", model="any")
calling = model.bind_tools([weather])
strict = model.bind_tools([weather], strict=True)


def turn(answer, asked):
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    return calling.invoke([*asked, answer, *results]).content


asked = [HumanMessage("Weather in two cities?")]
whole, streamed = calling.invoke(asked), None
for chunk in calling.stream(asked):
    streamed = chunk if streamed is None else streamed + chunk
print(
    json.dumps(
        {
            "calls": [[call["name"], call["args"]] for call in whole.tool_calls],
            "streamed": [[call["name"], call["args"]] for call in streamed.tool_calls],
            "strict": [[call["name"], call["args"]] for call in strict.invoke(asked).tool_calls],
            "answers": [turn(whole, asked), turn(streamed, asked)],
            "parsed": model.with_structured_output(City, method="json_schema").invoke("A city").model_dump(),
        }
    )
)
