import sys

import dspy

url, *names = sys.argv[1:]
for name in names:
    model = dspy.LM(f"openai/{name}", api_base=f"{url}/v1", api_key="none", max_tokens=8, cache=False)
    print(model("How many users?"))
