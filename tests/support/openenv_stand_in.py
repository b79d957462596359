"""What OpenEnv's server of `openenv_server.py` says, without OpenEnv: `python openenv_stand_in.py PORT`."""

import json
import os
import random
import sys
from typing import Any

from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

ACTION = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "number": {"type": "integer", "title": "Number"}},
    "required": ["number"],
    "additionalProperties": False,
}


def schema(connection: ServerConnection, request: Request) -> Response | None:
    if request.path == "/schema":
        return connection.respond(200, json.dumps({"action": ACTION, "observation": {}, "state": {}}))
    return None


def session(connection: ServerConnection) -> None:
    secret = 0

    def said(hint: str, reward: float | None = None, *, done: bool = False) -> dict[str, Any]:
        return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}}

    for text in connection:
        message = json.loads(text)
        if message["type"] == "close":
            return
        number = message["data"].get("number")
        if number == 666:
            os._exit(1)
        if message["type"] == "reset":
            secret = random.Random(message["data"]["seed"]).randrange(100)
            reply = said("Guess a number from 0 to 99.")
        elif not isinstance(number, int) or abs(number) > 2**63:
            reply = {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
        elif number == secret:
            reply = said("Right.", 1.0, done=True)
        else:
            reply = said("higher" if number < secret else "lower", 0.0)
        connection.send(json.dumps(reply))


if __name__ == "__main__":
    server: Server
    with serve(session, "127.0.0.1", int(sys.argv[1]), process_request=schema) as server:
        server.serve_forever()
