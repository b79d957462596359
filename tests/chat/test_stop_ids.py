"""Sampling ends at every token that the template, the tokenizer or the model's generation config names."""

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import AutoConfig, ChatMLConfig, TemplateRenderer, pretrained_tokenizer, stop_ids, train_tokenizer
from agentrl.chat.renderer import GENERATION_ENDS
from agentrl.errors import RendererError
from agentrl.policy.export import export_model, stop_at
from agentrl.policy.model import load_pretrained
from agentrl.testing import check_renderer
from tests.support.architectures import ARCHITECTURES, write_model
from tests.support.each import each
from tests.support.families import family_tokenizer, template_names
from tests.support.templates import QWEN, tokenizer
from tests.support.tiers import first_quick

USER = {"role": "user", "content": "Hello."}
YES = {"role": "assistant", "content": "Yes."}
END, PAD = 2, 0


def with_ends(made: Any, *ids: int) -> Any:
    setattr(made, GENERATION_ENDS, ids)
    return made


@pytest.mark.slow
@each("name", template_names())
def test_every_renderer_of_a_family_ends_turns_where_its_generation_config_does(name: str) -> None:
    made = copy.deepcopy(family_tokenizer(name))
    made.add_special_tokens({"additional_special_tokens": ["<|one end|>", "<|another end|>"]})
    ends = made.convert_tokens_to_ids(["<|one end|>", "<|another end|>"])
    renderers: list[Any] = [TemplateRenderer(made, name=name)]
    before = renderers[0].stop_token_ids
    with_ends(made, *ends)
    renderers = [TemplateRenderer(made, name=name)]
    with suppress(RendererError):  # of a template that is refused for what is not asked here
        renderers.append(AutoConfig().build(made, name=name))
    for renderer in renderers:
        assert {*before, made.eos_token_id, *ends} - {None} <= set(renderer.stop_token_ids)
        assert renderer.stop_token_ids[0] == before[0]
        action = renderer.encode(YES)
        closing = renderer.extend((), action[:-1], [USER])
        for end in ends:
            sampled = (*action[:-1], end)
            assert renderer.parse(sampled) == renderer.parse(action) == YES
            assert renderer.extend((), sampled, [USER]) == closing
    if len(renderers) > 1:
        check_renderer(renderers[-1])


PUBLISHED = {
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
    "llama3_1": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "phi3_5": ("<|end|>", "<|assistant|>", "<|endoftext|>"),
}
"""Tokens that the generation configs of published models name."""


@pytest.mark.slow
@each("name", PUBLISHED)
def test_no_turn_holds_an_end_that_a_published_model_names(name: str) -> None:
    made = copy.deepcopy(family_tokenizer(name))
    ends = made.convert_tokens_to_ids(list(PUBLISHED[name]))
    renderer = AutoConfig().build(with_ends(made, *ends), name=name)  # which proves it
    assert {*ends} <= {*renderer.stop_token_ids}


def test_chatml_ends_turns_where_the_tokenizer_and_the_generation_config_do() -> None:
    made = with_ends(train_tokenizer([], vocab_size=261), END, PAD)
    renderer = ChatMLConfig().build(made)
    assert renderer.stop_token_ids == (END, PAD)
    check_renderer(renderer)
    assert renderer.parse((*renderer.encode(YES)[:-1], PAD)) == YES
    assert renderer.extend((), (65, PAD), [USER]) == renderer.extend((), (65,), [USER])
    made.eos_token = "<|endoftext|>"
    assert ChatMLConfig().build(with_ends(made)).stop_token_ids == (END, PAD)


@each(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 0]}, "config.json": {"eos_token_id": 3}}, (2, 0)),
        ({"config.json": {"eos_token_id": 3}}, (3,)),
        ({"generation_config.json": {"eos_token_id": None}, "config.json": {}}, ()),
        ({"generation_config.json": {"eos_token_id": [2, "a", -1, True]}}, (2,)),
        ({"generation_config.json": [1], "config.json": {"eos_token_id": 3}}, (3,)),
        ({}, ()),
    ],
)
def test_the_ends_of_a_generation_config_come_with_its_tokenizer(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    tokenizer(QWEN).save_pretrained(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    made = pretrained_tokenizer(str(tmp_path))
    assert getattr(made, GENERATION_ENDS) == ends
    assert stop_ids(made, template=(END, None)) == tuple(dict.fromkeys((END, *ends)))


@pytest.mark.parametrize("name", first_quick(ARCHITECTURES, num=2))
def test_an_exported_model_ends_where_training_did(tmp_path: Path, name: str) -> None:
    write_model(name, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    model, made = load_pretrained(str(tmp_path / "model"))
    ends = [made.eos_token_id, made.convert_tokens_to_ids(made.pad_token or made.unk_token or made.bos_token)]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    model, made = load_pretrained(str(tmp_path / "model"))
    stops = AutoConfig(template=tools if (tools := tmp_path / "model" / "tools.jinja").is_file() else None).build(made)
    stop_at(model, stops.stop_token_ids)
    export_model(model, made, tmp_path / "exported")
    written = json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"]
    assert written == list(stops.stop_token_ids)
    assert set(ends) <= set(written)
    again, its_tokenizer = load_pretrained(str(tmp_path / "exported"))
    assert again.generation_config.eos_token_id == written
    assert set(stop_ids(its_tokenizer)) == set(written)
