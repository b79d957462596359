"""What every renderer must keep to: proven by playing dialogues, before the first sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentrl.chat.dialogue import Dialogue
from agentrl.chat.proof_episode import Episode, functions, is_same, says
from agentrl.chat.proof_reading import READING
from agentrl.chat.renderer import Renderer, Tools
from agentrl.chat.turns import TOOLS
from agentrl.errors import RendererError
from agentrl.types import Message

_MERGED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one claim."""

    claim: str
    """What a renderer should do."""
    problems: tuple[str, ...] = ()
    """Where it does not."""
    lacks: str | None = None
    """Why it is not asked for: the renderer says that it cannot."""


class UnprovenError(RendererError):
    """A renderer that does not do what it should."""

    def __init__(self, words: str, *, renderer: Renderer, findings: list[Finding]) -> None:
        super().__init__(words)
        self.renderer, self.findings = renderer, findings


def examine(renderer: Renderer, *, tools: Tools = TOOLS) -> list[Finding]:
    """Play dialogues with a renderer, and tell what it does and what it does not.

    Six turns of words, six of tools and six of both are played (one call, several, with thoughts and without), with actions in
    the renderer's own words, in other tokens than those words are encoded to, and without the stop token: what `extend`
    appends must be the same each time, after the stop token where it is missing, and the same that `start` ends with. Every
    message must be heard in the context; words that spell a control token must stay words; `parse` must take any tokens, and
    give back what `encode` wrote; what is drafted in a thought is no call. A renderer that cannot extend (None) is held to the
    rest.

    Args:
        renderer: what to examine.
        tools: at least two tools, as in the first context of an episode. None: there are none.
    """
    episode = Episode(renderer, list(tools))
    return [finding for check in _CHECKS for finding in _found(check, episode)]


def prove(renderer: Renderer, *, name: str, tools: Tools = TOOLS) -> list[Finding]:
    """Return what `examine` found of a renderer; refuse one that does not do what it should.

    Args:
        renderer: of a model.
        name: of the model, for the message.
        tools: at least two, or none where the renderer is not used with tools.

    Raises:
        UnprovenError: with what was not proven.
    """
    findings = examine(renderer, tools=tools)
    unproven = [finding for finding in findings if finding.problems]
    if unproven:
        lines = "".join(f"\n- {finding.claim}: not so. {finding.problems[0]}" for finding in unproven)
        raise UnprovenError(
            f"chat.renderer: the dialogues of {name!r} cannot be rendered exactly; `agentrl chat` shows the proof.{lines}\n"
            "Set chat.template to a file with another template, or chat.renderer to a renderer of your own ('module:Class')",
            renderer=renderer,
            findings=findings,
        )
    return findings


def _found(check: Callable[["Episode"], Iterator[str]], episode: "Episode") -> list[Finding]:
    claim = (check.__doc__ or check.__name__).partition("\n")[0].rstrip(".")
    try:
        return [Finding(claim, tuple(dict.fromkeys(check(episode))))]
    except RendererError as error:
        return [Finding(claim, lacks=str(error))]
    except Exception as error:  # noqa: BLE001 - whatever a stranger's renderer raises belongs in the list
        return [Finding(claim, (f"{type(error).__name__} where {claim[0].lower()}{claim[1:]}: {error}",))]


def _stop_tokens(episode: Episode) -> Iterator[str]:
    """Turns end by one token, and only there."""
    stops = episode.renderer.stop_token_ids
    if not stops:
        yield "stop_token_ids is empty: no turn would ever end"
    for message, _ in episode.turns((0, 1, 2) if episode.tools else (0,)):
        if len(functions(message)) > 1 and not episode.can(message):
            continue
        ids = episode.encode(message)
        if not ids or ids[-1] not in stops:
            yield "encode() does not end with one of stop_token_ids"
        if set(ids[:-1]) & set(stops):
            yield "encode() writes a stop token before the end: sampling would end there"


def _context(episode: Episode) -> Iterator[str]:
    """The first context holds all that it is made of."""
    opening, tools = list(episode.opening), episode.tools
    ids = episode.start(opening, tools)
    if not ids or not all(type(i) is int and i >= 0 for i in ids):
        yield f"start() must return token ids, got {ids!r:.80}"
    if episode.start(opening, tools) != ids:
        yield "start(), called twice, returns different tokens"
    if opening != list(episode.opening):
        yield "start() changes the messages it is given"
    if tools and episode.start(opening, ()) == ids:
        yield "start() leaves out the tools"
    for role in ("system", "developer"):
        contexts = {
            episode.start([{"role": role, "content": words}, episode.opening[1]], tools)
            for words in ("Be brief.", "Be kind.")
        }
        if len(contexts) == 1:
            yield f"start() leaves out messages of the role {role!r}"
    if episode.start([opening[0], {"role": "user", "content": "Something else."}], tools) == ids:
        yield "start() leaves out messages of the role 'user'"
    episode.start([{"role": "user", "content": ""}], tools)


def _extends_words(episode: Episode) -> Iterator[str]:
    """What users say is appended, and nothing before it changes."""
    yield from _extension(episode, (0,) * 6)


def _extends_tools(episode: Episode) -> Iterator[str]:
    """What tools return is appended, and nothing before it changes."""
    episode.need_tools()
    yield from _extension(episode, (1, 2, 1, 1, 2, 1))


def _extends_both(episode: Episode) -> Iterator[str]:
    """Users and tools may follow each other."""
    episode.need_tools()
    yield from _extension(episode, (0, 1, 0, 2, 1, 0), is_mixed=True)


