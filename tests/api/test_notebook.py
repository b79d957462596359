import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.process

CELL = """
import agentrl
from agentrl import ToolEnv

class Echo(ToolEnv):
    def start(self, options):
        return "hello"
    def answer(self, text):
        self.reward(float(len(text) % 3))
        self.finish(success=False)

run = agentrl.train(
    env=Echo,
    model={"local": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}},
    rollout={"num_groups": 2, "group_size": 2, "max_turns": 2, "max_turn_tokens": 8, "max_context_tokens": 128},
    train={"steps": 2, "device": "cpu"}, evaluation={"num_tasks": 2}, run_dir="RUN",
)
"""


def test_a_cell_trains_and_shows_how_far_it_is(tmp_path: object) -> None:
    cells = [CELL.replace("RUN", f"{tmp_path}/run"), "print(run.recipe.env.id, len(run.metrics))\nrun.plot()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300).execute()
    trained, drawn = (cell.outputs for cell in notebook.cells)
    lines = [output.data["text/plain"] for output in trained if output.output_type == "display_data"]
    assert any(line.startswith("training 2/2  reward ") for line in lines)
    assert "".join(output.get("text", "") for output in drawn).startswith("__main__:Echo 3")
    assert any("image/png" in output.get("data", {}) for output in drawn)
