"""A loop over chat completions with nothing but the standard library, which pays for what it reads."""

import json
import os
import urllib.request
from typing import Any

BASE = os.environ["OPENAI_BASE_URL"]


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{BASE}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


task = json.loads(os.environ["AGENTRL_TASK"])
messages = [{"role": "user", "content": task["question"]}]
for number in range(task["turns"]):
    answer = post("/chat/completions", {"model": "policy", "messages": messages})
    message = answer["choices"][0]["message"]
    post("/agentrl/reward", {"reward": len(message["content"] or "") % 7 / 7, "call": answer["id"]})
    messages += [message, {"role": "user", "content": f"{number}"}]
