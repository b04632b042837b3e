import sys

from smolagents import ChatMessage, OpenAIModel

url, *names = sys.argv[1:]
for name in names:
    model = OpenAIModel(model_id=name, api_base=f"{url}/v1", api_key="none", max_tokens=8)
    print(model([ChatMessage(role="user", content=[{"type": "text", "text": "How many users?"}])]).content)
