"""Instructions and prompts."""

import pytest

from dzrobot.embodiments.registry import EMBODIMENTS
from dzrobot.modality.window import clean_instruction, prompt_of


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("Pick UP the Cup.", "pick up the cup."),
        ("['Pick up the cup', 'Take it']", "pick up the cup"),
        ('["It\'s Open"]', "it's open"),
        ("[Pick] the cup", "[pick] the cup"),
        ("[1", "[1"),
        ("('a', 'b')", "('a', 'b')"),
        ("put {this} <there>", "put {this} <there>"),
        ("  two  spaces ", "  two  spaces "),
    ],
)
def test_instruction(given, cleaned):
    assert clean_instruction(given) == cleaned


def test_braces_in_an_instruction_stay():
    robot = EMBODIMENTS["oxe_droid"]
    assert "robot put {task} there The video" in prompt_of("Put {task} there", robot)
