"""Tokenizers of model families, without a download: for each chat template that TRL ships, a small one of the family's kind.

The vocabulary is a small one, trained on the spot; what decides how a dialogue becomes tokens is the family's own: how text is
split, how bytes are spelled, which tokens are control tokens, and what stands before the first token.
"""

import base64
import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = (
    "user assistant system tool developer model thought analysis commentary final channel message function functions "
    "arguments parameters parameter name description properties required type string integer number boolean object array ",
    "You are a helpful assistant. You may call one or more functions to assist with the user. For each function call, "
    "return a JSON object with the name of the function and its arguments. Do not use variables. Look at the results of "
    "the tools before you answer, think step by step, and say what you have found in one sentence.\n\n",
    'Hello. {"type": "function", "function": {"name": "look", "arguments": {"n": 3, "text": "a b"}}}\n\n' * 3,
    "Größe, naïve, 鍵は箱の中にあります。世界 Привет мир! 🔑 1234567890 + - * / = ( ) [ ] < > | ' \" \\ \t\r\n\n\n",
)
"""What the small vocabularies are trained on."""
_GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3, GLM-4 and LFM2 split text; Qwen's is the same, with single digits."""
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How gpt-oss and Mistral's Tekken split text."""
QWEN_SPLIT = _GPT4.replace("{1,3}", "")
_SPLITS = {"qwen": QWEN_SPLIT, "gpt4": _GPT4, "o200k": _O200K}

