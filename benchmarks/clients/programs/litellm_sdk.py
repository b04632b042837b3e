import sys

import litellm

url, *names = sys.argv[1:]
for name in names:
    messages = [{"role": "user", "content": "How many users?"}]
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(f"{provider}/{name}", messages, api_base=f"{url}/v1", api_key="none", max_tokens=8)
        print(answer.choices[0].message.content)
