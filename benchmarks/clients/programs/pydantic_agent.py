import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, *names = sys.argv[1:]
for name in names:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    print(Agent(model, instructions="Be brief.").run_sync("How many users?", model_settings={"max_tokens": 64}).output)