_TOOL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_QWEN_SEES = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_QWEN2 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", *_QWEN_SEES)
_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
_DEEPSEEK = tuple(
    f"<｜{name}｜>"
    for name in (
        *("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end"),
        *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end", "tool▁sep"),
    )
)
_GEMMA_RUNS = ("\n\n", "\n\n\n", "▁▁", "▁▁▁▁", "<table>", "</table>", "<strong>")
"""Gemma's vocabulary has runs of lines and spaces and tags of HTML as added tokens, none of them a control token."""
_GEMMA4 = (
    *(
        "<|turn>",
        "<turn|>",
        "<|channel>",
        "<channel|>",
        "<|think|>",
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
    ),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|image>", "<|image|>", "<image|>", "<|audio|>", "<|video|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family's tokenizer has beside a vocabulary."""

    splits: str
    """`sentencepiece` (pieces of text with `▁` for a space, bytes where no piece fits; `llama` puts one before the text),
    or the name of a way to split text whose pieces are spelled in bytes: `qwen`, `gpt4`, `o200k`, `gpt2`."""
    bos: str | None = None
    adds_bos: bool = False
    """`tokenizer(text)` begins with the BOS token, beside any that a template writes."""
    eos: str
    pad: str | None = None
    unk: str | None = None
    special: tuple[str, ...] = ()
    """Added tokens that count as special."""
    plain: tuple[str, ...] = ()
    """Added tokens that do not, as `<think>` and `<tool_call>` in Qwen3: decoding never leaves them out."""
    strips_right: tuple[str, ...] = ()
    """Those of `special` that take the white space that follows them into themselves, as Phi-3's do."""
    nfc: bool = False
    """Text is composed (NFC) first."""


FAMILIES = {
    "cohere": Family(
        splits="gpt2", bos="<BOS_TOKEN>", adds_bos=True, eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>", unk="<UNK>", nfc=True,
        plain=("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    ),
    "cohere2": Family(
        splits="gpt2", bos="<BOS_TOKEN>", adds_bos=True, eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>", unk="<UNK>", nfc=True,
        plain=("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>",
               "<|END_RESPONSE|>"),
    ),
    "deepseek_r1_distill": Family(
        splits="qwen", bos="<｜begin▁of▁sentence｜>", adds_bos=True, eos="<｜end▁of▁sentence｜>", nfc=True,
        plain=("<｜User｜>", "<｜Assistant｜>", *_THINK),
    ),
    "deepseekv3": Family(
        splits="gpt4", bos="<｜begin▁of▁sentence｜>", adds_bos=True, eos="<｜end▁of▁sentence｜>", pad="<｜▁pad▁｜>",
        plain=(*_DEEPSEEK, *_THINK),
    ),
    "diffusion_gemma": Family(
        splits="sentencepiece", bos="<bos>", adds_bos=True, eos="<eos>", pad="<pad>", unk="<unk>", special=_GEMMA4,
        plain=_GEMMA_RUNS,
    ),
    "gemma": Family(
        splits="sentencepiece", bos="<bos>", adds_bos=True, eos="<eos>", pad="<pad>", unk="<unk>",
        special=("<start_of_turn>", "<end_of_turn>"), plain=_GEMMA_RUNS,
    ),
    "gemma3": Family(
        splits="sentencepiece", bos="<bos>", adds_bos=True, eos="<eos>", pad="<pad>", unk="<unk>",
        special=("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"), plain=_GEMMA_RUNS,
    ),
    "gemma4": Family(
        splits="sentencepiece", bos="<bos>", adds_bos=True, eos="<eos>", pad="<pad>", unk="<unk>", special=_GEMMA4,
        plain=_GEMMA_RUNS,
    ),
    "glm4moe": Family(
        splits="gpt4", eos="<|endoftext|>", pad="<|endoftext|>",
        special=("[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink"),
        plain=(*_THINK, *_TOOL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gptoss": Family(
        splits="o200k", bos="<|startoftext|>", eos="<|return|>", pad="<|endoftext|>",
        special=("<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"),
    ),
    "idefics3": Family(
        splits="gpt4", bos="<|begin_of_text|>", adds_bos=True, eos="<|end_of_text|>",
        special=(*_LLAMA3, "<image>", "<end_of_utterance>"),
    ),
    "lfm2": Family(
        splits="gpt4", bos="<|startoftext|>", adds_bos=True, eos="<|im_end|>", pad="<|pad|>",
        special=("<|im_start|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
                 "<|tool_response_start|>", "<|tool_response_end|>", "<image>"),
        plain=_THINK,
    ),
    "llama3": Family(
        splits="gpt4", bos="<|begin_of_text|>", adds_bos=True, eos="<|eot_id|>", pad="<|finetune_right_pad_id|>",
        special=_LLAMA3,
    ),
    "llava_next": Family(
        splits="llama", bos="<s>", adds_bos=True, eos="</s>", pad="<pad>", unk="<unk>", special=("<image>",),
    ),
    "muse_glimmer": Family(
        splits="o200k", bos="<|begin_of_text|>", adds_bos=True, eos="<|eot|>", pad="<|pad|>",
        special=("<|start|>", "<|message|>", "<|eom|>", "<|patch|>", "<|video|>"),
    ),
    "nemotron_3": Family(
        splits="o200k", bos="<s>", eos="<|im_end|>", unk="<unk>", special=("</s>", "<|im_start|>", *_THINK, *_TOOL),
    ),
    "phi3": Family(
        splits="llama", bos="<s>", eos="<|endoftext|>", pad="<|endoftext|>", unk="<unk>",
        special=("</s>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        strips_right=("</s>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
    ),
    "qwen2_5": Family(
        splits="qwen", eos="<|im_end|>", pad="<|endoftext|>", nfc=True, special=_QWEN2, plain=_TOOL[:2],
    ),
    "qwen3": Family(
        splits="qwen", eos="<|im_end|>", pad="<|endoftext|>", nfc=True, special=_QWEN2, plain=(*_TOOL, *_THINK),
    ),
    "smolvlm": Family(
        splits="gpt2", bos="<|im_start|>", eos="<end_of_utterance>", pad="<|im_end|>", unk="<|endoftext|>",
        special=("<image>", "<fake_token_around_image>", "<global-img>"),
    ),
}  # fmt: skip
"""A row for each family, by the beginning of its templates' names; as the tokenizers of the checkpoints have it."""


def templates_folder() -> Path:
    """Return where TRL keeps its chat templates.

    Raises:
        ModuleNotFoundError: without TRL.
    """
    return _package("trl") / "chat_templates"


def _package(name: str) -> Path:
    """Return the folder of a package of which only files are read: importing it may take seconds, or fail."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is missing: pip install --no-deps --requirement requirements-families.txt")
    return Path(spec.submodule_search_locations[0])


def template_names() -> tuple[str, ...]:
    """Return the names of TRL's chat templates."""
    return tuple(sorted(path.stem for path in templates_folder().glob("*.jinja")))


def family_of(template: str) -> str:
    """Return the family of a template, by the longest name that it begins with."""
    return max(
        (name for name in FAMILIES if f"{template}_".startswith(f"{name}_") or template.startswith(name)), key=len
    )


@cache
def family_tokenizer(template: str) -> Any:
    """Return a tokenizer of a template's family that has the template. It is shared: do not change it."""
    made = make_tokenizer(FAMILIES[family_of(template)])
    made.chat_template = (templates_folder() / f"{template}.jinja").read_text(encoding="utf-8")
    made.name_or_path = template
    return made


def make_tokenizer(family: Family) -> Any:
    """Return a tokenizer of a family, without a chat template."""
    tokenizer = Tokenizer.from_str(_vocabulary(family.splits, family.nfc))
    named = [token for token in (family.unk, family.bos, family.eos, family.pad) if token]
    special = dict.fromkeys((*named, *family.special))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True, rstrip=token in family.strips_right) for token in special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in family.plain])
    if family.bos and family.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos}:0 $A:0",
            pair=f"{family.bos}:0 $A:0 {family.bos}:1 $B:1",
            special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        unk_token=family.unk,
        clean_up_tokenization_spaces=False,
    )