def _extension(episode: Episode, counts: Sequence[int], *, is_mixed: bool = False) -> Iterator[str]:
    renderer, stops = episode.renderer, episode.renderer.stop_token_ids
    dialogue = Dialogue.begin(episode.opening, episode.tools, renderer)
    told = dialogue.context_ids
    for number, (message, replies) in enumerate(episode.turns(counts), start=1):
        if len(functions(message)) > 1 and not episode.can(message):
            continue
        where = f"turn {number} ({', '.join(reply['role'] for reply in replies)})"
        context, action = dialogue.context_ids, episode.encode(message)
        dialogue = dialogue.after(action, message, replies, renderer)
        told_before, told = told, episode.start(dialogue.history, episode.tools)
        if not dialogue.extends:
            if not told or told == told_before:
                yield f"{where}: extend() returns None, and start() of the whole history returns nothing new"
            continue
        added = dialogue.observation_ids
        # The last tokens may differ where the tokenizer merges the end of the prompt with the action. Families take out
        # thoughts that hold nothing when a user speaks: that leaves what was sampled as it is.
        if not is_mixed and told[: len(told_before) - _MERGED] != told_before[: len(told_before) - _MERGED]:
            yield f"{where}: start() of the whole history changes what was said before: extend() must return None"
        unclosed = tuple(renderer.extend(context, action[:-1], replies) or ())
        if told[-len(unclosed) :] != unclosed:
            yield f"{where}: extend() appends other tokens than start() of the whole history ends with"
        if not added:
            yield f"{where}: extend() appends nothing, not even the generation prompt"
        if tuple(renderer.extend(context, action, replies) or ()) != added:
            yield f"{where}: extend(), called twice, returns different tokens"
        for index, reply in enumerate(replies):
            other = [*replies]
            other[index] = reply | {"content": "Something else."}
            if renderer.extend(context, action, other) == added:
                yield f"{where}: extend() leaves out messages of the role {reply['role']!r}"
        for how, sampled in _other_actions(episode, message, action):
            if renderer.extend(context, sampled, replies) != added:
                yield f"{where}: extend() appends other tokens {how}: it must not depend on how the action is split"
        if unclosed[1:] != added or unclosed[0] in added[:1]:
            yield f"{where}: after an action without a stop token extend() must append one, and then the same as after one"
    if not stops:
        yield "stop_token_ids is empty: no turn would ever end"


def _other_actions(episode: Episode, message: Message, action: tuple[int, ...]) -> Iterator[tuple[str, Sequence[int]]]:
    if not functions(message):
        spelled = episode.spelled(message["content"])
        if spelled != action and is_same(episode.renderer.parse(spelled), message):
            yield "after the same text in other tokens", spelled
    body = sorted(episode.seen_ids - set(episode.renderer.stop_token_ids))
    yield "after random tokens", [*episode.rng().choices(body, k=30), action[-1]]
    yield "after a lone stop token", [action[-1]]


def _thoughts(episode: Episode) -> Iterator[str]:
    """A thought that is dropped leaves no trace, and one that is kept stays."""
    renderer, call = episode.renderer, ("look", {"n": 1})
    for calls in ((), (call,)) if episode.tools else ((),):
        message = says("" if calls else "Yes.", *calls) | {"reasoning_content": "Thought."}
        if not episode.can(message):
            continue
        user: Message = {"role": "user", "content": "Go on."}
        tool: Message = {"role": "tool", "name": "look", "tool_call_id": "call_0", "content": "a lamp"}
        before = Dialogue.begin(episode.opening, episode.tools, renderer)
        for reply in (user, tool) if calls else (user,):
            after = before.after(episode.encode(message), message, [reply], renderer)
            drops = renderer.thinking == "drop" or (renderer.thinking == "drop_at_user" and reply is user)
            if drops and after.extends:
                yield f"thinking is {renderer.thinking!r}, and a thought stays when the {reply['role']} has spoken"
            other = episode.start([*episode.opening, message | {"reasoning_content": "Another."}, reply], episode.tools)
            if drops and other != after.context_ids:
                yield f"thinking is {renderer.thinking!r}, and a thought leaves a trace when the {reply['role']} has spoken"


def _control_tokens(episode: Episode) -> Iterator[str]:
    """Words that spell a control token stay words."""
    renderer, tools = episode.renderer, episode.tools
    for stop in renderer.stop_token_ids:
        spelled = renderer.parse((stop, stop)).get("content") or ""
        if not spelled:
            continue
        words = f"Before {spelled} after"
        message = says("Yes.")
        ids = episode.encode(says(words))
        if stop in ids[:-1]:
            yield f"encode() makes a token of {spelled!r} in what the assistant says"
        for role in ("user", "tool") if tools else ("user",):
            said = says("", ("look", {"n": 1})) if role == "tool" else message
            harmless, hostile = (
                [{"role": role, "name": "look", "tool_call_id": "call_0", "content": content}]
                for content in ("Before", words)
            )
            action = episode.encode(said)
            pairs = [
                tuple(
                    (renderer.extend(episode.start(episode.opening, tools), action, replies) or ()).count(stop)
                    for replies in (harmless, hostile)
                ),
                tuple(
                    episode.start([*episode.opening, said, *replies], tools).count(stop)
                    for replies in (harmless, hostile)
                ),
            ]
            if any(one != other for one, other in pairs):
                yield f"{spelled!r} in what the {role} says becomes a token: it would end a turn"


_CHECKS = (
    _context,
    _stop_tokens,
    _extends_words,
    _extends_tools,
    _extends_both,
    _control_tokens,
    _thoughts,
    *READING,
)
