"""Words of docstrings, comments and notes, as far as a rule can say it."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gdn", "kernels_tl", "kernels_cute", "autotune", "tests")
# A docstring begins with a verb or a noun phrase that names the thing: not with a subordinate clause, a preposition that belongs
# to the function's name, or a word for something that is named elsewhere.
BEGINNING = re.compile(
    r"(Of|As|What|Whatever|Where|Which|Whichever|Who|Whoever|Whose|How|However|Why|When|While|Until|Once|If|Else|Everything"
    r"|All that|Those|They|Their|Its|There|Here|Nobody|In|Into|Inside|Within|With|Without|From|By|To|On|For|Per|After|Before"
    r"|Between|Around|Besides|Beyond|Through|Against|At (?!most|least)|Or|And|So|Also|Not|Never|Neither|Nor)\b"
)
SENTENCE = re.compile(r"(?:^|[.?!] |\n\s*)Of [\w`]")  # an inversion that one reads twice
# "after", "next to".
PLACE = re.compile(r"\b(behind|beside)\b", re.IGNORECASE)


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def _faults(place: str, source: str) -> Iterator[str]:
    if place.endswith(".md"):
        texts = [(number, line.lstrip("|-* ")) for number, line in enumerate(source.splitlines(), 1)]
    else:
        docstrings = list(_docstrings(source))
        yield from (f"{place}:{line}: {text[:60]}" for line, text in docstrings if BEGINNING.match(text))
        texts = [*docstrings, *_comments(source)]
    for line, text in texts:
        for found in (SENTENCE.search(text), PLACE.search(text)):
            if found is not None:
                yield f"{place}:{line}: {text[max(0, found.start() - 20) : found.end() + 40]!r}"


def test_words() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*")) if path.suffix in (".py", ".md")]
    assert len(files) > 500
    faults = [_faults(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in [ROOT / "README.md", *files]]
    assert [fault for of_file in faults for fault in of_file] == []


def test_faults_are_found() -> None:
    bad = (
        "What it is",
        "Where it is",
        "Which rows",
        "Those of a",
        "How they lie",
        "Everything known",
        "In this context",
        "At a time",
    )
    good = ("Whether it is", "Rows that", "At most two", "All rows", "Asks", "Inputs", "Forms", "Whole rows")
    assert [text for text in (*bad, *good) if BEGINNING.match(text)] == list(bad)
    source = '"""What it is.\n\nOf two, the first."""\n# It comes behind.\nx = 1  # Of x\n'
    assert len(list(_faults("bad.py", source))) == 4
    assert len(list(_faults("bad.md", "It is after.\n| Of all rows | beside |\n"))) == 2