@cache
def _vocabulary(splits: str, nfc: bool) -> str:
    """Return a trained tokenizer of one kind, as JSON."""
    if splits in ("sentencepiece", "llama"):
        return _sentencepiece(leading_space=splits == "llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if nfc else None
    if splits == "gpt2":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        parts = [
            pre_tokenizers.Split(Regex(_SPLITS[splits]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    return str(tokenizer.to_str())


def _sentencepiece(*, leading_space: bool) -> str:
    """Return a tokenizer of SentencePiece's kind, in which a character without a piece is spelled in bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=400, limit_alphabet=100, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if leading_space else []), *spaces])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", left=1)] if leading_space else [])])
    return str(made.to_str())


# Tokenizers that packages ship, whole: Qwen's with dashscope, Mistral's with mistral-common.


def qwen_ranks() -> dict[bytes, int]:
    """Return Qwen's own vocabulary, as dashscope ships it: the rank of each token's bytes.

    Raises:
        ModuleNotFoundError: without dashscope.
    """
    lines = (_package("dashscope") / "resources/qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, _, rank in (line.partition(b" ") for line in lines if line)}


@cache
def qwen_tokenizer(template: str = "qwen3") -> Any:
    """Return Qwen's own vocabulary of 151,643 tokens, from dashscope's file, with the control tokens of Qwen3 at their ids."""
    tokenizer = Tokenizer(_bpe(qwen_ranks()))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
    )
    boxes = ("<|box_end|>", "<|quad_start|>", "<|quad_end|>")
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (*special, *boxes, *_QWEN_SEES)]
    )
    code = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    plain = (*_TOOL[:2], *code, *_TOOL[2:], *_THINK)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = (templates_folder() / f"{template}.jinja").read_text(encoding="utf-8")
    return made


def _bpe(ranks: dict[bytes, int]) -> models.BPE:
    """Return a vocabulary of tiktoken's kind, a rank for each token, as merges."""
    letters = _byte_letters()
    vocabulary = {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right, token[:cut], token[cut:]))
    return models.BPE(vocabulary, [merge[3:] for merge in sorted(merges)])


def _byte_letters() -> dict[int, int]:
    """Return the letter that stands for each byte in a byte-level vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {byte: byte if byte in printable else next(others) for byte in range(256)}


@cache
def mistral_tokenizer(file: str = "tekken_240911.json") -> Any:
    """Return one of Mistral's tokenizers from mistral-common's files: `tekken_*.json` (tiktoken's kind) or `*.model.v*`."""
    from transformers.tokenization_mistral_common import MistralCommonBackend

    return MistralCommonBackend(_package("mistral_common") / "data" / file)
