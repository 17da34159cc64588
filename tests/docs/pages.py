"""The pages' fenced blocks: `bash` blocks are run, `console` blocks need more than this machine and are parsed."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    def commands(self) -> list[str]:
        """The commands, continuation lines joined, comments and prompts gone."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(line.split(" #")[0].split()) for line in lines if line.strip() and not line.startswith("#")]


def blocks(language: str) -> list[Block]:
    return [
        Block(page.name, language, text)
        for page in PAGES
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


def commands(language: str) -> list[str]:
    return [command for block in blocks(language) for command in block.commands()]
