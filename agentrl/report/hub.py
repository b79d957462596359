"""Exported folders on the Hugging Face Hub."""

from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.plain_data import line_of


def check_repo_id(repo_id: str) -> None:
    """Look whether the Hub could have a repository of this name.

    Raises:
        ConfigError: where it could not.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"--push: {line_of(error).partition(': ')[2]}") from error
    if "/" not in repo_id:
        raise ConfigError(f"--push: {repo_id!r} has no owner; write OWNER/{repo_id}")


def push(folder: Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a folder as one commit into a repository of models, which is made where there is none; return its address.

    Args:
        folder: to upload.
        repo_id: `OWNER/NAME`.
        private: where it is made, it is so that others do not see it; one that they see already is refused.

    Raises:
        ConfigError: where it cannot be done; the folder stays.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    api: Any = HfApi()
    again = f"The folder stays; upload it later: hf upload {'--private ' if private else ''}{repo_id} {folder}"
    if get_token() is None:
        raise ConfigError(f"--push: no token of the Hub; run `hf auth login`, or set HF_TOKEN. {again}")
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise ConfigError(f"--private: {repo_id} exists, and is public; choose another name. {again}")
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload a policy trained with agentrl")
    except (HTTPError, OSError, RuntimeError) as error:
        raise ConfigError(f"--push: {_words(error, repo_id, api.endpoint)}. {again}") from error
    return str(url)


def _words(error: Exception, repo_id: str, endpoint: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # of the upload of a large file
        return _words(error.__cause__, repo_id, endpoint)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return "the Hub does not take the token; run `hf auth login`, or set another HF_TOKEN"
    if status in (403, 404):
        return f"the token may not write to {repo_id}; use one that may, or another name"
    if status is not None:
        return f"the Hub refused it: {line_of(error).rstrip('.')}"
    return f"{endpoint} was not reached: {line_of(error).rstrip('.')}"
