import sys

from openai import OpenAI

url, *names = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none")
for name in names:
    messages = [{"role": "user", "content": "How many users?"}]
    print(client.chat.completions.create(model=name, messages=messages, max_tokens=8).choices[0].message.content)
    print(client.completions.create(model=name, prompt="The quick", max_tokens=8).choices[0].text)
    print(client.responses.create(model=name, input="How many users?", max_output_tokens=8).output_text)
