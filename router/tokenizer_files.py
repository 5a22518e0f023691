"""A model folder's tokenizer, as the library that wrote it reads it. Never goes to the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_GENERIC_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
"""One class by its old and its new name: reads `tokenizer.json` as it stands."""
_PLAIN_MODEL_TYPES = {None, "llama"}
"""Types for which the library goes by the class that is named; for some others it knows better."""


def load_tokenizer(folder: Path) -> Any:
    """What `AutoTokenizer` of the library gives; takes seconds for its imports, or one where no class is to be chosen.

    Raises whatever the library's parsers meet.
    """
    options = {"local_files_only": True, "trust_remote_code": False}
    if _is_generic(folder):
        # To choose a class, the library imports all that it knows of models, and torch with it.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **options)


def _is_generic(folder: Path) -> bool:
    """Whether the library would choose its generic class; what is no such folder is left to it to tell."""
    try:
        named = json.loads((folder / "tokenizer_config.json").read_bytes())
        config = folder / "config.json"
        model = json.loads(config.read_bytes()) if config.exists() else {}
        return (
            (folder / "tokenizer.json").is_file()
            and named.get("tokenizer_class") in _GENERIC_CLASSES
            and "auto_map" not in named
            and model.get("model_type") in _PLAIN_MODEL_TYPES
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False
