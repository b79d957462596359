"""mini-swe-agent in a folder of its own, which only echoes."""

import os

os.environ["MSWEA_CONFIGURED"] = "true"
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from tests.support.agents.tools import FIRST, MODEL

config = get_config_from_spec("mini.yaml")
keywords = {"api_base": os.environ["OPENAI_BASE_URL"], "drop_params": True}
model = LitellmModel(model_name=f"openai/{MODEL}", model_kwargs=keywords, cost_tracking="ignore_errors")
settings = {name: config["agent"][name] for name in ("system_template", "instance_template")}
agent = DefaultAgent(model, LocalEnvironment(), **settings, step_limit=6, cost_limit=0.0)
print(agent.run(FIRST))
