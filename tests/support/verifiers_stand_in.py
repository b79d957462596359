"""What the worker says of `verifiers_sums.py`, without verifiers: `python -P verifiers_stand_in.py ID CONFIG MAX_TASKS`."""

import json
import os
import sys
import time

taskset, config, max_tasks = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])


def say(reply: object) -> None:
    print(json.dumps(reply), flush=True)


if taskset != "verifiers-sums":
    say({"error": f"ModuleNotFoundError: taskset {taskset!r} not found"})
    sys.exit(1)
sums = range(min(config.get("num_sums", 40), max_tasks))
opening = {"role": "system", "content": "Add."}
say(
    {"tasks": [{"messages": [opening, {"role": "user", "content": f"{n} + {n}?"}], "answer": str(2 * n)} for n in sums]}
)
for line in sys.stdin:
    asked = json.loads(line)
    reply = asked["messages"][-1]["content"].strip()
    if reply == "die":
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(3)
    if reply == "hang":
        time.sleep(600)
    if reply == "raise":
        say({"error": "TaskError: division by zero"})
        continue
    right = float(reply == str(2 * asked["task"]))
    say({"rewards": {"right": right, "short": 0.1 * (len(reply) < 10)}, "skipped": []})
