"""A tokenizer made on the spot from the texts that a local model will see."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.chat.chatml import END, START
from agentrl.chat.forms.json_calls import CLOSE, OPEN
from agentrl.chat.renderer import GENERATION_ENDS
from agentrl.data.files import absolute, damage
from agentrl.data.plain import line_of
from agentrl.errors import ConfigError, UnreachableError
from agentrl.models.gguf import gguf_folder

PAD = "<|endoftext|>"
SPECIAL_TOKENS = (PAD, START, END, OPEN, CLOSE)


def load_tokenizer(folder: Path) -> Any:
    """Read a tokenizer that was trained here, from the folder of its run.

    Raises:
        ConfigError: if it is not what was written.
    """
    from transformers import PreTrainedTokenizerFast  # here: it loads torch

    what = damage(folder)
    try:
        if what is None:
            return PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
    raise ConfigError(f"the tokenizer of this run is damaged ({what}); begin a new run")


def pretrained_tokenizer(name_or_path: str, *, field: str = "model.name_or_path") -> Any:
    """Return the tokenizer of a Hugging Face folder or hub name.

    Raises:
        ConfigError: when there is none.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer  # which loads torch

    where = local_folder(name_or_path, field=field)
    if where and not where.is_dir():
        raise ConfigError(f"{field}: there is no folder {name_or_path!r}; a model of the hub is named OWNER/MODEL")
    try:
        # Said outright: by default transformers asks at the terminal whether to run a model's own code.
        tokenizer = AutoTokenizer.from_pretrained(where or name_or_path, trust_remote_code=False)
    except (
        OSError,
        ValueError,
        ImportError,
        StrictDataclassError,
    ) as error:  # ImportError: a package that its kind needs
        words = " ".join(str(error).split())
        raise ConfigError(f"{field}: cannot load the tokenizer of {name_or_path!r}: {words}") from error
    setattr(tokenizer, GENERATION_ENDS, _generation_ends(str(where or name_or_path)))
    return tokenizer


def _generation_ends(source: str) -> tuple[int, ...]:
    """Return the ids at which the generation config of a model ends sampling; without one, those of its config."""
    from transformers.utils.hub import cached_file

    for name in ("generation_config.json", "config.json"):
        try:
            file = cached_file(source, name)
            config = json.loads(Path(file).read_bytes()) if file else None
        except (
            OSError,
            ValueError,
            RecursionError,
        ):  # a folder with a tokenizer alone; loading a model says what is wrong
            continue
        if isinstance(config, dict):
            named = config.get("eos_token_id")
            return tuple(i for i in (named if isinstance(named, list) else [named]) if type(i) is int and i >= 0)
    return ()


def local_folder(name_or_path: str, *, field: str = "model.name_or_path") -> Path | None:
    """Return the folder that a model's name means: that made of a GGUF file; that of the cache, if the hub cannot be reached.

    None: the hub has it.

    Raises:
        UnreachableError: for a name of the hub, `owner/model`, that is not in the cache while the hub cannot be reached.
    """
    if folder := gguf_folder(name_or_path, field=field):
        return folder
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1:
        return absolute(name_or_path)
    if (reason := _unreachable()) is None:
        return None
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(name_or_path, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UnreachableError(
            f"{field}: {name_or_path!r} is not in the cache of Hugging Face, and {constants.ENDPOINT} cannot be reached "
            f"({reason}); connect, or copy the model here. A folder of this name is given as ./{name_or_path}"
        ) from error


@cache
def _unreachable() -> str | None:
    """Return why the hub cannot be reached, asked once. None: it can. Its own client tries each file for minutes."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # noqa: BLE001 - of whichever HTTP client the installed version has
        return line_of(error)
    return None


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer whose digits and signs of arithmetic stand alone; any text can be encoded.

    Nothing else splits the text before merging, so that whole phrases of a small world become one token each.

    Args:
        texts: what the model will read and write, control tokens included.
        vocab_size: number of entries, at least 256 bytes and the special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\d+\-*/=()]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
