import sys

from anthropic import Anthropic

url, *names = sys.argv[1:]
client = Anthropic(base_url=url, api_key="none")
for name in names:
    messages = [{"role": "user", "content": "How many users?"}]
    print(client.messages.create(model=name, messages=messages, max_tokens=8).content[0].text)
    with client.messages.stream(model=name, messages=messages, max_tokens=8) as stream:
        print(stream.get_final_text())
