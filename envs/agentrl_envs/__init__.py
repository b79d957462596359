"""Built-in environments, one file each, registered with Gymnasium when this package is imported."""

import gymnasium as gym

_ENTRY_POINTS = {
    "agentrl/Calculator-v0": "agentrl_envs.calculator:Calculator",
    "agentrl/ServiceDesk-v0": "agentrl_envs.service_desk:ServiceDesk",
    "agentrl/KeyDoor-v0": "agentrl_envs.key_door:KeyDoor",
    "agentrl/Corridor-v0": "agentrl_envs.corridor:Corridor",
    "agentrl/FrozenLake-v0": "agentrl_envs.frozen_lake:FrozenLake",
    "agentrl/CustomerService-v0": "agentrl_envs.customer_service:CustomerService",
    "agentrl/Search-v0": "agentrl_envs.search:Search",
    "agentrl/SQLAnalyst-v0": "agentrl_envs.sql_analyst:SQLAnalyst",
    "agentrl/Wordle-v0": "agentrl_envs.wordle:Wordle",
    "agentrl/Sokoban-v0": "agentrl_envs.sokoban:Sokoban",
    "agentrl/Negotiation-v0": "agentrl_envs.negotiation:Negotiation",
    "agentrl/TwentyQuestions-v0": "agentrl_envs.twenty_questions:TwentyQuestions",
    "agentrl/Shell-v0": "agentrl_envs.shell:Shell",
    "agentrl/Repository-v0": "agentrl_envs.repository:Repository",
    "agentrl/PythonSandbox-v0": "agentrl_envs.python_sandbox:PythonSandbox",
}


def register() -> None:
    """Register every built-in environment with Gymnasium; again changes nothing."""
    for env_id, entry_point in _ENTRY_POINTS.items():
        if env_id not in gym.registry:
            gym.register(id=env_id, entry_point=entry_point)


register()
