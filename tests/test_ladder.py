"""Every hunk of the two diffs is one named idea; code, docstrings and README name it alike."""

import difflib
import re

import pytest
from conftest import ROOT, SCRIPTS

STEPS = list(zip(SCRIPTS, SCRIPTS[1:]))
TAG = re.compile(r"\[(\d+)\] ([\w.-]+(?: [\w.-]+)*)")


def lines(name):
    return (ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()


def hunks(old, new):
    """(removed lines, added lines) of each hunk without context."""
    a, b = lines(old), lines(new)
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return [(a[i1:i2], b[j1:j2]) for kind, i1, i2, j1, j2 in matcher.get_opcodes()
            if kind != "equal"]


def docstring_ideas(name):
    """{number: name} of the table in a script's docstring: two spaces or more end a name."""
    doc = "\n".join(lines(name)).split('"""')[1]
    found = re.findall(r"\[(\d+)\] (\S+(?: \S+)*)", doc)
    return {int(n): title for n, title in found if not title.startswith("to ")}


def ideas():
    return docstring_ideas(SCRIPTS[1]) | docstring_ideas(SCRIPTS[2])


def readme_ideas():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (\d+) \| ([^|]+?) \|", text, re.MULTILINE)
    return {int(n): title for n, title in found}


@pytest.mark.parametrize("old, new", STEPS)
def test_every_hunk_is_tagged_and_there_are_few(old, new):
    found = hunks(old, new)
    assert 0 < len(found) <= 14
    untagged = [added or removed for removed, added in found
                if not any(TAG.search(line) for line in added)]
    assert untagged == []


@pytest.mark.parametrize("old, new", STEPS)
def test_tags_in_code_carry_the_names_of_the_docstring(old, new):
    names = docstring_ideas(new)
    code = [line for _, added in hunks(old, new)[1:] for line in added]
    used = [(int(n), title) for line in code for n, title in TAG.findall(line)]
    assert {n for n, _ in used} == set(names)
    for number, title in used:
        assert title.startswith(names[number]), f"[{number}] {title} is not {names[number]}"


def test_numbers_are_consecutive_and_readme_has_the_same_rows():
    assert sorted(ideas()) == list(range(1, len(ideas()) + 1))
    assert readme_ideas() == ideas()


def test_no_line_is_only_indented_anew_between_01_and_02():
    for removed, added in hunks(*STEPS[1]):
        assert not {line.strip() for line in removed} & {line.strip() for line in added} - {""}


@pytest.mark.parametrize("name", SCRIPTS)
def test_rank_is_no_condition_and_lines_are_short(name):
    text = lines(name)
    assert not [line for line in text if re.search(r"\bif .*rank", line)]
    assert [i for i, line in enumerate(text, 1) if len(line) > 100] == []
    assert 200 <= len(text) <= 300


def test_the_test_sees_an_untagged_hunk():
    a, b = ["x = 1", "y = 2"], ["x = 1", "y = 3"]
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    changed = [b[j1:j2] for kind, _, _, j1, j2 in opcodes if kind != "equal"]
    assert [added for added in changed if not TAG.search(" ".join(added))] == [["y = 3"]]
