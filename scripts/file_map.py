#!/usr/bin/env python3
"""Writes the file map in docs/architecture.md: every file of the package with the first sentence of its docstring.

scripts/file_map.py           # write it
scripts/file_map.py --check   # exit code 1 if it is not what is written there
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "shiplap"
BEGIN, END = "<!-- file map: scripts/file_map.py writes it -->\n", "<!-- end of the file map -->\n"


def first_sentence(path: Path) -> str:
    """Of a file's docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def file_map() -> str:
    """A list for each folder; a folder whose files have one purpose is in alphabetical order."""
    lines = []
    for folder in sorted({path.parent for path in SOURCE.rglob("*.py")}):
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if files:
            name = folder.relative_to(SOURCE).as_posix()
            about = first_sentence(folder / "__init__.py")
            lines += [f"**{'shiplap' if name == '.' else name}/** {about}", ""]
            lines += [f"- `{path.name}`: {first_sentence(path)}" for path in files]
            lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write or check."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    made = f"{before}{BEGIN}\n{file_map()}{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
