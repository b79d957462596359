"""A negotiation over several issues, with private values and a scripted opponent."""
# Dimensions: S deals, A issues.

from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from agentrl import Message, Prompt, ToolEnv, UserError, tool, tool_call
from agentrl_envs.options import in_split, opening, prompt_form, share, whole_number

Strategy: TypeAlias = Literal["steady", "early", "late", "mirror"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_EXPONENTS = {"steady": 1.0, "early": 0.4, "late": 3.0}
_ISSUES = ("price", "delivery", "warranty", "training", "support")
_EPS = 1e-9
_MAX_DRAWS = 100


class Negotiation(ToolEnv):
    """Agree on a level of each issue: you know what levels are worth to you, not what they are worth to the other side.

    The higher a level, the better for you and the worse for the other; what matters most to you matters least to it. Each
    of your offers is accepted, or answered by a counter-offer. What the other asks for falls: with time, `steady`, `early`
    or `late`; or, with `mirror`, as far as your offers have come towards it. After the last round there is no agreement.

    An agreement earns its share of the achievable gain: of the most that the other would accept at any time. Success is a
    share of `target` or more. On the way, counter-offers that are better for you than all before earn `offer_reward`
    together, if they come as far.
    """

    def __init__(
        self,
        *,
        num_issues: int = 3,
        num_levels: int = 5,
        num_rounds: int = 8,
        strategy: Strategy | Literal["any"] = "any",
        target: float = 0.8,
        offer_reward: float = 0.2,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            num_issues: issues to agree on.
            num_levels: levels of each, from 0.
            num_rounds: offers that you may make.
            strategy: how the other gives way: `steady`, `early`, `late`, `mirror`, or `any` of them, by the seed.
            target: share of the achievable gain that counts as success.
            offer_reward: what better counter-offers earn.
            turn_rewards: False pays for the agreement alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.num_issues = whole_number("num_issues", num_issues, at_least=1, at_most=len(_ISSUES))
        self.num_levels = whole_number("num_levels", num_levels, at_least=2, at_most=6)
        if self.num_issues == 1 and self.num_levels == 2:
            raise UserError("num_levels: with one issue (num_issues: 1) give 3 or more, else there is nothing to gain")
        self.num_rounds = whole_number("num_rounds", num_rounds, at_least=2, at_most=50)
        if strategy not in {*STRATEGIES, "any"}:
            raise UserError(f"strategy: give {', '.join(STRATEGIES)} or any, got {strategy!r}")
        self.strategy = strategy
        self.target = share("target", target)
        self.offer_reward = share("offer_reward", offer_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.manner: Strategy = "steady"
        self.weights_A = self.others_A = np.zeros(
            self.num_issues
        )  # points of the highest level; to the other, of level 0
        self.least = 0.0  # share of its points that the other asks for at the end
        self.round = 1
        self.met = 0.0  # the most that an offer of ours was worth to the other
        self.offered: int | None = None  # its last counter-offer
        self.best_offered = 0.0

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Draw what the issues are worth to either side, and how the other gives way."""
        self.round = 1
        self.met = 0.0
        self.offered = None
        self.best_offered = 0.0
        for _ in range(_MAX_DRAWS):  # of two issues there are few
            self._draw()
            if in_split(self.state_key(), options.get("split", "train")):
                break
        worth = ", ".join(f"{name} {points:g}" for name, points in zip(_ISSUES, self.weights_A, strict=False))
        top = self.num_levels - 1
        return opening(
            self.prompt,
            f"Agree on levels 0 to {top}. Your points at level {top}: {worth}. {self.num_rounds} rounds. Your offer?",
            f"You negotiate a deal: a level from 0 to {top} for each of {self.num_issues} issues. Higher levels give you more "
            "points, in proportion, and the other side fewer. What matters most to you matters least to the other, so ask for "
            "high levels where your points are many and give way where they are few. In each turn, call offer with a list of "
            f"{self.num_issues} levels, in the order of the issues; or accept, which takes the other's last counter-offer; or "
            "quit, which ends without a deal. The other gives way as rounds pass, so insist for a while. Text without a call "
            "does nothing.",
            self.turn_rewards and f"Better counter-offers than all before earn up to {self.offer_reward:g} together.",
            "A deal earns your points as a share of the most that could be had, and ends the task. Without a deal after "
            f"{self.num_rounds} offers you earn nothing.",
        )

    @tool
    def offer(self, levels: list[int]) -> str:
        """Offer a deal.

        Args:
            levels: one for each issue, in order.
        """
        if len(levels) != self.num_issues or not all(0 <= level < self.num_levels for level in levels):
            return f"Give {self.num_issues} levels from 0 to {self.num_levels - 1}."
        deal = int(np.ravel_multi_index(levels, (self.num_levels,) * self.num_issues))
        to_other_S = self._to_other()
        self.met = max(self.met, float(to_other_S[deal]))
        asked = self._asked()
        if to_other_S[deal] >= asked - _EPS:
            return self._agree(deal)
        if self.round == self.num_rounds:
            self.finish(success=False, score=0.0)
            return "No. We do not agree."
        self.round += 1
        # Of what the other would take, the deal nearest to the offer.
        distances_S = np.abs(deals(self.num_issues, self.num_levels) - np.array(levels)).sum(axis=1) - to_other_S / 10
        distances_S[to_other_S < asked - _EPS] = np.inf
        self.offered = int(distances_S.argmin())
        worth = float(self._to_own()[self.offered])
        if worth > self.best_offered + _EPS:
            if self.turn_rewards:
                self.reward(self.offer_reward * (worth - self.best_offered) / self._achievable()[1], "offer")
            self.best_offered = worth
        listed = ", ".join(map(str, self._levels(self.offered)))
        return f"No. I offer [{listed}], {100 * worth:.0f} points for you. Round {self.round} of {self.num_rounds}."

    @tool
    def accept(self) -> str:
        """Accept the last counter-offer."""
        return "There is no offer yet." if self.offered is None else self._agree(self.offered)

    @tool
    def quit(self) -> str:
        """End without agreement."""
        self.finish(success=False, score=0.0)
        return "No deal."

    def answer(self, text: str) -> str:  # noqa: ARG002 - words move nobody
        """Ask for a tool."""
        return "Use offer, accept or quit."

    def state_key(self) -> str:
        """Return both sides' points, what the other asks for at the end, the round, and what was offered and met so far."""
        met = f"{self.met:.4f}" if self.manner == "mirror" else ""
        own, others = (",".join(f"{points:g}" for points in of) for of in (self.weights_A, self.others_A))
        told = f"{own}/{others}/{self.manner}/{self.least:g}"
        return f"{told}/{self.round}/{self.offered}/{met}/{self.best_offered:.4f}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Insist on the best deal that the other will ever accept; it knows what the other wants.

        A wrong turn accepts a counter-offer that is worth less than the target, or offers any deal of that kind.
        """
        rng = np.random.default_rng() if rng is None else rng
        best, worth = self._achievable()
        to_own_S = self._to_own()
        if rng.random() < skill:
            return tool_call("offer", levels=self._levels(best))
        poor = np.flatnonzero(to_own_S < (self.target or 1.0) * worth - _EPS)
        if self.offered in poor and rng.random() < 0.5:
            return tool_call("accept")
        return tool_call("offer", levels=self._levels(int(poor[rng.integers(len(poor))])))

    def _draw(self) -> None:
        rng = self.np_random
        self.weights_A, others_A = _points(self.num_issues, rng), np.sort(_points(self.num_issues, rng))
        self.others_A = np.empty_like(others_A)
        self.others_A[np.argsort(-self.weights_A, kind="stable")] = others_A
        self.least = float(rng.integers(4, 11)) / 20
        self.manner = STRATEGIES[int(rng.integers(len(STRATEGIES)))] if self.strategy == "any" else self.strategy

    def _agree(self, deal: int) -> str:
        gain = float(self._to_own()[deal]) / self._achievable()[1]
        self.reward(gain, "agreement")
        self.finish(success=gain >= self.target - _EPS, score=min(gain, 1.0))
        return f"Agreed: {100 * self._to_own()[deal]:.0f} points for you."

    def _asked(self) -> float:
        """Return what the other asks for now, as a share of its points."""
        if self.manner == "mirror":
            return max(self.least, 1 - self.met)
        passed = (self.round - 1) / (self.num_rounds - 1)
        return float(1 - (1 - self.least) * passed ** _EXPONENTS[self.manner])

    def _achievable(self) -> tuple[int, float]:
        """Return the best deal that the other would accept at any time, and its worth."""
        # One that mirrors is met half way: it asks for 1 less what it was offered.
        asked = max(self.least, 0.5) if self.manner == "mirror" else self.least
        to_own_S = np.where(self._to_other() >= asked - _EPS, self._to_own(), -1.0)
        best = int(to_own_S.argmax())
        return best, float(to_own_S[best])

    def _to_own(self) -> npt.NDArray[np.float64]:
        """Return what each deal is worth, from 0 to 1."""
        return deals(self.num_issues, self.num_levels) @ self.weights_A / (100 * (self.num_levels - 1))

    def _to_other(self) -> npt.NDArray[np.float64]:
        """Return what each deal is worth to the other, from 0 to 1."""
        return 1 - deals(self.num_issues, self.num_levels) @ self.others_A / (100 * (self.num_levels - 1))

    def _levels(self, deal: int) -> list[int]:
        return [int(level) for level in deals(self.num_issues, self.num_levels)[deal]]


@cache
def deals(num_issues: int, num_levels: int) -> npt.NDArray[np.int64]:
    """Return the levels of every deal; shared, and never changed."""
    shape = (num_levels,) * num_issues
    return np.stack(np.unravel_index(np.arange(num_levels**num_issues), shape), axis=1)


def _points(num_issues: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Spread 100 points over the issues, at least 5 each, in steps of 5."""
    cuts = np.sort(rng.choice(np.arange(1, 20), size=num_issues - 1, replace=False))
    return 5.0 * np.diff(np.concatenate([[0], cuts, [20]]))
