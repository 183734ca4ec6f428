"""The OpenAI Agents SDK, over Responses and chat completions: an agent's loop streamed and not, an answer parsed into a type."""

import asyncio
import json
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
models = {
    "responses": OpenAIResponsesModel("any", client),
    "chat": OpenAIChatCompletionsModel("any", client),
}


class City(BaseModel):
    name: str
    population: int


async def run(model):
    seen = []

    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        seen.append(city)
        return f"sunny in {city}"

    agent = Agent(name="a", instructions="Help.", tools=[weather], model=model)
    answers = [(await Runner.run(agent, "Weather in two cities?")).final_output]
    streamed = Runner.run_streamed(agent, "Weather in two cities?")
    kinds = {event.type async for event in streamed.stream_events()}
    answers.append(streamed.final_output)
    typed = Agent(name="t", instructions="Help.", tools=[weather], model=model, output_type=City)
    parsed = (await Runner.run(typed, "Weather in two cities?")).final_output
    return {"cities": sorted(seen), "answers": answers, "kinds": sorted(kinds), "parsed": parsed.model_dump()}


async def main():
    print(json.dumps({name: await run(model) for name, model in models.items()}))


asyncio.run(main())
