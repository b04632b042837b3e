import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, *names = sys.argv[1:]
for name in names:
    # Its own temperature is 0.1; PEFT's answer is the likeliest.
    more = {"is_chat_model": True, "max_tokens": 8, "temperature": 0}
    model = OpenAILike(model=name, api_base=f"{url}/v1", api_key="none", **more)
    print(model.chat([ChatMessage(role="user", content="How many users?")]).message.content)
