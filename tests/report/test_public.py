from pathlib import Path
from typing import Any

from agentrl.report.public import flat, public
from tests.support.each import each


@each(
    ("given", "shown"),
    [
        (
            {"api_key": "abc", "HF_TOKEN": "abc", "password": "abc"},
            dict.fromkeys(("api_key", "HF_TOKEN", "password"), "(hidden)"),
        ),
        ({"options": {"auth-token": ["abc"]}}, {"options": {"auth-token": ["(hidden)"]}}),
        ({"note": "use sk-abcdefgh12345678 here"}, {"note": "use (hidden) here"}),
        (
            {"env": {"GITLAB_TOKEN": "a", "PGPASSWORD": "a", "OPENAI_KEY": "a", "DB_PASS": "a"}},
            {"env": dict.fromkeys(("GITLAB_TOKEN", "PGPASSWORD", "OPENAI_KEY", "DB_PASS"), "(hidden)")},
        ),
        (
            {"bot_token": "a", "session-token": "a", "cookie": "a", "Authorization": "Bearer a"},
            dict.fromkeys(("bot_token", "session-token", "cookie", "Authorization"), "(hidden)"),
        ),
        ({"note": "glpat-abcdefgh12345678, Bearer abc.def.ghi"}, {"note": "(hidden), (hidden)"}),
        ({"DATABASE_URL": "postgres://ann:pw@db.lab/tasks"}, {"DATABASE_URL": "postgres://(host)/tasks"}),
        ({"file": "/srv/team data/tasks.db"}, {"file": "tasks.db"}),
        ({"url": "https://user:pw@lab.example.org:8000/v1"}, {"url": "https://(host)/v1"}),
        ({"file": "/data/of/ann/tasks.jsonl"}, {"file": "tasks.jsonl"}),
        ({"file": "C:\\Users\\ann\\tasks.jsonl"}, {"file": "tasks.jsonl"}),
        ({"file": "~/tasks.jsonl"}, {"file": "tasks.jsonl"}),
        ({"id": "/home/ann/envs.py:MyEnv"}, {"id": "envs.py:MyEnv"}),
        ({"note": f"kept in {Path.home()}/x"}, {"note": "kept in ~/x"}),
    ],
)
def test_what_is_private_is_not_shown(given: dict[str, Any], shown: dict[str, Any]) -> None:
    assert public(given) == shown


def test_what_is_not_private_stays_as_it_is() -> None:
    given = {
        "api_key_env": "OPENAI_API_KEY",
        "max_turn_tokens": 12,
        "stop_token": "</s>",
        "eos_token": "</s>",
        "state_key": "board",
        "system": "/no_think Answer yes/no / maybe.",
        "name_or_path": "org/model",
        "data": "tasks/train.jsonl",
        "nothing": None,
        "rates": [1e-5, True],
    }
    assert public(given) == given


def test_fields_go_by_their_whole_names() -> None:
    assert dict(flat({"train": {"steps": 3, "more": {"a": [1]}}, "options": {}})) == {
        "train.steps": 3,
        "train.more.a": [1],
        "options": {},
    }
