"""A choice whose reward comes many turns later."""

from typing import Any

import numpy as np

from agentrl import Message, Prompt, ToolEnv, UserError, tool, tool_call
from agentrl_envs.options import opening, prompt_form, share, whole_number

_SMALL_TALK = ("Nice day?", "Long way?", "Seen a cat?", "Tea?")


class KeyDoor(ToolEnv):
    """`The key is in box 2.`: open that box at once, talk until the door is reached, and open it with the key.

    Only the first turn can take the key. Then come `num_distractors` turns in which nothing that is said or done
    matters, and then the door: `open_door` ends the task and earns 1 with the key, 0 without. With `noise`, the turns
    in between pay as chance has it, and hide in the return what the first turn was worth.
    """

    def __init__(
        self,
        *,
        num_boxes: int = 3,
        num_distractors: int = 3,
        key_reward: float = 0.2,
        noise: float = 0.0,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            num_boxes: boxes, numbered from 0.
            num_distractors: turns between the key and the door.
            key_reward: reward for taking the key.
            noise: each turn between key and door earns this or its negative, at even odds.
            turn_rewards: False pays at the door alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.

        Raises:
            UserError: for an option outside its range, and for noise without turn rewards.
        """
        super().__init__()
        self.num_boxes = whole_number("num_boxes", num_boxes, at_least=2)
        self.num_distractors = whole_number("num_distractors", num_distractors, at_least=0)
        self.key_reward = share("key_reward", key_reward)
        self.noise = share("noise", noise)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        if noise and not turn_rewards:
            raise UserError(f"noise: {noise:g} is paid turn by turn; set turn_rewards: true, or noise: 0")
        self.where = self.stage = 0  # stage 0: boxes; 1 to num_distractors: talk; then the door; then the end
        self.has_key = False

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Hide the key by the seed alone; what the turns after it pay differs within a group."""
        self.where = int(self.np_random.integers(self.num_boxes))
        self.stage = 0
        self.has_key = False
        if self.noise:
            self.np_random = np.random.default_rng(
                [int(self.np_random.integers(2**31)), options.get("rollout_index", 0)]
            )
        return opening(
            self.prompt,
            f"The key is in box {self.where}.",
            "You need a key to open a door. In your first turn, call open_box with the number of the box that holds the key: "
            "no later turn can take it.",
            self.num_distractors > 0
            and f"Then you walk to the door for {self.num_distractors} turns, in which you are asked something and "
            "nothing that you do matters: answer in a few words, or call look.",
            "When you read 'The door.', call open_door.",
            self.turn_rewards and f"Taking the key earns {self.key_reward:g}.",
            self.noise > 0 and f"Each turn on the way earns or costs {self.noise:g} by chance.",
            "Opening the door ends the task: with the key it earns 1, without it nothing.",
        )

    @tool
    def open_box(self, box: int) -> str:
        """Open a box.

        Args:
            box: its number.
        """
        if self.stage > 0:
            return self._advance("No box here.")
        self.has_key = box == self.where
        if self.has_key and self.turn_rewards:
            self.reward(self.key_reward, "key")
        return self._advance("A key!" if self.has_key else "Empty.")

    @tool
    def look(self) -> str:
        """Look around."""
        return self._advance("Nothing.")

    @tool
    def open_door(self) -> str:
        """Open the door."""
        if self.stage <= self.num_distractors:
            return self._advance("No door here.")
        self.stage += 1
        self.reward(float(self.has_key), "door")
        self.finish(success=self.has_key)
        return "Open." if self.has_key else "Locked."

    def answer(self, text: str) -> str:  # noqa: ARG002 - whatever is said, time passes
        """Continue the walk."""
        return self._advance("Well.")

    def state_key(self) -> str:
        """Return the stage, and what the reward still depends on: where the key is, then whether it is held."""
        return f"{self.stage}/{self.where if self.stage == 0 else self.has_key}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Take the key, talk, open the door; wrong turns open another box, try the door too early, or talk at it."""
        rng = np.random.default_rng() if rng is None else rng
        is_right = bool(rng.random() < skill)
        if self.stage == 0:
            offset = 0 if is_right else int(rng.integers(1, self.num_boxes))
            return tool_call("open_box", box=(self.where + offset) % self.num_boxes)
        if is_right == (self.stage > self.num_distractors):
            return tool_call("open_door")
        return {"role": "assistant", "content": "Yes."}

    def _advance(self, said: str) -> str:
        """Move to the next stage, but never past the door, and return what was said with what is asked there."""
        if self.noise and 0 < self.stage <= self.num_distractors:
            self.reward(self.noise if self.np_random.random() < 0.5 else -self.noise, "chance")
        self.stage = min(self.stage + 1, self.num_distractors + 1)
        at_door = self.stage > self.num_distractors
        return f"{said} {'The door.' if at_door else _SMALL_TALK[(self.stage - 1) % len(_SMALL_TALK)]}"
