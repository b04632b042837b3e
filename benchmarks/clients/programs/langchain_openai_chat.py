import sys

from langchain_openai import ChatOpenAI

url, *names = sys.argv[1:]
for name in names:
    model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_tokens=8)
    print(model.invoke("How many users?").content)
