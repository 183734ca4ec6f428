"""Pydantic AI, over chat completions and Responses: an agent's loop streamed and not, an answer parsed into a type."""

import asyncio
import json
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str
    population: int


openai = OpenAIProvider(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
models = {
    "chat": OpenAIChatModel("gpt-4o", provider=openai),
    "responses": OpenAIResponsesModel("gpt-4o", provider=openai),
}


async def run(model):
    seen = []

    def weather(city: str) -> str:
        """The weather in a city."""
        seen.append(city)
        return f"sunny in {city}"

    agent = Agent(model, tools=[weather])
    answers = [(await agent.run("Weather in two cities?")).output]
    async with agent.run_stream("Weather in two cities?") as streamed:
        answers.append(await streamed.get_output())
    typed = Agent(model, output_type=NativeOutput(City), tools=[weather])
    parsed = (await typed.run("Weather in two cities?")).output
    return {"cities": sorted(seen), "answers": answers, "parsed": parsed.model_dump()}


async def main():
    print(json.dumps({name: await run(model) for name, model in models.items()}))


asyncio.run(main())
