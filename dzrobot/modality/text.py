"""From an instruction to the prompt the checkpoints were trained with."""

import ast

from dzrobot.embodiments.spec import Embodiment
from dzrobot.errors import ModalityError

LONGEST = 10_000
"""Characters of an instruction; the networks read 512 tokens, which are a few thousand."""


def clean_instruction(text: object) -> str:
    """Return the instruction in lower case; of a written Python list, its first element.

    Some datasets store ``"['Pick up the cup', 'Take the cup']"`` (docs/model.md, section 5).

    Raises:
        ModalityError: not a text, nothing in it, too long, or not to be written in UTF-8.
    """
    if not isinstance(text, str):
        raise ModalityError(f"the instruction is a {type(text).__name__}: give a str")
    if len(text) > LONGEST:
        raise ModalityError(
            f"the instruction {text[:40]!r}... has {len(text)} characters: give up to {LONGEST}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModalityError(
            f"the instruction holds {text[error.start]!r} at character {error.start}, which is no "
            "character of its own: decode the text from its bytes once more"
        ) from error
    listed = _listed(text)
    instruction = text if listed is None else listed
    if not instruction.strip():
        raise ModalityError(f"the instruction {text!r} is empty: say what the robot shall do")
    return instruction.lower()


def prompt_of(text: object, embodiment: Embodiment) -> str:
    """Return the embodiment's prompt for the instruction ``text``."""
    return embodiment.prompt.format(task=clean_instruction(text))


def _listed(text: str) -> str | None:
    """Return the first element of a written list, or None if ``text`` is no list."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = ast.literal_eval(text.strip())
    # The last two: brackets or signs nested deeper than Python reads.
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(value, list):
        return None
    if not value or not isinstance(value[0], str):
        raise ModalityError(f"the instruction list {text!r} must begin with a text")
    return value[0]
