"""The prose of a page: its sentences, without code, tables and headings."""

import re
from collections.abc import Iterator

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def prose(text: str) -> str:
    """Paragraphs and items, links kept; each piece of code is the word Code."""
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    lines = [line for line in text.splitlines() if not re.match(r"\s*\||#|    |\[\]", line)]
    kept = "\n".join(re.sub(r"^([-*]|\d+\.) ", "\n", line) for line in lines)
    return re.sub(r"`[^`]+`", "Code", kept)


def sentences(text: str) -> Iterator[str]:
    """What ends with a full stop or a question mark, across lines; the next begins with a capital, or with lngen."""
    for paragraph in re.split(r"\n\s*\n", LINK.sub(r"\1", prose(text))):
        joined = " ".join(paragraph.split())
        yield from (part for part in re.split(r"(?<=[.!?])\**\s+(?=\**(?:[A-Z\d]|lngen\b))", joined) if part)


def words(sentence: str) -> list[str]:
    """The words and numbers of a sentence."""
    return [word for word in sentence.split() if re.search(r"\w", word)]
