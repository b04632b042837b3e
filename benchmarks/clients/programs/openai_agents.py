import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI


async def main(url: str, *names: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for name in names:
        # An untrained model never ends, and `OpenAIResponsesModel` takes an answer at its limit for an error.
        model = OpenAIChatCompletionsModel(model=name, openai_client=client)
        agent = Agent("counter", "Be brief.", model=model, model_settings=ModelSettings(max_tokens=8))
        print((await Runner.run(agent, "How many users?")).final_output)


set_tracing_disabled(disabled=True)
asyncio.run(main(*sys.argv[1:]))
